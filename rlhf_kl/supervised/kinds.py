"""What supervised training can learn: texts, responses, preference pairs, and texts with labels 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_kl.data.chat import (
    chat_exchange,
    chat_prompt,
    opening,
    plain_text,
    require_chat_template,
    without_opening,
)
from rlhf_kl.data.rows import Example, Labelled, Pair
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import InputError, blame
from rlhf_kl.models.lm import LM, negative_log_likelihood
from rlhf_kl.models.perplexity import perplexity_of, text_sums
from rlhf_kl.models.pretrained import check_vocabulary, context_length, eos_ids, save_model, texts_fingerprint
from rlhf_kl.models.tokens import encode_all, encode_behind
from rlhf_kl.ops.losses import bradley_terry_loss
from rlhf_kl.rewards.model import RewardModel, Texts, save_reward_model
from rlhf_kl.supervised.figures import histogram, label_figures, pair_figures
from rlhf_kl.supervised.fit import ALONE, Task

Figures = dict[str, Any]


class LanguageTask(Task):
    """Rows of token ids; each row's tokens from its start on are learned by cross-entropy."""

    data = "data.texts"

    def __init__(self, lm: LM, tokenizer: Any, rows: list[list[int]], starts: list[int], fingerprint: str) -> None:
        self.lm, self.tokenizer, self.rows, self.starts = lm, tokenizer, rows, starts
        learned = [float(len(row) - start) for row, start in zip(rows, starts, strict=True)]
        super().__init__(lm.model, [len(row) for row in rows], learned, fingerprint)

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed negative log-likelihood in nats."""
        losses = negative_log_likelihood(self.lm, [self.rows[i] for i in rows], [self.starts[i] for i in rows])
        return losses.sum(), {}

    def save(self, folder: Path) -> None:
        save_model(self.model, self.tokenizer, folder)


class TextTask(LanguageTask):
    """Text and eos; every token after the first is learned, which is the bos if the tokenizer adds one.

    A text too long for the context is cut. Errors: InputError if no text has a token.
    """

    unit = "texts"

    def __init__(self, lm: LM, tokenizer: Any, texts: Sequence[str], heldout: Sequence[str] = ()) -> None:
        self.heldout = list(heldout)
        context = context_length(lm.model)
        rows = [[*row, tokenizer.eos_token_id] for row in encode_all(tokenizer, texts)]
        with blame(self.data):
            if all(len(row) < 2 for row in rows):
                raise InputError(f"the tokenizer of the model makes no tokens of any of {len(texts)} texts")
            check_vocabulary(lm.model, tokenizer, rows)
        super().__init__(lm, tokenizer, [row[:context] for row in rows], [1] * len(rows), texts_fingerprint(texts))
        if cut := sum(context is not None and len(row) > context for row in rows):
            self.notes.append(f"{cut} of {len(texts)} texts are longer than the context and are cut off")

    def evaluate(self, ranks: Ranks = ALONE) -> Figures:
        """Perplexity of the held-out texts."""
        read = ranks.parts(len(self.heldout), lambda part: text_sums(self.lm, self.tokenizer, self.heldout[part]))
        figures = perplexity_of(read)
        return {
            "eval/loss": figures.nats_per_token,
            "eval/perplexity": figures.perplexity,
            "eval/bits_per_byte": figures.bits_per_byte,
        }


class ResponseTask(LanguageTask):
    """bos, prompt, response, eos; the response's tokens and the eos are learned.

    The prompt is tokenised alone, as in a rollout. A response too long for the context is cut. An example whose
    prompt fills the context, or has no tokens, is left out. Errors: InputError if none is left.
    """

    unit = "responses"

    def __init__(
        self,
        lm: LM,
        tokenizer: Any,
        examples: Sequence[Example],
        heldout: Sequence[Example] = (),
        *,
        chat: bool = False,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        rows_of_a_pass: int = 1,
    ) -> None:
        """`rows_of_a_pass`: of an evaluation."""
        self.chat, self.system, self.options = chat, system, options or {}
        if chat:
            require_chat_template(tokenizer, "data.chat_template", self.options)
        self.opened = opening(tokenizer, system, self.options) if chat else ""
        self.rows_of_a_pass = rows_of_a_pass
        self.eos_ids, self.context = eos_ids(lm.model, tokenizer), context_length(lm.model)
        rows, starts, cut = self._encoded(lm.model, tokenizer, examples)
        fingerprint = texts_fingerprint(plain_text(text) for example in examples for text in example)
        super().__init__(lm, tokenizer, rows, starts, fingerprint)
        self.heldout, self.heldout_starts, _ = self._encoded(lm.model, tokenizer, heldout) if heldout else ([], [], 0)
        if cut:
            self.notes.append(f"{cut} of {len(examples)} responses are longer than the context and are cut off")
        if left_out := len(examples) - len(rows):
            why = "their prompts fill the context, or have no tokens"
            self.notes.append(f"{left_out} of {len(examples)} rows left out: {why}")
        bare = sum(without_opening(each.response, self.opened) is None for each in examples)
        if bare and self.opened.strip():
            begin = f"do not begin with {self.opened.strip()!r}, with which the chat template ends the prompt"
            self.notes.append(f"{bare} of {len(examples)} responses {begin}: they are learned as what follows it")

    def _encoded(
        self, model: Any, tokenizer: Any, examples: Sequence[Example]
    ) -> tuple[list[list[int]], list[int], int]:
        """Rows, the start of the response in each, and how many were cut."""
        both = [self._encode(tokenizer, example) for example in examples]
        fitting = [(p, r) for p, r in both if p and (self.context is None or len(p) < self.context)]
        if not fitting:
            why = f"fill the context of {self.context} tokens" if any(p for p, _ in both) else "have no tokens"
            raise InputError(f"data.texts: the prompts of all {len(examples)} rows {why}")
        cut = sum(self.context is not None and len(p) + len(r) > self.context for p, r in fitting)
        rows = [[*p, *r][: self.context] for p, r in fitting]
        with blame(self.data):
            check_vocabulary(model, tokenizer, rows)
        return rows, [len(p) for p, _ in fitting], cut

    def _encode(self, tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, with a bos where the tokenizer adds one, and of the response with its eos."""
        if self.chat:
            asked = chat_prompt(tokenizer, example.prompt, self.system, self.options)
            exchange = chat_exchange(tokenizer, example.prompt, example.response, self.system, self.options)
            # A template may leave out a thought of the answer, or write its beginning elsewhere than in the prompt.
            rest = without_opening(example.response, self.opened)
            alone = asked + (example.response if rest is None else rest)
            answered = exchange if exchange.startswith(asked) else alone
        else:
            asked = plain_text(example.prompt)
            answered = asked + example.response
        bos = False if self.chat else None  # a template writes its bos itself
        prompt, both = encode_all(tokenizer, [asked, answered], bos=bos)
        if both[: len(prompt)] == prompt:
            response = both[len(prompt) :]
        else:
            response = encode_behind(tokenizer, answered[len(asked) :])
        ends = [i for i, token in enumerate(response) if token in self.eos_ids]
        # A chat template ends a turn itself and may add a line break, which a policy need not learn.
        return prompt, response[: ends[0] + 1] if ends else [*response, self.eos_ids[0]]

    def evaluate(self, ranks: Ranks = ALONE) -> Figures:
        """Loss per token of the held-out responses."""
        tokens = sum(map(len, self.heldout)) - sum(self.heldout_starts)
        loss = sum(ranks.parts(len(self.heldout), self._summed_loss)) / tokens
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    @torch.no_grad()
    def _summed_loss(self, part: slice) -> float:
        order = sorted(range(part.start, part.stop), key=lambda i: len(self.heldout[i]))

        size, total = self.rows_of_a_pass, 0.0
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            texts, starts = [self.heldout[i] for i in rows], [self.heldout_starts[i] for i in rows]
            total += float(negative_log_likelihood(self.lm, texts, starts).sum())
        return total


class RewardTask(Task):
    """What a reward model learns; every row counts the same."""

    def __init__(self, reward: RewardModel, texts: Sequence[Texts], fingerprint: str) -> None:
        """`texts`: of all rows, and again of all rows where each has two; the longer one counts."""
        self.reward = reward
        rows, shortened = [row for each in texts for row in each.rows], sum(each.shortened for each in texts)
        with blame(self.data):
            check_vocabulary(reward.model, reward.tokenizer, rows)
        lengths = [max(map(len, each)) for each in zip(*(text.rows for text in texts), strict=True)]
        super().__init__(reward.model, lengths, [1.0] * len(lengths), fingerprint)
        if shortened:
            reward.cuts_told = True
            self.notes.append(f"{self.data}: {reward.cut_words(shortened, len(rows))}")

    def save(self, folder: Path) -> None:
        save_reward_model(self.reward, folder)


class PairTask(RewardTask):
    """Both responses of a pair in one pass: the loss is -log sigmoid(score of chosen - score of rejected).

    The Bradley-Terry loss (Ouyang et al. 2022, 2203.02155, eq. 1).
    """

    data, unit = "data.pairs", "pairs"

    def __init__(self, reward: RewardModel, pairs: Sequence[Pair], heldout: Sequence[Pair] = ()) -> None:
        self.heldout = list(heldout)
        prompts = [pair.prompt for pair in pairs]
        both = [[pair.chosen for pair in pairs], [pair.rejected for pair in pairs]]
        read = [reward.read(prompts, responses) for responses in both]
        self.chosen, self.rejected = (texts.rows for texts in read)
        fingerprint = texts_fingerprint(plain_text(text) for pair in pairs for text in pair)
        super().__init__(reward, read, fingerprint)

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed loss in nats; `train/accuracy` counts pairs in the right order."""
        scores = self.reward.forward([self.chosen[i] for i in rows] + [self.rejected[i] for i in rows])
        chosen, rejected = scores.chunk(2)
        return bradley_terry_loss(chosen, rejected).sum(), {"train/accuracy": float((chosen > rejected).sum())}

    def evaluate(self, ranks: Ranks = ALONE) -> Figures:
        """Accuracy, loss and calibration on the held-out pairs."""

        def score(part: slice) -> Tensor:
            prompts = [pair.prompt for pair in self.heldout[part]]
            chosen = self.reward.score(prompts, [pair.chosen for pair in self.heldout[part]])
            return torch.stack([chosen, self.reward.score(prompts, [pair.rejected for pair in self.heldout[part]])])

        self.scores = torch.cat(ranks.parts(len(self.heldout), score), 1)  # (2, held-out pairs)
        return pair_figures(*self.scores)

    def distribution(self) -> Figures:
        chosen, rejected = self.scores
        return {"histogram": histogram({"chosen": chosen, "rejected": rejected})}


class LabelTask(RewardTask):
    """A classifier of texts: the score is the log-odds of label 1, and the loss is cross-entropy."""

    data, unit = "data.labels", "labelled texts"

    def __init__(self, reward: RewardModel, rows: Sequence[Labelled], heldout: Sequence[Labelled] = ()) -> None:
        self.heldout = list(heldout)
        read = reward.read([""] * len(rows), [row.text for row in rows])
        self.encoded = read.rows
        self.labels = torch.tensor([row.label for row in rows])
        fingerprint = texts_fingerprint(f"{row.label} {row.text}" for row in rows)
        super().__init__(reward, [read], fingerprint)

    def loss(self, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
        """Summed loss in nats; `train/accuracy` counts right labels."""
        scores = self.reward.forward([self.encoded[i] for i in rows])
        labels = self.labels[rows].to(scores)
        right = float(((scores > 0) == (labels > 0.5)).sum())
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum"), {"train/accuracy": right}

    def evaluate(self, ranks: Ranks = ALONE) -> Figures:
        """Accuracy, loss and calibration on the held-out texts."""

        def score(part: slice) -> Tensor:
            texts = [row.text for row in self.heldout[part]]
            return self.reward.score([""] * len(texts), texts)

        self.scores = torch.cat(ranks.parts(len(self.heldout), score))
        self.positive = torch.tensor([row.label > 0.5 for row in self.heldout])
        return label_figures(self.scores, self.positive)

    def distribution(self) -> Figures:
        ones, zeros = self.scores[self.positive], self.scores[~self.positive]
        return {"histogram": histogram({"label 1": ones, "label 0": zeros})}
