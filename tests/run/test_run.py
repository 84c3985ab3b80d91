"""What a run promises, on a model of a few numbers; the same of PPO is tests/commands/test_resume.py."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl.config.resolve import load_config
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import GuardStop, InputError, Interrupted, RunFailed
from rlhf_kl.optim import adamw
from rlhf_kl.run import interval as interval_module
from rlhf_kl.run import run as run_module
from rlhf_kl.run import saving, signals
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.interval import interval_words, usual_interval
from rlhf_kl.run.log import JsonlWriter, read_jsonl
from rlhf_kl.run.opened import open_run
from rlhf_kl.run.run import Run
from rlhf_kl.run.signals import stopping_on_signals
from tests.runs import Killed


class Counter:
    """Something that a checkpoint must hold."""

    def __init__(self) -> None:
        self.count = 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


Work = Callable[..., Any]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """work("name", "checkpoint.every=3", resume=True, at=act): six steps; `act(run, step)` is called in each."""

    def do(
        name: str,
        *overrides: str,
        resume: bool = False,
        overwrite: bool = False,
        content: str = "a",
        ranks: Ranks | None = None,
        at: Callable[[Run, int], object] = lambda run, step: None,
    ) -> Any:
        settings = ["checkpoint={every: 2, keep: 10}", "ppo.lr_schedule=constant", "ppo.total_episodes=96"]
        settings += ["tracking.tensorboard=false", f"run.output_dir='{tmp_path / name}'", *overrides]
        config = load_config("train", "smoke.yaml", settings)
        with open_run(config, ranks or Ranks(), resume=resume, overwrite=overwrite) as run:
            if run.finished is not None:
                return run.finished
            run.check(config, torch.device("cpu"), {"data.prompts": content})
            net, counter = torch.nn.Linear(3, 2), Counter()
            torch.nn.init.ones_(net.weight)
            optimizer = adamw(net, 0.01, 0.1)
            run.track(model=net, optimizer=optimizer, counter=counter)
            run.begin(config.updates)
            for step in run.steps():
                at(run, step)
                loss = net(torch.randn(4, 3)).square().sum() * random.random()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                counter.count *= 1.7
                run.sample({"step": step, "prompt": "a", "response": f"{counter.count}"})
                run.log({"step": step, "loss": loss.item(), "count": counter.count})
            torch.save(net.state_dict(), run.folder.path / "weights")
            run.folder.final.mkdir(exist_ok=True)
            return run.finish(steps=config.updates, stopped_by=None)

    return do


def left(folder: Path) -> list[Any]:
    """What a finished run leaves."""
    return [read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "samples.jsonl"), steps_of(folder)] + [
        tensor.tolist() for tensor in torch.load(folder / "weights").values()
    ]


def test_the_seconds_of_earlier_parts_count(work: Work, tmp_path: Path, crashed: Path) -> None:
    (state,) = checkpoints(crashed / "checkpoints")[-1].path.glob("state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"seconds": 1000.0}))
    assert work(crashed.name, resume=True)["seconds"] > 1000.0


def die(run: Run, step: int) -> None:
    if step == 6:
        raise Killed


@pytest.fixture
def whole(work: Work, tmp_path: Path) -> list[Any]:
    work("whole")
    return left(tmp_path / "whole")


@pytest.fixture
def crashed(work: Work, tmp_path: Path) -> Path:
    """A run that was killed in step 6: its newest checkpoint is that of step 4, and it has a row of step 5."""
    with pytest.raises(Killed):
        work("crashed", at=die)
    return tmp_path / "crashed"


def steps_of(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints(folder / "checkpoints")]


def test_a_run_reads_its_copy_of_a_plugin_that_has_gone(work: Work, tmp_path: Path) -> None:
    law, copy = tmp_path / "law.py", tmp_path / "run" / "law.py"
    law.write_text("class Keep:\n    coef = 0.4\n    def update(self, kl, episodes): ...\n")
    work("run", f"kl.controller={{kind: '{law}:Keep'}}")
    law.unlink()
    assert load_config("train", tmp_path / "run" / "config.yaml").kl.controller.kind == f"{copy}:Keep"
    work("run", f"kl.controller={{kind: '{copy}:Keep'}}", overwrite=True)
    assert copy.is_file()


def test_a_run_keeps_what_it_began_with(work: Work, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A function that was corrected is told at each later start; the run's own config names its copy."""
    law, kept = tmp_path / "law.py", tmp_path / "run" / ".rlhf-kl.inputs"
    law.write_text("class Keep:\n    coef = 0.4\n    def update(self, kl, episodes): ...\n")
    kind, copy = (f"kl.controller={{kind: '{file}:Keep'}}" for file in (law, tmp_path / "run" / "law.py"))
    with pytest.raises(Killed):
        work("run", kind, at=die)
    before = json.loads(kept.read_text())
    assert list(before) == [str(law)]
    law.write_text(law.read_text().replace("0.4", "0.5"))
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    work("run", copy, resume=True)
    assert "law.py has changed" not in caplog.text
    (tmp_path / "run").rename(tmp_path / "ended")
    (tmp_path / "other").rename(tmp_path / "run")
    work("run", kind, resume=True)
    assert caplog.text.count("law.py has changed") == 1
    assert json.loads(kept.read_text()) == before
    work("run", kind, resume=True)  # finished
    assert caplog.text.count("law.py has changed") == 2
    work("run", kind, overwrite=True)
    assert json.loads(kept.read_text()) != before
    work("run", overwrite=True)
    assert json.loads(kept.read_text()) == {}


def test_a_users_file_in_the_place_of_a_plugins_copy_is_kept(work: Work, tmp_path: Path) -> None:
    law, copy = tmp_path / "law.py", tmp_path / "run" / "law.py"
    law.write_text("class Keep:\n    coef = 0.4\n    def update(self, kl, episodes): ...\n")
    with pytest.raises(Killed):
        work("run", f"kl.controller={{kind: '{law}:Keep'}}", at=die)
    copy.write_text(f"{copy.read_text()}# my notes\n")
    before = left_of(tmp_path / "run")
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match=r"run/law\.py "):
            work("run", f"kl.controller={{kind: '{law}:Keep'}}", **options)
    assert left_of(tmp_path / "run") == before
    work("run", overwrite=True)  # which copies nothing
    assert copy.read_text().endswith("# my notes\n")


def left_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".rlhf-kl.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# ---- which checkpoints there are


def test_auto_goes_by_the_bytes_of_a_checkpoint(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [usual_interval(size, 100) for size in (0, 5 * 10**9, 5 * 10**9 + 1, 12 * 10**9)] == [5, 5, 10, 15]
    sizes: list[int] = []
    monkeypatch.setattr(interval_module, "usual_interval", lambda size, total, few: sizes.append(size) or 4)
    work("auto", "checkpoint.every=auto")
    tensors: list[Any] = []
    for path in (tmp_path / "auto" / "checkpoints" / "step-000006").glob("*.safetensors"):
        tensors += [tensor for name, tensor in load_file(path).items() if not name.endswith(".step")]
    assert sizes == [sum(tensor.nbytes for tensor in tensors)]
    assert steps_of(tmp_path / "auto") == [4, 6]  # the last step is always saved


def test_a_large_model_has_about_four_checkpoints_in_a_run(work: Work, tmp_path: Path) -> None:
    """7B parameters with Adam's moments are 84 GB, for which 85 updates are usual; none are 60."""
    for total in (*range(1, 30), 60, 61, 1000):
        every = usual_interval(84 * 10**9, total)
        written = {*range(every, total + 1, every), total}
        assert min(3, total) <= len(written) <= (4 if total < 340 else 13), total
    with pytest.raises(Killed):
        work("run", "checkpoint.every=auto", at=die)
    assert steps_of(tmp_path / "run") == [2, 4]
    work("run", "checkpoint.every=auto", "ppo.total_episodes=960", resume=True)  # longer: it keeps its interval
    assert json.loads(next((tmp_path / "run" / "checkpoints").glob("*/state.json")).read_text())["every"] == 2


def test_what_a_run_says_of_its_checkpoints() -> None:
    large = 84 * 10**9
    assert interval_words(15, large, "updates", auto=True, seconds=70.0) == (
        "a checkpoint every 15 updates (84 GB, about every 17:30), and where 30 minutes have passed without one"
    )
    assert "(84 GB, about every 30:00)" in interval_words(15, large, "updates", auto=True, seconds=600.0)
    assert "(84 GB, about every 1:00:00)" in interval_words(15, large, "updates", auto=True, seconds=3600.0)
    assert interval_words(1, 10**6, "steps", auto=False) == "a checkpoint every 1 step (1 MB)"
    assert "(84 GB, about every 15:00:00)" in interval_words(15, large, "updates", auto=False, seconds=3600.0)


class Clock(Ranks):
    """Of another process, by whose clock the last checkpoint is always too old."""

    def all(self, value: Any, *, scores: bool = False) -> list[Any]:
        return [value, True] if value is False else [value]


@pytest.mark.parametrize("another", [False, True], ids=["this process", "another process"])
def test_long_updates_have_checkpoints_by_the_clock_that_change_no_result(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    monkeypatch.setattr(interval_module, "usual_interval", lambda size, total, few: 4)
    work("whole", "checkpoint={every: auto, keep: 1}")
    seen: list[Any] = []

    def note(run: Run, step: int) -> None:
        seen.append([(each, run.interval.is_regular(each)) for each in steps_of(run.folder.path)])
        die(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(interval_module, "MOST_SECONDS", 1800.0 if another else 0.0)
        with pytest.raises(Killed):
            work("run", "checkpoint={every: auto, keep: 1}", at=note, ranks=Clock() if another else None)
    irregular = [[], [(1, False)], [(2, False)], [(3, False)]]
    assert seen == [*irregular, [(4, True)], [(4, True), (5, False)]]  # only the newest, beside the regular ones
    work("run", "checkpoint={every: auto, keep: 1}", resume=True)
    assert left(tmp_path / "run") == left(tmp_path / "whole")
    monkeypatch.setattr(interval_module, "MOST_SECONDS", 0.0)
    work("written", "checkpoint={every: 4, keep: 1}", at=lambda run, step: seen.append(steps_of(run.folder.path)))
    assert seen[-1] == [4]  # a number that somebody wrote is kept to


def test_old_checkpoints_are_dropped_but_those_that_are_spared(work: Work, tmp_path: Path, crashed: Path) -> None:
    def spare(run: Run, step: int) -> None:
        if step == 1:
            run.spared = [2]
        die(run, step)

    with pytest.raises(Killed):
        work("spared", "checkpoint.keep=1", at=spare)
    assert steps_of(tmp_path / "spared") == [2, 4]
    work("spared", "checkpoint.keep=1", resume=True)
    assert steps_of(tmp_path / "spared") == [2, 6]
    with pytest.raises(Killed):  # also one that a killed run did not get to drop
        work("crashed", "checkpoint.keep=1", resume=True, at=die)
    assert steps_of(crashed) == [4]


# ---- going on


@pytest.mark.parametrize("background", [False, True])
def test_wherever_a_run_is_killed_it_goes_on_as_if_nothing_had_been(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Before each operation that writes, syncs or renames, and in the middle of one that removes."""
    work("whole", "checkpoint.keep=1")
    whole = left(tmp_path / "whole")
    settings = ["checkpoint.keep=1", f"checkpoint.background={background}"]
    for fatal in range(1, 200, 3 if background else 1):
        calls = iter(range(1, 1000))

        def dying(real: Callable[..., Any], calls: Any = calls, fatal: int = fatal) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                if (number := next(calls)) < fatal:
                    return real(*arguments, **named)
                if number == fatal and real.__name__ == "rmtree":
                    for file in Path(arguments[0]).glob("*"):
                        file.unlink()
                raise Killed

            return call

        with monkeypatch.context() as patch:
            for place, name in ((os, "fsync"), (Path, "rename"), (shutil, "rmtree"), (JsonlWriter, "write")):
                patch.setattr(place, name, dying(getattr(place, name)))
            try:
                work(f"{fatal}", *settings)
                break
            except Killed:
                pass
        work(f"{fatal}", *settings, resume=True)
        assert left(tmp_path / f"{fatal}") == whole, fatal
        assert not list((tmp_path / f"{fatal}").rglob("*.tmp"))
    assert 40 < fatal < 199


def test_a_finished_run_gives_its_summary_and_more_episodes_go_on(work: Work, whole: list[Any], tmp_path: Path) -> None:
    summary = work("whole", resume=True)
    assert summary == json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["steps"] == 6
    work("more", "ppo.total_episodes=64")
    work("more", resume=True)
    assert left(tmp_path / "more") == whole
    with pytest.raises(InputError, match=r"ppo\.total_episodes: 96 -> 64"):
        work("more", "ppo.total_episodes=64", resume=True)


@pytest.mark.parametrize(
    "others",
    [
        ["ppo.lr_schedule=linear"],
        ["kl.controller={kind: schedule, coef: 0.1, end_coef: 0.2}"],
        ["kl.controller={kind: ziegler, coef: 0.1}"],
    ],
)
def test_more_episodes_are_refused_where_something_depends_on_their_number(work: Work, others: list[str]) -> None:
    work("run", *others)
    with pytest.raises(InputError, match=r"ppo\.total_episodes: 96 -> 6400"):
        work("run", *others, "ppo.total_episodes=6400", resume=True)


def test_another_config_is_refused_and_what_is_free_may_change(
    work: Work, crashed: Path, whole: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as caught:
        work("crashed", "kl.target=0.3", "eval.every=1", resume=True)
    assert len(caught.value.problems) == 3  # with the way out
    assert "kl.target: 0.2 -> 0.3" in str(caught.value)
    work("crashed", "ppo.microbatch_size=4", "eval.every=1", resume=True)
    assert "ppo.microbatch_size: 8 -> 4: " in capsys.readouterr().err
    assert left(crashed) == whole


def test_other_content_is_refused_and_another_environment_reported(
    work: Work, crashed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"data\.prompts: its content .*crashed "):
        work("crashed", content="b", resume=True)
    path = crashed / "checkpoints" / "step-000004"
    state = json.loads((path / "state.json").read_text())
    state["environment"] |= {"machine": "Linux abacus", "torch": "1.0"}
    (path / "state.json").write_text(json.dumps(state))
    work("crashed", resume=True)
    messages = capsys.readouterr().err
    assert "machine Linux abacus -> " in messages
    assert "torch 1.0 -> " in messages


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_resumed_run_has_the_threads_that_it_had(
    work: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(Killed):
            work("run", at=die)
        torch.set_num_threads(1)
        with pytest.raises(Killed):
            work("run", resume=True, at=die)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        work("run", resume=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert capsys.readouterr().err.count("threads 2 -> 1") == 1


# ---- checkpoints that are written while the run goes on

BACKGROUND = "checkpoint.background=true"


class Writing:
    """The writing of checkpoints, which waits for `go`; `begun`: their steps."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.go = threading.Event()
        self.write = saving.save_checkpoint

    def __call__(self, folder: Path, step: int, *parts: Any) -> Any:
        self.begun.append(step)
        assert self.go.wait(20)
        return self.write(folder, step, *parts)

    def wait_for(self, step: int) -> None:
        deadline = time.monotonic() + 20
        while step not in self.begun:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    slow = Writing()
    monkeypatch.setattr(saving, "save_checkpoint", slow)
    return slow


def test_a_checkpoint_holds_its_step_though_it_is_written_during_later_ones(
    work: Work, whole: list[Any], tmp_path: Path, writing: Writing
) -> None:
    def at(run: Run, step: int) -> None:
        if step == 4:  # steps 3 and its rows were done in between
            writing.wait_for(2)
            assert steps_of(run.folder.path) == []
            writing.go.set()

    work("run", BACKGROUND, at=at)
    assert left(tmp_path / "run") == whole
    for step in (2, 4, 6):
        one, two = (tmp_path / name / "checkpoints" / f"step-{step:06d}" for name in ("whole", "run"))
        states = [json.loads((each / "state.json").read_text()) for each in (one, two)]
        assert [state.pop("seconds") > 0 for state in states] == [True, True]
        assert states[0] == states[1]
        for name in states[0]["files"]:
            assert (one / name).read_bytes() == (two / name).read_bytes()


def test_a_disk_that_is_full_is_told_after_the_next_step_and_leaves_the_checkpoint_before(
    work: Work, whole: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: Writing
) -> None:
    writing.go.set()
    write, steps = writing.write, list[int]()

    def full(folder: Path, step: int, *parts: Any) -> Any:
        if step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        return write(folder, step, *parts)

    def at(run: Run, step: int) -> None:
        steps.append(step)
        if step == 5:
            run._saving.wait()

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write", full)
        with pytest.raises(RunFailed, match="No space left on device; the checkpoint of step 2 is complete"):
            work("run", BACKGROUND, at=at)
    assert steps == [1, 2, 3, 4, 5]
    assert steps_of(tmp_path / "run") == [2]
    work("run", BACKGROUND, resume=True)
    assert left(tmp_path / "run") == whole


@pytest.mark.parametrize("end", ["read", "signal", "guard"])
def test_what_needs_a_checkpoint_waits_until_it_is_written(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    write, seen = saving.save_checkpoint, list[list[int]]()

    def slow(*parts: Any) -> Any:
        time.sleep(0.2)
        return write(*parts)

    def at(run: Run, step: int) -> None:
        if step == 3 and end == "read":
            seen.append([checkpoint.step for checkpoint in run.checkpoints()])
        elif step == 3 and end == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif step == 3:
            run.stop({"step": 2}, "too much")

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    monkeypatch.setattr(run_module, "LAST_SECONDS", 0.0)
    with pytest.raises((Interrupted, GuardStop)) if end != "read" else contextlib.nullcontext():
        work("run", BACKGROUND, at=at)
    if end == "read":
        assert seen == [[2]]
    assert steps_of(tmp_path / "run") == {"read": [2, 4, 6], "signal": [2, 3], "guard": [2]}[end]


def test_an_interrupted_run_waits_a_moment_and_keeps_its_lock_while_it_writes(
    work: Work, whole: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: Writing
) -> None:
    monkeypatch.setattr(run_module, "LAST_SECONDS", 0.05)
    runs: list[Run] = []

    def at(run: Run, step: int) -> None:
        if step == 3:
            runs.append(run)
            writing.wait_for(2)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)

    began = time.monotonic()
    with pytest.raises(Interrupted):
        work("run", BACKGROUND, at=at)
    assert time.monotonic() - began < 10
    assert not runs[0]._lock.closed
    assert steps_of(tmp_path / "run") == []
    writing.go.set()
    runs[0]._saving.wait()
    assert steps_of(tmp_path / "run") == [2]
    deadline = time.monotonic() + 20
    while not runs[0]._lock.closed:
        assert time.monotonic() < deadline
    work("run", resume=True)
    assert left(tmp_path / "run") == whole


@pytest.mark.parametrize(
    ("device", "free", "copies"), [("cpu", 10**9, False), ("meta", 161, True), ("meta", 160, False)]
)
def test_auto_copies_what_lies_on_a_gpu_where_the_host_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch, device: str, free: int, copies: bool
) -> None:
    monkeypatch.setattr(saving, "free_memory", lambda device: free)
    assert saving.is_worth_copying([torch.empty(10, device=device) for _ in range(2)]) is copies


# ---- signals and guards


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    work: Work, whole: list[Any], tmp_path: Path, number: int, code: int
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        work("run", at=lambda run, step: os.kill(os.getpid(), number) if step == 3 else None)
    assert caught.value.exit_code == code
    assert signal.getsignal(signal.SIGINT) is handler
    assert steps_of(tmp_path / "run") == [2, 3]
    work("run", resume=True)
    assert left(tmp_path / "run") == whole


@pytest.mark.parametrize(
    ("again", "grace"), [(False, 0.1), (True, 100.0), (False, 0.0)], ids=["grace ends", "a second signal", "no grace"]
)
def test_a_step_that_does_not_end_is_cut_short(
    work: Work, whole: list[Any], tmp_path: Path, again: bool, grace: float
) -> None:
    def hang(run: Run, step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            if again:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)

    began, threads = time.monotonic(), threading.active_count()
    with pytest.raises(Interrupted) as caught:
        work("run", f"checkpoint.grace={grace}", at=hang)
    assert time.monotonic() - began < 10
    assert caught.value.exit_code == 143
    assert threading.active_count() == threads
    work("run", resume=True)
    assert left(tmp_path / "run") == whole


@pytest.mark.parametrize("grace", [0.1, 100.0])
def test_what_waits_again_on_its_way_out_is_interrupted_again(grace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pool of processes does that is left while they work. The timer of a user's own time limit stays as it is."""
    monkeypatch.setattr(signals, "AGAIN_S", 0.1)
    before, left = signal.getitimer(signal.ITIMER_REAL)[0], []

    def wait() -> None:
        try:
            for _ in range(2 if grace > 1.0 else 1):
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        finally:
            left.append(time.monotonic())
            time.sleep(20)

    signal.setitimer(signal.ITIMER_REAL, 1000.0)  # as pytest-timeout and rewards with time limits of their own do
    try:
        with pytest.raises(Interrupted), stopping_on_signals(grace):
            wait()
        assert time.monotonic() - left[0] < 10
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)


@pytest.mark.parametrize(("second", "last"), [(signal.SIGTERM, 4), (signal.SIGINT, 2)])
def test_a_signal_that_torchrun_sends_again_is_one_signal(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: int, last: int
) -> None:
    """A cluster signals every process of a job, and torchrun sends its own processes what it got."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")

    def both(run: Run, step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), second)

    with pytest.raises(Interrupted):
        work("run", at=both)
    assert steps_of(tmp_path / "run")[-1] == last  # the update is finished, or is not


@pytest.mark.parametrize(
    ("grace", "times"), [(0.0, 1), (0.5, 1), (100.0, 3)], ids=["no grace", "grace ends", "a signal after the echo"]
)
def test_under_torchrun_only_one_signal_is_taken_for_its_own(
    monkeypatch: pytest.MonkeyPatch, grace: float, times: int
) -> None:
    """The end of the grace period is no echo, and neither is what the user sends after it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    began = time.monotonic()

    def wait() -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(4)

    with pytest.raises(Interrupted), stopping_on_signals(grace):
        wait()
    assert time.monotonic() - began < 3


def test_a_first_signal_is_answered_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        with stopping_on_signals(9.0):
            os.kill(os.getpid(), signal.SIGINT)
        assert ("stopping after this update" in capfd.readouterr().err) == terminal


def test_a_grace_that_a_launcher_does_not_give_is_told(
    work: Work, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    words = "torchrun kills its processes 30 s after a signal, unless its --shutdown-timeout says otherwise: before "
    work("alone", "checkpoint.grace=30")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    work("usual")
    assert "torchrun" not in capsys.readouterr().err
    work("long", "checkpoint.grace=30")
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=40" in said
    assert "checkpoint.grace=20" in said
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "40")
    work("longer", "checkpoint.grace=30")
    assert "torchrun" not in capsys.readouterr().err
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5m")  # which a launcher of another kind may leave
    work("odd", "checkpoint.grace=30")
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_guard_ends_the_run_with_its_reason_and_a_checkpoint(work: Work, tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="too much"):
        work("run", at=lambda run, step: run.stop({"step": 3}, "too much") if step == 4 else None)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "too much"
    assert steps_of(tmp_path / "run") == [2, 3]


def test_what_may_not_be_saved_is_not_saved(work: Work, tmp_path: Path) -> None:
    def unsound(run: Run, step: int) -> None:
        write = type(run).log
        run.log = lambda row, **_: write(run, row, sound=step != 2)  # type: ignore[method-assign]

    work("run", at=unsound)
    assert steps_of(tmp_path / "run") == [4, 6]  # 3 is dropped again


# ---- disks and folders


def test_a_row_that_cannot_be_written_ends_the_run_in_one_line(
    work: Work, whole: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = JsonlWriter.write

    def fails(self: JsonlWriter, row: Any) -> None:
        if self.path.name == "metrics.jsonl" and row["step"] == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        write(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlWriter, "write", fails)
        with pytest.raises(RunFailed, match=r"metrics\.jsonl: Input/output error; .*step 4 is complete: --resume goes"):
            work("run")
    work("run", resume=True)
    assert left(tmp_path / "run") == whole


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(
    work: Work, whole: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, unlimited = saving.save_checkpoint, resource.RLIM_INFINITY

    def limited(folder: Path, step: int, *parts: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if step == 6 else unlimited, unlimited))
        try:
            return save(folder, step, *parts)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

    words = "File too large .*; the checkpoint of step 4 is complete"
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", limited)
        with pytest.raises(RunFailed, match=words):
            work("run")
    assert steps_of(tmp_path / "run") == [2, 4]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    work("run", resume=True)
    assert left(tmp_path / "run") == whole


def test_other_errors_of_the_system_are_not_taken_for_the_disks(work: Work) -> None:
    def fails(run: Run, step: int) -> None:
        raise ConnectionResetError("the hub is gone")

    with pytest.raises(ConnectionResetError):
        work("run", at=fails)


def test_an_error_of_the_user_s_names_the_checkpoint_and_frees_the_folder(
    work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(run: Run, step: int) -> None:
        if step == 4:
            raise InputError("no such thing")

    for resume in (False, True):
        with pytest.raises(InputError, match="no such thing"):
            work("run", resume=resume, at=breaks)
        assert "the checkpoint of step 2 is complete: --resume goes on from it" in capsys.readouterr().err


def test_a_run_that_cannot_start_removes_nothing(work: Work, crashed: Path) -> None:
    before = sorted(crashed.rglob("*"))
    with pytest.raises(InputError, match=r"data\.prompts"):
        work("crashed", "data.prompts=none.jsonl", overwrite=True)
    inside = f"data.prompts='{crashed / 'config.yaml'}'"
    with pytest.raises(InputError, match="--overwrite"):
        work("crashed", inside, overwrite=True)
    assert sorted(crashed.rglob("*")) == before
    work("crashed", overwrite=True)
    assert read_jsonl(crashed / "metrics.jsonl")[0]["step"] == 1
