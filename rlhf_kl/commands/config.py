"""`rlhf-kl config`: look at a config without running it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer

from rlhf_kl.commands.options import Command, Group, Json, Set
from rlhf_kl.errors import InputError, collected
from rlhf_kl.text import safe_text

app = typer.Typer(help="Show, check or describe a config.", cls=Group)

File = Annotated[str, typer.Argument(metavar="FILE", help="YAML file, or the name of a shipped config.")]


@app.command(cls=Command)
def show(file: File, sets: Set = None) -> None:
    """Print the resolved config: every key, after `extends` and `--set`."""
    from rlhf_kl.config.resolve import dump_config, load_config

    print(dump_config(load_config(None, file, sets or [])), end="")


@app.command(cls=Command)
def validate(file: File, sets: Set = None, as_json: Json = False) -> int:
    """Check keys, values and paths, and list every problem. `doctor` also checks models, data and your code."""
    from rlhf_kl.builtin.world import GOLD
    from rlhf_kl.config.named import plugin_notes, plugins_of
    from rlhf_kl.config.paths import find_config
    from rlhf_kl.config.resolve import load_config
    from rlhf_kl.config.schema import AnyConfig
    from rlhf_kl.config.variants import load_compare
    from rlhf_kl.config.yaml import read_yaml

    configs, problems = list[AnyConfig](), list[str]()
    with collected(problems):
        if "variants" in read_yaml(find_config(file)):
            configs += [run.config for run in load_compare(file, sets or []).runs]
        else:
            configs.append(load_config(None, file, sets or []))
    notes = list(dict.fromkeys(note for config in configs for note in plugin_notes(config)))
    if as_json:
        print(json.dumps({"file": file, "problems": problems, "notes": notes}, indent=2))
        return 2 if problems else 0
    if problems:
        raise InputError(*problems)
    for note in notes:
        print(f"note: {safe_text(note)}", file=sys.stderr)
    own = any(plugin.ref != GOLD for config in configs for plugin in plugins_of(config))
    unseen = ", but for the code that it names, which doctor checks" * own
    print(f"{safe_text(file)}: ok{unseen}")
    return 0


@app.command(cls=Command)
def schema(
    kind: Annotated[
        Literal["train", "sft", "reward-model", "compare"],
        typer.Option("--kind", metavar="COMMAND", help="train, sft, reward-model or compare."),
    ] = "train",
) -> None:
    """Print the JSON Schema, for completion and checks in an editor."""
    from rlhf_kl.config.resolve import json_schema
    from rlhf_kl.config.variants import compare_schema

    print(json.dumps(compare_schema() if kind == "compare" else json_schema(kind), indent=2))
