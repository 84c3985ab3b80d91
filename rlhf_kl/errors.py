"""The errors a user can cause, the exit code that each one means, and the name that a wrong one is closest to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class RlhfKlError(Exception):
    """Base of all errors that are reported as one line, without a traceback."""

    exit_code = 1
    told: bool | None = None  # another process of the group has reported it, or the failure that led to it


class InputError(RlhfKlError, ValueError):
    """Bad command line, config or input: one line per problem, exit code 2."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = [" ".join(problem.split()) for problem in problems]
        super().__init__("\n".join(self.problems))


@contextmanager
def blame(key: str) -> Iterator[None]:
    """Errors: InputError with the config key in front of each problem; so does a ServiceFailed."""
    try:
        yield
    except InputError as error:
        raise InputError(*(f"{key}: {problem}" for problem in error.problems)) from error
    except ServiceFailed as error:
        raise ServiceFailed(f"{key}: {error}") from error


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """An InputError ends here: its problems are added to `problems`."""
    try:
        yield
    except InputError as error:
        problems += error.problems


class RunFailed(RlhfKlError):
    """The machine failed the run (disk full, folder gone, memory full): exit code 1, and `--resume` goes on."""


class ServiceFailed(RunFailed):
    """The engine of the rollouts failed, or the server of a reward; the policy is sound."""


class OtherProcessFailed(RunFailed):
    """Another process of the group failed, so that this one cannot go on."""


class MemoryFull(RunFailed):
    """Even the smallest part of some work does not fit into memory; `change`: advice to need less."""

    def __init__(self, work: str, change: str) -> None:
        self.work, self.change = work, change
        super().__init__(f"{work}: {change}")


class GuardStop(RlhfKlError):
    """A guard stopped the run (a failed check at step 0, a KL above the ceiling, ...): exit code 3."""

    exit_code = 3


class Interrupted(BaseException):
    """A signal ended the run: exit code 130 (SIGINT) or 143 (SIGTERM).

    No `Exception`, like KeyboardInterrupt, so a user's `except Exception` cannot catch it.
    """

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__("interrupted")


# ---- the nearest name ----

# Keys, and what other programs and tutorials call them.
FAMILIAR = {
    **dict.fromkeys(["updates", "steps", "max_steps", "iterations"], "ppo.total_episodes"),
    **dict.fromkeys(["beta", "kl_coef", "init_kl_coef"], "kl.controller.coef"),
    **dict.fromkeys(["max_length", "max_completion_length"], "rollout.max_new_tokens"),
    **dict.fromkeys(["wandb", "report_to"], "tracking.trackers"),
    **dict.fromkeys(["url", "remote_rm_url"], "reward.kind: http"),
    "lr": "ppo.learning_rate",
    "num_generations": "rollout.samples_per_prompt",
}


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name closest to `word`, or with `word` as its initials (lr: learning_rate); else None."""
    by_lower = {name.lower(): name for name in names}
    for name in by_lower:
        if "_" in name and word.lower() == "".join(part[:1] for part in name.split("_")):
            return by_lower[name]
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def suggestion(word: str, names: Iterable[str], prefix: str = "") -> str:
    """ "; did you mean X?", or the valid names if none is close (empty if there are none)."""
    names = sorted(names)
    familiar = FAMILIAR.get(word, "")
    if prefix and familiar.startswith(prefix):
        return f"; did you mean {familiar}?"
    if close := nearest(word, names):
        return f"; did you mean {prefix}{close}?"
    return f"; valid: {', '.join(names)}" if names else ""


def is_address(name: str | Path) -> bool:
    """Whether a name is written as an address (`s3://bucket/x`), of whose slashes a `Path` keeps one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(name)) is not None


def no_such_file(name: str | Path, *folders: Path) -> InputError:
    """The error of a file that is in none of the folders (default: the working directory), with the nearest one."""
    if is_address(name):
        return InputError(
            f"{name} is an address: only local files and ids of the hub (owner/name) are read; download it"
        )
    given, places = Path(name).expanduser(), list(dict.fromkeys(folders or [Path.cwd()]))
    files = [file for place in places for file in (place / given.parent).glob("*")]
    names = [file.name for file in files if file.is_file() or not given.suffix]
    hint = "" if given.is_absolute() else f" (looked in {' and '.join(map(str, places))})"
    if close := nearest(given.name, names):
        hint += f"; did you mean {given.with_name(close)}?"
    return InputError(f"no such file{'' if given.suffix else ' or folder'}: {name}{hint}")
