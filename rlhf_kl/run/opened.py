"""A run that is open: its folder is locked, and what ends it is told with the way on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from safetensors import SafetensorError

from rlhf_kl.config.schema import AnyConfig
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import InputError, MemoryFull, RunFailed
from rlhf_kl.memory import LESS_MEMORY, memory_for
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.run import Run
from rlhf_kl.ui import log


@contextlib.contextmanager
def open_run(config: AnyConfig, ranks: Ranks, *, resume: bool, overwrite: bool) -> Iterator[Run]:
    """A run whose folder is locked inside the block. After an error in it, the way on is told.

    Errors: those of `Run.open`; RunFailed in place of a full disk, a broken one and a full memory.
    """
    run = Run(config, ranks)
    try:
        with memory_for("the run does not fit", LESS_MEMORY[run.kind]):
            run.open(resume=resume, overwrite=overwrite)
            yield run
    except InputError:
        way_on = run.way_on()
        if run.began and checkpoints(run.folder.checkpoints):
            log.warning(f"{way_on}, once the error is fixed")
        raise
    except MemoryFull as error:
        raise RunFailed(f"{error}; {run.way_on()}") from error
    except SafetensorError as error:  # it names the disk's error
        raise RunFailed(f"{run.folder.path}: {error}; {run.way_on()}") from error
    except OSError as error:
        if error.errno is None:  # a library's own words, not the system's
            raise
        raise RunFailed(f"{error.filename or run.folder.path}: {error.strerror}; {run.way_on()}") from error
    finally:
        run.close()
