"""The comparison with lm-eval, whose part a program plays that says a figure found by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).parents[2] / "scripts" / "lm_eval_agrees.py"
TEXTS = ["abcd", "ddcb", "a" * 31, "b" * 40]  # the last one does not fit into a context of 32


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.001, 1)])
def test_it_tells_whether_both_agree(tiny_folder: Path, letters: Any, tmp_path: Path, factor: float, code: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(tiny_folder), dtype=torch.float32).eval()
    nats = 0.0
    for text in TEXTS[:3]:
        ids = torch.tensor([[1, *letters(text, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            nats += float(model(input_ids=ids, labels=ids).loss) * len(text)
    figure = factor * nats / sum(map(len, TEXTS[:3])) / math.log(2)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    stand_in = tmp_path / "python"
    stand_in.write_text(f"""#!/bin/sh\necho '{json.dumps({"version": "0", "bits_per_byte,none": figure})}'\n""")
    stand_in.chmod(0o755)
    options = ["--model", str(tiny_folder), "--texts", str(tmp_path / "texts.jsonl"), "--python", str(stand_in)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "3 (39 tokens, 39 bytes)" in done.stdout
