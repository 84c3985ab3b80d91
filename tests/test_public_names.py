from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_kl

HEAVY = ("torch", "transformers", "numpy", "datasets", "accelerate", "matplotlib")


def modules_after(code: str, folder: Path) -> set[str]:
    """The modules of HEAVY that a fresh interpreter has imported after running `code`."""
    listing = f"import sys\nprint('modules:', *[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{listing}"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rsplit("modules:", 1)[1].split())


COMMANDS = (
    ["--help"],
    ["train", "--help"],
    ["eval", "--help"],
    ["config", "show", "smoke.yaml"],
    ["train", "--config", "nowhere.yaml"],
    ["train", "--config", "smoke.yaml", "--set", "kl.target=-1"],
    ["sft", "--config", "sft_reviews.yaml", "--set", "sft.epoch=1"],
    ["reward-model", "--config", "smoke.yaml"],
    ["eval", "--no-such-option"],
)


def test_nothing_heavy_before_it_is_needed(tmp_path: Path) -> None:
    """One interpreter for all: each on its own would cost a start of its own."""
    code = "\n".join(
        [
            "import contextlib, io, rlhf_kl, rlhf_kl.cli",
            "quiet = io.StringIO()",
            "with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):",
            f"    codes = [rlhf_kl.cli.run(command) for command in {COMMANDS!r}]",
            "assert codes == [0, 0, 0, 0, 2, 2, 2, 2, 2], (codes, quiet.getvalue())",
            "rlhf_kl.AdaptiveKL, dir(rlhf_kl)",
        ]
    )
    assert modules_after(code, tmp_path) == set()


@pytest.mark.parametrize("name", rlhf_kl.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    public = getattr(rlhf_kl, name)
    assert public.__name__ == name
    assert (public.__doc__ or "").strip()
    assert name in dir(rlhf_kl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        rlhf_kl.nonsense  # noqa: B018
