"""Makes the measurements behind the figures of README and guide, each into scripts/results/NAME.json.

    make figures                       all of them: hours on two cores
    make figures ONLY="sweep_target"   some; FOLDER=runs/figures holds their runs, of which finished ones are used again

A result has what was measured, its command, commit, date, machine and seeds, and `figures`: numbers by name.
`trl_budget_picture.py` makes trl_budget.json, in environments with TRL. A table in README or guide that begins with
`<!-- figures: NAME -->` shows these numbers; `tests/test_figures.py` compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_kl.run.log import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
OF_A_VARIANT = ("kl", "scores", "gold", "perplexity", "tail_error", "peak")


class Measurement(NamedTuple):
    """One command, whose result is read from a file in its folder; without one it writes the result itself."""

    what: str
    command: Sequence[str]  # after `python`; FOLDER is replaced
    file: str = ""
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


def of_comparison(found: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds, and each seed's value, of every variant's figures."""

    def figures(variant: Mapping[str, Any]) -> dict[str, Any]:
        known = [name for name in OF_A_VARIANT if variant["mean"].get(name) is not None]
        every = {name: [seed[name] for seed in variant["seeds"].values()] for name in known}
        return {
            name: {"mean": variant["mean"][name], "sd": variant["sd"][name], "seeds": every[name]} for name in known
        }

    return {name: figures(variant) for name, variant in found["variants"].items()}


def of_control(found: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of `bench_control.py`."""
    return dict(found["rows"])


def comparison(what: str, config: str, *options: str) -> Measurement:
    """A `rlhf-kl compare`."""
    command = ["-m", "rlhf_kl", "compare", "--config", config, *options, "--jobs", "2", "--output-dir", "FOLDER"]
    return Measurement(what, command, "compare.json", of_comparison)


def control(what: str, *rows: str) -> Measurement:
    """A `bench_control.py`."""
    command = ["scripts/bench_control.py", *rows, "--jobs", "2", "--out", "FOLDER"]
    return Measurement(what, command, "bench_control.json", of_control)


MEASUREMENTS = {  # in the order of what they cost; minutes on two cores
    "what_beta_does": comparison("the KL of constant betas", "sweep_beta.yaml"),  # 8
    "adaptive_or_fixed": comparison("a target of 0.1 from three betas", "compare_adaptive_vs_static.yaml"),  # 10
    "sweep_target": comparison("score and true score by KL target", "sweep_target.yaml"),  # 15
    "advantages": comparison("gae, rloo and grpo at three targets", "compare_advantages.yaml"),  # 20
    "choices": comparison("where the KL is paid, and the value function", "scripts/choices.yaml"),  # 10
    "chain": Measurement("a chain beside own runs", ["scripts/chain_arms.py", "--jobs", "2", "--out", "FOLDER"]),  # 40
    "control": control("tail errors of all controllers"),  # 40
    "stress": control("settings that nobody tuned for", "--rows", "stress"),  # 30; needs RLHF_KL_REAL
}


def machine() -> str:
    """Processor, cores and versions."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def commit() -> str:
    """The present commit, `+` where files differ from it."""
    words = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def measure(name: str, folder: Path, extra: Sequence[str]) -> None:
    """Run a measurement, and write its result."""
    what, words, file, read = MEASUREMENTS[name]
    command = [*words, *extra]
    placed = [word.replace("FOLDER", str(folder / name)) for word in command]
    done = subprocess.run([sys.executable, *placed], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"error: {name} failed with exit code {done.returncode}")
    if not file:
        return
    found = json.loads((folder / name / file).read_text(encoding="utf-8"))
    seeds = sorted({int(seed) for variant in found.get("variants", {}).values() for seed in variant["seeds"]})
    RESULTS.mkdir(exist_ok=True)
    result = {"what": what, "command": " ".join(["python", *command]), "commit": commit(), "date": str(date.today())}
    write_json(RESULTS / f"{name}.json", result | {"machine": machine(), "seeds": seeds, "figures": read(found)})


def main(words: Sequence[str] | None = None) -> None:
    """Make the measurements that are named."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all; there are {', '.join(MEASUREMENTS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/figures"), help="of the runs")
    args, extra = parser.parse_known_args(words)
    if unknown := set(args.names) - set(MEASUREMENTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    for name in args.names or MEASUREMENTS:
        measure(name, args.folder.resolve(), extra)


if __name__ == "__main__":
    main()
