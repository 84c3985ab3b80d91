from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from rlhf_kl.kernels import build


def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build.library(), ctypes.CDLL)
    assert build.missing() is None
    (made,) = (fresh / "kernels").iterdir()  # and nothing of the building is left
    build._loaded.cache_clear()
    monkeypatch.setattr(build, "_run", lambda *_: pytest.fail("compiled again"))
    assert build.library() is not None
    assert made.is_file()


def test_a_machine_without_a_compiler_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert build.library() is None
    assert build.missing() == "there is no C compiler (gcc)"


def test_a_compiler_that_fails_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-march=pdp11"))
    assert build.library() is None
    assert "pdp11" in str(build.missing())
    assert list((fresh / "kernels").iterdir()) == []


@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
def test_other_processors_do_without(fresh: Path, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "VECTORS", {"avx2", "of-the-future"})
    expected = {"arm64": "they are made for Linux on x86-64", "x86_64": "the processor has no AVX2"}
    assert build.missing() == expected[machine]


def test_a_cache_that_cannot_be_written_costs_a_compilation_only(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLHF_KL_CACHE", str(tmp_path / "file"))
    assert isinstance(build.library(), ctypes.CDLL)
    assert not fresh.exists()


def test_a_library_that_is_damaged_is_built_again(fresh: Path) -> None:
    build.library()
    (made,) = (fresh / "kernels").iterdir()
    made.unlink()  # another file: this one is in use
    made.write_bytes(b"not a library")
    build._loaded.cache_clear()
    assert isinstance(build.library(), ctypes.CDLL)


def test_code_that_somebody_else_can_write_is_not_run(fresh: Path) -> None:
    build.library()
    (made,) = (fresh / "kernels").iterdir()
    for path, mode in ((made, 0o777), (fresh / "kernels", 0o777)):
        path.chmod(mode)
        with pytest.raises(OSError, match="somebody else"):
            build._kept(made.name, "gcc")
        path.chmod(0o700)


def test_no_home_costs_a_compilation_only(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_KL_CACHE", "~nobody-of-this-name/cache")
    assert isinstance(build.library(), ctypes.CDLL)


def test_a_library_that_nothing_can_load_says_why(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that names functions of another OpenMP."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-Dfree=no_such_function"))
    assert build.library() is None
    assert "no_such_function" in str(build.missing())
    assert list((fresh / "kernels").iterdir()) == []
