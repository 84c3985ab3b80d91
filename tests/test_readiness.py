"""Each line of the table on facts at both sides of its limit."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_kl.monitors.readiness import CHECKS, judge, judge_terms

RATE = {"rate": 1e-4, "size": "1M", "usual": 1e-4}
SHOWN = {"count": 64, "low": 0.0, "bars": "", "high": 1.0, "different": 4}
SAME = {"shown": "'a' -> 'b'", "count": 4, "share": 0.5, "text": "b"}
ENDS = {"names": "</s>", "length": 6.0, "lost": 1.0}
PEAK = {"room": 2.0, "tokens": 1.0, "share": ""}

TABLE: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "shard": [({}, False)],
    "unused": [({"note": "{x} has no effect"}, False)],
    "dtype": [({"dtype": "d", "device": "cpu", "slower": 1.2, "slowdown": x}, x < 1.3) for x in (1.2, 1.3)],
    "rate": [(RATE | {"ratio": x}, 0.2 <= x <= 5) for x in (0.19, 0.2, 5.0, 5.1)],
    "context": [({"longest": 4, "new": 6, "limit": x}, x is not None) for x in (32, None)],
    "reads": [({"key": "k", "shown": "'ab'", "advice": "other", "doubt": x}, not x) for x in ("", "why")],
    "reward context": [({"key": "k", "limit": 8, "new": 2, "cut": 3, "count": 4}, False)],
    "no accuracy": [({}, False)],
    "accuracy": [
        *(({"accuracy": x, "chance": 0.5, "where": "pairs"}, x >= 0.6) for x in (0.59, 0.6)),
        *(({"accuracy": x, "chance": 0.58, "where": "labelled texts"}, x >= 0.68) for x in (0.63, 0.69)),
    ],
    "chat": [({}, False)],
    "start": [({"begins": "begins as", "kept": "", "same": x}, x) for x in (True, False)],
    "scores": [(SHOWN | {"warning": x}, x is None) for x in (None, "clipped: {a}")],
    "few scores": [(SHOWN | {"critic": x}, not x) for x in (True, False)],
    "terms": [({"table": "", "term": "a", "advice": "less", "share": x}, x <= 0.9) for x in (-0.5, 0.9, 0.91)],
    "samples": [(SAME | {"most": x}, x < 3) for x in (2, 3)],
    "free endings": [(ENDS | {"rate": 0.0}, True)],
    "endings": [(ENDS | {"rate": x}, x > 0.1) for x in (0.1, 0.11)],
    "eval": [({"perplexity": x, "texts": 20, "words": 300}, x < 600) for x in (301.0, 4.8e6)],  # random weights: 301
    "checkpoint": [({"often": "", "count": 4, "need": "1 MB", "room": "2 MB", "fits": x}, x) for x in (True, False)],
    "memory": [(PEAK | {"peak": x}, x <= 2) for x in (2.0, 2.1)],
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_fine_or_doubtful_with_advice(name: str) -> None:
    for facts, fine in TABLE[name]:
        found = judge(name, **facts)
        assert (found.level == "fine", found.topic) == (fine, CHECKS[name].topic), facts
        advised = bool(found.change) or "warning" in facts  # which ends with advice
        assert advised >= (not fine)


@pytest.mark.parametrize(
    ("weights", "shares", "each", "decides"),
    [
        ({"a": 1.0, "b": 1.0}, (0.91, 0.09), False, "a"),
        ({"a": 1.0, "b": 1.0}, (-0.2, 1.2), True, "b"),
        ({"a": 1.0, "b": 1.0}, (0.5, 0.5), True, None),
        ({"a": 1.0, "b": 0.0}, (1.0, 0.0), False, None),  # one alone is the sum
        ({"a": 1.0, "b": 1.0}, (None, None), False, None),
    ],
)
def test_a_term_that_decides_is_named(
    weights: dict[str, float], shares: tuple[float | None, ...], each: bool, decides: str | None
) -> None:
    plain = {"mean": 0.5, "std": None, "scored": 1.0, "correlation": {"b": -0.001, "a": None}}
    figures = {name: plain | {"share": share} for name, share in zip("ab", shares, strict=True)}
    found = judge_terms(weights, figures, each=each)
    assert (found.topic, found.level) == ("terms", "fine" if decides is None else "doubtful")
    assert ("reward.normalize=each" in found.change) == (decides is not None and not each)
    assert decides is None or f"reward.terms.{decides}.weight" in found.change
    table = [line.split() for line in found.text.splitlines()[:3]]
    assert [row[0] for row in table] == ["term", "a", "b"]
    assert table[1][-1] == "0.00"  # of a and b, and no -0.00
