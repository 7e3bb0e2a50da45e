"""CPU speed on the embedded model, side by side: this engine, transformers + bitsandbytes NF4, transformers in bfloat16.

    python -m bench.cpu        # table, and bench/results/cpu.json; wants quiet cores
    python -m bench.cpu --llama ENVIRONMENT/bin/python      # with llama.cpp, too; needs llama-cpp-python built there:
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF" pip install --no-binary llama-cpp-python llama-cpp-python

Every contender runs in a process of its own, this engine once for each instruction set that the machine has, forced by
NF4_CPU_ISA (--isas avx2,portable: only those). The best set and llama.cpp run in turns, three times (--rounds), and their
medians count, because the cores of a shared host differ from minute to minute. llama.cpp runs the GGUF file that the
embedded model is made from (Q4_1), and the same in Q4_0. The exit status is 1 if a row of any instruction set is slower than
bitsandbytes, or decode of one sequence slower than 0.95 of llama.cpp's. Decode: prompts of 128 tokens, the median interval
between tokens; prefill: the median time of 512 tokens to the first logits. Greedy, the same random prompts for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import cores, cpu_name, current_commit, versions
from server.engine.supervisor.child import ENVIRONMENT

CONTENDERS = ("ours", "bnb-float32", "bnb-bfloat16", "bfloat16")
GGUF = ("Q4_1", "Q4_0")
"""llama.cpp's quantizations; the first is the file's own."""
LLAMA_SHARE = 0.95
"""Share of llama.cpp's speed that decode of one sequence should reach."""
PROMPT = 128
TOKENS = 65
PREFILL = 512
PREFILL_RUNS = 7
RESULT = Path(__file__).resolve().parent / "results" / "cpu.json"
# (what, at least, aim), in tokens per second
TARGETS = {"decode 1": (60, 135), "decode 8": (200, 350), "prefill 512": (1600, 2300)}


def main() -> int:
    """Run all contenders, or one of them (a child process), which prints its figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--isas", help="instruction sets, with commas between; by default all of this machine's")
    parser.add_argument("--llama", type=Path, metavar="PYTHON", help="of an environment that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3, help="in which ours and llama.cpp run in turns (medians)")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(_measure(options.only, options.threads)))
        return 0
    isas = options.isas.split(",") if options.isas else _isas()
    load_before = os.getloadavg()[0]
    forced = {isa: _run("ours", options.threads, {**ENVIRONMENT, "NF4_CPU_ISA": isa}) for isa in isas[1:]}
    rows = {contender: _run(contender, options.threads, {}) for contender in CONTENDERS[1:]}
    ours, llama, rounds = _in_turns(isas[0], options)
    rows["ours"], forced = ours, {isas[0]: ours, **forced}
    report = {
        "device": cpu_name(),
        "commit": current_commit(),
        "threads": options.threads,
        "load_before": round(load_before, 1),
        "versions": {**versions(), "nf4_kernels": isas[0]},
        "rows": _rows(rows, llama),
        "llama_cpp": llama,
        "rounds": rounds,
        "forced": {isa: {what: round(speed, 1) for what, speed in found.items()} for isa, found in forced.items()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    _print(report)
    slower = _slower(report)
    for line in slower:
        print(f"bench: {line}", file=sys.stderr)
    return 1 if slower else 0


def _isas() -> list[str]:
    """The instruction sets of this machine, the best first."""
    from nf4_kernels import cpu

    best, found = cpu.isa(), []
    for name in cpu.ISAS:
        try:
            cpu.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    cpu.set_isa(best)
    return found


def _run(contender: str, threads: int, environment: dict[str, str]) -> dict[str, float]:
    print(f"bench: {contender} {environment.get('NF4_CPU_ISA', '')} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "bench.cpu", "--only", contender, "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _in_turns(isa: str, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, dict[str, Any]], list[Any]]:
    """Ours and llama.cpp's medians, and all figures, of as many rounds as asked for, in each of which both run."""
    mine, theirs = list[dict[str, float]](), list[dict[str, dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as folder:
        file = _gguf(Path(folder)) if options.llama else None
        for _ in range(options.rounds):
            mine.append(_run("ours", options.threads, {**ENVIRONMENT, "NF4_CPU_ISA": isa}))
            if file is not None:
                theirs.append({name: _run_llama(options.llama, file, name, options.threads) for name in GGUF})
    ours = {what: statistics.median(found[what] for found in mine) for what in mine[0]}
    llama = {
        name: {
            key: value if key == "version" else round(statistics.median(found[name][key] for found in theirs), 1)
            for key, value in theirs[0][name].items()
        }
        for name in (GGUF if theirs else ())
    }
    return ours, llama, [{"ours": own, "llama_cpp": other} for own, other in itertools.zip_longest(mine, theirs)]


def _gguf(folder: Path) -> Path:
    """The embedded model's GGUF file."""
    from server.checkpoint.embedded.files import embedded_gguf

    return embedded_gguf(folder, folder, lambda stage, _: print(stage, file=sys.stderr))


def _run_llama(python: Path, file: Path, name: str, threads: int) -> dict[str, Any]:
    """llama-cpp-python's version, and tokens per second with a quantization."""
    print(f"bench: llama.cpp {name} ...", file=sys.stderr, flush=True)
    # Not the variables of this process: PYTHONPATH may name packages for another Python.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = Path(__file__).with_name("gguf_peer.py")
    quantize = [] if name == GGUF[0] else ["--quantize", name]
    command = [str(python), str(script), str(file), "--threads", str(threads), *quantize]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, env=environment
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _slower(report: dict[str, Any]) -> list[str]:
    """Rows that are slower than bitsandbytes, of every instruction set, or than they should be next to llama.cpp."""
    found = [
        f"{isa}, {row['what']}: {report['forced'][isa][row['what']]} tokens per second,"
        f" bitsandbytes {row['transformers_bnb_nf4']}"
        for isa in report["forced"]
        for row in report["rows"]
        if report["forced"][isa][row["what"]] < row["transformers_bnb_nf4"]
    ]
    one = report["rows"][0]
    if "llama_cpp" in one and one["ours"] < LLAMA_SHARE * one["llama_cpp"]:
        found.append(f"{one['what']}: {one['ours']} tokens per second, llama.cpp {one['llama_cpp']}")
    return found


def _measure(contender: str, threads: int) -> dict[str, float]:
    from server.checkpoint.source import resolve_checkpoint
    from server.config import EMBEDDED_MODEL, default_cache_dir

    folder = resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda stage, _: print(stage, file=sys.stderr))
    if contender == "ours":
        return _measure_engine(folder, threads)
    return _measure_transformers(folder, contender, threads)


def _prompt(index: int, length: int) -> list[int]:
    return [10 + (index * 7919 + i * 104729) % 40000 for i in range(length)]


def _measure_engine(folder: Path, threads: int) -> dict[str, float]:
    from server.config import EngineConfig
    from server.engine.core import Engine
    from server.engine.start import load_runner
    from server.types import GenerateRequest, SamplingParams

    # The same prompt is sent several times, and each time it must be computed.
    config = EngineConfig(device="cpu", threads=threads, enable_prefix_caching=False)
    engine = Engine(load_runner(folder, config, lambda stage, fraction: None), config)

    def run(batch: int, length: int, tokens: int) -> tuple[list[float], list[float]]:
        """Seconds of the steps with prefill and of those with decode only; every step has all sequences."""
        for i in range(batch):
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            engine.add(GenerateRequest(str(i), _prompt(i, length), sampling))
        prefill: list[float] = []
        decode: list[float] = []
        while engine.has_work:
            started = time.perf_counter()
            stats = engine.step().stats
            (prefill if stats.step_prefill_tokens else decode).append(time.perf_counter() - started)
        return prefill, decode

    run(1, PREFILL, 4)
    return {
        "decode 1": 1 / statistics.median(run(1, PROMPT, TOKENS)[1]),
        "decode 8": 8 / statistics.median(run(8, PROMPT, TOKENS)[1]),
        "prefill 512": PREFILL / statistics.median(sum(run(1, PREFILL, 1)[0]) for _ in range(PREFILL_RUNS)),
    }


def _measure_transformers(folder: Path, contender: str, threads: int) -> dict[str, float]:
    import torch
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    dtype = torch.float32 if contender == "bnb-float32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if contender == "bfloat16":
        model = model.dequantize(dtype=dtype)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = dtype
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)

    def decode(batch: int) -> float:
        ids = torch.tensor([_prompt(i, PROMPT) for i in range(batch)])
        moments: list[float] = []
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            stopping_criteria=[_noting(moments)],
        )
        return batch / statistics.median(b - a for a, b in itertools.pairwise(moments))

    def prefill() -> float:
        ids = torch.tensor([_prompt(0, PREFILL)])
        started = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started

    with torch.inference_mode():
        prefill()
        return {
            "decode 1": decode(1),
            "decode 8": decode(8),
            "prefill 512": PREFILL / statistics.median(prefill() for _ in range(PREFILL_RUNS)),
        }


def _noting(moments: list[float]) -> Callable[..., Any]:
    """A stopping criterion that never stops and notes when each token was there."""
    import torch

    def criterion(ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        moments.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    return criterion


def _rows(measured: dict[str, dict[str, float]], llama: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for what, (least, aim) in TARGETS.items():
        bnb = {dtype: measured[f"bnb-{dtype}"][what] for dtype in ("float32", "bfloat16")}
        faster = max(bnb, key=lambda dtype: bnb[dtype])
        rows.append(
            {
                "what": what,
                "ours": round(measured["ours"][what], 1),
                "transformers_bnb_nf4": round(bnb[faster], 1),
                "transformers_bnb_dtype": faster,
                "transformers_bf16": round(measured["bfloat16"][what], 1),
                "at_least": least,
                "aim": aim,
            }
        )
        if llama:
            fastest = max(llama, key=lambda name: llama[name][what])
            rows[-1] |= {"llama_cpp": llama[fastest][what], "llama_cpp_quantization": fastest}
    return rows


def _print(report: dict[str, Any]) -> None:
    print(f"\n{report['device']}, {report['threads']} threads, {report['versions']}\ntokens per second:\n")
    print("| | ours | transformers + bitsandbytes NF4 | transformers bf16 | llama.cpp | at least | aim |")
    print("|---|---|---|---|---|---|---|")
    for row in report["rows"]:
        bnb = f"{row['transformers_bnb_nf4']} ({row['transformers_bnb_dtype']})"
        llama = f"{row['llama_cpp']} ({row['llama_cpp_quantization']})" if "llama_cpp" in row else ""
        cells = (row["what"], row["ours"], bnb, row["transformers_bf16"], llama, row["at_least"], row["aim"])
        print(f"| {' | '.join(map(str, cells))} |")
    for isa, found in report["forced"].items():
        print(f"forced {isa}: {found}")


if __name__ == "__main__":
    sys.exit(main())
