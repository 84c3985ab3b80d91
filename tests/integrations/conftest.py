"""The toy of `scripts/trl_budget_picture.py`: a random GPT-2 over sixteen letters, steps of 64 responses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def script(name: str) -> Any:
    """A file of `scripts/`, imported."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def library_warnings(library_warnings: list[str]) -> Iterator[None]:
    """The trainers of TRL load and call models in their own way: what transformers tells them is no error here."""
    yield
    library_warnings.clear()


@pytest.fixture(scope="session")
def toy() -> Any:
    return script("trl_budget_picture")


@pytest.fixture(scope="session")
def peer() -> Any:
    return script("peer_trl")


@pytest.fixture(scope="session")
def toy_model(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("toy"))
    toy.make_model(folder)
    return folder


@pytest.fixture
def make_trainer(toy: Any, toy_model: str, tmp_path: Path) -> Callable[..., Any]:
    """make_trainer("grpo" or "rloo", beta, **settings)."""

    def make(kind: str, beta: float, **settings: Any) -> Any:
        return toy.make_trainer(kind, toy_model, str(tmp_path / "run"), beta, **settings)

    return make
