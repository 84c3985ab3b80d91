"""Options that several commands have."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rlhf_kl.errors import InputError, Interrupted, is_address

if TYPE_CHECKING:
    from rlhf_kl.config.schema import Kind


class Plain:
    """A command whose help shows no `<bool>` beside a flag, which takes no value, and that Ctrl-C does not silence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except KeyboardInterrupt:  # which typer would turn into an exit code
            raise Interrupted(signal.SIGINT) from None

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param.metavar = "" if getattr(param, "is_flag", False) else param.metavar
        return params


class Whole(Plain):
    """A command that takes every word; where some are left, they stand in the error's `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        left: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        if left:
            ctx.fail(f"Got unexpected extra argument(s) ({' '.join(left)})")
        return left


Command: Any = type("Command", (Whole, TyperCommand), {})
Group: Any = type("Group", (Plain, TyperGroup), {})


def local(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """A path to write to. Errors: InputError for an address, which would become a folder called `s3:`."""
    if path is not None and is_address(path):
        raise InputError(f"{param.opts[0]} {path}: must be on a local disk: write there and sync it")
    return path


DATA = ("data.prompts", "eval.prompts", "eval.texts")
Config = Annotated[
    str, typer.Option("--config", "-c", metavar="FILE", help="YAML: a path, a name in configs/, or a shipped config.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key: --set kl.target=0.05. Repeatable.")
]
OutputDir = Annotated[
    Path | None, typer.Option(metavar="DIR", callback=local, help="Folder of the run (default: runs/NAME).")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed, instead of the config's run.seed.")]
Updates = Annotated[int | None, typer.Option(min=1, metavar="N", help="Updates, instead of ppo.total_episodes.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint; start if there is none.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already in the folder.")]
Merge = Annotated[bool, typer.Option("--merge", help="With policy.lora: also write merged/, the adapter in the model.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress: only the result, alerts and errors.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
StoredRun = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="A run; default: the newest.")]
Model = Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Any causal language model.")]
Step = Annotated[int | None, typer.Option(metavar="STEP", help="A checkpoint, not the final model.")]

# A run folder may come from anybody: the command line decides what it may run, not the folder's config.
Plugins = Annotated[bool, typer.Option("--plugins", help="Use the run's reward functions and servers. Read first.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code. Read it first.")]
Pickle = Annotated[bool, typer.Option("--allow-pickle", help="Load pickled weights, which can run code.")]


def read_config(
    kind: Kind,
    file: str,
    sets: Sequence[str] | None,
    output_dir: Path | None = None,
    seed: int | None = None,
    updates: int | None = None,
    *,
    named: bool = True,
) -> Any:
    """The config with the changes of the command line, of which --output-dir, --seed and --updates win.

    Its models and plugins are checked where `named`: errors come before torch is imported.
    """
    from rlhf_kl.config.named import check_named
    from rlhf_kl.config.resolve import load_config

    check_updates(updates, sets)
    changes = list(sets or [])
    if output_dir is not None:
        changes.append(f"run.output_dir={json.dumps(str(output_dir))}")
    if seed is not None:
        changes.append(f"run.seed={seed}")
    config = load_config(kind, file, changes)
    if updates is not None:
        config = load_config(kind, file, [*changes, f"ppo.total_episodes={updates * config.rollout.batch_size}"])
    if named:
        check_named(config)
    return config


def read_elsewhere(file: str, sets: Sequence[str] | None, seed: int | None, updates: int | None) -> Any:
    """The config of a run that is planned here: its data, and the weights of its models, may be on another machine."""
    from rlhf_kl.plugins import GIVEN

    try:
        return read_config("train", file, sets, None, seed, updates, named=False)
    except InputError as error:
        absent = [key for key in DATA if any(line.startswith(f"{key}: ") for line in error.problems)]
        if len(absent) < len(error.problems):
            raise
        sets = [*(sets or []), *(f"{key}={GIVEN}{key}" for key in absent)]
        return read_config("train", file, sets, None, seed, updates, named=False)


def byte_count(option: str, text: str) -> int:
    """The bytes of `80GB` or `24GiB`. Errors: InputError for anything else."""
    found = re.fullmatch(r"([0-9]+\.?[0-9]*) ?([MGT])(i?)B", text.strip(), flags=re.IGNORECASE)
    size = float(found[1]) * (1024 if found[3] else 1000) ** (2 + "MGT".index(found[2].upper())) if found else 0.0
    if size < 1:
        raise InputError(f"{option} {text}: must be a size such as 80GB or 24GiB")
    return int(size)


def numbers(option: str, text: str | None, least: float = 0.0) -> list[float]:
    """Those of an option, with commas between them. Errors: InputError for one that is no number or below `least`."""
    try:
        values = [float(word) for word in (text or "").split(",") if word.strip()]
    except ValueError:
        values = []
    if text is not None and (not values or any(value < least for value in values)):
        raise InputError(f"{option} {text}: must be numbers from {least:g} on with commas between, such as 0.02,0.05")
    return values


def check_updates(updates: int | None, sets: Sequence[str] | None) -> None:
    """Errors: InputError if the number of updates is given twice."""
    if updates is not None and any(change.startswith("ppo.total_episodes") for change in sets or []):
        raise InputError(f"--updates {updates} and --set ppo.total_episodes exclude each other: choose one")
