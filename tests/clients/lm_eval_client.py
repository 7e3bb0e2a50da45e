"""lm-eval's local-completions: multiple choice and perplexity by log-probabilities of token prompts, and generation."""

import json
import os
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    ("The capital of France is", ["Paris", "Berlin", "Madrid"], 0),
    ("The opposite of hot is", ["yellow", "cold", "seven"], 1),
    ("Two plus two equals", ["five hundred", "purple", "four"], 2),
    ("A dog is an", ["animal", "ocean", "hour"], 0),
    ("The sun rises in the", ["kitchen", "east", "refrigerator"], 1),
    ("Water freezes into", ["ice", "gold", "music"], 0),
]
TEXTS = ["The sun rises in the east and sets in the west.", "Water is made of hydrogen and oxygen."]
JUMBLED = ["west the in sets and east the in rises sun The.", "oxygen and hydrogen of made is Water."]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "continuation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "temperature": 0.0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}

home = Path(os.environ["HOME"]).absolute()
documents = {
    "choices": [{"question": question, "choices": choices, "label": label} for question, choices, label in QUESTIONS],
    "perplexity": [{"text": text} for text in TEXTS],
    "jumbled": [{"text": text} for text in JUMBLED],
    "continuation": [{"question": QUESTIONS[0][0], "choices": QUESTIONS[0][1], "label": 0}],
}
for name, rows in documents.items():
    data = home / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **TASKS.get(name, TASKS["perplexity"]),
    }
    (home / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def evaluate(batch_size: int, **options: Any) -> dict[str, Any]:
    arguments = {
        "model": os.environ["MODEL"],
        "base_url": f"{os.environ['BASE_URL']}/v1/completions",
        "tokenizer": os.environ["TOKENIZER"],
        "tokenizer_backend": "huggingface",
        "max_length": 512,
        **options,
    }
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=list(documents),
        batch_size=batch_size,
        task_manager=TaskManager(include_path=str(home), include_defaults=False),
        bootstrap_iters=0,
    )
    return dict(found)


one = evaluate(1)
scores = one["results"]
assert scores["choices"]["acc,none"] >= 5 / 6, scores
assert 0 < scores["perplexity"]["bits_per_byte,none"] < 0.8 * scores["jumbled"]["bits_per_byte,none"], scores
assert "Paris" in one["samples"]["continuation"][0]["resps"][0][0]
together = evaluate(4, num_concurrent=3)


def likelihoods(found: dict[str, Any]) -> list[float]:
    samples = sorted(found["samples"]["choices"], key=lambda sample: int(sample["doc_id"]))
    return [float(response[0][0]) for sample in samples for response in sample["resps"]]


pairs = list(zip(likelihoods(one), likelihoods(together), strict=True))
assert len(pairs) == 18
assert all(a < 0 and abs(a - b) < 0.02 for a, b in pairs), pairs
