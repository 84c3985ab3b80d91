"""The held-out evaluation of a run: its `eval/*` figures, and the responses for `samples.jsonl`."""

from __future__ import annotations

from typing import Any

from rlhf_kl.events import Event
from rlhf_kl.ppo.heldout import STDERR, HeldOut, figures_of, own_figures
from rlhf_kl.train.samples import heldout_rows

ROW = ("bits_per_byte", "documents", "unscored", "forward_kl_token", "distinct_2")
WITH_ERRORS = ("perplexity", "scores", "kl_token")


def evaluate_policy(
    held: HeldOut, began_as_reference: bool, step: int, events: list[Event], more: HeldOut | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The `eval/*` figures of the policy before update `step`, and its `heldout_rows`.

    `events` gets what is left out. `more`: further prompts, for the scores. Errors: InputError from a reward.
    """
    assert held.reference is not None
    same = step == 1 and began_as_reference  # then these are the reference's figures too
    texts = held.perplexity(held.policy)
    of_reference = held.perplexity(held.reference) if step == 1 and not same else None
    every, others = held.samples(same=same)
    own, other = every.pick(held.firsts), others.pick(held.firsts)
    figures = texts | figures_of(own, other, events, None if more is None else more.samples()[0])
    with_errors = (*WITH_ERRORS, *own.watched)
    row = {f"eval/{name}": figures[name] for name in (*ROW, *with_errors, *(name + STDERR for name in with_errors))}
    if of_reference is not None:
        known = of_reference | own_figures(other)
        row |= {f"eval/reference_{name}": known[name] for name in ("perplexity", "distinct_2", *other.watched)}
    return row, heldout_rows(held, every, others if step == 1 else None, held.scorers.column_names)
