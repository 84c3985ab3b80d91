"""transformers without its own messages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import transformers


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load reports and progress bars; `load` checks the parts that matter."""
    before = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        if bars:
            transformers.logging.enable_progress_bar()
