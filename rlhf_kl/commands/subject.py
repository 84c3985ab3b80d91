"""What `eval` and `scale` measure: a run, the start of a config, or any model. It imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_kl import ui
from rlhf_kl.builtin.world import world_file
from rlhf_kl.commands.stored import Permissions, load_policy, load_reference, located, scorers_of_run
from rlhf_kl.config.named import NOTHING, Given, scorers_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.reward import ScorerSection
from rlhf_kl.data.files import is_file_name
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.data.rows import PromptRow, read_texts
from rlhf_kl.events import Event, worded
from rlhf_kl.models.lora import adapter_base, blame_base, is_adapter
from rlhf_kl.ppo.heldout import NO_SCORERS, HeldOut, Samples, figures_of
from rlhf_kl.ppo.origin import same_weights
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.training import sets
from rlhf_kl.training.device import on_this_machine, run_device
from rlhf_kl.training.load import Loader
from rlhf_kl.training.setup import build_prompts, sampling_of, trained_on
from rlhf_kl.training.world_files import with_files
from rlhf_kl.types import REWARD, Prompts, Sampling
from rlhf_kl.ui import log


class Subject:
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
        scored: bool = True,
        given: Given = NOTHING,
    ) -> None:
        """`settings`, `folder`: as `Permissions.opened` returns them; the other options as those of `eval`.

        `scored`: whether scorers are loaded. `given`: see `resolve`.
        """
        config = on_this_machine(settings, stored=stored)
        loader = Loader(config.run, run_device(config.run), given=given)
        held = config.eval
        ref, key = (held.texts, "eval.texts") if texts is None else (located(texts), "--texts")
        limit = held.most_texts if texts is None else None  # it does not limit a named file
        named_by = "--column" if texts else "eval.column:"
        read = partial(read_texts, column=column or held.column, key=named_by)
        own_texts = sets.given_rows(given.get("eval.texts"), held.column) if texts is None else None
        file = world_file(ref, "heldout")
        split = held.split if texts is None or not is_file_name(file) else "test"  # it selects from no named file
        self.documents = sets.load(key, file, split, read, limit, own_texts, beside=held.prompts)
        self.rows = tuple[list[PromptRow], ...]()  # of prompts: to train on, held out
        self.scorers = NO_SCORERS
        if model is None:
            files = with_files(config, ("data", "eval"))
            self.rows = sets.prompts(
                files.data, files.eval, sets.given_rows(given.get("data.prompts"), files.data.column)
            )
            config = with_files(config)
            if scored:
                refused = {} if folder is None else permissions.refused(config)
                self.scorers = scorers_of_run(loader, config, folder, allowed_scorers(config, refused), checkpoint)
        self.config = config
        self.policy, self.tokenizer = load_policy(loader, config, folder, model, checkpoint)
        self.reference, self.reference_tokenizer = None, None
        if model is None or reference is not None:
            own = (self.policy, self.tokenizer) if self.rows else None
            prompted = [row.text for row in self.rows[0]] if self.rows else []
            self.reference, self.reference_tokenizer = load_reference(loader, config, own, reference, prompted)
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

    def held_out(self, samples: int | None, **options: Any) -> HeldOut:
        """The evaluation with `samples` responses (None: one to each held-out prompt); `options`: of `HeldOut`.

        Some prompts are answered more than once where there are fewer of them. A model alone has none.
        """
        config, prompts, sampling = self.config, Prompts([], [], [], []), Sampling(0, 1.0, [], 0)  # of no prompts
        if self.rows:
            sampling = sampling_of(config, self.policy.model, self.tokenizer)
            train, kept = build_prompts(config, self.rows, self.policy.model, self.tokenizer)
            options["trained_on"] = trained_on(train, kept)
            several = samples or max(len(kept), config.rollout.batch_size)
            self.scorers.begin(config.updates + 1, config.updates)
            prompts = PromptStream(kept, several, config.run.seed).batch(1)
        return HeldOut(
            self.policy,
            self.reference,
            self.tokenizer,
            sampling,
            prompts,
            texts=self.documents,
            scorers=self.scorers,
            seed=config.run.seed,
            batch=config.rollout.batch_size,
            **options,
        )

    def of_texts(self, held: HeldOut, name: str) -> dict[str, Any]:
        """The figures of the "policy" or the "reference" on the texts; `name`: of it, or what else is shown."""
        model, tokenizer = self.policy, self.tokenizer
        if name == "reference" and self.reference is not None:
            model, tokenizer = self.reference, self.reference_tokenizer
        with ui.progress(f"reading {len(self.documents)} documents: {name}") as advance:
            return held.perplexity(model, tokenizer, advance)

    def of_prompts(self, held: HeldOut, name: str) -> tuple[dict[str, Any], Samples, Samples]:
        """The policy's figures on the prompts, all of its samples and those of the reference."""
        count = len(held.prompts)
        with ui.progress(f"sampling {count} responses: {name}", 2 * count) as advance:
            every = held.samples(advance=advance)
        events: list[Event] = []
        own, other = (samples.pick(held.firsts) for samples in every)
        figures = figures_of(own, other, events)
        for alert in worded(events):
            log.warning(alert)
        if unscored := figures["unscored"]:
            log.warning(f"scores: the reward returned None for {unscored} of {len(held.firsts)} responses: left out")
        return figures, *every


def allowed_scorers(config: TrainConfig, refused: Mapping[str, str]) -> dict[str, ScorerSection]:
    """The scorers of a config without those that have no permission; an alert names these."""
    if refused:
        code = ", ".join(dict.fromkeys(refused.values()))
        log.warning(f"scores left out that need code or a server of the run ({code}): --plugins runs it")
    whole = not any(key.startswith(REWARD) for key in refused)  # a sum has no meaning without a term
    known = scorers_of(config).items()
    return {key: scorer for key, scorer in known if key not in refused and (whole or not key.startswith(REWARD))}


def different(prompts: Prompts) -> int:
    """How many prompts there are; those of the same tokens are one."""
    return len({*map(tuple, prompts.ids)})
