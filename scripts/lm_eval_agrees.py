"""Bits per byte of a model on documents within its context: `rlhf-kl eval` beside lm-eval.

lm-eval brings its own dependencies, so it lives in an environment of its own:

    python -m venv lm-eval && lm-eval/bin/pip install torch && lm-eval/bin/pip install "lm-eval[hf]"
    python scripts/lm_eval_agrees.py --model RUN/final --texts heldout.jsonl --python lm-eval/bin/python

Both score every token of a document behind one bos. lm-eval puts that in front itself, so its tokenizer must not do
it a second time (`add_bos_token`): it would then score a bos behind a bos too, once a document. A tokenizer without a
bos is refused here: lm-eval then puts the eos in front, and `rlhf-kl eval` leaves out the first token. Exit 1 where
the figures differ by more than 1e-4 of their size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlhf_kl.data.files import read_rows, text_column
from rlhf_kl.data.texts import read_texts
from rlhf_kl.models.load import context_length, load_causal_lm, load_tokenizer
from rlhf_kl.models.text import encode_all

TOLERANCE = 1e-4
TASK = {
    "task": "local_documents",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
PROGRAM = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

model, folder, batch = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf",
    model_args={"pretrained": model, "dtype": "float32", "add_bos_token": False},
    tasks=["local_documents"],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    device="cpu",
    batch_size=int(batch),
    bootstrap_iters=0,
)
print(json.dumps({"version": lm_eval.__version__, **found["results"]["local_documents"]}))
"""


def documents_within_context(model: str, texts: Path, column: str, limit: int | None) -> list[str]:
    """The documents that fit into the model's context behind a bos, none of them empty."""
    tokenizer = load_tokenizer(model)
    if tokenizer.bos_token_id is None:
        sys.exit(f"{model}: its tokenizer has no bos: lm-eval would put the eos in front")
    context = context_length(load_causal_lm(model))
    documents = read_texts(read_rows(texts, "--texts"), text_column(str(texts), column), None, f"--texts: {texts}")
    documents = [text for text in documents if text.strip()]
    lengths = [len(row) for row in encode_all(tokenizer, documents)]
    return [text for text, n in zip(documents, lengths, strict=True) if context is None or n <= context][:limit]


def ours(model: str, file: Path) -> dict[str, Any]:
    """The figures of `rlhf-kl eval`."""
    return _answer([sys.executable, "-m", "rlhf_kl", "eval", "--model", model, "--texts", str(file), "--json"])


def theirs(python: str, model: str, file: Path, batch: int) -> dict[str, Any]:
    """The figures of lm-eval, as a local task of the same file."""
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(file)}}}
    (file.parent / "task.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return _answer([python, "-c", PROGRAM, model, str(file.parent), str(batch)])


def _answer(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    text = done.stdout.strip()
    answer: dict[str, Any] = json.loads(text if text.startswith("{\n") else text.splitlines()[-1])
    return answer


def main() -> int:
    """Print both figures and how closely they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder that plain transformers loads, such as RUN/final")
    parser.add_argument("--texts", required=True, type=Path, help=".jsonl .json .csv .parquet .txt")
    parser.add_argument("--column", default="text")
    parser.add_argument("--python", required=True, help="the python of an environment with lm-eval")
    parser.add_argument("--max-documents", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1, help="of lm-eval")
    options = parser.parse_args()
    model = str(Path(options.model).resolve())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        texts = documents_within_context(model, options.texts, options.column, options.max_documents)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        mine, other = ours(model, file), theirs(options.python, model, file, options.batch_size)
    one, two = mine["bits_per_byte"], other["bits_per_byte,none"]
    difference = abs(one - two) / two
    print(f"documents             {mine['documents']} ({mine['tokens']} tokens, {mine['bytes']} bytes)")
    print(f"rlhf-kl eval          {one:.8f} bits per byte")
    print(f"lm-eval {other['version']:13s} {two:.8f} bits per byte")
    print(f"relative difference   {difference:.1e} ({'agrees' if difference <= TOLERANCE else 'does NOT agree'})")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
