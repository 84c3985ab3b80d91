"""The command line: `rlhf-kl COMMAND`. A command parses, calls and prints; heavy imports wait until then."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from rlhf_kl.cli import compare, config, evaluate, generate, guide, simulate, training
from rlhf_kl.errors import Interrupted, RlhfKlError
from rlhf_kl.memory import memory_is_full
from rlhf_kl.program import shell_command, prepare_torch
from rlhf_kl.text import safe_text

TRAINING = {  # commands that take a config, and one that comes along
    "train": "smoke.yaml",
    "sft": "sft_reviews.yaml",
    "reward-model": "reward_reviews.yaml",
    "compare": "compare_adaptive_vs_static.yaml",
    "doctor": "ppo_adaptive.yaml",
}
app = typer.Typer(
    name="rlhf-kl",
    help="Fine-tune a language model with PPO, and hold its KL to the reference at a target.\n\n"
    f"Start with `{shell_command()} train --config smoke.yaml` (seconds) or `ppo_adaptive.yaml` (minutes, CPU).",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(training.train)
app.command("eval")(evaluate.evaluate)
app.command("sft", help="Train a language model on texts: fine-tuning, or from scratch.")(training.supervised)
app.command("reward-model", help="Train a reward model from preference pairs (Bradley-Terry).")(training.supervised)
app.command()(compare.compare)
app.command()(compare.report)
app.command()(generate.generate)
app.command()(training.doctor)
app.command()(simulate.simulate)
app.command()(guide.guide)
app.add_typer(config.app, name="config")


def _print_version(version_flag: bool) -> None:
    if version_flag:
        print(f"rlhf-kl {version('rlhf-kl')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the script: runs the command line and exits with its code."""
    prepare_torch()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; problems go to stderr, one line each."""
    try:
        result: Any = app(list(arguments) or ["--help"], prog_name=shell_command(), standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        return result if isinstance(result, int) else 0
    except RlhfKlError as error:
        if not (_follows() if error.told is None else error.told):
            for line in getattr(error, "problems", None) or [str(error)]:
                print(f"error: {safe_text(line)}", file=sys.stderr)
        return error.exit_code
    except Interrupted as interrupted:
        print(f"interrupted; to go on from the last checkpoint: {_going_on(arguments)}", file=sys.stderr)
        return interrupted.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter must not try to flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if memory_is_full(error):
            print(
                "error: memory is full: use a smaller model, or a device with more memory (run.device)", file=sys.stderr
            )
            return 1
        if not hasattr(error, "format_message"):  # of typer's usage errors: it has a click of its own
            raise
        if not _follows():
            print(f"error: {_usage_error(error, arguments)}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))


def _follows() -> bool:
    """Whether a launcher started another process of a group on this machine before this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and int(os.environ.get("LOCAL_RANK", "0")) > 0


def _going_on(arguments: Sequence[str]) -> str:
    """The command that goes on where this one was interrupted."""
    words = [word for word in arguments if word != "--overwrite"]
    if "--resume" not in words and words[0] != "compare":  # which does so anyway
        words.append("--resume")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "the same command with --resume"
    return safe_text(f"{shell_command()} {shlex.join(words)}")


def _usage_error(error: Any, arguments: Sequence[str]) -> str:
    """What is wrong with a command line, and what helps."""
    message = safe_text(" ".join(error.format_message().split())).removesuffix(".")
    path = getattr(getattr(error, "ctx", None), "command_path", None) or shell_command()
    command, kind = arguments[0], type(error).__name__
    if command in TRAINING and kind == "NoSuchOption":
        from rlhf_kl.config.errors import all_keys, nearest_keys
        from rlhf_kl.config.schema import MODELS

        key = error.option_name.lstrip("-").replace("-", "_")
        model = next((model for kind, model in MODELS.items() if kind == command), MODELS["train"])
        nearest = (nearest_keys(key, all_keys(model)) or ["KEY"])[0]
        return f"{message}; config keys are changed with --set: --set {nearest}=VALUE (see {path} --help)"
    if command in TRAINING and kind == "MissingParameter":
        return f"{message}; such as {path} --config {TRAINING[command]} (see {path} --help)"
    return f"{message}; see {path} --help"
