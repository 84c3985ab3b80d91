"""What a run's policy and its reference answer to the same held-out prompts: at its start, on its way, at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_kl.run.folder import RunFolder
from rlhf_kl.run.log import read_jsonl

HELD_OUT = "held out"  # `chosen` in samples.jsonl: all other rows are responses that were trained on


def held_out_texts(folder: Path) -> list[dict[str, Any]]:
    """For each prompt `{prompt, reference: {text, score, gold}, policy: [{step, text, score, gold, kl, tokens}, ...]}`.

    `step`: of the update that follows, so 1 is the policy at the start. All texts of a prompt come from the same noise.
    Scores and KL (nats) may be None. Empty if nothing has been evaluated.
    """
    return grouped(row for row in read_jsonl(RunFolder(folder).samples) if row.get("chosen") == HELD_OUT)


def grouped(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same for rows of samples.jsonl; the first of a prompt holds the reference's response."""
    texts: dict[str, dict[str, Any]] = {}
    for row in rows:
        prompt = row["prompt"]
        if "reference" in row:
            texts.setdefault(prompt, {"prompt": prompt, "reference": _text(row["reference"]), "policy": []})
        texts[prompt]["policy"].append(_text(row))
    return list(texts.values())


def _text(row: Mapping[str, Any]) -> dict[str, Any]:
    names = {"step": "step", "response": "text", "score": "score", "gold": "gold", "kl": "kl", "tokens": "tokens"}
    return {names[key]: row[key] for key in names if key in row}
