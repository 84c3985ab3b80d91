"""A sequence classifier as a reward function."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf_kl.data.chat import chat_exchange, exchange_lacks_system, plain_text, require_chat_template
from rlhf_kl.errors import InputError
from rlhf_kl.models.labels import labels
from rlhf_kl.models.lm import FLOAT16_ENDS, Trunk
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.models.pretrained import check_tokens, context_length, save_model
from rlhf_kl.models.tokens import AS_WRITTEN, encode_all, pad
from rlhf_kl.ops.packing import (
    Layout,
    group_lengths,
    idle_pass,
    pack_last,
    pass_overhead,
    same_tokens,
    send,
    text_layout,
)
from rlhf_kl.sharding import equally_many, has_shards
from rlhf_kl.text import cut
from rlhf_kl.types import Prompt, Responses
from rlhf_kl.ui import log

SCORING_ROWS = 64  # texts in one forward pass of a reward model
SCORING_TOKENS = 1 << 16
SAME_SCORE = 1e-3  # largest difference to the classifier's own forward pass, over the score

INDEPENDENT = ("multi_label_classification", "regression")  # a problem_type that makes each output a score of its own
Rows = list[list[int]]
T = TypeVar("T")

FORMAT_KEY = "rlhf_kl_format"  # in the config.json of a model that was trained here
FORMAT_FILE = "rlhf_kl_format.json"  # beside an adapter, which has no config.json
EXAMPLE = (["Was it good?"], ["Yes, it was."])  # a prompt and a response that are shown as a model reads them
SHOWN = 400  # characters of them at most


class Texts(NamedTuple):
    """What a reward model reads."""

    rows: Rows  # ids of each text
    types: Rows | None  # of an encoder's tokens, where it has such
    shortened: int  # how many texts have lost their beginning


@dataclass(frozen=True)
class TextFormat:
    """How prompt and response become the text that a reward model reads."""

    chat: bool = False  # as turns in its tokenizer's chat template, which then decides how a text ends
    append_eos: bool = True  # without a chat template; encoders bring their own special tokens
    pair: bool = False  # as two texts, in the pair form of its tokenizer


def text_format(
    model: Any, *, chat: bool | None = None, append_eos: bool | None = None, pair: bool | None = None
) -> TextFormat:
    """The format of a reward model: as configured, else as stored in its folder, else plain text and an EOS."""
    stored = TextFormat(**getattr(model.config, FORMAT_KEY, {}))
    return TextFormat(
        chat=stored.chat if chat is None else chat,
        append_eos=stored.append_eos if append_eos is None else append_eos,
        pair=stored.pair if pair is None else pair,
    )


def remember_format(model: Any, folder: str | Path) -> None:
    """Read the format from the folder of an adapter; a whole model has it in its config."""
    file = Path(folder) / FORMAT_FILE
    if file.is_file():  # made by rlhf-kl
        setattr(model.config, FORMAT_KEY, json.loads(file.read_text(encoding="utf-8")))


class RewardModel:
    """A sequence classifier as a reward function; texts are encoded with its own tokenizer.

    A decoder is read through `Trunk`: its head reads the state of a text's last token. An encoder is a plain
    classifier. Of several outputs `label` names one. Where they are independent of one another (`problem_type` of its
    config: multi-label, regression) the score is that output. Of labels that exclude each other it is the log-odds of
    that one against the others.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        form: TextFormat | None = None,
        label: str | None = None,
        dtype: torch.dtype = torch.float32,
        key: str = "reward model",
    ) -> None:
        """`key`: its config key. Errors: InputError for a classifier whose head needs more than the last state."""
        self.model, self.tokenizer, self.key = model, tokenizer, key
        self.form = form or text_format(model)
        if self.form.chat:
            require_chat_template(tokenizer, "reward.model")
        names = labels(model.config)
        self.output = names.index(label) if label is not None else 0
        self.independent = model.config.problem_type in INDEPENDENT
        self.encoder = not hasattr(model, "score")  # it reads the first token, not the last
        names_types = "token_type_ids" in tokenizer.model_input_names
        self.has_types = self.encoder and names_types and getattr(model.config, "type_vocab_size", 0) > 1
        if self.form.pair and not self.encoder:
            raise InputError(f"text_pair: a {type(model).__name__} reads one text, not a pair: set it to false")
        # Tokenizers without a limit have a number of 30 digits.
        limits = [n for n in (context_length(model), tokenizer.model_max_length) if n is not None and n < 1 << 31]
        self.limit = min(limits, default=None)
        self.trunk = Trunk(model, dtype)
        self.system: str | None = None  # message before a chat that has none, as the policy reads it
        self.ignored: int | None = None  # the token that ends no text: padding, which transformers leaves out
        self.doubt, self.advice = "", ""  # of a format that is only guessed
        self.told = False  # that the chat template leaves out system messages
        self.cuts_told = False  # that a text has lost its beginning
        self.overflowed = False  # in float16, which was told
        self.keeps_states = False
        # Of the last batch, where `keeps_states`: its layout, with a token more behind each text, and states (N, H).
        self.kept: tuple[Layout, Tensor] | None = None
        if not self.encoder:
            self._check_head()

    def words(self) -> str:
        """What the score is, in words."""
        names = labels(self.model.config)
        if len(names) == 1:
            return "the only output of the reward model"
        own = names[self.output]
        if self.independent:
            return f"the reward model's output {own!r} ({self.model.config.problem_type})"
        others = [name for name in names if name != own]
        against = repr(others[0]) if len(others) == 1 else f"the {len(others)} other labels"
        return f"the log-odds of the reward model's label {own!r} against {against}"

    @property
    def hidden_size(self) -> int:
        """Numbers in a state."""
        return int(self.model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def _check_head(self) -> None:
        pad_id = self.model.config.get_text_config().pad_token_id  # the classifier scores the last other token
        row = [token for token in (1, 2, 3, 1) if token != pad_id]
        ids = torch.tensor([row], device=self.trunk.device)
        own = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
        ours = self._head(Trunk(self.model).hidden(pack_last([row], ids.device)))
        if ours.shape != own.shape or not (ours - own).abs().max() <= SAME_SCORE * own.abs().max().clamp_min(1.0):
            raise InputError(
                f"reward.model: the scores of a {type(self.model).__name__} are not its head applied to a text's "
                "last hidden state"
            )

    def __call__(self, responses: Responses) -> Tensor:
        """As `score`."""
        return self.score(responses.prompts.asked, responses.texts)

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        """Scores (B,) float32 on the CPU, in the model's unit; inf where it is not finite, since NaN means no score.

        Errors: InputError for a token that the model lacks.
        """
        if not responses:  # a process whose part is empty
            return torch.zeros(0)
        rows, types, shortened = self.read(prompts, responses)
        if shortened and not self.cuts_told:
            self.cuts_told = True
            log.warning(f"{self.key}: {self.cut_words(shortened, len(rows))} (told once)")
        check_tokens(self.model, self.tokenizer, rows)
        read = partial(self._encoded, types) if self.encoder else partial(self._behind, self._starts(prompts, rows))
        scores = read(rows, SCORING_ROWS).cpu()
        if self.trunk.dtype == torch.float16 and not self.overflowed and not bool(scores.isfinite().all()):
            self.overflowed = True
            log.warning(f"{self.key}: a score is not finite; activations may be too large, since {FLOAT16_ENDS}")
        return torch.where(scores.isfinite(), scores, math.inf)

    def _encoded(self, types: Rows | None, rows: Rows, most_rows: int) -> Tensor:
        """Scores (B,) of an encoder; `types`: of the tokens."""
        scores, overhead = torch.zeros(len(rows)), pass_overhead(self.trunk.device)
        lengths = [len(row) for row in rows]
        groups = group_lengths(lengths, most_rows=most_rows, most_tokens=SCORING_TOKENS, overhead=overhead)
        for group in self._with_others(groups, []):
            if not group:
                self.trunk.hidden(idle_pass(self.trunk.device))
                continue
            kinds = None if types is None else [types[i] for i in group]
            scores[group] = self.forward([rows[i] for i in group], kinds).cpu()
        return scores

    def _with_others(self, passes: Sequence[T], idle: T) -> Iterable[T]:
        """As many passes as the process that makes the most, where the weights are sharded."""
        device = self.trunk.device
        return equally_many(passes, idle, device) if has_shards(self.model) else passes

    def _starts(self, prompts: Sequence[Prompt], rows: Sequence[Sequence[int]]) -> list[int]:
        """How many tokens of each text are those of its prompt alone; at least 1."""
        different = list(dict.fromkeys(prompts))
        alone = dict(zip(different, self.encode(different, [""] * len(different)), strict=True))
        return [max(1, min(same_tokens(alone[p], row), len(row) - 1)) for p, row in zip(prompts, rows, strict=True)]

    def _behind(self, starts: Sequence[int], rows: Sequence[list[int]], most_rows: int) -> Tensor:
        """Scores (B,) of a decoder, which reads equal prompts once; the states behind them are kept, if wanted."""
        # A state belongs to the token after it; the last one's is a token that is not read.
        layout = text_layout([[*row, 0] for row in rows], starts, self.trunk.device)
        owner = torch.full((layout.tokens,), len(rows))  # of the last token of a text; of all others none
        owner[layout.responses.cumsum(0) - 1] = torch.arange(len(rows))
        (owner,) = send(layout.device, owner)
        ends = states = torch.empty(0)
        share = self.trunk.shares_prompts and not has_shards(self.model)  # which calls the layers more than once
        passes = layout.passes(range(len(rows)), most_rows=most_rows, most_tokens=SCORING_TOKENS, share=share)
        for packed in self._with_others(list(passes), idle_pass(layout.device)):
            hidden = self.trunk.hidden(packed)
            if not len(ends):
                ends = hidden.new_empty(len(rows) + 1, hidden.shape[1])
                states = hidden.new_empty(layout.tokens if self.keeps_states else 0, hidden.shape[1])
            ends[owner[packed.numbers]] = hidden
            if self.keeps_states:
                states[packed.numbers] = hidden
        if self.keeps_states:
            self.kept = layout, states
        return self._scores(self._head(ends[:-1]))

    def forward(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Scores (B,) float32 of encoded texts, with gradients if they are enabled. `types`: of an encoder's tokens."""
        if not self.encoder:
            return self._scores(self._head(self.trunk.hidden(pack_last(rows, self.trunk.device))))
        ids, mask = (x.to(self.trunk.device) for x in pad(rows, int(self.tokenizer.pad_token_id), left=False))
        more = {} if types is None else {"token_type_ids": pad(types, 0, left=False)[0].to(self.trunk.device)}
        with self.trunk.precision():
            return self._scores(self.model(input_ids=ids, attention_mask=mask, **more).logits.float())

    def _head(self, states: Tensor) -> Tensor:
        """Outputs (B, outputs) float32 of states (B, H), outside of autocast."""
        with torch.autocast(states.device.type, enabled=False):
            logits: Tensor = self.trunk.base.score(states.float())
        return logits.float()

    def _scores(self, logits: Tensor) -> Tensor:
        """Scores (B,) of logits (B, outputs)."""
        if logits.shape[1] == 1 or self.independent:
            return logits[:, self.output]
        others = [i for i in range(logits.shape[1]) if i != self.output]
        return logits[:, self.output] - logits[:, others].logsumexp(1)

    def encode(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Rows:
        """bos, prompt, response, eos; or a pair, or the chat template's tokens. A long text loses its beginning."""
        return self.read(prompts, responses).rows

    def read(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Texts:
        """As `encode`, with what else is known of the texts."""
        pairs = list(zip(prompts, responses, strict=True))
        if self.form.chat:
            texts = [chat_exchange(self.tokenizer, prompt, response, self.system, {}) for prompt, response in pairs]
            if not self.told and any(exchange_lacks_system(self.tokenizer, prompt, self.system) for prompt in prompts):
                self.told = True
                log.warning(f"{self.key}: its chat template leaves out system messages, so it does not read them")
        else:
            texts = [plain_text(prompt) + response for prompt, response in pairs]
        if self.encoder and not self.form.chat:
            asked = [plain_text(prompt) for prompt in prompts]
            return self._read_encoder(*((asked, responses) if self.form.pair else (texts,)))
        eos = self.tokenizer.eos_token_id
        end = [eos] if self.form.append_eos and not self.form.chat and eos is not None else []
        rows = [[*ids, *end] for ids in encode_all(self.tokenizer, texts, bos=False if self.form.chat else None)]
        for row in rows:
            while row[1:] and row[-1] == self.ignored:
                row.pop()
        limit = self.limit or max(map(len, rows), default=1)
        return Texts([row[-limit:] for row in rows], None, sum(len(row) > limit for row in rows))

    def _read_encoder(self, *texts: Sequence[str]) -> Texts:
        """What an encoder reads of texts, or of first and second texts, with the special tokens of its tokenizer."""
        self.tokenizer.truncation_side = "left"
        limits = {"truncation": self.limit is not None, "max_length": self.limit, "padding": False}
        full = self.tokenizer(*map(list, texts), **limits, return_token_type_ids=self.has_types)
        ends = [i for i, row in enumerate(full["input_ids"]) if len(row) == self.limit]  # or one that just fits
        whole = self.tokenizer(*([part[i] for i in ends] for part in texts), verbose=False)["input_ids"] if ends else []
        shortened = sum(len(row) > len(full["input_ids"][i]) for i, row in zip(ends, whole, strict=True))
        return Texts(full["input_ids"], full["token_type_ids"] if self.has_types else None, shortened)

    def cut_words(self, shortened: int, count: int) -> str:
        """That so many of these texts were cut."""
        return f"{shortened} of {count} texts lose their beginning: the model reads {self.limit} tokens"

    def shown(self) -> str:
        """A short exchange as the model reads it, special tokens and all."""
        return cut(self.tokenizer.decode(self.encode(*EXAMPLE)[0], **AS_WRITTEN), SHOWN)


def save_reward_model(reward: RewardModel, folder: Path) -> None:
    """Save a folder for plain transformers, or for peft if the model has an adapter; it also stores the format."""
    setattr(reward.model.config, FORMAT_KEY, asdict(reward.form))
    pad, eos = reward.tokenizer.pad_token_id, reward.tokenizer.eos_token_id
    # Plain transformers scores the last token that is no padding: if that were the EOS, another one than was trained.
    reward.model.config.pad_token_id = None if pad == eos and not reward.encoder else pad
    save_model(reward.model, reward.tokenizer, folder)
    if has_adapter(reward.model):
        (folder / FORMAT_FILE).write_text(json.dumps(asdict(reward.form)) + "\n", encoding="utf-8")
