"""What `eval` and `scale` measure on held-out texts and prompts, with standard errors. It imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_kl import ui
from rlhf_kl.commands.stored import Permissions, load_policy, load_reference, located
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.data.rows import PromptRow, read_texts
from rlhf_kl.events import Event, worded
from rlhf_kl.models.lora import adapter_base, blame_base, is_adapter
from rlhf_kl.models.perplexity import perplexity_of, text_sums
from rlhf_kl.ppo.heldout_samples import (
    NO_SCORERS,
    CachedSamples,
    Samples,
    errors_of,
    figures_of,
    policy_samples,
    text_errors,
)
from rlhf_kl.ppo.origin import same_weights
from rlhf_kl.ppo.rollout import rows_at_once
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.train import sets
from rlhf_kl.train.device import on_this_machine, run_device
from rlhf_kl.train.load import Loader
from rlhf_kl.train.setup import build_prompts, sampling_of
from rlhf_kl.train.world_files import with_files, world_file
from rlhf_kl.types import Prompts
from rlhf_kl.ui import log


class HeldOut:
    """Data and models of a run, of a config's start, or of any model (which has no prompts)."""

    def __init__(
        self,
        settings: TrainConfig,
        folder: RunFolder | None,
        permissions: Permissions,
        *,
        texts: str | None = None,
        column: str | None = None,
        model: str | None = None,
        checkpoint: int | None = None,
        reference: str | None = None,
        stored: bool = True,
    ) -> None:
        """`settings`, `folder`: as `Permissions.opened` returns them; the other options as those of `eval`."""
        config = on_this_machine(settings, stored=stored)
        loader = Loader(config.run, run_device(config.run))
        held = config.eval
        ref, key = (held.texts, "eval.texts") if texts is None else (located(texts), "--texts")
        limit = held.most_texts if texts is None else None  # it does not limit a named file
        named_by = "--column" if texts else "eval.column:"
        read = partial(read_texts, column=column or held.column, key=named_by)
        self.documents = sets.load(key, world_file(ref, "heldout"), held.split, read, limit)
        self.rows = tuple[list[PromptRow], ...]()  # of prompts: to train on, held out
        self.scorers = NO_SCORERS
        if model is None:
            files = with_files(config, ("data", "eval"))
            self.rows = sets.prompts(files.data, files.eval)
            config = with_files(config)
            if folder is not None and (refused := permissions.refused(config)):
                code = ", ".join(refused)
                log.warning(f"scores left out: they need code that the run names ({code}): --plugins runs it")
            else:
                self.scorers = loader.scorers(config.reward)
        self.config = config
        self.policy, self.tokenizer = load_policy(loader, config, folder, model, checkpoint)
        self.reference, self.reference_tokenizer = None, None
        if model is None or reference is not None:
            self.reference, self.reference_tokenizer = load_reference(loader, config, reference)
        self.loader = loader

    def began_at_reference(self, final: Path) -> bool:
        """Whether the run's policy began as its reference, or is an adapter on it: else no way between them is known.

        `final`: the run's.
        """
        ref, load = self.config.reference.model, self.loader
        if ref is None or load.folder(ref) == load.folder(self.config.policy.model):
            return True
        with blame_base(final):
            if is_adapter(final) and load.folder(adapter_base(final)) == load.folder(ref):
                return True
        assert self.reference is not None
        start = load.language_model(self.config.policy.model, "policy.model").model
        return same_weights(start, self.reference.model)

    @property
    def sampling(self) -> Any:
        return sampling_of(self.config, self.policy.model, self.tokenizer)

    def perplexity(self, name: str) -> dict[str, Any]:
        """Perplexity of the "policy" or the "reference", by the keys of `eval --json`."""
        lm, tokenizer = self.policy, self.tokenizer
        if name == "reference" and self.reference is not None:
            lm, tokenizer = self.reference, self.reference_tokenizer
        with ui.progress(f"reading {len(self.documents)} documents: {name}") as advance:
            sums = text_sums(lm, tokenizer, self.documents, advance=advance)
        return asdict(perplexity_of([sums])) | {"standard_errors": text_errors([sums])}

    def prompts(self, samples: int | None) -> tuple[Prompts, int]:
        """The prompts of `samples` responses (None: one to each held-out prompt), and how many different ones.

        Some prompts are answered more than once where there are fewer of them. Prompts of the same tokens are one.
        """
        _, kept = build_prompts(self.config, self.rows, self.policy.model, self.tokenizer)
        several = samples or max(len(kept), self.config.rollout.batch_size)
        self.scorers.begin(self.config.updates + 1, self.config.updates)
        prompts = PromptStream(kept, several, self.config.run.seed).batch(1)
        return prompts, len({*map(tuple, prompts.ids)})

    def sampled(
        self, prompts: Prompts, firsts: Sequence[int], name: str, cached: CachedSamples | None = None
    ) -> tuple[dict[str, Any], Samples, Samples]:
        """Figures of the policy by the keys of `eval --json`, its samples and those of the reference.

        The figures are of the `firsts` of the prompts; see `asked`. `cached`: as in `policy_samples`.
        """
        with ui.progress(f"sampling {len(prompts)} responses: {name}", 2 * len(prompts)) as advance:
            every = policy_samples(
                self.policy,
                self.reference,
                prompts,
                range(len(prompts)),
                self.config.run.seed,
                self.sampling,
                self.tokenizer,
                self.scorers,
                batch_size=rows_at_once(self.config.rollout.batch_size, prompts, self.sampling),
                advance=advance,
                cached=cached,
                shown=len(prompts),
                firsts=firsts,
            )
        own, other = (samples.pick(firsts) for samples in every)
        events: list[Event] = []
        figures = figures_of(own, other, events)
        for alert in worded(events):
            log.warning(alert)
        if unscored := figures.pop("unscored"):
            log.warning(f"scores: the reward returned None for {unscored} of {len(firsts)} responses: left out")
        forgetting = {"forward_kl_token": errors_of(other)["kl_token"]}
        return figures | {"standard_errors": errors_of(own) | forgetting}, *every


def of_reference(own: Samples, other: Samples) -> dict[str, Any]:
    """The figures of the reference beside those of a policy."""
    names = ("scores", "gold", "length", "eos_rate", "distinct_2")
    figures, errors = figures_of(other, own, []), errors_of(other)
    return {name: figures[name] for name in names} | {"standard_errors": {name: errors[name] for name in names}}


def joined(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Figures of one model from two measurements, with the standard errors of both."""
    return a | b | {"standard_errors": a["standard_errors"] | b["standard_errors"]}
