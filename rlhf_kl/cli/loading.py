"""What a terminal shows while torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(quiet: bool) -> Iterator[None]:
    """A spinner around imports that take seconds; a log shows nothing."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("loading torch"):
        yield
