from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_kl.kernels import build


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The library for a processor whose vectors have eight numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512f"))
        patch.setenv("RLHF_KL_CACHE", str(tmp_path_factory.mktemp("narrow")))
        return build._loaded.__wrapped__()


@pytest.fixture(params=["native", "narrow"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled functions for this processor, and for one with narrower vectors; skips where there are none."""
    if reason := build.missing():
        pytest.skip(reason)
    if request.param == "narrow":
        library = request.getfixturevalue("narrow")
        assert library.lanes() == 8
        monkeypatch.setattr(build, "_loaded", lambda: library)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and nothing loaded yet; gives the cache's folder."""
    if reason := build.missing():
        pytest.skip(reason)
    monkeypatch.setenv("RLHF_KL_CACHE", str(tmp_path / "cache"))
    build._loaded.cache_clear()
    yield tmp_path / "cache"
    build._loaded.cache_clear()
