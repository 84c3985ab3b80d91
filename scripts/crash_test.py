"""Kills runs and resumes them: `python scripts/crash_test.py [--kills 50] [--faults 30] [--seed 0]`.

Each trial starts a run in a process of its own, ends that with SIGKILL, resumes, and compares the finished run
with one that was never interrupted: weights, value function, checkpoints, rows (timings aside), samples,
TensorBoard points, summary. Other faults are tried the same way: a full disk, a disk that fails to sync,
signals, damaged files of the newest checkpoint. Exit 1 where a run differs. The processes are forked from this
one, which has imported everything: starting Python anew would take most of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rlhf_kl import cli
from rlhf_kl.builtin import world
from rlhf_kl.builtin.corpus import CorpusSizes
from rlhf_kl.run import jsonl
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.jsonl import JsonlWriter, encode_json, read_jsonl

SMALL = "builtin:reviews-small"
RUNS = {
    "train": ["train", "--config", "smoke.yaml", "--set", "ppo.total_episodes=96", "--set", "checkpoint.every=2"],
    "sft": [
        *("sft", "--config", "sft_reviews.yaml", "--set", f"policy.model={SMALL}", "--set", f"data.texts={SMALL}"),
        *("--set", "sft.epochs=0.2", "--set", "checkpoint.every=4", "--set", "eval={every: 8, max_documents: 10}"),
    ],
    "reward-model": [
        *("reward-model", "--config", "reward_reviews.yaml"),
        *("--set", f"policy.model={SMALL}", "--set", f"data.pairs={SMALL}", "--set", "reward_model.epochs=0.3"),
        *("--set", "checkpoint.every=4", "--set", "eval={every: 8, max_pairs: 20}"),
    ],
}
# What a build is killed in: every part in about a second.
TINY = {
    "sizes": CorpusSizes(train_texts=300, heldout_texts=30, prompts=40, heldout_prompts=20, pairs=60, heldout_pairs=20),
    "sft": ("policy.architecture={hidden_size: 16, layers: 1, heads: 1, vocab_size: 300}", "sft.epochs=1"),
    "reward_model": ("reward_model.epochs=1",),
}


class Fault(NamedTuple):
    """A way to die."""

    name: str
    run: str
    arm: Callable[[random.Random, dict[str, int]], None] | None  # in the process to be killed; None = by the clock
    build: bool = False  # with an empty cache, so that the run begins with building its world
    ends: int = -signal.SIGKILL  # the process's exit code


# ---- dying from inside, at a chosen operation on the disk ----


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch_disk(place: str, at: Callable[[int], None]) -> None:
    """Calls `at(number)` before each operation that syncs, names or removes something below a `place`."""
    count = 0

    def path_of(target: Any) -> str:
        return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal count
            if place in path_of(named.get("dir_fd", target) if named.get("dir_fd") is not None else target):
                count += 1
                at(count)
            return real(target, *arguments, **named)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, watched(getattr(os, name)))


def dying_at(place: str) -> Callable[[random.Random, dict[str, int]], None]:
    """Arms a process to die before a random one of its operations below `place`."""

    def arm(chance: random.Random, operations: dict[str, int]) -> None:
        fatal = chance.randint(1, operations[place])
        watch_disk(place, lambda number: die() if number == fatal else None)

    return arm


def dying_in_a_row(chance: random.Random, _: dict[str, int]) -> None:
    """Arms a process to die when a random part of a random row is written."""
    fatal, part, name = chance.randint(1, 6), chance.random(), chance.choice(["metrics.jsonl", "samples.jsonl"])
    written = 0

    def write(self: JsonlWriter, row: Any) -> None:
        nonlocal written
        data = encode_json(row) + b"\n"
        written += self.path.name == name
        if self.path.name == name and written == fatal:
            self._file.write(data[: int(part * len(data))])
            die()
        self._file.write(data)

    jsonl.JsonlWriter.write = write  # type: ignore[method-assign]


# ---- faults that the process notices itself ----


def with_a_full_disk(chance: random.Random, _: dict[str, int]) -> None:
    """No file may grow beyond some size: the disk is full for large files first."""
    limit = int(10 ** chance.uniform(3.7, 6.1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def with_a_failing_sync(chance: random.Random, operations: dict[str, int]) -> None:
    """A random sync of the run fails, and all later ones."""
    fatal, real, count = chance.randint(1, operations["/checkpoints"] // 2), os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count >= fatal:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    os.fsync = fsync


FAULTS = [
    Fault("anywhere", "train", None),
    Fault("checkpoint write", "train", dying_at("/checkpoints")),
    Fault("row write", "train", dying_in_a_row),
    Fault("building the world", "train", None, build=True),
    Fault("anywhere", "sft", None),
    Fault("anywhere", "train", None),
    Fault("checkpoint write", "train", dying_at("/checkpoints")),
    Fault("any file of the run", "train", dying_at("/run")),
    Fault("building the world", "train", dying_at("/cache/"), build=True),
    Fault("checkpoint write", "reward-model", dying_at("/checkpoints")),
]


NOTICED = [
    Fault("full disk", "train", with_a_full_disk, ends=1),
    Fault("failing sync", "train", with_a_failing_sync, ends=1),
    Fault("SIGTERM", "train", None, ends=143),
    Fault("full disk", "sft", with_a_full_disk, ends=1),
    Fault("SIGINT", "reward-model", None, ends=130),
    Fault("failing sync", "sft", with_a_failing_sync, ends=1),
]


# ---- damage to a checkpoint ----


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def tear(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def zero(path: Path, chance: random.Random) -> None:
    """A page that never reached the disk."""
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES = {"bit flipped": flip, "torn": tear, "page of zeros": zero, "removed": remove}
CHECKPOINT_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "checksums.json")


# ---- processes ----


def started(run: str, folder: Path, cache: Path | None, prepare: Callable[[], None]) -> int:
    """The process id of a fork that executes the command."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        with (folder.parent / "log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if cache is not None:
            os.environ["RLHF_KL_CACHE"] = str(cache)
            world.WORLDS["reviews-small"] = dataclasses.replace(world.WORLDS["reviews-small"], **TINY)
        prepare()
        code = cli.run([*RUNS[run], "--output-dir", str(folder), "--resume"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int:
    """The exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def send_at_random(number: int, process: int, within: float, after: Path | None, chance: random.Random) -> None:
    """A signal after a random time, which mostly begins when the file `after` has been written to."""
    if after is not None and (number != signal.SIGKILL or chance.random() < 0.75):
        while not (after.exists() and after.stat().st_size) and time.sleep(0.01) is None:
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
        within /= 2
    time.sleep(chance.uniform(0, within))
    os.kill(process, number)


# ---- what a run left ----


def left_behind(folder: Path) -> dict[str, Any]:
    """Everything about a finished run that must not depend on whether it was interrupted."""
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("seconds", "config", "git"):
        summary.pop(key)
    summary["final"] = timeless(summary["final"])
    files = sorted(path for path in folder.rglob("*.safetensors") if path.is_file())
    return {
        "rows": [timeless(row) for row in read_jsonl(folder / "metrics.jsonl")],
        "samples": read_jsonl(folder / "samples.jsonl"),
        "summary": summary,
        "tensorboard": sorted(points(folder / "tensorboard")),  # tags come in the order of their first event
        **{str(path.relative_to(folder)): path.read_bytes() for path in files},
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


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    return next((key for key in [*one, *other] if one.get(key) != other.get(key)), None)


def updates_lost(folder: Path) -> int:
    """Updates that were finished and will be done again."""
    rows = read_jsonl(folder / "metrics.jsonl")
    kept = checkpoints(folder / "checkpoints")
    return max(0, len(rows) - (kept[-1].step if kept else 0))


# ---- trials ----


class Whole(NamedTuple):
    """An uninterrupted run."""

    left: dict[str, Any]
    seconds: float
    operations: dict[str, int]  # on the disk, below a place


def uninterrupted(fault: Fault, work: Path) -> Whole:
    place = work / f"whole-{fault.run}{'-build' if fault.build else ''}"
    place.mkdir()
    folder, cache = place / "run", (place / "cache" if fault.build else None)
    counts = place / "operations.json"

    def counting() -> None:
        found = dict.fromkeys(("/checkpoints", "/run", "/cache/"), 0)
        for name in found:
            watch_disk(name, lambda number, name=name: found.__setitem__(name, number))  # type: ignore[misc]
        run = cli.run

        def counted(arguments: Any) -> int:
            code = run(arguments)
            counts.write_text(json.dumps(found))
            return code

        cli.run = counted

    began = time.monotonic()
    code = ended(started(fault.run, folder, cache, counting))
    if code:
        sys.exit(f"the uninterrupted run ended with {code}:\n{(place / 'log').read_text()}")
    return Whole(left_behind(folder), time.monotonic() - began, json.loads(counts.read_text()))


class Trial(NamedTuple):
    fault: Fault
    lost: int
    torn: bool  # it died with a half-written folder on the disk
    problem: str | None


def trial(fault: Fault, whole: Whole, place: Path, chance: random.Random) -> Trial | None:
    """None where the run ended before it could be killed."""
    place.mkdir()
    folder, cache = place / "run", (place / "cache" if fault.build else None)
    arm = fault.arm
    prepare = (lambda: arm(chance, whole.operations)) if arm is not None else (lambda: None)
    process = started(fault.run, folder, cache, prepare)
    if arm is None:
        after = None if fault.build else folder / "metrics.jsonl"
        number = -fault.ends if fault.ends < 0 else fault.ends - 128
        send_at_random(number, process, whole.seconds * (0.6 if fault.build else 1.0), after, chance)
    if ended(process) != fault.ends:
        return None
    if fault.ends > 0 and "Traceback" in (place / "log").read_text():
        return Trial(fault, 0, False, f"a traceback: {(place / 'log').read_text()[-2000:]}")
    lost = updates_lost(folder)
    torn = any(path.name.endswith((".tmp", ".removed", ".replaced")) for path in place.rglob(".*"))
    code = ended(started(fault.run, folder, cache, lambda: None))
    if code:
        return Trial(fault, lost, torn, f"--resume ended with {code}: {(place / 'log').read_text()[-2000:]}")
    left = left_behind(folder)
    if fault.ends > 0:  # it saved where it was stopped, which may be behind the last checkpoint that is due
        left = {key: value for key, value in left.items() if key in whole.left or not key.startswith("checkpoints/")}
    found = difference(whole.left, left)
    return Trial(fault, lost, torn, f"{found} differs" if found else None)


def damage_trial(run: str, name: str, how: str, whole: Path, place: Path, chance: random.Random) -> Trial:
    """A run whose newest checkpoint was damaged after it died."""
    shutil.copytree(whole, place)
    folder, fault = place / "run", Fault(f"{name} {how}", run, None)
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "final")
    newest = checkpoints(folder / "checkpoints")[-1]
    DAMAGES[how](newest.path / name, chance)
    code = ended(started(run, folder, None, lambda: None))
    said = (place / "log").read_text()
    if code or f"damaged checkpoint {newest.path.name}" not in " ".join(said.split()):
        return Trial(fault, 0, False, f"--resume ended with {code}: {said[-2000:]}")
    found = difference(left_behind(whole / "run"), left_behind(folder))
    return Trial(fault, 2, False, f"{found} differs" if found else None)


def table(trials: list[Trial]) -> str:
    lines = [f"{'fault':<52}{'tried':>6}{'same':>6}{'half a folder left':>20}{'updates done again':>20}"]
    for name in dict.fromkeys((t.fault.run, t.fault.name) for t in trials):
        mine = [t for t in trials if (t.fault.run, t.fault.name) == name]
        same, torn = sum(t.problem is None for t in mine), sum(t.torn for t in mine)
        lost = max(t.lost for t in mine)
        lines.append(f"{f'{name[0]}: {name[1]}':<52}{len(mine):>6}{same:>6}{torn:>20}{f'at most {lost}':>20}")
    same = sum(t.problem is None for t in trials)
    return "\n".join([*lines, f"{'all':<52}{len(trials):>6}{same:>6}"])


def say(found: Trial, number: int, total: int) -> None:
    words = found.problem or "same"
    print(f"{number}/{total} {found.fault.run}: {found.fault.name}: {words}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills runs, resumes them, compares.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--faults", type=int, default=30, help="other faults than kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, trials = random.Random(options.seed), []
    wholes: dict[tuple[str, bool], Whole] = {}
    work = Path(tempfile.mkdtemp(prefix="crash-test-")).resolve()
    number = 0
    damages = [(name, how) for name in CHECKPOINT_FILES for how in DAMAGES][: max(0, options.faults - len(NOTICED))]
    total = options.kills + options.faults
    while len(trials) < total - len(damages):
        count = len(trials) - options.kills
        fault = FAULTS[len(trials) % len(FAULTS)] if count < 0 else NOTICED[count % len(NOTICED)]
        key = (fault.run, fault.build)
        if key not in wholes:
            wholes[key] = uninterrupted(fault, work)
        place = work / f"trial-{number}"
        number += 1
        found = trial(fault, wholes[key], place, random.Random(chance.random()))
        if found is None:
            shutil.rmtree(place)
            continue
        trials.append(found)
        say(found, len(trials), total)
        if found.problem is None:
            shutil.rmtree(place)
    for name, how in damages:
        if ("train", False) not in wholes:
            wholes["train", False] = uninterrupted(FAULTS[0], work)
        place = work / f"damage-{name}-{how}"
        found = damage_trial("train", name, how, work / "whole-train", place, random.Random(chance.random()))
        trials.append(found)
        say(found, len(trials), total)
    print(table(trials))
    failed = [t for t in trials if t.problem]
    if not failed:
        shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    import importlib

    for name in ("commands.train", "commands.sft", "commands.reward_model"):  # once, before any fork
        importlib.import_module(f"rlhf_kl.{name}")
    for name in ("transformers.models.gpt2.modeling_gpt2", "torch.utils.tensorboard"):
        importlib.import_module(name)
    sys.exit(main())
