"""What a run's policy and its reference answer to the same held-out prompts: at its start, on its way, at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlhf_kl.run.folder import RunFolder
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.text import read_number, safe_text

HELD_OUT = "held out"  # `chosen` in samples.jsonl: all other rows are responses that were trained on
WIDE = 70  # columns from which two texts stand side by side
LONGEST = 800  # characters of a text that are shown


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


def across(folders: Mapping[str, Path]) -> dict[str, Any] | None:
    """`{prompt, reference, policies: {name: text at the end}}` of a prompt that all runs have; None without one."""
    runs = {name: {each["prompt"]: each for each in held_out_texts(folder)} for name, folder in folders.items()}
    first = next(iter(runs.values()), {})
    prompt = next((prompt for prompt in first if all(prompt in texts for texts in runs.values())), None)
    if prompt is None:
        return None
    policies = {name: texts[prompt]["policy"][-1] for name, texts in runs.items()}
    return {"prompt": prompt, "reference": first[prompt]["reference"], "policies": policies}


class TextTable:
    """Prompts with their texts for a terminal: two texts side by side, one above the other where it is narrow."""

    def __init__(self, texts: Iterable[Mapping[str, Any]]) -> None:
        """`texts`: as from `held_out_texts`, of which the last of the policy is shown."""
        self.texts = list(texts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.texts:
            yield Text("Held-out prompts, answered by both (KL of the whole text, in nats)", style="bold")
        for each in self.texts:
            pair = [_shown("reference", each["reference"]), _shown("policy", each["policy"][-1])]
            grid = Table.grid(padding=(0, 2, 0, 0))
            if options.max_width >= WIDE:
                grid.add_column(ratio=1)
                grid.add_column(ratio=1)
                grid.expand = True
                grid.add_row(*pair)
            else:
                for text in pair:
                    grid.add_row(text)
            yield Padding(Text(_safe(each["prompt"][-LONGEST:]), style="cyan"), (1, 0, 0, 0))
            yield grid


def _shown(name: str, text: Mapping[str, Any]) -> Text:
    figures = [f"{key} {text[key]:.2f}" for key in ("score", "gold") if read_number(text, key) is not None]
    if read_number(text, "kl") is not None:
        figures.append(f"KL {text['kl']:.2f}")
    more = "..." if len(text["text"]) > LONGEST else ""
    body = _safe(text["text"][:LONGEST]) or "(empty)"
    return Text.assemble((name, "bold"), (f"  {', '.join(figures)}\n", "dim"), body, more)


def _safe(text: str) -> str:
    return safe_text(text.strip(), keep_newlines=True)


def _text(row: Mapping[str, Any]) -> dict[str, Any]:
    names = {"step": "step", "response": "text", "score": "score", "gold": "gold", "kl": "kl", "tokens": "tokens"}
    return {names[key]: row[key] for key in names if key in row}
