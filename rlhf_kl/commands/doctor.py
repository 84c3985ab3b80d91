"""`rlhf-kl doctor`."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from typing import Annotated

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Config, Json, Quiet, Seed, Set, Updates, byte_count, read_config, read_elsewhere
from rlhf_kl.errors import InputError
from rlhf_kl.shell import shell_command
from rlhf_kl.text import hanging, stdout_width

STYLES = {"fine": "green", "doubtful": "yellow", "fatal": "bold red"}


def doctor(
    config: Config,
    set_: Set = None,
    seed: Seed = None,
    updates: Updates = None,
    pairs: Annotated[
        str | None, typer.Option(metavar="FILE", help="Held-out pairs to test the reward model on.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Of the training: whether they can share it.")] = 1,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the device of a process, such as 80GB: only compute whether it fits."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Check a run before it starts: one line for each check (fine, doubtful or fatal), with advice."""
    from rlhf_kl.commands.stored import check_given

    ui.start(quiet)
    if device_memory is not None:
        memory = byte_count("--device-memory", device_memory)
        if pairs is not None:
            raise InputError("--pairs and --device-memory exclude each other: nothing is loaded to try on pairs")
        planned = read_elsewhere(config, set_, seed, updates)
        with ui.progress("loading torch"):
            from rlhf_kl.commands.fitting import run_fitting

        findings = run_fitting(planned, processes, memory)
    else:
        settings = read_config("train", config, set_, None, seed, updates)
        check_given({}, "--pairs", pairs, "chosen", settings)  # its errors come before torch is imported
        with ui.progress("loading torch"):
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
        given = [("--config", config), ("--seed", seed), ("--updates", updates)]
        given += [("--set", change) for change in set_ or ()]
        typed = [word for name, value in given if value is not None for word in (name, str(value))]
        train = f"next: {shell_command()} train {shlex.join(typed)}"
        after = "change what is fatal" if counts["fatal"] else train
        print(f"{'not ready' if counts['fatal'] else 'ready'}: {told}; {after}")
    return 2 if any(finding.level == "fatal" for finding in findings) else 0
