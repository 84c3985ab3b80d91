"""What a run's policy and its reference answer to the same held-out prompts: at its start, on its way, at its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from rlhf_kl.config.schema.eval import scorer_names
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.run.log import EVALUATED, NOT_HELD_OUT, read_jsonl
from rlhf_kl.text import cut, format_number, read_number, safe_text, scorer_label

TITLE = "\n{prompts}, answered by both (KL in nats per response):"
KINDS = {False: "Held-out prompts", True: "Prompts of the training (too few to hold some out)"}
COLUMN = 39  # columns of a text: two fit beside each other
SHADES = ((0.05, ""), (0.5, "yellow"), (2.0, "dark_orange3"), (math.inf, "red"))  # nats of a token
LONGEST = 800  # characters of a text that are shown


def held_out_texts(folder: Path) -> list[dict[str, Any]]:
    """For each prompt `{prompt, trained_on, reference: {text, score}, policy: [{step, text, score, kl, tokens}, ...]}`.

    Beside `score` stand those of the scorers that never train, by name. `step`: of the update that follows, so 1 is the
    policy at the start. A text of several that were drawn has `score_mean` and their number `of`. Scores and KL (nats)
    may be None. Empty if nothing has been evaluated.
    """
    return grouped(row for row in read_jsonl(RunFolder(folder).samples) if row.get("chosen") in EVALUATED)


def grouped(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same for rows of samples.jsonl; the first of a prompt holds the reference's response."""
    texts: dict[str, dict[str, Any]] = {}
    for row in rows:
        prompt = row["prompt"]
        if "reference" in row:
            about = {"prompt": prompt, "trained_on": row.get("chosen") == NOT_HELD_OUT}
            texts.setdefault(prompt, about | {"reference": _text(row["reference"]), "policy": []})
        texts[prompt]["policy"].append(_text(row))
    return list(texts.values())


def across(folders: Mapping[str, Path]) -> dict[str, Any] | None:
    """`{prompt, reference, policies: {name: text at the end}}` of a prompt that all runs have; None without one."""
    runs = {name: {each["prompt"]: each for each in held_out_texts(folder)} for name, folder in folders.items()}
    for prompt, each in next(iter(runs.values()), {}).items():
        if all(prompt in texts for texts in runs.values()):
            policies = {name: texts[prompt]["policy"][-1] for name, texts in runs.items()}
            return {"prompt": prompt, "reference": each["reference"], "policies": policies}
    return None


def titled_answers(texts: Sequence[Mapping[str, Any]]) -> Group:
    """`answers` below a title that says whether the prompts are held out."""
    return answers(texts, TITLE.format(prompts=KINDS[any(each.get("trained_on") for each in texts)]))


def answers(texts: Sequence[Mapping[str, Any]], title: str = "") -> Group:
    """`held_out_texts` for a terminal: reference (if any) and policy at the end, side by side where there is room."""
    parts: list[RenderableType] = [Text(title, style="bold")] if texts and title else []
    for each in texts:
        prompt = Text(safe_text(cut(each["prompt"].strip(), -LONGEST), keep_newlines=True), style="cyan")
        own = _shown("policy", each["policy"][-1])
        pair = _Beside(_shown("reference", each["reference"]), own) if "reference" in each else own
        parts += [prompt, pair, ""]
    return Group(*parts[:-1])


class _Beside:
    """Two texts side by side, or one below the other as wide as a terminal that has no room for that."""

    def __init__(self, *texts: Text) -> None:
        self.texts = texts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Columns(self.texts, width=COLUMN) if options.max_width > 2 * COLUMN else Group(*self.texts)


def text_figures(text: Mapping[str, Any], kl: str = "KL {}", digits: int = 3) -> list[str]:
    """Scores and KL of a response (nats), as far as they are known."""
    forms = {"score": "score {}", **{name: f"{scorer_label(name)} {{}}" for name in scorer_names(text)}, "kl": kl}
    known = {name: value for name in forms if (value := read_number(text, name)) is not None}
    if (mean := read_number(text, "score_mean")) is not None:
        forms["score"] += f" (median of {text.get('of')}, mean {format_number(mean, digits)})"
    return [forms[name].format(format_number(value, digits)) for name, value in known.items()]


def _shown(name: str, text: Mapping[str, Any]) -> Text:
    """Its figures and the text; a token with a larger KL is redder."""
    figures = [*text_figures(text, digits=2), *["not ended"] * (text.get("ended") is False)]
    rest, body = text["text"][:LONGEST].lstrip(), Text()
    for token in text.get("tokens", ()):
        piece = token["text"] if body else token["text"].lstrip()
        if not rest.startswith(piece):  # a special token, or a part of a character
            break
        style = next(style for bound, style in SHADES if token["kl"] < bound)
        body.append(safe_text(piece, keep_newlines=True), style=style)
        rest = rest[len(piece) :]
    body.append(safe_text(rest, keep_newlines=True) + "..." * (len(text["text"]) > LONGEST))
    head = ((name, "bold"), (f"  {', '.join(figures)}\n" if figures else "\n", "dim"))
    return Text.assemble(*head, body if body else "(empty)")


def _text(row: Mapping[str, Any]) -> dict[str, Any]:
    figures = ("step", "score", "score_mean", "of", *scorer_names(row), "kl", "tokens")
    return {"text": row["response"], **{key: row[key] for key in figures if key in row}}
