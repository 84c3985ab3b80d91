"""`make install PYTHON=...`: adds missing packages to an existing environment, and does not change its torch.

Run by the python of that environment. `--check` installs nothing and fails where something is missing that a run
needs, `--check-dev` also where a tool of the tests is. Exit code 2 with a line for what stands in the way.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def installed(name: str) -> str | None:
    """The version of a package here, None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing(*, dev: bool) -> list[str]:
    """The project's requirements that nothing here fulfils, as they are written.

    `dev`: also those of its tests, and the project itself, which runs from its folder without being installed.
    """
    import tomllib

    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = []
    for line in project["dependencies"] + (project["optional-dependencies"]["dev"] if dev else []):
        need = Requirement(line)
        version = installed(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            lines.append(line + ("" if version is None else f" ({version} is here)"))
    return [*lines, *([project["name"]] if dev and not installed(project["name"]) else [])]


def install(lacking: list[str]) -> int:
    """pip's exit code."""
    torch = installed("torch")
    print(f"missing: {', '.join(lacking)}")
    print(f"torch {torch} stays unchanged" if torch else "torch is missing: pip chooses a version", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(f"torch=={torch}\n" if torch else "", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        return subprocess.run([*command, "--editable", ".[dev]"], cwd=ROOT, check=False).returncode


def problem(arguments: list[str]) -> str | None:
    """Install or check; what stands in the way, None where the environment is complete."""
    if sys.version_info < (3, 11):  # noqa: UP036  whatever PYTHON= names
        return f"{sys.executable}: Python 3.11 or newer is needed, this one is {platform.python_version()}"
    lacking = missing(dev=arguments != ["--check"])
    if arguments and lacking:
        return f"{sys.executable} lacks {', '.join(lacking)}: make install PYTHON={sys.executable}"
    old = [line for line in lacking if line.startswith("torch")]
    if old and installed("torch"):
        return f"{old[0]}, and this command does not change torch: update it yourself, or name another environment"
    if lacking and install(lacking):
        return "pip could not install the missing packages: see its message above"
    return None


if __name__ == "__main__":
    words = problem(sys.argv[1:])
    if words:
        print(f"error: {words}", file=sys.stderr)
    sys.exit(2 if words else 0)
