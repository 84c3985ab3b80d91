from __future__ import annotations

from dataclasses import replace

import torch

from rlhf_kl.processes import Processes
from rlhf_kl.rollout.whole import joined, whole_batch
from rlhf_kl.types import Prompt, RolloutBatch


def batch(width: int, tokens: int, start: int) -> RolloutBatch:
    """Two rows; the first has a prompt of one token and a response of one."""
    prompt_mask = torch.ones(2, width, dtype=torch.bool)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    prompt_mask[0, :-1], mask[0, 1:] = False, False
    figures = torch.arange(2 * tokens, dtype=torch.float32).view(2, tokens) + start
    return RolloutBatch(
        prompt_ids=torch.full((2, width), start),
        prompt_mask=prompt_mask,
        response_ids=torch.full((2, tokens), start),
        mask=mask,
        **dict.fromkeys(
            ("logprobs", "ref_logprobs", "exact_kl", "entropy", "k1_variance", "logprob_variance", "values"), figures
        ),
        scores=torch.tensor([1.0, 2.0]) + start,
        shaped_scores=torch.tensor([1.0, 2.0]) + start,
        ended=torch.tensor([True, False]),
        prompts=[Prompt("a", {"answer": start}), Prompt("b", {"answer": start + 1})],
        responses=["c", "d"],
        score_terms={"one": torch.tensor([0.5, 0.25]) + start},
        penalties={"two": torch.tensor([0.0, 1.0])},
        scored=torch.tensor([True, start > 0]),
    )


def test_batches_of_other_widths_below_each_other() -> None:
    small, large = batch(2, 3, 0), batch(4, 5, 10)
    whole = joined([small, large])
    assert whole.prompt_mask.tolist()[:2] == [[False, False, False, True], [False, False, True, True]]
    assert whole.mask.sum(1).tolist() == [1, 3, 1, 5]
    assert whole.logprobs[1].tolist() == [3.0, 4.0, 5.0, 0.0, 0.0]
    assert whole.logprobs[2:].equal(large.logprobs)
    assert whole.scores.tolist() == [1.0, 2.0, 11.0, 12.0]
    assert whole.scored.tolist() == [True, False, True, True]
    assert whole.score_terms["one"].tolist() == [0.5, 0.25, 10.5, 10.25]
    assert [prompt.row["answer"] for prompt in whole.prompts if isinstance(prompt, Prompt)] == [0, 1, 10, 11]
    # Each row's tokens lie where they lay: the last token of a prompt is its last column.
    assert whole.input_ids[0, 3] == 0
    assert whole.input_ids[2, 3] == 10


def test_a_process_alone_keeps_its_batch() -> None:
    one = replace(batch(2, 3, 0))
    assert whole_batch(one, Processes()) is one
