"""The held-out evaluation of a run: its `eval/*` figures, responses for `samples.jsonl`, and the KL by token."""

from __future__ import annotations

from typing import Any

from rlhf_kl.events import Event
from rlhf_kl.monitors.kl_shares import Part
from rlhf_kl.ppo.heldout import STDERR, HeldOut, figures_of, own_figures
from rlhf_kl.training.samples import heldout_rows, token_parts

ROW = ("bits_per_byte", "documents", "unscored", "forward_kl_token", "distinct_2")
WITH_ERRORS = ("perplexity", "scores", "kl_token")


def evaluate_policy(
    held: HeldOut, began_as_reference: bool, step: int, events: list[Event], more: HeldOut | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Part]]:
    """The `eval/*` figures of the policy before update `step`, its `heldout_rows`, and its `token_parts`.

    Before step 1 that is the reference, where the policy began as it: so this may follow the update. `events` gets what
    is left out. `more`: further prompts, for the scores. Errors: InputError from a reward.
    """
    assert held.reference is not None
    same = step == 1 and began_as_reference  # then these are the reference's figures too
    texts = held.perplexity(held.reference if same else held.policy)
    of_reference = held.perplexity(held.reference) if step == 1 and not same else None
    every, others = held.samples(same=same)
    own, other = every.pick(held.firsts), others.pick(held.firsts)
    figures = texts | figures_of(own, other, events, None if more is None else more.samples()[0])
    with_errors = (*WITH_ERRORS, *own.watched)
    row = {f"eval/{name}": figures[name] for name in (*ROW, *with_errors, *(name + STDERR for name in with_errors))}
    if of_reference is not None:
        known = of_reference | own_figures(other)
        row |= {f"eval/reference_{name}": known[name] for name in ("perplexity", "distinct_2", *other.watched)}
    rows = heldout_rows(held, every, others if step == 1 else None, held.scorers.column_names)
    return row, rows, token_parts(held, own)
