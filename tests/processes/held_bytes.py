"""One update of a config in every process: the estimate of its memory, and the bytes of its tensors, to OUT.RANK."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from rlhf_kl.commands.build import build_setup
from rlhf_kl.commands.memory import estimate_memory
from rlhf_kl.commands.session import joined, run_device
from rlhf_kl.commands.start import prepare_training
from rlhf_kl.config.load import load_config


def bytes_of_tensors() -> int:
    """Of all storages that tensors use, each once."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and not hasattr(thing, "full_tensor"):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    config = load_config("train", sys.argv[1])
    with joined(config.run) as processes:
        before = bytes_of_tensors()
        device = run_device(config.run, group=True)
        setup = build_setup(config, device)
        estimate = estimate_memory(config, setup, device, processes.count)
        training = prepare_training(config, setup, ranks=processes)
        training.trainer.update(1)
        found = {"held": bytes_of_tensors() - before, "world": processes.count, **asdict(estimate)}
        Path(f"{sys.argv[2]}.{processes.index}").write_text(json.dumps(found))
