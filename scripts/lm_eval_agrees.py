"""Bits per byte of a model on documents that fit into its context: `rlhf-kl eval` beside lm-eval.

lm-eval brings its own dependencies, so it lives in an environment of its own:

    python -m venv lm-eval && lm-eval/bin/pip install torch && lm-eval/bin/pip install "lm-eval[hf]"
    python scripts/lm_eval_agrees.py RUN/final documents.jsonl lm-eval/bin/python

Each line of the file has a "text". Both score every token behind one bos, which the tokenizer must have. Exit 1 where
the figures differ by more than 1e-4 of their size.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK = {
    "task": "local_documents",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
# lm-eval puts the bos in front itself: the tokenizer must not do it a second time.
PROGRAM = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

answer = lm_eval.simple_evaluate(
    model="hf",
    model_args={"pretrained": sys.argv[1], "dtype": "float32", "add_bos_token": False},
    tasks=["local_documents"],
    task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False),
    device="cpu",
    batch_size=1,
    bootstrap_iters=0,
)
print(json.dumps(answer["results"]["local_documents"]))
"""


def printed(*command: str) -> dict[str, Any]:
    """The JSON at the end of what a command prints."""
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    answer: dict[str, Any] = json.loads(text if text.startswith("{\n") else text.splitlines()[-1])
    return answer


def main(model: str, texts: str, python: str) -> int:
    """Print both figures and how closely they agree."""
    ours = printed(sys.executable, "-m", "rlhf_kl", "eval", "--model", model, "--texts", texts, "--json")
    with tempfile.TemporaryDirectory() as folder:
        task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(Path(texts).resolve())}}}
        Path(folder, "task.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
        theirs = printed(python, "-c", PROGRAM, model, folder)
    one, two = ours["bits_per_byte"], theirs["bits_per_byte,none"]
    print(f"rlhf-kl eval {one:.8f}, lm-eval {two:.8f} bits per byte, difference {abs(one - two) / two:.1e} of it")
    return int(abs(one - two) > 1e-4 * two)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
