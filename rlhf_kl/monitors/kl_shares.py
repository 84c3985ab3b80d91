"""Which tokens carry the KL: the exact KL at each position of responses, by the token drawn there and by the place.

The KL at a position is that of the whole distribution from which its token was drawn. So the parts of any division of
the positions add up to the KL of the responses.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rlhf_kl.text import visible

MOST = 20  # tokens of a table
LEAST = 1e-6  # nats per token: less is rounding
MUCH = 1 / 3  # share of one token that is told
TOKEN, EOS, SPECIAL, OTHERS, PLACE, ALL = "token", "eos", "special", "others", "place", "all"  # kinds of parts
PLACES = {"first": 0, "second to fifth": 1, "later": 5}  # in a response: from this position on
MEANING = {
    TOKEN: "much of what sets the policy apart is when to write this token. Read the texts: a reward may be pleased "
    "by it alone",
    EOS: "much of what sets the policy apart is when to end. Compare the lengths: a reward may pay for them",
    SPECIAL: "much of what sets the policy apart is the form of a response, not its words",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Some positions of responses: those where one token was drawn, or those of a range of places."""

    kind: str
    text: str  # what the token adds to a text, or a name
    id: int | None  # of the token
    count: int
    kl: float  # nats: sum of the exact KL at these positions
    logratio: float  # nats: sum of log pi - log ref of the tokens drawn there


def part_of(row: Mapping[str, Any]) -> Part:
    """Of a row of tokens.jsonl, where null is a number that was not finite."""
    known = {field.name: row[field.name] for field in fields(Part)}
    return Part(**known | {name: math.nan for name in ("kl", "logratio") if known[name] is None})


def kl_parts(responses: Iterable[Sequence[Sequence[Any]]], named: Mapping[int, tuple[str, str]]) -> list[Part]:
    """A part for each token that was drawn, and one for each range of places.

    responses: of each the ids, the log-probs of policy and reference, and the exact KL (nats), all of T numbers.
    named: kind (`TOKEN`, `EOS` or `SPECIAL`) and text of each token.
    """
    names, starts, parts = list(PLACES), list(PLACES.values()), list[Part]()
    for columns in responses:
        for i, (token, logprob, ref_logprob, kl) in enumerate(zip(*columns, strict=True)):
            kind, text = named[token]
            parts.append(Part(kind, text, token, 1, kl, logprob - ref_logprob))
            parts.append(Part(PLACE, names[bisect(starts, i) - 1], None, 1, kl, logprob - ref_logprob))
    return merged(parts)


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts, those of the same name as one; the largest KL comes first, and places last."""
    same: dict[tuple[str, str, int | None], list[Part]] = {}
    for part in parts:
        same.setdefault((part.kind, part.text, part.id), []).append(part)
    sums = [
        Part(*name, sum(p.count for p in each), math.fsum(p.kl for p in each), math.fsum(p.logratio for p in each))
        for name, each in same.items()
    ]
    return sorted(sums, key=lambda part: (part.kind == PLACE, -part.kl))


def kl_shares(parts: Iterable[Part]) -> dict[str, Any] | None:
    """`{all, tokens, places, meaning}` of the parts of one run or several; None where there is no KL.

    tokens: rows of the `MOST` with the largest share, of EOS and special tokens behind them, and of all others. They
    add up to the row `all`, and so do the places. A row has what its part has, and in place of the sum of log-ratios
    their mean: above 0 the policy makes the token more likely. mean_kl: nats per token; share: of the KL.
    """
    parts = merged(parts)
    ordinary, apart = ([p for p in parts if p.kind in kinds] for kinds in ((TOKEN,), (EOS, SPECIAL)))
    others = (replace(p, kind=OTHERS, text="all others", id=None) for p in ordinary[MOST:] + apart[MOST:])
    tokens = [*ordinary[:MOST], *apart[:MOST], *merged(others)]
    whole = merged(replace(p, kind=ALL, text="all", id=None) for p in tokens)
    if not whole or not LEAST * whole[0].count < whole[0].kl < math.inf:
        return None

    def row(part: Part) -> dict[str, Any]:
        means = {"mean_kl": part.kl / part.count, "share": part.kl / whole[0].kl}
        return asdict(part) | means | {"logratio": part.logratio / part.count}

    rows = list(map(row, tokens))
    places = sorted((p for p in parts if p.kind == PLACE), key=lambda part: PLACES[part.text])
    told = [
        f"{visible(each['text'])} has {each['share']:.0%} of the KL and is {each['count'] / whole[0].count:.0%} of the "
        f"tokens: {MEANING[each['kind']]}."
        for each in rows
        if each["share"] > MUCH and each["kind"] in MEANING
    ]
    return {"all": row(whole[0]), "tokens": rows, "places": list(map(row, places)), "meaning": told}
