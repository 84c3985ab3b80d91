"""Which tokens carry the KL: tables by hand, and that every table adds up to the KL."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_kl.monitors.kl_shares import MOST, Part, kl_parts, kl_shares, merged, part_of
from rlhf_kl.report.token_tables import in_steps, largest, tables_text, token_tables
from rlhf_kl.run.log import encode_json
from rlhf_kl.text import visible

NAMED = {2: ("eos", "<eos>"), 3: ("token", " a"), 4: ("token", "\n"), 5: ("special", "<think>")}
# ids, log pi, log ref, exact KL of each response
ONE = [[5, 3, 4, 3, 3, 3, 2], [-1.0] * 7, [-2.0, -1.5, -0.5, -1.5, -1.5, -1.5, -1.0], [0.5, 0.1, 0.3, 0.1, 0.2, 0.6, 0]]
OTHER = [[4, 2], [-1.0, -1.0], [-0.5, -1.0], [0.1, 0.1]]


def test_a_table_by_hand() -> None:
    """Seven and two tokens, of 1.8 and 0.2 nats."""
    found = kl_shares(kl_parts([ONE, OTHER], NAMED))
    assert found is not None
    rows = [
        (row["kind"], row["text"], row["id"], row["count"], row["kl"], row["mean_kl"], row["share"], row["logratio"])
        for row in found["tokens"]
    ]
    assert rows == [
        pytest.approx(("token", " a", 3, 4, 1.0, 0.25, 0.5, 0.5)),
        pytest.approx(("token", "\n", 4, 2, 0.4, 0.2, 0.2, -0.5)),
        pytest.approx(("special", "<think>", 5, 1, 0.5, 0.5, 0.25, 1.0)),
        pytest.approx(("eos", "<eos>", 2, 2, 0.1, 0.05, 0.05, 0.0)),
    ]
    places = [(row["text"], row["count"], row["kl"]) for row in found["places"]]
    assert places == [
        pytest.approx(("first", 2, 0.6)),
        pytest.approx(("second to fifth", 5, 0.8)),
        pytest.approx(("later", 2, 0.6)),
    ]
    assert (found["all"]["count"], found["all"]["mean_kl"]) == (9, pytest.approx(2.0 / 9))
    (told,) = found["meaning"]
    assert "␣a" in told
    assert "50%" in told
    assert "44%" in told  # four of nine tokens


def test_a_token_with_a_third_is_not_told_and_one_with_more_is() -> None:
    def meaning(*kls: float) -> list[str]:
        named = {i: ("eos" if i == 0 else "token", f"t{i}") for i in range(len(kls))}
        found = kl_shares(kl_parts([[range(len(kls)), kls, kls, kls]], named))
        assert found is not None
        return list(found["meaning"])

    assert meaning(1.0, 1.0, 1.0) == []
    assert [text.split()[0] for text in meaning(1.1, 1.0, 1.0)] == ["t0"]
    assert [text.split()[0] for text in meaning(1.0, 2.0, 2.0)] == ["t1", "t2"]
    assert meaning(2.0, 1.0, 1.0)[0].split(": ")[1] != meaning(1.0, 2.0, 1.0)[0].split(": ")[1]


def test_what_is_no_row_is_in_the_row_of_all_others() -> None:
    """Thirty tokens, and thirty special ones: twenty rows of each, by their KL."""
    kls = [1.0 + i for i in range(60)]
    named = {i: ("token" if i < 30 else "special", f"t{i}") for i in range(60)}
    found = kl_shares(kl_parts([[range(60), kls, kls, kls]], named))
    assert found is not None
    *rows, others = found["tokens"]
    assert [row["id"] for row in rows] == [*range(29, 29 - MOST, -1), *range(59, 59 - MOST, -1)]
    assert (others["kind"], others["count"]) == ("others", 20)
    assert others["kl"] == sum(kls[:10]) + sum(kls[30:40])


NATS = st.floats(0.0, 50.0, width=32)
TOKENS = st.lists(st.tuples(st.integers(0, 40), st.floats(-30.0, 0.0, width=32), NATS), min_size=1, max_size=30)
ANY = {i: (("eos", "special", "token")[min(i, 2)], f"t{i}") for i in range(41)}


@given(st.lists(TOKENS, min_size=1, max_size=8), st.integers(0, 8))
def test_every_table_adds_up_to_the_kl(responses: list[Any], first: int) -> None:
    """However the responses are divided among runs, and after a way through the file."""
    columns = [list(zip(*((i, p, -1.0, kl) for i, p, kl in each), strict=True)) for each in responses]
    runs = [kl_parts(part, ANY) for part in (columns[:first], columns[first:])]
    parts = [part_of(json.loads(encode_json(asdict(part)))) for run in runs for part in run]
    kls, count = [kl for each in responses for _, _, kl in each], sum(map(len, responses))
    found = kl_shares(parts)
    if found is None:
        assert sum(kls) <= 1e-6 * count
        return
    whole = found["all"]
    assert whole["count"] == sum(row["count"] for row in found["tokens"]) == count
    assert whole["kl"] == math.fsum(row["kl"] for row in found["tokens"]) == pytest.approx(math.fsum(kls), rel=1e-14)
    for rows in (found["tokens"], found["places"]):
        assert sum(row["count"] for row in rows) == count
        assert math.fsum(row["kl"] for row in rows) == pytest.approx(whole["kl"], rel=1e-14)
        assert math.fsum(row["share"] for row in rows) == pytest.approx(1.0, rel=1e-14)
        total = math.fsum(row["count"] * row["logratio"] for row in rows)
        assert total == pytest.approx(whole["count"] * whole["logratio"], rel=1e-9, abs=1e-9)
    for _, cells in token_tables(found):
        *shares, all_of_them = (round(10 * float(row[3].rstrip("%"))) for row in cells)
        assert sum(shares) == all_of_them == 1000


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40).filter(lambda each: sum(each) > 0.01))
def test_shares_in_steps_keep_their_order_and_add_up(weights: list[float]) -> None:
    shares = [weight / math.fsum(weights) for weight in weights]
    steps = in_steps(shares, 1000)
    assert sum(steps) == 1000
    assert all(abs(n - 1000 * share) < 1.0 for n, share in zip(steps, shares, strict=True))
    ranked = [n for _, n in sorted(zip(shares, steps, strict=True))]
    assert ranked == sorted(ranked)


def test_where_there_is_no_kl_there_is_no_table() -> None:
    zero, broken = ([[3, 2], [-1.0] * 2, [-1.0] * 2, [kl, 0.0]] for kl in (1e-7, math.nan))
    for parts in ([], kl_parts([zero], NAMED), kl_parts([broken], NAMED)):
        rows = [json.loads(encode_json(asdict(part))) for part in parts]
        assert kl_shares(parts) is kl_shares(map(part_of, rows)) is None
    assert tables_text(None, 80)


def test_parts_of_one_token_are_one_and_two_tokens_of_the_same_text_are_two() -> None:
    a, other = Part("token", "a", 3, 2, 1.0, 0.5), Part("token", "a", 9, 1, 2.0, 0.5)
    assert merged([a, other, a]) == [Part("token", "a", 3, 4, 2.0, 1.0), other]


def test_the_tables_show_blanks_and_fit_a_terminal() -> None:
    long = Part("token", "-" * 99, 7, 1, 0.01, -3.0)
    found = kl_shares([*kl_parts([ONE, OTHER], NAMED), long, Part("place", "later", None, 1, 0.01, -3.0)])
    assert found is not None
    (header, rows), (_, places) = token_tables(found)
    assert len(header) == len(rows[0]) == len(places[0]) + 1 == 5
    assert [row[0] for row in rows] == ["␣a", r"\n", "-" * 20 + "…", "<think> (special)", "<eos> (EOS)", "all"]
    assert [row[4] for row in rows] == [
        "1.6x more likely", "1.6x less likely", "20x less likely", "2.7x more likely", "as likely", "",
    ]  # fmt: skip
    assert [row[3] for row in places] == ["29.9%", "39.8%", "30.3%", "100.0%"]
    assert largest(found).split(", ")[0] == "␣a 50%"
    text = tables_text(found, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert found["meaning"][0].split(":")[0] in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "shown"), [(" a", "␣a"), ("\n\n", r"\n\n"), ("", "∅"), ("\x1b[2J", r"\x1b[2J"), ("é", "é")]
)
def test_a_token_is_seen_whatever_it_is(text: str, shown: str) -> None:
    assert visible(text) == shown
