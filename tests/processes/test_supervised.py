"""`sft` and `reward-model` in two processes beside one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl.run.log import read_jsonl
from tests.made import Make


def test_two_processes_learn_what_one_does(together: Make, rlhf_kl: Make, tiny_folder: Path, tmp_path: Path) -> None:
    """Batches of 8 and a last one of 1, so that the second process has no row of it."""
    pairs = [
        {"prompt": x + "abcd"[n % 4] * n, "chosen": "a" * n, "rejected": "d" * n} for x in "abcd" for n in range(1, 8)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*pairs, *pairs[:5]]))
    for name, repeats in (("texts", range(1, 10)), ("held_out", range(10, 12))):
        texts = [{"text": (x + y) * n} for x, y in ("ab", "cd", "ad", "bc", "ac") for n in repeats]
        lines = [json.dumps(row) + "\n" for row in texts[: 41 if name == "texts" else None]]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    held_out = f"data.eval_texts='{tmp_path / 'held_out.jsonl'}'"
    own = {
        "sft": (f"data.texts='{tmp_path / 'texts.jsonl'}'", held_out, "sft.batch_size=8"),
        "reward-model": (f"data.pairs='{tmp_path / 'pairs.jsonl'}'", "reward_model.batch_size=8"),
    }

    def words(kind: str, count: int) -> list[Any]:
        settings = [f"policy.model='{tiny_folder}'", "run.device=cpu", "tracking.tensorboard=false", *own[kind]]
        settings += [f"{kind.replace('-', '_')}.{key}" for key in ("microbatch_size=4", "epochs=3")]
        config = {"sft": "sft_reviews.yaml", "reward-model": "reward_reviews.yaml"}[kind]
        options = [word for setting in settings for word in ("--set", setting)]
        return [kind, "--config", config, "--output-dir", tmp_path / f"{kind}-{count}", "--quiet", *options]

    for kind in own:
        outcome = rlhf_kl(*words(kind, 1))
        assert outcome.code == 0, outcome.err
    result = together([words(kind, 2) for kind in own])
    assert result.codes == [[0, 0], [0, 0]], result.output
    for kind in own:
        one, two = (list(read_jsonl(tmp_path / f"{kind}-{count}" / "metrics.jsonl")) for count in (1, 2))
        assert len(one) == len(two) > 3
        for a, b in zip(one, two, strict=True):
            numbers = {key: value for key, value in a.items() if not key.startswith("time/")}
            assert {key: b[key] for key in numbers} == pytest.approx(numbers, rel=2e-3, abs=1e-5), kind
        before, after = (load_file(tmp_path / f"{kind}-{count}" / "final" / "model.safetensors") for count in (1, 2))
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-2, atol=1e-4)
