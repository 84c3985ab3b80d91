"""What surrounds a call from Python: progress in a notebook, and the state of the process as it was before."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_kl import ui
from rlhf_kl.errors import InputError, Interrupted, RlhfKlError

ARGUMENTS = {"--resume": "resume=True", "--overwrite": "overwrite=True", "--output-dir": "output_dir"}


@contextmanager
def python_call(*, quiet: bool) -> Iterator[None]:
    """A block that does the work of a command. Afterwards torch has its threads, random numbers and memory as before.

    Errors: KeyboardInterrupt after Ctrl-C, RlhfKlError for all that the user can mend.
    """
    ui.start(quiet)
    import torch

    from rlhf_kl.seeding import library_state_kept

    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with library_state_kept():
            yield
    except RlhfKlError as error:
        error.args = tuple(_with_arguments(str(text)) for text in error.args)
        if isinstance(error, InputError):
            error.problems = list(map(_with_arguments, error.problems))
        raise
    except Interrupted as stopped:
        if stopped.exit_code == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        signal.raise_signal(signal.SIGTERM)  # as it came
        raise
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        ui.start(quiet=True)


def _with_arguments(text: str) -> str:
    """An error's text, with arguments of Python in place of options of the command line."""
    for option, argument in ARGUMENTS.items():
        text = text.replace(option, argument)
    return text
