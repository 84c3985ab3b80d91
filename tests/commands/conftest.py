from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """`train(folder, "kl.target=0.2", resume=True)`: a run of the tiny model; returns its summary."""
    from rlhf_kl import ui
    from rlhf_kl.commands.train import train_command
    from rlhf_kl.config.resolve import load_config
    from rlhf_kl.training.loop import run_train

    file = tmp_path_factory.mktemp("configs") / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_settings))

    def run(folder: Path, *overrides: str, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
        config = load_config("train", file, [*overrides, f"run.output_dir='{folder}'"])
        ui.start(quiet=True)
        return train_command(run_train, config, resume=resume, overwrite=overwrite)

    return run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., dict[str, Any]]) -> Path:
    """A finished run of six updates with all its checkpoints; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(folder)
    return folder
