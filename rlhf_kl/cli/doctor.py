"""`rlhf-kl doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rlhf_kl import ui
from rlhf_kl.cli.options import Config, Quiet, Seed, Set, loading, overrides

STYLES = {"fine": "green", "doubtful": "yellow", "fatal": "bold red"}


def doctor(
    config: Config,
    set_: Set = None,
    seed: Seed = None,
    pairs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Held-out preference pairs to test the reward model on.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of processes of the training, for the memory estimate.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    quiet: Quiet = False,
) -> int:
    """Check a run before it starts: one line for each check (fine, doubtful or fatal), with advice."""
    from rlhf_kl.config.load import load_config
    from rlhf_kl.config.plugins import check_plugins

    settings = load_config("train", config, overrides(set_, None, seed))
    check_plugins(settings)
    with loading(quiet):
        from rlhf_kl.commands.doctor import run_doctor

    ui.start(quiet)
    findings = run_doctor(settings, pairs, processes)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        from rlhf_kl.text import hanging, stdout_width

        console = Console(soft_wrap=True)
        for level, topic, text, change in findings:
            head = Text.assemble((f"{level:<9} ", STYLES[level]), (f"{topic:<10} ", "bold"))
            words = text + (f"; advice: {change}" if change else "")
            console.print(head + hanging(words, stdout_width(), len(head)))
    return 2 if any(finding.level == "fatal" for finding in findings) else 0
