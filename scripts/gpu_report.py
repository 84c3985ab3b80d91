"""What a GPU does that is lent for ten minutes, in order of worth: `python scripts/gpu_report.py [--out FOLDER]`.

Every step of `STEPS` runs in a process of its own (`gpu_steps.py` says what it measures) and is written to report.json
as soon as it ends, so that all may be cut off at any moment, by `kill -9` too. A step that fails leaves its error, and
the next one goes on. One that is expected to take longer than what is left of --minutes is left out, and the report
says so. Called again, it makes what is missing in FOLDER: steps never ended first, then those that failed.

    make gpu-kit                            before, where there is a network: packages and weights into gpu-kit/
    python scripts/gpu_report.py            there; of gpu-kit/ it takes what there is
    python scripts/gpu_report.py --rehearse the same on a CPU with a tenth of the sizes
    python scripts/figures.py gpu --from report.json    back here: the report becomes scripts/results/gpu.json

Without the weights of a real model, KL and texts are those of the built-in world, and without TRL the step beside it
fails; shapes with random weights need neither. FOLDER (runs/gpu-report) keeps models, runs and logs; --copy, or $OUT,
gets report.json alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "gpu_steps.py"
TRL = ROOT / ".venv-trl-1.16" / "bin" / "python"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PATIENCE = 3  # times the expected seconds after which a step is stopped


class Expected(NamedTuple):
    """Seconds of a step."""

    on_gpu: int  # an H100
    rehearsed: int  # on two cores


STEPS = {  # the first are worth most
    "machine": Expected(15, 15),
    "weights": Expected(40, 40),
    "smollm2": Expected(100, 90),
    "rloo": Expected(60, 60),
    "trl_rloo": Expected(60, 60),
    "gemma3": Expected(50, 30),
    "llama_1b": Expected(90, 40),
    "llama_1b_lora": Expected(60, 30),
    "paths": Expected(35, 30),
    "without_graphs": Expected(40, 30),
    "without_head": Expected(35, 30),
    "without_norms": Expected(35, 30),
    "float16": Expected(35, 30),
    "equal_texts": Expected(40, 60),
    "smollm2_seeds": Expected(150, 90),
    "without_shared_prompts": Expected(35, 30),
    "without_ready_masks": Expected(40, 30),
    "paths_again": Expected(35, 30),
    "vllm": Expected(120, 15),
    "long_prompts": Expected(40, 30),
    "long_prompts_without_shared_prompts": Expected(40, 30),
    "several": Expected(240, 15),
}
GAINS = {  # what a path gains: an update's seconds in the first step over those in the second
    "graphs": ("without_graphs", "paths"),
    "head in half precision": ("without_head", "paths"),
    "norms of one kernel": ("without_norms", "paths"),
    "its dtype over float16": ("float16", "paths"),
    "shared prompts": ("without_shared_prompts", "paths"),
    "shared prompts of 256 tokens": ("long_prompts_without_shared_prompts", "long_prompts"),
    "ready masks, without graphs": ("without_ready_masks", "without_graphs"),
    "own sampling over vLLM": ("vllm", "paths"),
    "nothing (noise)": ("paths_again", "paths"),
}


def write(file: Path, value: Any) -> None:
    """JSON, whole or not at all."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(new, file)


def read(file: Path) -> dict[str, Any]:
    """JSON; {} where there is no file."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


# ---- processes


def end_children(pid: int) -> None:
    """Kill what a process started, and what that started."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def end_with_parent() -> None:
    """From now on this process ends, with all that it started, soon after the one that started it."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        end_children(os.getpid())
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def attempt(name: str, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The entry of a step in the report: its seconds, and what it found or its error."""
    log, found = args.folder / f"{name}.log", args.folder / f"{name}.json"
    found.unlink(missing_ok=True)
    options = json.dumps({key: value for key, value in vars(args).items() if key != "steps"}, default=str)
    began = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen([sys.executable, str(SCRIPT), name, options], stdout=out, stderr=subprocess.STDOUT)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            end_children(child.pid)
            child.kill()
            child.wait()
    entry: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    if code == 0 and found.is_file():
        return entry | read(found)
    words = log.read_text(encoding="utf-8", errors="replace")[-1500:].strip()
    reason = f"exit code {code}" if code is not None else f"stopped after {limit:.0f} s"
    return entry | {"error": f"{reason}: {words}"}


# ---- the report


def order(names: Sequence[str], done: dict[str, Any]) -> list[str]:
    """What is missing: steps that never ended, then those that failed; the machine is asked each time."""
    failed = [name for name in names if "error" in done.get(name, {})]
    return [name for name in names if name not in done or name == "machine"] + [n for n in failed if n != "machine"]


def gains(done: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Ratios of the steps of `GAINS` that this machine has both of, of an update and of its phases."""

    def ratios(without: str, beside: str) -> Iterator[tuple[str, float]]:
        slow, fast = (done.get(name, {}) for name in (without, beside))
        if slow.get("machine") == fast.get("machine"):
            for phase in ("step_s", "rollout_s", "score_s", "update_s"):
                if phase in slow.get("result", {}) and fast.get("result", {}).get(phase):
                    yield phase, round(slow["result"][phase] / fast["result"][phase], 3)

    return {path: found for path, pair in GAINS.items() if (found := dict(ratios(*pair)))}


class Report:
    """report.json: it is written after every change."""

    def __init__(self, folder: Path, copy: Path | None) -> None:
        self.files = [folder / "report.json", *([copy / "report.json"] if copy and copy != folder else [])]
        known = read(self.files[0])
        self.done: dict[str, Any] = known.get("steps", {})
        if begun := known.get("running"):  # when all was cut off, perhaps just after its result was written
            self.done.pop(begun, None)
            self.done |= {begun: found} if (found := read(folder / f"{begun}.json")) else {}
        self.left_out: dict[str, str] = {}

    def save(self, running: str | None = None) -> None:
        """Write it."""
        about = {"running": running, "left_out": self.left_out, "gains": gains(self.done)}
        for file in self.files:
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, {"steps": self.done, **about})

    def lines(self) -> Iterator[str]:
        """The report in short."""
        for name, entry in self.done.items():
            words = shortened(entry["result"]) if "result" in entry else entry["error"].splitlines()[-1]
            yield f"{name}, {entry.get('seconds', 0):.0f} s: {words}"
        yield from (f"{name}: left out, {reason}" for name, reason in self.left_out.items())
        for path, found in gains(self.done).items():
            yield f"gain of {path}: {', '.join(f'{phase} {ratio:.2f}x' for phase, ratio in found.items())}"


def shortened(result: dict[str, Any]) -> str:
    """The figures and names of a result, lists left out."""

    def words(found: dict[str, Any], above: str = "") -> Iterator[str]:
        for key, value in found.items():
            if isinstance(value, dict):
                yield from words(value, f"{above}{key} ")
            elif isinstance(value, str | int | float):
                yield f"{above}{key} {value:.4g}" if isinstance(value, float) else f"{above}{key} {value}"

    return ", ".join(words(result))


def make_report(args: argparse.Namespace, began: float) -> int:
    """Make what is missing; the exit code: 1 where no step ever ended well."""
    report = Report(args.folder, args.copy)
    for name in order(args.steps, report.done):
        left = 60 * args.minutes - (time.monotonic() - began)
        expected = STEPS[name].rehearsed if args.rehearse else STEPS[name].on_gpu
        if expected > left:
            report.left_out[name] = f"{expected} s expected and {max(0.0, left):.0f} s left"
            continue
        print(f"{name}: about {expected} s of {left:.0f} s", flush=True)
        report.save(running=name)
        report.done[name] = attempt(name, args, min(left, PATIENCE * expected))
        report.save()
    report.save()
    print("\n".join(["", *report.lines()]))
    return int(all("error" in entry for entry in report.done.values()))


# ---- before the steps


def take_kit(kit: Path, folder: Path) -> Path | None:
    """The folder of the kit's packages, installed beside what this Python has, None without a kit."""
    site, wheels = folder / "site", sorted(map(str, kit.glob("wheels/*.whl")))
    if wheels and not site.is_dir():
        new = folder / "site.new"
        shutil.rmtree(new, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--target", str(new), *wheels], check=True)
        new.rename(site)
    return site if site.is_dir() else None


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with whole paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", dest="folder", type=Path, help="of the report, models and runs (runs/gpu-report, or of a rehearsal)")
    add("--copy", type=Path, default=os.environ.get("OUT"), metavar="FOLDER", help="that gets report.json too; $OUT")
    add("--minutes", type=float, default=10.0, help="from now on; nothing is begun that takes longer")
    add("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=f"of {', '.join(STEPS)}")
    add("--rehearse", action="store_true", help="on the CPU, with a tenth of the sizes")
    add("--model", default=MODEL, help="a chat model's folder, for KL and texts")
    add("--dtype", help="of all runs but those that say so; default: bfloat16, or float16 where a GPU has none")
    add("--peer-python", default=str(TRL), help="of an environment with TRL; the kit's TRL comes first")
    add("--kit", type=Path, default=ROOT / "gpu-kit", help="packages and weights, by `make gpu-kit`")
    args = parser.parse_args(words)
    args.folder = (args.folder or Path("runs", "gpu-report" + "-rehearsal" * args.rehearse)).resolve()
    args.copy, args.kit = args.copy and Path(args.copy).resolve(), args.kit.resolve()
    args.device = "cpu" if args.rehearse else "cuda"
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Make the report; the exit code."""
    began = time.monotonic()
    args = parse_arguments(words)
    args.folder.mkdir(parents=True, exist_ok=True)
    site = take_kit(args.kit, args.folder)
    paths = [str(ROOT), *([str(site)] if site else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path += paths
    os.environ["HF_HUB_OFFLINE"] = "1"
    if site and (site / "trl").is_dir():
        peer = args.folder / "peer-python"
        peer.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n', encoding="utf-8")
        peer.chmod(0o755)
        args.peer_python = str(peer)
    return make_report(args, began)


if __name__ == "__main__":
    sys.exit(main())
