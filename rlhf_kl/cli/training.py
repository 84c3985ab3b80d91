"""The commands that take a config of one run: `train`, `sft`, `reward-model` and `doctor`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import (
    Config,
    Json,
    Merge,
    OutputDir,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    Set,
    Updates,
    check_updates,
    overrides,
)
from rlhf_kl.program import shell_command
from rlhf_kl.text import hanging, stdout_width

if TYPE_CHECKING:
    from rlhf_kl.config.schema import Kind

STYLES = {"fine": "green", "doubtful": "yellow", "fatal": "bold red"}


def train(
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    updates: Updates = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a policy with PPO and keep its KL to the reference at the target."""
    _run("train", config, overrides(set_, output_dir, seed), updates, resume, overwrite, merge, as_json, quiet)


def supervised(
    context: typer.Context,  # `sft` or `reward-model`, as the command is called
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    quiet: Quiet = False,
) -> None:
    kind: Any = context.info_name
    _run(kind, config, overrides(set_, output_dir, seed), None, resume, overwrite, merge, False, quiet)


def _settings(kind: Kind, config: str, changes: list[str], updates: int | None) -> Any:
    """The config, with its models and plugins checked. Its errors come before torch is imported."""
    from rlhf_kl.config.load import load_config
    from rlhf_kl.config.plugins import check_named

    check_updates(updates, changes)
    settings = load_config(kind, config, changes)
    if updates is not None:
        changes = [*changes, f"ppo.total_episodes={updates * settings.rollout.batch_size}"]
        settings = load_config(kind, config, changes)
    check_named(settings)
    return settings


def _run(kind: Kind, config: str, changes: list[str], updates: int | None, *flags: bool) -> None:
    resume, overwrite, merge, as_json, quiet = flags
    settings = _settings(kind, config, changes, updates)
    ui.start(quiet)
    with ui.waiting("loading torch"):
        from rlhf_kl.build.machine import train_command
        from rlhf_kl.commands.final import merge_final, require_adapter, supervised_closing, train_closing
        from rlhf_kl.commands.loop import run_train
        from rlhf_kl.commands.supervised import run_supervised
        from rlhf_kl.report.texts import TITLE, held_out_texts, text_table
        from rlhf_kl.run.log import encode_json

    if merge:
        require_adapter(settings)
    run: Any = run_train if kind == "train" else run_supervised
    summary = train_command(run, settings, resume=resume, overwrite=overwrite)
    if not summary:  # the first process shows it
        return
    if merge:
        merge_final(settings)
    texts = text_table(held_out_texts(Path(settings.run.output_dir)), TITLE) if kind == "train" else None
    closing = train_closing if kind == "train" else supervised_closing
    if as_json:
        print(encode_json(summary, indent=2).decode())
    else:
        ui.print_summary(*closing(summary, settings), texts)


def doctor(
    config: Config,
    set_: Set = None,
    seed: Seed = None,
    updates: Updates = None,
    pairs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Held-out pairs to test the reward model on.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Of the training: what each stores.")] = 1,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Check a run before it starts: one line for each check (fine, doubtful or fatal), with advice."""
    settings = _settings("train", config, overrides(set_, None, seed), updates)
    ui.start(quiet)
    with ui.waiting("loading torch"):
        from rlhf_kl.commands.findings import run_doctor

    findings = run_doctor(settings, pairs, processes)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True)
        for level, topic, text, change in findings:
            head = Text.assemble((f"{level:<9} ", STYLES[level]), (f"{topic:<10} ", "bold"))
            words = text + (f"; advice: {change}" if change else "")
            console.print(head + hanging(words, stdout_width(), len(head)))
        counts = Counter[str](finding.level for finding in findings)
        told = ", ".join(f"{counts[level]} {level}" for level in STYLES if counts[level])
        after = "change what is fatal" if counts["fatal"] else f"next: {shell_command()} train --config {config}"
        print(f"{'not ready' if counts['fatal'] else 'ready'}: {told}; {after}")
    return 2 if any(finding.level == "fatal" for finding in findings) else 0
