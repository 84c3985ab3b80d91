"""Kills runs and resumes them: `python scripts/crash_test.py [--kills 50] [--seed 0] [--run 'train --config my.yaml']`.

Each trial starts a run in a process of its own, ends that with SIGKILL, resumes, and compares the finished run with
one that was never interrupted: weights, value function, checkpoints, rows (timings aside), samples, TensorBoard
points, summary. A third of the kills come at a random time, the others before a random operation on the disk. Exit 1
where a run differs. The processes are forked from this one, which has imported everything: starting Python anew would
take most of the time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rlhf_kl import cli
from rlhf_kl.run.log import read_jsonl

SMALL = "builtin:reviews-small"
RUNS = (
    "train --config smoke.yaml --set ppo.total_episodes=96 --set checkpoint.every=2",
    f"sft --config sft_reviews.yaml --set policy.model={SMALL} --set data.texts={SMALL} --set sft.epochs=0.2"
    " --set checkpoint.every=4 --set 'eval={every: 8, max_documents: 10}'",
    f"reward-model --config reward_reviews.yaml --set policy.model={SMALL} --set data.pairs={SMALL}"
    " --set reward_model.epochs=0.3 --set checkpoint.every=4 --set 'eval={every: 8, max_pairs: 20}'",
)
ANY_TIME, CHECKPOINT, ANY_FILE = "at any time", "in a checkpoint", "at any file of the run"
PLACES = {CHECKPOINT: "/checkpoints", ANY_FILE: "/run"}


class Complete(NamedTuple):
    """An uninterrupted run."""

    left: dict[str, Any]  # `left_behind`
    seconds: float
    operations: dict[str, int]  # on the disk, below each of PLACES


def started(command: str, folder: Path, prepare: Callable[[], None]) -> int:
    """The process id of a fork that executes the command."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        with (folder.parent / "log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        prepare()
        code = cli.run([*shlex.split(command), "--output-dir", str(folder), "--resume"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """The exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def watch_disk(at: Callable[[str], None]) -> None:
    """Calls `at(path)` before each operation that syncs, names or removes something."""

    def path_of(target: Any) -> str:
        return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **named: Any) -> Any:
            at(path_of(named.get("dir_fd", target) if named.get("dir_fd") is not None else target))
            return real(target, *arguments, **named)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, watched(getattr(os, name)))


def uninterrupted(command: str, folder: Path) -> Complete:
    """What a run leaves that nothing stops, and how often it works on the disk."""
    folder.mkdir()
    counts, counted = folder / "operations.json", dict.fromkeys(PLACES, 0)

    def count(path: str) -> None:
        for when, part in PLACES.items():
            counted[when] += part in path
        counts.write_text(json.dumps(counted))

    began = time.monotonic()
    if code := ended(started(command, folder / "run", lambda: watch_disk(count))):
        sys.exit(f"the uninterrupted run ended with {code}:\n{(folder / 'log').read_text()}")
    return Complete(left_behind(folder / "run"), time.monotonic() - began, json.loads(counts.read_text()))


def kill_before(number: int, part: str) -> Callable[[str], None]:
    """Ends this process before its operation of that number below a folder."""
    seen = 0

    def at(path: str) -> None:
        nonlocal seen
        seen += part in path
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def killed(command: str, when: str, complete: Complete, folder: Path, chance: random.Random) -> bool:
    """Start a run and kill it; False where it ended before."""
    if when != ANY_TIME:
        fatal = kill_before(chance.randint(1, complete.operations[when]), PLACES[when])
        return ended(started(command, folder, lambda: watch_disk(fatal))) == -signal.SIGKILL
    process = started(command, folder, lambda: None)
    time.sleep(chance.uniform(0.2, 1.0) * complete.seconds)
    os.kill(process, signal.SIGKILL)
    return ended(process) == -signal.SIGKILL


def left_behind(folder: Path) -> dict[str, Any]:
    """Everything about a finished run that must not depend on whether it was interrupted."""
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("seconds", "config", "git"):
        summary.pop(key)
    summary["final"] = timeless(summary["final"])
    return {
        "rows": [timeless(row) for row in read_jsonl(folder / "metrics.jsonl")],
        "samples": read_jsonl(folder / "samples.jsonl"),
        "summary": summary,
        "tensorboard": sorted(points(folder / "tensorboard")),  # tags come in the order of their first event
        **{str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))},
    }


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}


def points(folder: Path) -> Iterator[tuple[str, int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
    for tag in events.Tags()["scalars"]:
        if not tag.startswith(("time/", "perf/")):
            yield from ((tag, event.step, event.value) for event in events.Scalars(tag))
    for tag in events.Tags()["tensors"]:
        yield from ((tag, event.step, float(len(event.tensor_proto.string_val[0]))) for event in events.Tensors(tag))


def problem(command: str, complete: Complete, folder: Path) -> str | None:
    """What is wrong with a killed run once it is resumed; None where it ends as if nothing had been."""
    if code := ended(started(command, folder, lambda: None)):
        return f"--resume ended with {code}: {(folder.parent / 'log').read_text()[-2000:]}"
    one, other = complete.left, left_behind(folder)
    return next((f"{key} differs" for key in [*one, *other] if one.get(key) != other.get(key)), None)


def main() -> int:
    """Kill, resume and compare; the last line says how many of the runs are the same."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="append", metavar="COMMAND", help="instead of the built-in ones")
    options = parser.parse_args()
    chance, commands = random.Random(options.seed), options.run or RUNS
    work, same, number = Path(tempfile.mkdtemp(prefix="crash-test-")).resolve(), 0, 0
    complete: dict[str, Complete] = {}
    while number < options.kills:
        command = commands[number % len(commands)]
        when = chance.choice([ANY_TIME, *PLACES])
        if command not in complete:
            complete[command] = uninterrupted(command, work / f"uninterrupted-{len(complete)}")
        trial = work / f"trial-{number}"
        trial.mkdir()
        if killed(command, when, complete[command], trial / "run", chance):
            number += 1
            wrong = problem(command, complete[command], trial / "run")
            same += wrong is None
            kind = command.split()[0]
            print(f"{number}/{options.kills} {kind}, killed {when}: {wrong or 'same'}", file=sys.stderr, flush=True)
            if wrong:
                continue  # its folder stays
        shutil.rmtree(trial)
    print(f"all {options.kills} {same}")
    if same == options.kills:
        shutil.rmtree(work)
    return int(same < options.kills)


if __name__ == "__main__":
    for name in ("rlhf_kl.commands.train", "rlhf_kl.commands.supervised"):
        importlib.import_module(name)  # once, before any fork
    for name in ("transformers.models.gpt2.modeling_gpt2", "torch.utils.tensorboard"):
        importlib.import_module(name)
    sys.exit(main())
