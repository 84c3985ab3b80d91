"""What users' code sets in the process: it finds it again, and the program does not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.plugins import home_of, load_attribute, users_code
from rlhf_kl.rewards.plugin import PluginReward
from tests.made import BATCH

SETTINGS = {  # what sets one -> what tells it
    "torch.set_grad_enabled(False)": "torch.is_grad_enabled()",
    "torch.set_default_dtype(torch.float64)": "torch.tensor(1.0).dtype",
    "torch.set_default_device('meta')": "torch.empty(0).device.type",
    "torch.set_num_threads(3)": "torch.get_num_threads()",
    "torch.use_deterministic_algorithms(True)": "torch.are_deterministic_algorithms_enabled()",
    "torch.set_float32_matmul_precision('high')": "torch.get_float32_matmul_precision()",
    "torch.backends.cuda.matmul.allow_tf32 = True": "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.fp32_precision = 'tf32'": "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.fp32_precision = 'ieee'": "[(b.cudnn.conv.fp32_precision, b.cuda.matmul.fp32_precision)"
    " for b in [torch.backends]]",
    "torch.backends.cudnn.benchmark = True": "torch.backends.cudnn.benchmark",
    "torch.backends.cuda.enable_flash_sdp(False)": "torch.backends.cuda.flash_sdp_enabled()",
    "torch.autocast('cpu', torch.float16).__enter__()": "torch.is_autocast_enabled('cpu')",
    "torch.autocast_increment_nesting()": "(torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1]",
    "torch.set_autocast_dtype('cpu', torch.float16)": "torch.get_autocast_dtype('cpu')",
    "torch.autograd.set_detect_anomaly(True)": "torch.is_anomaly_enabled()",
    "torch.set_flush_denormal(True)": "bool(torch.tensor(1e-310, dtype=torch.float64) * 1.0)",
    "os.chdir('/')": "os.getcwd()",
    "warnings.filterwarnings('error', 'of mine')": "sum(each[0] == 'error' for each in warnings.filters)",
}
CODE = """
import os, torch, warnings
{top}
def told(prompts=None, responses=None): return [str({tells})] * 3
def change(prompts, responses):
    {sets}
    return [0.0] * 3
class Changes:
    def __init__(self):
        {sets}
    __call__ = staticmethod(told)
"""


def tell(words: str) -> str:
    return str(eval(words, {"os": os, "torch": torch, "warnings": warnings}))


def run(target: Any) -> Any:
    with users_code("raised", home_of(target)):
        return target([], [])


@pytest.mark.parametrize("sets", SETTINGS)
@pytest.mark.parametrize("place", ["at the top", "in a call", "in a class"])
def test_a_setting_stays_with_the_code_that_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tells = SETTINGS[sets]
    before = {words: tell(words) for words in SETTINGS.values()}
    (tmp_path / "sets.py").write_text(CODE.format(top=sets if place == "at the top" else "", sets=sets, tells=tells))
    told, change, law = (load_attribute(f"sets.py:{name}") for name in ("told", "change", "Changes"))
    if place == "in a call":
        run(change)
    if place == "in a class":
        with users_code("raised", home_of(law)):
            law()
    for _ in range(2):
        assert {words: tell(words) for words in SETTINGS.values()} == before
        assert run(told) != [before[tells]] * 3
    (tmp_path / "sets.py").write_text(CODE.format(top="", sets=sets, tells=tells) + "changed = True\n")
    assert run(load_attribute("sets.py:told")) == [before[tells]] * 3  # a file that is run again begins anew


def test_what_a_file_sets_holds_in_the_thread_of_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are switched off for the main thread alone, and it runs the file, but not the function."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets.py").write_text(
        "import torch\ntorch.set_grad_enabled(False)\n"
        "def f(prompts, responses): return torch.nn.Linear(2, 3)(torch.ones(2)).numpy()\n"
        "def g(prompts, responses):\n    torch.set_default_dtype(torch.float64)\n    return [0.0] * 3\n"
    )
    for limit in (None, 60.0):
        assert len(PluginReward(load_attribute("sets.py:f"), {}, limit)(BATCH)) == 3
        assert PluginReward(load_attribute("sets.py:g"), {}, limit)(BATCH).tolist() == [0.0] * 3
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float32


def test_inference_mode_that_is_left_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stay on for the training, and nothing ends it from outside. In a block it is as it should be."""
    monkeypatch.chdir(tmp_path)
    code = (
        "import torch\nmode = torch.inference_mode()\n"
        "def on(prompts, responses): mode.__enter__()\n"
        "def block(prompts, responses):\n    with torch.inference_mode(): return [1.0] * 3\n"
    )
    (tmp_path / "sets.py").write_text(code)
    assert run(load_attribute("sets.py:block")) == [1.0] * 3
    on = load_attribute("sets.py:on")
    try:
        with pytest.raises(InputError, match=r"left torch\.inference_mode on"):
            run(on)
    finally:
        on.__globals__["mode"].__exit__(None, None, None)
    assert not torch.is_inference_mode_enabled()


def test_a_neighbour_with_the_name_of_a_library_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("rlhf_kl"), "propagate", True)
    for name in ("datasets.py", "calendar.py", "near.py"):
        (tmp_path / name).touch()
    (tmp_path / "mine.py").write_text("def f(prompts, responses): ...\n")
    load_attribute("mine.py:f")
    assert f"{tmp_path}: calendar.py, datasets.py: " in caplog.text


def test_what_a_function_prints_does_not_stand_among_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json, stdout is one document."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tells.py").write_text("print('imported')\ndef f(prompts, responses): print('called')\n")
    run(load_attribute("tells.py:f"))
    assert capsys.readouterr() == ("", "imported\ncalled\n")


def test_a_folder_that_has_gone_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets.py").write_text(
        "import os\ndef f(prompts, responses):\n    os.mkdir('gone')\n    os.chdir('gone')\n    os.rmdir('../gone')\n"
    )
    for _ in range(2):
        run(load_attribute("sets.py:f"))
        assert Path.cwd() == tmp_path


def test_ctrl_c_is_the_program_s_whatever_a_library_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    (tmp_path / "sets.py").write_text(
        "import signal\nfor n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
        "def f(prompts, responses): return signal.getsignal(signal.SIGINT)\n"
    )
    assert run(load_attribute("sets.py:f")) is before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
def test_a_file_that_imports_torch_before_the_program_does(tmp_path: Path) -> None:
    """As in every command: plugins are checked first. What torch begins with is then the program's."""
    (tmp_path / "near.py").write_text("import transformers\n")
    (tmp_path / "sets.py").write_text(
        "import near, torch\ntorch.set_grad_enabled(False)\ntorch.set_num_threads(3)\ndef f(): ...\n"
    )
    code = """
        import sys
        from rlhf_kl.plugins import load_attribute
        load_attribute("sets.py:f")
        assert not [finder for finder in sys.meta_path if "rlhf_kl" in type(finder).__module__]
        import torch
        print(torch.is_grad_enabled(), torch.get_num_threads())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "True 2\n", done.stderr
