"""The errors a user can cause, and the exit code that each one means."""

from __future__ import annotations


class RlhfKlError(Exception):
    """Base of all errors that are reported as one line, without a traceback."""

    exit_code = 1
    shared = False  # every process of the group ends with it
    told = False  # the first process of the group reports it
    in_group = False  # raised in one process of a group; others may not have it


class InputError(RlhfKlError, ValueError):
    """Bad command line, config or input: one line per problem, exit code 2."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = [" ".join(problem.split()) for problem in problems]
        super().__init__("\n".join(self.problems))


class RunFailed(RlhfKlError):
    """The machine failed the run (disk full, folder gone, memory full): exit code 1, and `--resume` goes on."""


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

    shared = False  # every process of the group ends with it

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__("interrupted")
