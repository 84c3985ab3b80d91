"""Which tokens carry the KL of the runs of harm.yaml: the end, openings, and what the reward counts.

    python scripts/evidence/tokens.py FOLDER     reads the runs of FOLDER/../harm

Of the closing evaluation's responses, all seeds together: the share of the KL and of the tokens of EOS, of the first
token, of the second to fifth, and of the reward's own words: those that VADER's lexicon calls positive; the ends of
sentences for the other two. Into FOLDER/tokens.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import finished, scorers

from rlhf_kl.monitors.kl_shares import EOS, PLACE, Part, merged
from rlhf_kl.run.log import write_json

SHOWN = 8  # tokens with the largest shares
VADER = scorers()["vader"]()


def is_positive(text: str) -> bool:
    """Whether VADER's lexicon calls a token positive."""
    return VADER.lexicon.get(text.strip().lower(), 0.0) > 0


def ends_sentence(text: str) -> bool:
    """Whether a token has a full stop, a question mark or an exclamation mark."""
    return re.search("[.!?]", text) is not None


OWN: dict[str, Callable[[str], bool]] = {"positive": is_positive, "easy": ends_sentence, "plain": ends_sentence}


def shares(parts: list[Part], own: Callable[[str], bool]) -> dict[str, Any]:
    """Share of the KL and of the tokens, by kind of token and by place."""
    places = {part.text: part for part in parts if part.kind == PLACE}
    tokens = [part for part in parts if part.kind != PLACE]
    kl, count = (sum(getattr(part, key) for part in tokens) for key in ("kl", "count"))

    def share(some: list[Part]) -> dict[str, float]:
        return {
            "kl": sum(part.kl for part in some) / kl,
            "tokens": sum(part.count for part in some) / count,
        }

    return {
        "eos": share([part for part in tokens if part.kind == EOS]),
        "first": share([places["first"]]),
        "second to fifth": share([places["second to fifth"]]),
        "own words": share([part for part in tokens if own(part.text)]),
        "largest": [
            {"text": part.text, "kind": part.kind, "logratio": part.logratio / part.count, **share([part])}
            for part in tokens[:SHOWN]
        ],
    }


def main() -> None:
    """Read the runs, and write shares."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"seeds": []}
    for variant, runs in finished(folder.parent / "harm").items():
        parts = merged(part for run in runs.values() for part in run.token_parts)
        result[variant] = shares(parts, OWN[variant.partition("-")[0]])
        result["seeds"] = sorted({*result["seeds"], *runs})
    write_json(folder / "tokens.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
