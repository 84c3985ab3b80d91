"""Makes the measurements behind the figures of README, guide and scripts/results, each into scripts/results/NAME.json.

    make figures                       all of them: hours on two cores
    make figures ONLY="sweep_target"   some. A result that this program made stays; finished runs in runs/figures are
                                       used again, and an interrupted one goes on
    make figures ONLY=--list           only which results are older than the program
    make figures ONLY="gpu --from report.json"   store what another machine measured

A result has what was measured, its command, commit, date, machine and seeds, and `figures`: numbers by name.
A result is old if the program has changed since, but for texts and commits whose message has a line
`Results: unchanged`. `trl_budget_picture.py` makes trl_budget.json, in environments with TRL. A table that begins with
`<!-- figures: NAME -->` shows these numbers; `tests/test_figures.py` compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlhf_kl.commands.grid import planned_comparison
from rlhf_kl.config.variants import load_compare
from rlhf_kl.report.charts import DASHES, ratio_chart
from rlhf_kl.report.comparison import Comparison
from rlhf_kl.report.drawing import ORDERED, Chart, Line, save_sheet
from rlhf_kl.run.log import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
EVIDENCE = "scripts/evidence"
SHOWS = (  # what a result has been measured with, and not these, which only show it
    *(f"report/{name}" for name in ("charts.py", "drawing.py", "page.py", "sentences.py", "side_by_side.py")),
    *("report/templates", "report/texts.py", "report/token_tables.py", "cli.py", "display.py", "shell.py", "ui.py"),
    *("commands/guide.py", "commands/init.py"),
)
SAME = "^Results: unchanged$"  # line of the message of a commit that changes no figure, as of one that mends a message
PROGRAM = ("rlhf_kl", "configs", ":!*.md", ":!configs/schema", *(f":!rlhf_kl/{name}" for name in SHOWS))
PICTURES = {  # of README and guide, by the file that a measurement draws
    "adaptive_or_fixed": {"frontier": "frontier"},
    "curves": {"compare": "curves"},
    "frontier": {"frontier": "best", "frontier-dark": "best-dark"},
    "sweep_target": {"targets": "targets"},
}
HELD = {"adaptive_or_fixed": "compare"}  # the picture of README, light and dark
DRAWN_FROM = {"what_beta_does": "scripts/tutorial_pictures.py"}  # draws the numbers of a result
NEED_A_GPU = ("gpu", "smollm2_gpu")
OF_A_VARIANT = ("kl", "scores", "gold", "perplexity", "tail_error", "peak", "distinct_2", "forward_kl_token", "length")


class Measurement(NamedTuple):
    """One command, whose result is read from a file in its folder; without one it writes the result itself."""

    what: str
    command: Sequence[str]  # after `python`; FOLDER is replaced
    file: str = ""
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


def of_comparison(found: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds, and each seed's value, of every variant's figures."""

    def figures(variant: Mapping[str, Any]) -> dict[str, Any]:
        mean = variant["mean"]
        scorers = [name.removesuffix("_gain") for name in mean if name.endswith("_gain")]
        names = dict.fromkeys([*OF_A_VARIANT, *(name for name in scorers if name in mean)])
        known = [name for name in names if mean.get(name) is not None]
        every = {name: [seed[name] for seed in variant["seeds"].values()] for name in known}
        return {
            name: {"mean": variant["mean"][name], "sd": variant["sd"][name], "seeds": every[name]} for name in known
        }

    return {name: figures(variant) for name, variant in found["variants"].items()}


def of_control(found: Mapping[str, Any]) -> dict[str, Any]:
    """The runs of the rows of `bench_control.py`."""
    return dict(found["rows"])


def of_run(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of the summary of a run: seconds, and figures at its start and over its last ten updates."""
    closing, control = found["closing"], found["control"]
    known = {name: dict(zip(("start", "end"), closing[name], strict=True)) for name in ("scores", "perplexity")}
    kl = {"mean": control["kl"], "tail_error": control["tail_error"]}
    return {found["run"]: {"seconds": found["seconds"], "updates": found["steps"], "kl": kl, **known}}


def without_seeds(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of what names its seeds beside them."""
    return {name: figures for name, figures in found.items() if name != "seeds"}


def of_gpu(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of the report of `gpu_report.py`: what its steps found, why others found nothing, and the gains."""
    steps = {name: entry.get("result", {"error": entry.get("error")}) for name, entry in found["steps"].items()}
    return {**steps, "left_out": found["left_out"], "gains": found["gains"]}


def about_gpu(found: Mapping[str, Any]) -> dict[str, Any]:
    """Where and when such a report was made, as far as it says so."""
    known = found.get("steps", {}).get("machine", {}).get("result", {})
    return {key: known[key] for key in ("commit", "date", "machine") if known.get(key)}


def seeds_of(found: Mapping[str, Any]) -> list[int]:
    """Seeds of the variants of a comparison, or of runs that are named by row, start and seed; else the usual one."""
    named = [*found.get("seeds", []), *([found["seed"]] if "seed" in found else [])]
    named += [seed for variant in found.get("variants", {}).values() for seed in variant["seeds"]]
    named += [run.rpartition("-s")[2] for runs in found.get("rows", {}).values() for run in runs]
    return sorted(set(map(int, named))) or [0]


def comparison(what: str, config: str, *options: str) -> Measurement:
    """A `rlhf-kl compare`."""
    command = ["-m", "rlhf_kl", "compare", "--config", config, *options, "--jobs", "2", "--output-dir", "FOLDER"]
    return Measurement(what, command, "compare.json", of_comparison)


def control(what: str, *rows: str) -> Measurement:
    """A `bench_control.py`."""
    command = ["scripts/bench_control.py", *rows, "--jobs", "2", "--out", "FOLDER"]
    return Measurement(what, command, "bench_control.json", of_control)


def evidence(script: str, what: str, *options: str) -> Measurement:
    """A script of the evidence, which writes FOLDER/SCRIPT.json."""
    return Measurement(what, [f"{EVIDENCE}/{script}.py", "FOLDER", *options], f"{script}.json", without_seeds)


def speed(what: str, *options: str) -> Measurement:
    """A `bench_groups.py`."""
    command = ["scripts/bench_groups.py", "FOLDER", *options]
    return Measurement(what, command, "bench_groups.json", lambda found: dict(found["summary"]))


ONE_PAIR = ("--sides", "rloo", "TRL rloo", "--seeds", "0", "--updates", "7")
MEASUREMENTS = {  # behind each its minutes on two cores
    "what_beta_does": comparison("the KL of constant betas", "sweep_beta.yaml"),  # 8
    "adaptive_or_fixed": comparison("a target of 0.1 from three betas", "compare_adaptive_vs_static.yaml"),  # 17
    "sweep_target": comparison("score and true score by KL target", "sweep_target.yaml"),  # 20
    "advantages": comparison("gae, rloo and grpo at three targets", "compare_advantages.yaml"),  # 20
    "forgetting": Measurement(
        "forgetting beside the KL", ["scripts/forgetting.py", "FOLDER"], "forgetting.json"
    ),  # 4; of the runs above
    "scale": Measurement(
        "one run scaled to every target, beside runs trained there", ["scripts/scale_arms.py", "FOLDER"], "scale.json"
    ),  # 30; needs RLHF_KL_REAL, as stress
    # What a held KL buys (guide/evidence.md). The runs of harm and methods come first, and `make smollm2` before them.
    "harm": comparison("a real model, three rewards, three targets and none", f"{EVIDENCE}/harm.yaml"),  # 300
    "again": comparison("the same with another seed", f"{EVIDENCE}/harm.yaml", "--seed", "1"),  # 150
    "after": evidence("after", "losses on answers and stories, and answers to three prompts"),  # 15; RLHF_KL_REAL
    "after_again": evidence("after", "the same of the other seed", "FOLDER/../again"),  # 10; RLHF_KL_REAL
    "methods": comparison("a real model with rloo and grpo", f"{EVIDENCE}/methods.yaml"),  # 50
    "frontier": evidence("frontier", "score over KL beside the best that any policy can do"),  # 20; RLHF_KL_REAL
    "estimators": evidence("estimators", "where the KL is paid, at equal KL", "estimators.yaml"),  # 40
    "stories_estimators": evidence(  # 25; RLHF_KL_REAL
        "estimators", "the same with TinyStories-656K", "stories_estimators.yaml"
    ),
    "razor": evidence("razor", "forgetting of SmolLM2 beside the KL, and of fine-tuning"),  # 15; RLHF_KL_REAL
    "law": evidence("law", "Gao's law in the built-in world"),  # 0; of the runs of sweep_target
    "tokens": evidence("tokens", "which tokens carry the KL"),  # 0; of the runs of harm
    "smollm2_gpu": Measurement(
        "a real model on a GPU",
        [
            *("-m", "rlhf_kl", "train", "--config", "smollm2_sentiment.yaml", "--updates", "40"),
            *("--overwrite", "--output-dir", "FOLDER"),
        ],
        "summary.json",
        of_run,
    ),  # 1; needs a GPU
    "gpu": Measurement(
        "a GPU in ten minutes", ["scripts/gpu_report.py", "--out", "FOLDER"], "report.json", of_gpu
    ),  # 10; needs a GPU
    "control": control("tail errors of all controllers"),  # 40
    "stress": control("settings that nobody tuned for", "--rows", "stress"),  # 30
    "curves": comparison("a healthy run and three sick ones", "scripts/guide_curves.yaml"),  # 2
    # 9; needs TRL, as the three below
    "speed": speed("seconds beside TRL's RLOO", "--sides", "gae", "rloo", "TRL rloo", "--betas", "rloo=0.24"),
    "speed_llama": speed("the same with a Llama of 43M", "--model", "llama", *ONE_PAIR),  # 2
    "speed_llama_bfloat16": speed("the same in bfloat16", "--model", "llama", "--dtype", "bfloat16", *ONE_PAIR),  # 2
    "speed_smollm2": speed("the same with SmolLM2-135M's shape", "--model", "smollm2"),  # 8
    "speed_gemma3": speed("the same with Gemma 3 270M's shape", "--model", "gemma3", "--updates", "8"),  # 10
    "speed_qwen": speed("the same with Qwen2.5-0.5B's width and words, two layers", "--model", "qwen"),  # 5
    "speed_gpt2": speed(  # 4; needs `make .venv-trl-1.12/.ready TRL=1.12`
        *("GPT-2 small's shape beside TRL's PPO", "--model", "gpt2", "--updates", "5"),
        *("--peer-python", ".venv-trl-1.12/bin/python"),
    ),
    "speed_gpt2_bfloat16": speed(  # 3
        *("the same in bfloat16", "--model", "gpt2", "--dtype", "bfloat16", "--updates", "5"),
        *("--peer-python", ".venv-trl-1.12/bin/python"),
    ),
    "float16": Measurement(
        "float16 beside float32, 20 updates on the same texts",
        ["scripts/same_texts.py", "FOLDER"],
        "same_texts.json",
    ),  # 30
    "operations": Measurement(
        "operations, kernels and waits of an update, by phase",
        ["scripts/count_operations.py", "--out", "FOLDER"],
        "count_operations.json",
        lambda found: dict(found["phases"]),
    ),  # 2
    "reliability": Measurement(
        "how often a promise of reliability was put to the test, and kept",
        ["scripts/reliability.py", "--out", "FOLDER"],
        "reliability.json",
    ),  # 25
}


def held_by_family(comparison: Comparison) -> list[Chart]:
    """KL over target of every run, one chart for each family of variants; these differ in their first beta."""
    charts = []
    for name, variants in comparison.families.items():
        ends = [ratio for variant in variants if (ratio := variant.over_target) is not None]
        runs, held = (sum(map(count, variants)) for count in (lambda v: len(v.runs), lambda v: v.verdicts["held"]))
        found = f"held in {held} of {runs} runs"
        if not variants[0].verdicts:
            found = f"ends at {min(ends):.2g}x to {max(ends):.2g}x"
        lines: list[Line] = []
        for variant, tint, dash in zip(
            variants, ORDERED[: 2 * len(variants) : 2], DASHES[: len(variants)], strict=True
        ):
            start = variant.name.rpartition("-")[2]
            of_runs = [(run, tint, start * (i == 0)) for i, run in enumerate(variant.runs.values())]
            lines += [line._replace(dash=dash) for line in ratio_chart("", "", of_runs).lines]
        charts.append(replace(ratio_chart(name, f"{name}: {found}", []), lines=lines))
    return charts


def machine() -> str:
    """Processor, cores and versions."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    gpus = [f"{torch.cuda.get_device_name(i)}, " for i in range(torch.cuda.device_count())]
    return f"{''.join(gpus)}{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def commit() -> str:
    """The present commit, `+` where program, configs or scripts differ from it; texts and results may."""
    changed = git("status", "--porcelain", "--", *PROGRAM, "scripts", ":!scripts/results")
    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)


def program(at: str = "HEAD") -> str:
    """The last commit until then that changed the program or its configs, and with them what is measured."""
    return git("log", "-1", "--format=%h", "--invert-grep", f"--grep={SAME}", at, "--", *PROGRAM)


def is_made(file: Path, command: str) -> bool:
    """Whether a result is there, by this command and the present program."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    made = found.get("command") == command and program(found["commit"]) == program()
    return made and "+" not in commit() + found["commit"]


def old_results() -> dict[str, str]:
    """Commits of the results that another program made, by name."""
    made = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    return {name: found["commit"] for name, found in made.items() if program(found["commit"]) != program()}


def store(name: str, command: str, at: str, found: Mapping[str, Any]) -> None:
    """Write a result."""
    about = {"what": MEASUREMENTS[name].what, "command": command, "commit": at, "date": str(date.today())}
    about |= {"machine": machine(), **about_gpu(found)}
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / f"{name}.json", about | {"seeds": seeds_of(found), "figures": MEASUREMENTS[name].read(found)})


def measure(name: str, folder: Path, extra: Sequence[str]) -> bool:
    """Run a measurement that is not made yet, and write its result; whether it is there."""
    _, words, file, _ = MEASUREMENTS[name]
    command, at, result = [*words, *extra], commit(), RESULTS / f"{name}.json"
    line = shlex.join(["python", *command])
    if is_made(result, line):
        print(f"{name}: is made")
        return True
    if name in NEED_A_GPU and not torch.cuda.is_available():
        print(f"{name}: needs a GPU")
        return True
    (folder / name).mkdir(parents=True, exist_ok=True)
    placed = [word.replace("FOLDER", str(folder / name)) for word in command]
    done = subprocess.run([sys.executable, *placed], cwd=ROOT, check=False)
    if done.returncode:
        print(f"error: {name} failed with exit code {done.returncode}", file=sys.stderr)
    elif file:
        store(name, line, at, json.loads((folder / name / file).read_text(encoding="utf-8")))
        images = ROOT / ".github" / "images"
        for drawn, shown in PICTURES.get(name, {}).items():
            shutil.copy(folder / name / f"{drawn}.png", images / f"{shown}.png")
        if name in HELD:
            plan = load_compare(words[words.index("--config") + 1], (), folder / name)
            found = planned_comparison(plan)
            for dark in (False, True):
                file = images / f"{HELD[name]}{'-dark' * dark}.png"
                heading = f"KL over its target, {found.target:g}, by the first beta"
                save_sheet(held_by_family(found), file, heading=heading, dark=dark)
        if name in DRAWN_FROM:
            subprocess.run([sys.executable, DRAWN_FROM[name]], cwd=ROOT, check=True)
    return not done.returncode


def main(words: Sequence[str] | None = None) -> int:
    """Make the measurements that are named; the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all; there are {', '.join(MEASUREMENTS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/figures"), help="of the runs")
    parser.add_argument("--list", action="store_true", help="only say which results are older than the program")
    parser.add_argument("--from", dest="file", type=Path, help="of one NAME: what its command wrote elsewhere")
    args, extra = parser.parse_known_args(words)
    if args.file and len(args.names) != 1:
        parser.error("--from needs one NAME")
    if unknown := set(args.names) - set(MEASUREMENTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    old = [f"{name} ({at})" for name, at in old_results().items()]
    print(f"older than the program, {program()}: {', '.join(old) or 'none'}", flush=True)
    if args.list:
        return 0
    if args.file:
        (name,) = args.names
        line = shlex.join(["python", *MEASUREMENTS[name].command, *extra])
        store(name, line, commit(), json.loads(args.file.read_text(encoding="utf-8")))
        return 0
    folder = args.folder.resolve() / program()  # runs of another program are no runs of this one
    failed = [name for name in args.names or MEASUREMENTS if not measure(name, folder, extra)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
