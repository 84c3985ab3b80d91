"""`make install PYTHON=...`: adds missing packages to an existing environment, and does not change its torch.

Run by the python of that environment; needs nothing but its pip. `--check` installs nothing and fails where something
is missing that a run needs, `--check-dev` also where a tool of the tests is. Exit code 2 with a line for what stands in
the way.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DESCRIBE = """
import torch, transformers
print(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, transformers {transformers.__version__}")
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print("GPUs: " + (", ".join(names) or "none"))
"""


def obstacle() -> str | None:
    """Why nothing can be installed here; None where it can."""
    if sys.version_info < (3, 11):  # noqa: UP036  whatever PYTHON= names
        return f"Python 3.11 or newer is needed, this one is {platform.python_version()}"
    return None if importlib.util.find_spec("pip") else f"it has no pip: {sys.executable} -m ensurepip"


def installed(name: str) -> str | None:
    """The version of a package here, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing(*, dev: bool = True) -> list[str]:
    """The project's requirements that nothing here fulfils, as they are written.

    `dev`: also those of its tests, and the project itself, which runs from its folder without being installed.
    """
    import tomllib

    if importlib.util.find_spec("packaging"):
        from packaging.requirements import Requirement
    else:
        from pip._vendor.packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + (project["optional-dependencies"]["dev"] if dev else [])
    lines = []
    for line in wanted:
        need = Requirement(line)
        version = installed(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            lines.append(line + ("" if version is None else f" ({version} is here)"))
    return [*lines, *([project["name"]] if dev and not installed(project["name"]) else [])]


def forbidden(lacking: list[str]) -> str | None:
    """Why pip may not install these here; None if it may."""
    for line in lacking:
        if line.startswith("torch") and installed("torch"):
            return f"{line}, and this command does not change torch: update it yourself, or name another environment"
    marker = Path(sysconfig.get_path("stdlib", sysconfig.get_default_scheme())) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and marker.exists() and "PIP_BREAK_SYSTEM_PACKAGES" not in os.environ:  # PEP 668
        return (
            "the system manages its packages, so pip may not: make an environment that sees them "
            "(python3 -m venv --system-site-packages ENV) and name it with PYTHON=ENV/bin/python"
        )
    return None


def install(lacking: list[str]) -> int:
    """pip's exit code."""
    torch = installed("torch")
    print(f"missing: {', '.join(lacking)}")
    print(f"torch {torch} stays unchanged" if torch else "torch is missing: pip chooses a version", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(f"torch=={torch}\n" if torch else "", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            str(constraints),
            "--editable",
            ".[dev]",
        ]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    check = bool(arguments)
    able = bool(importlib.util.find_spec("packaging")) and check and sys.version_info >= (3, 11)
    if not able and (problem := obstacle()) is not None:
        print(f"error: {sys.executable}: {problem}", file=sys.stderr)
        return 2
    lacking = missing(dev=arguments != ["--check"])
    if check:
        if lacking:
            words = f"{sys.executable} lacks {', '.join(lacking)}"
            print(f"error: {words}: make install PYTHON={sys.executable}", file=sys.stderr)
        return 2 if lacking else 0
    print(f"Python {platform.python_version()}, {sys.executable}")
    if lacking and (problem := forbidden(lacking)) is not None:
        print(f"error: {sys.executable}: {problem}", file=sys.stderr)
        return 2
    if not lacking:
        print("nothing is missing")
    elif install(lacking):
        print("error: pip could not install the missing packages: see its message above", file=sys.stderr)
        return 2
    described = subprocess.run([sys.executable, "-c", DESCRIBE], check=False, capture_output=True, text=True)
    if described.returncode:
        print(f"error: torch or transformers cannot be imported: {described.stderr.strip().splitlines()[-1]}",
              file=sys.stderr)  # fmt: skip
        return 2
    print(described.stdout, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
