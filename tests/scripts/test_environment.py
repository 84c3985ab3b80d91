"""`make install PYTHON=...` against small environments with a pip that writes down what it is asked for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = [re.split(r"[^\w.-]", line)[0] for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
VERSIONS = dict.fromkeys((*NEEDED, PROJECT["name"]), "999") | {
    "torch": "2.9.0+cu128",
    "transformers": "5.1",
    "pydantic": "2.12",
}
PIP = """
import pathlib, sys
place = sys.argv.index("--constraint") + 1
pathlib.Path(sys.prefix, "asked").write_text(" ".join(sys.argv[place + 1:]) + "|" + open(sys.argv[place]).read())
sys.exit(1)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., Path]:
    """`environment(torch=None, numpy="1.0")`: the python of one where these differ from all that is needed."""

    def make(**changes: str | None) -> Path:
        place = tmp_path / "environment"
        venv.create(place)
        site = place / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        (site / "pip").mkdir()
        # Not by importing pip: that changes how setuptools finds distutils in this process.
        (site / "pip" / "_vendor").symlink_to(Path(str(distribution("pip").locate_file("pip/_vendor"))))
        (site / "pip" / "__init__.py").write_text("")
        (site / "pip" / "__main__.py").write_text(PIP)
        for name, version in (VERSIONS | changes).items():
            if version is not None:
                folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
                folder.mkdir()
                (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for name in ("torch", "transformers"):
            (site / f"{name}.py").write_text(f"__version__ = '{VERSIONS[name]}'\n")
        with (site / "torch.py").open("a") as file:
            file.write("class version: cuda = '12.8'\nclass cuda:\n    is_available = staticmethod(lambda: True)\n")
            file.write("    device_count = staticmethod(lambda: 2)\n    get_device_name = 'GPU {}'.format\n")
        return place / "bin" / "python"

    return make


def make(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *map(str, arguments)]
    # These tests run under make themselves.
    apart = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=apart)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    return line


def test_an_environment_that_has_everything_is_described(environment: Callable[..., Path]) -> None:
    python = environment()
    done = make("install", f"PYTHON={python}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Python 3.")
    assert lines[1:] == [
        "nothing is missing",
        "torch 2.9.0+cu128, CUDA 12.8, transformers 5.1",
        "GPUs: GPU 0, GPU 1",
    ]
    assert make("check-environment", f"PYTHON={python}").returncode == 0
    assert not (python.parents[1] / "asked").exists()


@pytest.mark.parametrize(
    ("changes", "said", "constraint"),
    [
        ({"peft": None}, "missing: peft>=0.17\ntorch 2.9.0+cu128 stays unchanged", "torch==2.9.0+cu128\n"),
        ({"torch": "2.7.0a0+nv25", "rlhf-kl": None}, "missing: rlhf-kl\ntorch 2.7.0a0", "torch==2.7.0a0+nv25\n"),
    ],
)
def test_pip_is_asked_for_what_is_missing_but_for_another_torch(
    environment: Callable[..., Path], changes: dict[str, str | None], said: str, constraint: str
) -> None:
    python = environment(**changes)
    done = make("install", f"PYTHON={python}")
    assert said in done.stdout
    assert (python.parents[1] / "asked").read_text() == f"--editable .[dev]|{constraint}"
    assert error_of(done).startswith("error: pip could not")  # the pip of these tests never can


def test_a_torch_that_is_too_old_is_not_replaced(environment: Callable[..., Path]) -> None:
    python = environment(torch="2.5.1")
    done = make("install", f"PYTHON={python}")
    assert done.returncode == 2
    assert "torch>=2.6 (2.5.1 is here), and this command does not change torch: update it yourself" in error_of(done)
    assert not (python.parents[1] / "asked").exists()


@pytest.mark.parametrize("target", ["train", "test"])
def test_every_target_says_what_an_environment_lacks(environment: Callable[..., Path], target: str) -> None:
    python = environment(peft=None, numpy="1.0")
    done = make(target, f"PYTHON={python}")
    assert done.returncode == 2
    lacks = f"{python} lacks peft>=0.17, numpy>=1.26 (1.0 is here): make install PYTHON={python}"
    assert error_of(done) == f"error: {lacks}"


def test_a_run_needs_no_tools_of_the_tests_and_no_pip(environment: Callable[..., Path]) -> None:
    python = environment(ruff=None, mypy=None, **{"rlhf-kl": None})
    checked = [sys.executable, "-c", "import importlib.util; print(importlib.util.find_spec('packaging').origin)"]
    packaging = Path(subprocess.run(checked, capture_output=True, text=True, check=True).stdout.strip()).parent
    site = next(python.parents[1].glob("lib/*/site-packages"))
    (site / "packaging").symlink_to(packaging)
    shutil.rmtree(site / "pip")
    script = ROOT / "scripts" / "environment.py"
    done = [
        subprocess.run([python, script, word], capture_output=True, text=True) for word in ("--check", "--check-dev")
    ]
    assert [one.returncode for one in done] == [0, 2]
    assert "lacks ruff>=" in error_of(done[1])


def test_an_environment_without_pip(environment: Callable[..., Path]) -> None:
    python = environment()
    shutil.rmtree(next(python.parents[1].glob("lib/*/site-packages/pip")))
    assert error_of(make("install", f"PYTHON={python}")).endswith("it has no pip: " + f"{python} -m ensurepip")
