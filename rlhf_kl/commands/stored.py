"""What `eval` and `generate` read: a run, with permissions to run other people's code, or any model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_kl.builtin.world import GOLD, is_builtin, world_file, world_folder
from rlhf_kl.config.inputs import changed_inputs, tell_copies
from rlhf_kl.config.named import plugins_of
from rlhf_kl.config.resolve import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.reward import EACH, ScorerSection
from rlhf_kl.config.schema.sections import refuse
from rlhf_kl.data.files import is_file_name, read_rows, text_column
from rlhf_kl.errors import InputError, blame, collected, suggestion
from rlhf_kl.hub import model_on_hub
from rlhf_kl.report.one_run import stored_config
from rlhf_kl.run.folder import NO_CHECKPOINTS, RunFolder, checkpoint_folders, checkpoint_step, newest_run
from rlhf_kl.shell import short_path
from rlhf_kl.templates import column
from rlhf_kl.ui import log

if TYPE_CHECKING:
    from rlhf_kl.models.lm import LM
    from rlhf_kl.rewards.scorer import Scorers
    from rlhf_kl.training.load import Loader


@dataclass(frozen=True)
class Permissions:
    """Permissions that the command line gives; those in the folder's config do not count."""

    plugins: bool = False
    remote_code: bool = False
    pickle: bool = False

    def opened(
        self, run: Path | None, model: str | None, step: int | None, config: str | None = None
    ) -> tuple[TrainConfig, RunFolder | None]:
        """The config of a config's start, of any model or of a run (the newest), and the run's folder.

        Errors: InputError, also for a run without a checkpoint of that `step`.
        """
        if config is not None:  # the user chose it, so its own permissions count
            return self.added_to(load_config("train", config)), None
        if model is not None:
            world = {"policy": {"model": model}} if is_builtin(model) else {}
            return self.added_to(TrainConfig.model_validate(world | {"run": {"dtype": "auto"}})), None
        folder = RunFolder(run or newest_run(finished=True))
        folder.require_run()
        if run is None:
            log.info(f"the newest run: {short_path(str(folder.path))}")
        steps = [str(checkpoint_step(path)) for path in checkpoint_folders(folder.checkpoints)]
        if step is not None and str(step) not in steps:
            hint = suggestion(str(step), steps) if steps else NO_CHECKPOINTS
            raise InputError(f"--checkpoint {step}: {folder.path} has no such checkpoint{hint}")
        stored = load_config("train", folder.config) if self.plugins else stored_config(folder.config)
        if self.plugins:
            tell_copies(stored)
        section = stored.run.model_copy(update={"trust_remote_code": False, "allow_pickle": False})
        return self.added_to(stored.model_copy(update={"run": section})), folder

    def added_to(self, config: TrainConfig) -> TrainConfig:
        """The config with these permissions beside its own."""
        names = {"trust_remote_code": self.remote_code, "allow_pickle": self.pickle}
        run = config.run.model_copy(update={name: True for name, allowed in names.items() if allowed})
        return config.model_copy(update={"run": run})

    def refused(self, config: TrainConfig) -> dict[str, str]:
        """By key of a scorer: its plugin or server, if it has no permission; this program's own plugin needs none.

        A server gets what the config names of the environment.
        """
        named = [plugin for plugin in plugins_of(config) if plugin.where != "kl.controller" and plugin.ref != GOLD]
        return {} if self.plugins else {plugin.where: plugin.address for plugin in named}

    def tell_changed(
        self, folder: RunFolder | None, config: TrainConfig, *unread: str, exactly: Collection[str] = ()
    ) -> None:
        """Alerts for what a command reads of a run's config, and that has changed since the run began.

        `unread`: what it does not read, the beginnings of keys. Errors: InputError for what may not change, `exactly`.
        """
        unread += ("kl.", *["data."] * (config.eval.prompts is not None), *(f"{key}." for key in self.refused(config)))
        changed = changed_inputs(folder.path, config, lambda key: not key.startswith(unread)) if folder else {}
        refuse(*(f"{line}: the policy began elsewhere" for keys, line in changed.items() if {*keys} & {*exactly}))
        for keys, line in changed.items():
            others = any(key.endswith(".prompts") for key in keys)
            log.warning(line + "; the held-out prompts may be others than those of the run" * others)


def of_a_run(**given: object) -> list[str]:
    """Problems: the options, by their names, that were given though no run was."""
    names = [name.replace("_", "-") for name, value in given.items() if value not in (None, False)]
    return [f"--{name} belongs to a run: name one with --run" for name in names]


def check_given(models: Mapping[str, str | None], key: str, data: str | None, name: str, config: TrainConfig) -> None:
    """Check models of the command line, and the column `name` of its data, `key`. Errors: InputError, every problem."""
    problems = list[str]()
    for option, model in models.items():
        with collected(problems), blame(option):
            if is_builtin(model):
                world_folder(str(model))
            elif model is not None:
                model_on_hub(located(model), pickled=config.run.allow_pickle)
    with collected(problems), blame(key):
        if data is not None and is_file_name(located(data)):
            for row in read_rows(Path(located(data)))[:1]:
                column(row, text_column(data, name), f"{data}: row 1", "--column")
    refuse(*problems)


def located(ref: str) -> str:
    """An existing path of the command line, made absolute; anything else unchanged."""
    path = Path(ref).expanduser()
    return str(path.absolute()) if path.exists() else ref


def load_policy(
    loader: Loader, config: TrainConfig, folder: RunFolder | None, model: str | None, step: int | None
) -> tuple[LM, Any]:
    """`model` and its tokenizer; else a run's final model, a checkpoint, or (no folder) start. Errors: InputError."""
    from torch import nn

    from rlhf_kl.models.lora import checkpointed
    from rlhf_kl.run.checkpoint import checkpoints

    final = folder.final if folder is not None and folder.final.is_dir() and step is None else None
    if model is not None or final is not None:
        ref, key = (str(final), "--run") if model is None else (world_file(located(model), "policy"), "--model")
        loaded = loader.language_model(ref, key)
        return loader.frozen(loaded.model), loaded.tokenizer
    section = config.policy.model_copy(update={"gradient_checkpointing": False})
    loaded = loader.trained_model(section.model, section, config.run.seed)
    if folder is not None:
        found = [checkpoint for checkpoint in checkpoints(folder.checkpoints) if step in (None, checkpoint.step)]
        if not found:
            raise InputError(f"{folder.path}: holds neither a final model nor a checkpoint")
        holder = nn.Module()
        holder.policy = loaded.model  # as in a checkpoint, beside the value function
        found[-1].load_model(checkpointed(holder))
    return loader.frozen(loaded.model), loaded.tokenizer


def scorers_of_run(
    loader: Loader,
    config: TrainConfig,
    folder: RunFolder | None,
    sections: Mapping[str, ScorerSection],
    step: int | None = None,
) -> Scorers:
    """These scorers of a run, the terms of `reward.normalize: each` on the scale that it measured at its start.

    Functions have the state that they had at the checkpoint `step` (None: the last). Of a config's start nothing was
    measured: then without such a reward. `sections`: some of `scorers_of` the config.
    """
    from rlhf_kl.rewards.scorer import Scorers
    from rlhf_kl.run.checkpoint import checkpoints
    from rlhf_kl.types import TERM

    scorers = loader.scorers(sections, config.reward.time_limit, config.data.system)
    if folder is not None and (names := scorers.with_state):
        read = [each for each in checkpoints(folder.checkpoints) if step in (None, each.step)]
        if read:
            scorers.load_state_dict(read[-1].state()["tracked"][0]["scorers"])
        else:
            log.warning(f"{', '.join(names)}: no checkpoint holds the state of this function: it begins anew")
    if config.reward.normalize != EACH or not scorers.terms:
        return scorers
    if folder is None:
        log.warning("scores left out: with reward.normalize=each a run measures the scale of each term at its start")
        return Scorers(*(scorer for scorer in scorers.scorers if not scorer.name.startswith(TERM)))
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.is_file() else {}
    found = [summary["reference"]] if "reference" in summary else []
    found += [each.state()["tracked"][0]["start"]["reference_scores"] for each in checkpoints(folder.checkpoints)]
    if not found:
        raise InputError(f"{folder.path}: no summary.json and no checkpoint tells the scale of the reward's terms")
    scorers.scale(found[0]["terms"])
    return scorers


def load_reference(
    loader: Loader,
    config: TrainConfig,
    own: tuple[LM, Any] | None,
    other: str | None = None,
    texts: Sequence[str] = (),
) -> tuple[LM, Any]:
    """The reference of a run, or another model in its place, and its tokenizer.

    `own`: the policy and its tokenizer, where their KL is asked for; `texts`: of the run, as `check_reference`.
    """
    from rlhf_kl.training.load import check_reference

    ref, key = other or config.reference.model or config.policy.model, "--reference" if other else "reference"
    loaded = loader.language_model(world_file(located(ref), "policy"), key)
    if own is not None:
        with blame(key):
            check_reference(own[0].model, own[1], loaded.model, loaded.tokenizer, texts)
    return loader.frozen(loaded.model), loaded.tokenizer
