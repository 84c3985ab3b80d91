"""Scores for responses, and how a raw score becomes what PPO sees."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rlhf_kl.data.chat import chat_exchange, require_chat_template
from rlhf_kl.errors import InputError
from rlhf_kl.models.actor_critic import choose_trunk_way, read_trunk
from rlhf_kl.models.compiled import compiled_weights
from rlhf_kl.models.last_layer import last_mlp_at, try_last_mlp
from rlhf_kl.models.load import context_length, save_model
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.models.prefix_sharing import least_share
from rlhf_kl.models.text import encode_all, pad
from rlhf_kl.ops.packing import group_lengths, pass_overhead
from rlhf_kl.ops.prefixes import find_prefixes
from rlhf_kl.time_limit import TimeLimited, TimeLimitExceeded
from rlhf_kl.types import RewardFn

GoldScorer = Callable[[Sequence[str], Sequence[str]], list[float]]
SCORING_ROWS = 64  # texts in one forward pass of a reward model
SCORING_TOKENS = 1 << 16
SHORT_AGREES = 1e-4  # largest difference of a score over the largest, where only its own place is computed


@dataclass(frozen=True)
class TextFormat:
    """How prompt and response become the text that a reward model reads."""

    chat: bool = False  # as turns in its tokenizer's chat template, which then says how a text ends
    append_eos: bool = True  # without a chat template; encoders bring their own special tokens


FORMAT_KEY = "rlhf_kl_format"  # in the config.json of a model that was trained here
FORMAT_FILE = "rlhf_kl_format.json"  # beside an adapter, which has no config.json


def text_format(model: Any, *, chat: bool | None = None, append_eos: bool | None = None) -> TextFormat:
    """The format of a reward model: what is asked for, else what its folder says, else plain text and an EOS."""
    said = getattr(model.config, FORMAT_KEY, None)
    said = said if isinstance(said, dict) else {}
    return TextFormat(
        chat=bool(said.get("chat", False)) if chat is None else chat,
        append_eos=bool(said.get("append_eos", True)) if append_eos is None else append_eos,
    )


class ReadText(NamedTuple):
    """A text as a reward model read it."""

    ids: list[int]
    states: Tensor  # (at least as many, H): last hidden states


def remember_format(model: Any, folder: str | Path) -> None:
    """What the folder of an adapter says of the format, where its model's config would say it."""
    file = Path(folder) / FORMAT_FILE
    if not file.is_file():
        return  # made elsewhere
    try:
        setattr(model.config, FORMAT_KEY, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error


class RewardModel:
    """A sequence classifier as a reward function; texts are re-encoded with its own tokenizer.

    Of several outputs, `label` names the one whose log-odds against the others are the score.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rows: int = SCORING_ROWS,
        form: TextFormat | None = None,
        label: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.rows = model, tokenizer, rows
        self.form = form or text_format(model)
        if self.form.chat:
            require_chat_template(tokenizer, "reward.model")
        names = [str(name) for name in model.config.id2label.values()]
        self.output = names.index(label) if label is not None else 0
        self.encoder = not hasattr(model, "score")  # it reads its first token and not the last
        self.limit = context_length(model)
        self.by_states = False  # whether its head reads the last states and nothing else
        self.read: list[ReadText] | None = None  # of the last batch, where somebody wants them: see `keep_states`
        if not self.encoder:
            text_config = model.config.get_text_config()
            pad_id = text_config.pad_token_id
            try_last_mlp(model, lambda: self.forward([[1, 2, 3, 1], [3, 2]]), SHORT_AGREES)
            if not has_adapter(model):
                choose_trunk_way(self.trunk)
                self.by_states = self._states_suffice()
            text_config.pad_token_id = pad_id

    @torch.no_grad()
    def _states_suffice(self) -> bool:
        """Whether the scores come out the same from last states alone; beginnings that repeat are read once for it."""
        rows = [[1, 2, 3, 1], [1, 2, 2]]
        try:
            whole = self.forward(rows)
            gaps = [(self.forward_by_states([0, 1], rows, once=once) - whole).abs().max() for once in (False, True)]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # a head that wants more than the states
        return bool(torch.stack(gaps).max() <= SHORT_AGREES)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """One score per response, in the model's own unit."""
        return self.score(prompts, responses).tolist()

    @torch.no_grad()
    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
        """Scores (B,) float32 on the CPU."""
        rows = self.encode(prompts, responses)
        scores = torch.zeros(len(rows))
        device = next(self.model.parameters()).device
        groups = group_lengths(
            [len(row) for row in rows], most_rows=self.rows, most_tokens=SCORING_TOKENS, overhead=pass_overhead(device)
        )
        if self.read is not None:
            self.read = [ReadText(row, torch.empty(0)) for row in rows]
        once = self.by_states and self._begin_alike(rows, device)
        by_states = once or (self.by_states and compiled_weights(self.trunk, device) is not None)
        for picked in groups:
            if by_states:
                found = self.forward_by_states(picked, [rows[i] for i in picked], once=once)
                scores[picked] = found.float().cpu()
                continue
            with self.listening(picked):
                scores[picked] = self.forward([rows[i] for i in picked]).float().cpu()
        return scores

    def _begin_alike(self, rows: Sequence[Sequence[int]], device: torch.device) -> bool:
        """Whether so much of these texts is repeated that reading it once pays."""
        least = least_share(self.trunk, device)
        return least < 1 and find_prefixes(*pad(rows, 0, left=False)).repeated >= least

    def keep_states(self) -> None:
        """From now on `read` holds the texts of the last batch that was scored, with the states of each."""
        self.read = []

    @contextlib.contextmanager
    def listening(self, picked: Sequence[int]) -> Iterator[None]:
        """Keep the last hidden states of one pass, which scores the texts `picked`."""
        read = self.read
        if read is None:
            yield
            return

        def keep(_trunk: Any, _args: Any, output: Any) -> None:
            for i, states in zip(picked, output.last_hidden_state, strict=True):
                read[i] = ReadText(read[i].ids, states)

        with self.trunk.register_forward_hook(keep):
            yield

    @property
    def trunk(self) -> Any:
        """The model below its head."""
        return self.model.base_model

    def encode(self, prompts: Sequence[str], responses: Sequence[str]) -> list[list[int]]:
        """bos, prompt, response, eos, or the chat template's words; a text too long loses its beginning."""
        pairs = list(zip(prompts, responses, strict=True))
        if self.form.chat:
            texts = [chat_exchange(self.tokenizer, prompt, response) for prompt, response in pairs]
        else:
            texts = [prompt + response for prompt, response in pairs]
        if self.encoder and not self.form.chat:
            self.tokenizer.truncation_side = "left"
            full: list[list[int]] = self.tokenizer(
                texts, truncation=self.limit is not None, max_length=self.limit, padding=False
            )["input_ids"]
            return full
        eos = self.tokenizer.eos_token_id
        end = [eos] if self.form.append_eos and not self.form.chat and eos is not None else []
        rows = [[*ids, *end] for ids in encode_all(self.tokenizer, texts)]
        return rows if self.limit is None else [row[-self.limit :] for row in rows]

    def forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores (B,) of encoded texts, with gradients where they are on."""
        filler = self.filler(rows)
        ids, mask = pad(rows, filler, left=False)
        device = next(self.model.parameters()).device
        ids, mask = ids.to(device), mask.to(device)
        if self.encoder:
            logits: Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        else:  # causal, so nothing behind the last token, where it reads, needs hiding
            last = torch.arange(len(rows), device=device) * ids.shape[1] + mask.sum(1) - 1
            with last_mlp_at(self.model, last) if self.read is None else contextlib.nullcontext():
                logits = self.model(input_ids=ids, attention_mask=torch.ones_like(mask)).logits
        return self._score_of(logits)

    def forward_by_states(self, picked: Sequence[int], rows: Sequence[Sequence[int]], *, once: bool) -> Tensor:
        """As `forward`, from a decoder's states; `picked` numbers the texts in the batch.

        `once`: what they begin with in common is read once.
        """
        ids, mask = (x.to(next(self.model.parameters()).device) for x in pad(rows, 0, left=False))
        lengths, first = mask.sum(1), torch.arange(len(rows), device=ids.device) * ids.shape[1]
        last = first + lengths - 1
        wanted = last if self.read is None else mask.flatten().nonzero().squeeze(1)
        states = read_trunk(self.trunk, ids, mask, wanted, find_prefixes(ids, mask) if once else None)
        if self.read is not None:
            for i, row, seen in zip(picked, rows, states.split(lengths.tolist()), strict=True):
                self.read[i] = ReadText(list(row), seen)
            states = states.index_select(0, lengths.cumsum(0) - 1)
        return self._score_of(self.model.score(states))

    def _score_of(self, logits: Tensor) -> Tensor:
        """Scores (B,) of logits (B, outputs)."""
        if logits.shape[1] == 1:
            return logits[:, 0]
        others = [i for i in range(logits.shape[1]) if i != self.output]
        return logits[:, self.output] - logits[:, others].logsumexp(1)

    def filler(self, rows: Sequence[Sequence[int]]) -> int:
        """The id to pad with, which the model is told is its pad token.

        A decoder scores the last token that is not the pad *id*, whatever the mask says: so the id must end no
        text, or a pad token that is also the EOS would hide it.
        """
        pad_id = int(self.tokenizer.pad_token_id)
        if not self.encoder:
            ends = {row[-1] for row in rows}
            pad_id = pad_id if pad_id not in ends else next(i for i in range(len(ends) + 1) if i not in ends)
            self.model.config.get_text_config().pad_token_id = pad_id
        return pad_id


def save_reward_model(reward: RewardModel, folder: Path) -> None:
    """A folder that plain transformers loads, or peft where the model has an adapter; it remembers the format."""
    setattr(reward.model.config, FORMAT_KEY, asdict(reward.form))
    reward.model.config.pad_token_id = reward.tokenizer.pad_token_id
    save_model(reward.model, reward.tokenizer, folder)
    if has_adapter(reward.model):
        (folder / FORMAT_FILE).write_text(json.dumps(asdict(reward.form)) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class WeightedSum:
    """Several reward functions as one: the sum of their raw scores, each times its weight."""

    terms: dict[str, tuple[float, RewardFn]]

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """One score per response."""
        return self.score(prompts, responses)[0].tolist()

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores (B,), and what each term adds to them: (B,) by name, its weight included."""
        parts = {
            name: weight * checked_scores(reward, prompts, responses, name).double()
            for name, (weight, reward) in self.terms.items()
        }
        total = sum(parts.values(), torch.zeros(len(responses), dtype=torch.float64)).float()
        if not bool(torch.isfinite(total).all()):
            sizes = ", ".join(f"{name} {float(part.abs().max()):g}" for name, part in parts.items())
            raise InputError(f"reward sum: beyond the range of float32; the largest of its terms: {sizes}")
        return total, parts


def bind_reward(attribute: Any, options: dict[str, Any], time_limit: float | None = None) -> RewardFn:
    """A user's function with its options, or an instance of a user's class made with them.

    time_limit: seconds that a call may take; None = any. Errors: InputError where the instance cannot be made.
    """
    bound = cast(RewardFn, _made(attribute, options) if inspect.isclass(attribute) else partial(attribute, **options))
    return bound if time_limit is None else cast(RewardFn, TimeLimited(bound, time_limit))


def _made(cls: type, options: dict[str, Any]) -> Any:
    try:
        return cls(**options)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # an exit code of the class's would pass for one of ours
        raise InputError(f"reward {cls.__name__}: cannot be made: raised {type(error).__name__}: {error}") from error


def checked_scores(
    reward: RewardFn | GoldScorer, prompts: Sequence[str], responses: Sequence[str], name: str
) -> Tensor:
    """Scores (B,) float32 of a reward function that may misbehave.

    Errors: InputError that names the function, what it did and the sample it did it on.
    """
    try:
        answer = reward(prompts, responses)
        returned = list(answer) if hasattr(answer, "__iter__") else None  # a generator runs once, here
    except InputError:
        raise
    except TimeLimitExceeded as error:
        raise InputError(f"reward {name}: {error} (reward.time_limit) on {_batch_words(responses)}") from error
    except (Exception, SystemExit) as error:
        culprit = _culprit(reward, prompts, responses)
        raise InputError(f"reward {name}: raised {type(error).__name__}: {error} on {culprit}") from error
    if returned is None:
        kind = type(answer).__name__
        raise InputError(f"reward {name}: returned {kind}, not one number per response, on {_batch_words(responses)}")
    scores = [_number(score) for score in returned]
    if len(scores) != len(responses):
        raise InputError(f"reward {name}: returned {len(scores)} scores for {_batch_words(responses)}")
    for score, raw, response in zip(scores, returned, responses, strict=True):
        if score is None or not math.isfinite(score):
            raise InputError(f"reward {name}: the score of {response[:60]!r} is {raw!r}, not a finite number")
    return torch.tensor(scores, dtype=torch.float32)


def _batch_words(responses: Sequence[str]) -> str:
    return f"{len(responses)} responses, the first of them {responses[0][:60]!r}"


def _culprit(reward: RewardFn | GoldScorer, prompts: Sequence[str], responses: Sequence[str]) -> str:
    """The first sample that raises by itself; the whole batch where none does."""
    for prompt, response in zip(prompts, responses, strict=True):
        try:
            answer = reward([prompt], [response])
            list(answer)
        except (Exception, SystemExit):
            return f"the response {response[:60]!r} to the prompt {prompt[:60]!r}"
    return _batch_words(responses)


def _number(score: Any) -> float | None:
    """As float32 would hold it; None where it is no single number."""
    if isinstance(score, bool | str) or not hasattr(score, "__float__"):
        return None
    try:
        return float(torch.tensor(float(score), dtype=torch.float32))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a row of several numbers
        return None


REPEAT = 3  # tokens in a row that count as repeated


class ResponseTraits(NamedTuple):
    """What penalties look at; every field (B,)."""

    ended: Tensor  # bool: the response has an EOS
    lengths: Tensor  # tokens, EOS included
    repeated: Tensor  # share of its runs of three tokens that occurred in it before


def response_traits(ids: Tensor, mask: Tensor, ended: Tensor) -> ResponseTraits:
    """Traits of responses (B, T), on the CPU."""
    rows = [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]
    return ResponseTraits(ended.cpu(), mask.sum(1).cpu(), torch.tensor([_repeated(row) for row in rows]))


def _repeated(tokens: list[int]) -> float:
    runs = [tuple(tokens[i : i + REPEAT]) for i in range(len(tokens) - REPEAT + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


@dataclass(frozen=True)
class ScoreShaping:
    """Raw score -> normalised on reference samples, clipped, less the penalties.

    Source: Ziegler et al. 2019, section 2.1 (normalisation on reference samples).
    """

    mean: float = 0.0
    std: float = 1.0
    clip: float | None = None
    missing_eos_penalty: float = 0.0
    length_penalty: float = 0.0  # per token
    repetition_penalty: float = 0.0  # times the repeated share

    def fit(self, scores: Tensor, *, normalize: bool) -> ScoreShaping:
        """The same with mean and spread of raw scores (N,) of reference samples.

        Errors: InputError where all scores are the same.
        """
        std = float(scores.std(correction=0))
        if not std > 1e-8 * max(1.0, float(scores.abs().max())):
            raise InputError(
                f"reward: every one of {len(scores)} reference samples scores {float(scores[0]):g}: "
                "a constant score teaches nothing"
            )
        return replace(self, mean=float(scores.mean()), std=std) if normalize else self

    def __call__(self, scores: Tensor, traits: ResponseTraits) -> Tensor:
        """Raw scores (B,) of responses with these traits -> shaped scores (B,)."""
        shaped = (scores - self.mean) / self.std
        if self.clip is not None:
            shaped = shaped.clamp(-self.clip, self.clip)
        for penalty in self.penalties(traits).values():
            shaped = shaped - penalty.to(shaped)
        return shaped

    def penalties(self, traits: ResponseTraits) -> dict[str, Tensor]:
        """Each penalty that is on, by its name: (B,), never negative."""
        terms = {
            "missing_eos": (self.missing_eos_penalty, (~traits.ended).float()),
            "length": (self.length_penalty, traits.lengths.float()),
            "repetition": (self.repetition_penalty, traits.repeated.float()),
        }
        return {name: size * amount for name, (size, amount) in terms.items() if size}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to shape scores as before."""
        return asdict(self)


def gold_scores_of(gold: GoldScorer | None, prompts: Sequence[str], responses: Sequence[str]) -> list[float] | None:
    """Checked scores of the gold scorer, None where there is none."""
    return None if gold is None else checked_scores(gold, prompts, responses, "gold").tolist()
