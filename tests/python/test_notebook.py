"""A real kernel: the notebook of the repository, and the stop button."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from rlhf_kl.run.folder import checkpoint_folders, checkpoint_step
from rlhf_kl.run.log import read_jsonl
from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
UPDATES = 30
RUN = f"""
import rlhf_kl
run = rlhf_kl.train("smoke.yaml", {{"tracking.tensorboard": False}}, output_dir="one", updates={UPDATES}, resume=True)
"""


def test_the_notebook_runs_offline_from_an_empty_folder(tmp_path: Path) -> None:
    notebook = nbformat.read(REPOSITORY / "scripts" / "notebook.ipynb", 4)
    for cell in notebook.cells:  # fewer updates than a reader has
        cell.source = cell.source.replace('"ppo_adaptive.yaml", 20', '"smoke.yaml", 3')
    options: dict[str, Any] = {"resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", **options).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output for output in shown if "<iframe" in output.get("data", {}).get("text/html", "")]
    assert [output for output in shown if "image/png" in output.get("data", {})]
    rows = list(read_jsonl(tmp_path / "runs" / "notebook" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (tmp_path / "runs" / "own-loop" / "model.safetensors").is_file()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, Callable[[str], str]]]:
    """A kernel, and what runs a cell in it: returns the name of the error, else an empty text."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))

    def run(code: str) -> str:
        reply = client.execute_interactive(code, timeout=120, output_hook=lambda _: None)
        return str(reply["content"].get("ename", ""))

    yield manager, run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_the_stop_button_leaves_a_checkpoint_and_a_usable_kernel(
    kernel: tuple[KernelManager, Callable[[str], str]], tmp_path: Path
) -> None:
    manager, run = kernel
    watch = f"""
import os, signal, threading, time
def stop():
    while not os.path.exists("one/metrics.jsonl") or len(open("one/metrics.jsonl").readlines()) < 2:
        time.sleep(0.05)
    os.kill({manager.provisioner.pid}, signal.SIGINT)
threading.Thread(target=stop, daemon=True).start()
"""
    assert run(watch + RUN) == "KeyboardInterrupt"
    done = len((tmp_path / "one" / "metrics.jsonl").read_text().splitlines())
    assert 2 <= done < UPDATES
    assert max(map(checkpoint_step, checkpoint_folders(tmp_path / "one" / "checkpoints"))) == done
    assert run(RUN) == ""
    assert run(f"assert len(run.metrics) == {UPDATES + 1}") == ""
