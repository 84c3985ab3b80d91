"""The held-out evaluation of a run: its `eval/*` figures, responses for `samples.jsonl`, and the KL by token."""

from __future__ import annotations

from typing import Any

from rlhf_kl.events import Event
from rlhf_kl.monitors.kl_shares import Part
from rlhf_kl.ppo.heldout import STDERR, HeldOut, distinct_2, figures_of
from rlhf_kl.training.samples import heldout_rows, token_parts

WITH_ERRORS = ("perplexity", "scores", "gold", "kl_token")
ROW = ("bits_per_byte", "documents", "unscored", "forward_kl_token", "distinct_2", *WITH_ERRORS,
       *(name + STDERR for name in WITH_ERRORS))  # fmt: skip


def evaluate_policy(
    held: HeldOut, began_as_reference: bool, step: int, events: list[Event]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Part]]:
    """The `eval/*` figures of the policy before update `step`, its `heldout_rows`, and its `token_parts`.

    `events` gets what is left out. Errors: InputError from a reward.
    """
    assert held.reference is not None
    same = step == 1 and began_as_reference  # then these are the reference's figures too
    texts = held.perplexity(held.policy)
    of_reference = held.perplexity(held.reference) if step == 1 and not same else None
    every, others = held.samples(same=same)
    own, other = every.pick(held.firsts), others.pick(held.firsts)
    figures = texts | figures_of(own, other, events)
    row = {f"eval/{name}": figures[name] for name in ROW}
    if of_reference is not None:
        row["eval/reference_perplexity"] = of_reference["perplexity"]
        row["eval/reference_distinct_2"] = distinct_2(other.texts)
    rows = heldout_rows(held, every, others if step == 1 else None, held.scorers.column_names)
    return row, rows, token_parts(held, own)
