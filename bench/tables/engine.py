"""Markdown tables of bench/results/*.json for README.md and pages of docs/."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.kernels.tables import LARGE, experts_rows, large, large_rows
from bench.tables.markdown import table, wrapped
from bench.tables.results import NAMES, PEERS, Result, load, peer

KERNELS, E2E, CPU = "kernels-nvidia-h200.json", "e2e-nvidia-h200.json", "cpu.json"
EXPERTS = "moe-nvidia-h200.json"
PLUGIN = "vllm-plugin-nvidia-h200.json"
# The paper's best ratios to bitsandbytes 0.47.0 on an A100, and the batch sizes at which it reached them.
PAPER = {"llama-3.3-70b": (1.54, 2), "qwen3-32b": (1.29, 32), "gemma-3-27b": (1.32, 64)}
HEADLINE = {
    "GPU: decode, 1 sequence": (1, 100),
    "GPU: decode, 100 sequences": (100, 100),
    "GPU: decode, 16 with 4000 tokens of context": (16, 4000),
    "GPU: prefill, 4 prompts of 3000 tokens": (4, 3000),
}
"""Sequences and tokens of each, of the README's rows."""
ENGINES = (("nf4-server", "NF4"), ("vLLM", "AWQ"), ("vLLM", "bf16"))
SHORT = (1, 8, 64, 256, 2048)
"""Numbers of tokens in the short table of kernels."""


def headline() -> str:
    """The README's table: the engine and its peers in one run on a GPU, and in one on a CPU."""
    run = load(PEERS["H100"])["runs"][0]
    lines = []
    for what, place in HEADLINE.items():
        speeds = [peer("H100", *engine, "llama-3.1-8b", *place) or 0.0 for engine in ENGINES]
        lines.append([what, *_leading(dict(zip(("", "vLLM AWQ", "vLLM bf16"), speeds, strict=True)))])
    cpu = load(CPU)
    for row in cpu["rows"]:
        others = {"llama.cpp Q4_0": cpu["llama_cpp"]["Q4_0"][row["what"]]}
        others |= {"transformers NF4": row["transformers_bnb_nf4"], "transformers bf16": row["transformers_bf16"]}
        what, _, size = row["what"].partition(" ")
        sequences = f"{size} tokens" if what == "prefill" else "1 sequence" if size == "1" else f"{size} sequences"
        lines.append([f"CPU: {what}, {sequences}", *_leading({"": row["ours"], **others})])
    gpu = load(PEERS["H100"])["device"]
    about = (
        f"Tokens per second of the engine alone. One {gpu}: random weights in the shape of Llama-3.1-8B, vLLM"
        f" {run['versions']['vllm']}, {run['measured']}. CPU: the embedded model on {cpu['threads']} cores of an"
        f" {cpu['device']}, commit {cpu['commit']}. Each comparison is of one run; the fastest is bold."
    )
    return f"{wrapped(about)}\n\n{table(['', 'ours, NF4', 'others'], lines)}"


def _leading(speeds: dict[str, float]) -> list[str]:
    """Two cells, ours (named "") and the others, with the fastest in bold."""
    best = max(speeds.values())
    cells = {name: f"**{_speed(value)}**" if value == best else _speed(value) for name, value in speeds.items()}
    return [cells.pop(""), ", ".join(f"{name} {cell}" for name, cell in cells.items())]


def kernels_short() -> str:
    """Six rows of kernels_all()."""
    return _kernel_rows([row for row in _projection() if row["op"] == "dequantize_nested" or row["M"] in SHORT])


def kernels_all() -> str:
    """A projection of Qwen3-32B: dequantize, and the linear layer at every number of tokens."""
    return _kernel_rows(_projection())


def kernels_large() -> str:
    """The ranges over all large projections, and how many miss which target."""
    result = load(KERNELS)
    count = len({(r["N"], r["K"]) for r in large_rows(result)})
    return f"{count} projections of three models, each of {LARGE // 1_000_000}M weights or more.\n\n{large(result)}"


def experts() -> str:
    """GEMMs of mixtures of experts beside the floor and torch's grouped GEMM."""
    return experts_rows(load(EXPERTS))


def models() -> str:
    """Decode of two models beside vLLM and transformers, rows of one state of the code."""
    rows = [row for row in _e2e("decode") if row["model"] in ("qwen3-8b", "qwen3-32b")]
    (commit,) = {row["commit"] for row in rows}
    lines = []
    for row in sorted(rows, key=lambda row: (list(NAMES).index(row["model"]), row["batch"])):
        place = row["model"], row["batch"]
        vllm = [_speed(peer("H200", "vLLM", weights, *place)) for weights in ("NF4", "AWQ", "bf16")]
        lines.append([NAMES[place[0]], str(place[1]), f"**{_speed(row['ours_tok_s'])}**", *vllm, _transformers(row)])
    heads = ["model", "sequences", "ours, NF4", "vLLM, NF4", "vLLM, AWQ", "vLLM, bf16", "transformers, NF4"]
    versions = load(PEERS["H200"])["runs"][0]["versions"]
    about = (
        f"One H200, tokens per second, 128 in and 128 out; commit {commit}; vLLM {versions['vllm']}, transformers"
        f" {load(E2E)['versions']['transformers']} on two hosts, both with bitsandbytes {versions['bitsandbytes']}."
    )
    return f"{wrapped(about)}\n\n{table(heads, lines)}"


def decode() -> str:
    """Decode of all models beside transformers."""
    heads = ["model", "sequences", "ours", "transformers generate", "times as fast", "generate_batch", "commit"]
    lines = [
        [
            NAMES[row["model"]],
            str(row["batch"]),
            _speed(row["ours_tok_s"]),
            _transformers(row),
            _span(_times(row)),
            _speed(row.get("hf_generate_batch_tok_s")),
            row["commit"],
        ]
        for row in _e2e("decode")
    ]
    return f"{wrapped(f'Tokens per second; {_versions(load(E2E))}.')}\n\n{table(heads, lines)}"


def prefill() -> str:
    """Prefill of all models beside transformers and vLLM."""
    heads = [
        "model",
        "prompts x tokens",
        "ours",
        "transformers",
        "vLLM, NF4",
        "vLLM, AWQ",
        "vLLM, bf16",
        "commit",
    ]
    lines = []
    for row in _e2e("prefill"):
        vllm = [peer("H200", "vLLM", w, row["model"], row["batch"], row["length"]) for w in ("NF4", "AWQ", "bf16")]
        cells = map(_speed, (row["ours_tok_s"], row.get("hf_generate_tok_s"), *vllm))
        lines.append([NAMES[row["model"]], f"{row['batch']} x {row['length']}", *cells, row["commit"]])
    return table(heads, lines)


def vllm() -> str:
    """Llama-3.1-8B's shape at large batches and long contexts, ours and vLLM, on two GPUs."""
    columns = ((1, 100), (100, 100), (200, 100), (256, 100), (512, 100), (16, 4000), (16, 12000), (4, 3000))
    heads = ["GPU", "engine", *(f"{batch} x {length}" for batch, length in columns[:-1]), "prefill 4 x 3000"]
    lines = []
    for gpu in PEERS:
        for engine, weights in ENGINES:
            cells = [_speed(peer(gpu, engine, weights, "llama-3.1-8b", *place)) for place in columns]
            lines.append([gpu, f"{engine}, {weights}", *cells])
    return table(heads, lines)


def vllm_plugin() -> str:
    """Decode by vLLM with and without nf4_kernels."""
    result = load(PLUGIN)
    lines = [
        [str(row["batch"]), *(_speed(row[key]) for key in ("vllm_tok_s", "enabled_tok_s")), f"{_gain(row):.1f}"]
        for row in result["rows"]
    ]
    (model,) = {NAMES[row["model"]] for row in result["rows"]}
    about = f"{model} in NF4 on one {result['device']}, decode, tokens per second; vLLM {result['versions']['vllm']}."
    return f"{about}\n\n{table(['sequences', 'vLLM', 'with nf4_kernels', 'times as fast'], lines)}"


def paper() -> str:
    """End to end, in times of transformers with bitsandbytes: the paper's kernels and this engine."""
    heads = ["times as fast as transformers", "the paper's kernels, at their best", "ours, 1 sequence", "32 sequences"]
    lines = []
    for model, (times, batch) in PAPER.items():
        ours = (_span(_times(_find(_e2e("decode"), model, sequences))) for sequences in (1, 32))
        lines.append([NAMES[model], f"{times:.2f} (batch {batch})", *ours])
    return table(heads, lines)


def http() -> str:
    """The real server under load, as its clients see it."""
    heads = ["model", "load", "tokens per second", "the engine alone", "TTFT median, p99", "ITL median, p99", "commit"]
    lines = []
    for row in _e2e("http"):
        offered = f"{row['batch']} clients" if "batch" in row else f"{row['rate']:g} requests per second"
        alone = row.get("direct_tok_s")
        share = f"{alone:.0f} ({row['ours_tok_s'] / alone:.0%} of it)" if alone else ""
        times = (f"{row[k]['p50'] * 1e3:.0f}, {row[k]['p99'] * 1e3:.0f}" for k in ("ttft_s", "itl_s"))
        lines.append([NAMES[row["model"]], offered, f"{row['ours_tok_s']:.0f}", share, *times, row["commit"]])
    return table(heads, lines)


def fidelity() -> str:
    """Errors of log-probabilities, memory and starts, of whole models."""
    heads = [
        "model", "error of log-probabilities, root mean square: ours", "transformers in bf16", "commit", "weights, GiB",
        "memory beside weights and KV cache, GiB", "ready after, s", "the server after that, s", "commit of the start",
    ]  # fmt: skip
    starts = {row["model"]: row for row in _e2e("start")}
    lines = []
    for row in _e2e("fidelity"):
        start = starts[row["model"]]
        weights, beside = start["weights_gib"], start["allocated_gib"] - start["weights_gib"] - start["kv_gib"]
        memory = [f"{weights:.1f}", f"{beside:.2f} ({beside / weights:.1%})"]
        times = [f"{start['ready_s']:.0f}", f"{start['again_s']:.0f}" if "again_s" in start else ""]
        errors = [f"{row['ours_rms']:.4f}", f"{row['hf_rms']:.4f}", row["commit"]]
        lines.append([NAMES[row["model"]], *errors, *memory, *times, start["commit"]])
    return table(heads, lines)


def cpu() -> str:
    """The engine on a CPU, by instruction set, beside transformers and llama.cpp."""
    result = load(CPU)
    best, *others = result["forced"]
    heads = ["", f"ours ({best})", *others, "transformers + bitsandbytes NF4", "transformers bf16"]
    heads += [f"llama.cpp {name}" for name in result["llama_cpp"]]
    lines = [
        [
            row["what"],
            *(f"{found[row['what']]:.0f}" for found in result["forced"].values()),
            f"{row['transformers_bnb_nf4']:.0f} ({row['transformers_bnb_dtype']})",
            f"{row['transformers_bf16']:.0f}",
            *(f"{found[row['what']]:.0f}" for found in result["llama_cpp"].values()),
        ]
        for row in result["rows"]
    ]
    about = f"{result['device']}, {result['threads']} threads, tokens per second; {_versions(result)}."
    return f"{wrapped(about)}\n\n{table(heads, lines)}"


def _projection() -> list[Result]:
    return [row for row in load(KERNELS)["rows"] if (row["model"], row["shape"]) == ("Qwen3-32B", "up")]


def _kernel_rows(rows: list[Result]) -> str:
    result = load(KERNELS)
    lines = []
    for row in rows:
        name = f"M = {row['M']}" if row["op"] == "linear" else row["op"].replace("_nested", ", nested scales")
        ours = f"**{row['ours_us']:.1f}** ({row['ours_us'] / row['floor_us']:.2f})"
        others = [_us(row.get(key), row["ours_us"]) for key in ("bnb_us", "bf16_us")]
        lines.append([name, ours, *others, f"{row['floor_us']:.1f}"])
    about = (
        f"{result['device']}, {rows[0]['N']} x {rows[0]['K']}, microseconds (ours: times the floor; others: times ours);"
        f" {_versions(result)}."
    )
    return f"{wrapped(about)}\n\n{table(['', 'ours', 'bitsandbytes', 'bf16 cuBLAS', 'floor'], lines)}"


def _e2e(mode: str) -> list[Result]:
    return [row for row in load(E2E)["rows"] if row["mode"] == mode]


def _find(rows: Iterable[Result], model: str, batch: int) -> Result:
    return next(row for row in rows if (row["model"], row["batch"]) == (model, batch))


def _theirs(row: Result) -> list[float]:
    """transformers' speeds of a decode row: on the host of our own figure first, then on the other host."""
    other = peer("H200", "transformers generate", "NF4", row["model"], row["batch"])
    return [speed for speed in (row.get("hf_generate_tok_s"), other) if speed is not None]


def _transformers(row: Result) -> str:
    return " to ".join(map(_speed, sorted(_theirs(row))))


def _times(row: Result) -> list[float]:
    """Our speed over transformers' speed on the same host, and over that on the other host."""
    ours = row["ours_beside_hf_tok_s" if "ours_beside_hf_tok_s" in row else "ours_tok_s"]
    return [ours / speed for speed in _theirs(row)]


def _span(values: Sequence[float]) -> str:
    return " to ".join(f"{value:.1f}" for value in sorted(values))


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def _gain(row: Result) -> float:
    return float(row["enabled_tok_s"] / row["vllm_tok_s"])


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _us(value: float | None, ours: float) -> str:
    return "" if value is None else f"{value:.1f} ({value / ours:.2f})"
