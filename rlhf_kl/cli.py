"""The command line: `rlhf-kl COMMAND`. A command parses, calls and prints; heavy imports wait until then."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rlhf_kl.commands import compare, config, doctor, evaluate, generate, guide, init, scale, simulate, train
from rlhf_kl.commands.options import Command, Group
from rlhf_kl.errors import FAMILIAR, InputError, Interrupted, RlhfKlError
from rlhf_kl.memory import memory_is_full
from rlhf_kl.shell import end_soon, hide_library_warnings, program_version, shell_command, wait_without_spinning
from rlhf_kl.text import safe_text, whole

TRAINING = {  # commands that take a config, and one that comes along
    "train": "smoke.yaml",
    "sft": "sft_reviews.yaml",
    "reward-model": "reward_reviews.yaml",
    "compare": "compare_adaptive_vs_static.yaml",
    "doctor": "ppo_adaptive.yaml",
}
RESUMED = ("train", "sft", "reward-model", "compare")
TAKES = {"eval": "--run", "generate": "--prompt"}  # what a word without an option was probably meant for
app = typer.Typer(
    name="rlhf-kl",
    help="Fine-tune a language model with PPO, and hold its KL to the reference at a target.\n\n"
    f"Start with `{shell_command()} train --config smoke.yaml` (seconds) or `ppo_adaptive.yaml` (minutes, CPU).",
    pretty_exceptions_enable=False,
    add_completion=False,
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(init.init)
app.command(cls=Command)(train.train)
app.command("eval", cls=Command)(evaluate.evaluate)
app.command("sft", cls=Command, help="A language model from texts: fine-tuned, or from scratch.")(train.supervised)
app.command("reward-model", cls=Command, help="A reward model from pairs (Bradley-Terry).")(train.supervised)
for function in (
    compare.compare,
    compare.report,
    scale.scale,
    generate.generate,
    doctor.doctor,
    simulate.simulate,
    guide.guide,
):
    app.command(cls=Command)(function)
app.add_typer(config.app, name="config")


def _print_version(version_flag: bool) -> None:
    if version_flag:
        print(f"rlhf-kl {program_version()}")
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
    wait_without_spinning()
    hide_library_warnings()
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # one more, while the first was to be told
        print("interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    # What libraries do at the exit would answer a signal with a traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(code or 128 + signal.SIGINT))
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        end_soon(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; problems go to stderr, one line each."""
    arguments = list(arguments) or ["--help"]
    if arguments[0] in TRAINING and arguments[1:] and not arguments[1].startswith("-") and arguments[0] != "compare":
        named = any(word.startswith(("--config", "-c")) for word in arguments)
        arguments[1:1] = [] if named else ["--config"]  # `train x`
    try:
        for word in arguments:
            _require_text(word)
        result: Any = app(arguments, prog_name=shell_command(), standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        return result if isinstance(result, int) else 0
    except RlhfKlError as error:
        if not (_follows() if error.told is None else error.told):
            for line in getattr(error, "problems", None) or [str(error)]:
                print(f"error: {safe_text(line)}", file=sys.stderr)
        return error.exit_code
    except (Interrupted, KeyboardInterrupt) as interrupted:
        if not _follows():
            last = "; to go on from the last checkpoint, if there is one: "
            way = last + _going_on(arguments) if arguments[0] in RESUMED else ""
            print(f"interrupted{way}", file=sys.stderr)
        return getattr(interrupted, "exit_code", 130)
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter must not try to flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {safe_text(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
        return 1 if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else 2  # the disk, or a wrong path
    except Exception as error:
        if memory_is_full(error):
            advice = "use a smaller model, or a device with more memory (run.device)"
            print(f"error: memory is full: {advice}", file=sys.stderr)
            return 1
        if not hasattr(error, "format_message"):  # of typer's usage errors: it has a click of its own
            raise
        if not _follows():
            print(f"error: {_usage_error(error, arguments)}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))


def _require_text(word: str) -> None:
    """Errors: InputError for bytes that are no UTF-8: no prompt can hold them, and no config the name of a file."""
    try:
        whole(word)
    except ValueError as error:
        raise InputError(f"command line: is no UTF-8 text: {word!r:.80}") from error


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
    """What is wrong with a command line, in the words of the command library, and what helps."""
    command, context = arguments[0], getattr(error, "ctx", None)
    message = " ".join(error.format_message().split()).removesuffix(".")
    path = shell_command() if context is None else context.command_path
    left = [] if context is None else context.args
    hint = ""
    match type(error).__name__:
        case "NoSuchOption":
            message = error.message  # without the list of similar ones
            near = f"did you mean {error.possibilities[0]}?" if error.possibilities else ""
            hint = _key_option(error.option_name, command, near) if command in TRAINING else near
        case "MissingParameter" if command in TRAINING:
            hint = f"such as {path} --config {TRAINING[command]}"
        case "BadParameter":
            message += "".join(f": {value!r}" for value in _values(error.param, arguments))
        case "UsageError" if left:
            hint = _option_for(left[0], command)
    return safe_text(f"{message}; {hint} (see {path} --help)" if hint else f"{message}; see {path} --help")


def _values(param: Any, arguments: Sequence[str]) -> list[str]:
    """What a command line gives an option: the word behind it, or behind its equals sign."""
    pairs = ((*word.partition("=")[::2], after) for word, after in zip(arguments, [*arguments[1:], ""], strict=True))
    return [value or after for name, value, after in pairs if name in param.opts]


def _option_for(word: str, command: str) -> str:
    """The option that was probably meant to stand before a word that no command takes."""
    if command in TAKES:
        is_run = os.path.isfile(os.path.join(word, "config.yaml"))
        return f"did you mean {'--run' if is_run else TAKES[command]} {word}?"
    return f"did you mean --set {word}?" if command in TRAINING and "=" in word else ""


def _key_option(option: str, command: str, near: str) -> str:
    """What to write in place of an option that a training command does not have: another one, or a config key."""
    from rlhf_kl.config.problems import all_keys, nearest_keys
    from rlhf_kl.config.schema import MODELS

    key, models = option.lstrip("-").replace("-", "_"), dict[str, Any](MODELS.items())
    known = all_keys(models.get(command, models["train"]))
    if near and not any(f".{dotted}".endswith(f".{key}") for dotted in [*known, *FAMILIAR]):
        return near
    nearest = (nearest_keys(key, known) or ["KEY"])[0]
    if nearest == "ppo.total_episodes" and command in ("train", "doctor"):
        return "did you mean --updates N?"
    return f"config keys are changed with --set: --set {nearest}=VALUE"
