from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_kl.run.tensorboard import TensorBoardWriter

CONFIG = {"run": {"name": "a\x1b", "tags": ["x", 1]}, "ppo": {"epochs": 4, "whiten_rewards": False}, "kl": None}


def _read(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
    return events


def _points(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 6)) for event in events.Scalars(tag)]


def _texts(events: Any, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{tag}/text_summary")]


def test_every_finite_number_becomes_a_scalar_at_its_step(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path, CONFIG) as board:
        board.row({"step": 1, "episodes": 64, "kl/token": 0.25, "kl/coef": math.nan, "objective/gold": None})
        board.row({"step": 2, "episodes": 128, "kl/token": 0.5, "alerts": ["kl-spike: <b>high</b>"]})
    events = _read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["episodes", "kl/token"]
    assert _points(events, "kl/token") == [(1, 0.25), (2, 0.5)]
    assert _texts(events, "alerts") == ["    kl-spike: <b>high</b>"]


def test_the_config_is_in_the_same_file_as_hparams(tmp_path: Path) -> None:
    TensorBoardWriter(tmp_path, CONFIG).close()
    assert len(list(tmp_path.iterdir())) == 1
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = _read(tmp_path).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    hparams = data.session_start_info.hparams
    assert hparams["ppo.epochs"].number_value == 4
    assert hparams["run.name"].string_value == "a\\x1b"
    assert hparams["kl"].string_value == "null"
    assert hparams["run.tags"].string_value == '["x", 1]'
    assert hparams["ppo.whiten_rewards"].string_value == "false"


def test_rebuild_never_doubles_a_point(tmp_path: Path) -> None:
    rows = [{"step": step, "kl/token": step / 8} for step in (1, 2, 3)]
    with TensorBoardWriter(tmp_path, CONFIG) as board:
        for row in [*rows, {"step": 4, "kl/token": 9.0}]:
            board.row(row)
    (tmp_path / "mine.txt").write_text("")
    with TensorBoardWriter(tmp_path, CONFIG) as board:
        board.rebuild(rows, [{"step": 2, "prompt": "p", "response": "r"}])
        board.row({"step": 4, "kl/token": 0.5})
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert (tmp_path / "mine.txt").exists()
    events = _read(tmp_path)
    assert _points(events, "kl/token") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert len(_texts(events, "samples")) == 1


def test_sample_text_is_shown_as_it_is(tmp_path: Path) -> None:
    response = "<script>alert(1)</script>\n# no heading **no bold**\x1b[2J\ud800"
    with TensorBoardWriter(tmp_path, {}) as board:
        board.sample({"step": 3, "prompt": "[x](http://a)", "response": response, "score": 1.25, "gold": None})
    (markdown,) = _texts(_read(tmp_path), "samples")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard import plugin_util
    html = plugin_util.markdown_to_safe_html(markdown)
    assert "<script" not in html
    assert "<h1" not in html
    assert "<a " not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "# no heading **no bold**\\x1b[2J\\ud800" in html
    assert "<strong>prompt</strong>" in html
    assert "score 1.25" in html


def test_what_shows_a_run_does_not_import_torch() -> None:
    names = ("monitors", "run.files", "run.jsonl", "run.run_folder", "run.tensorboard", "ui")
    code = "import sys, importlib\n" + "".join(f"importlib.import_module('rlhf_kl.{name}')\n" for name in names)
    heavy = "sys.exit(bool({'torch', 'transformers', 'numpy', 'tensorboard'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code + heavy], check=False).returncode == 0


def test_the_custom_charts_name_tags_that_runs_have(
    tmp_path: Path, metrics_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    TensorBoardWriter(tmp_path, CONFIG).close()
    from tensorboard.plugins.custom_scalar import layout_pb2

    [event] = _read(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    patterns = [tag for part in layout.category for chart in part.chart for tag in chart.multiline.tag]
    assert len(patterns) >= 10
    estimates = {"kl/k1": 0.1, "kl/k2": 0.1, "kl/k3": 0.1, "objective/rlhf_reward": 0.5}
    tags = {key for row in metrics_rows([0.1]) for key in row | estimates}
    assert [pattern for pattern in patterns if not any(re.search(pattern, tag) for tag in tags)] == []
