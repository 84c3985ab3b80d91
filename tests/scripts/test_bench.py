from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlhf_kl.models.load import load_causal_lm, load_tokenizer, save_model
from rlhf_kl.models.logits import LOGIT_ELEMENTS

PATH = Path(__file__).parents[2] / "scripts" / "bench.py"
TINY = {"hidden_size": 16, "layers": 2, "heads": 2, "vocab_size": 50}


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench"]


@pytest.fixture(scope="module")
def world(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    place: Path = tmp_path_factory.mktemp("world")
    return bench.random_world(place, TINY, [3, 5, 4, 4], batch=2, length=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["phasess"], "phasess: needs to be one of phases, groups"),
        (["peer"], "peer: needs --peer-python and --peer-script"),
        (["groups", "--models", "reviews"], "groups: needs gpt2 or llama among --models"),
        (["--updates", "2"], "--updates: needs more than 2"),
    ],
)
def test_bad_arguments(bench: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.arguments(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_ratios_by_hand(bench: ModuleType) -> None:
    """Three pairs: 2, 3 and 1.5 times as fast, in half, a quarter and all of the memory."""
    runs = [((1.0, 50), (2.0, 100)), ((1.0, 25), (3.0, 100)), ((2.0, 100), (3.0, 100))]
    pairs = []
    for ours, peer in runs:
        figures = [{"step_s": seconds, "peak_memory_mb": memory} for seconds, memory in (ours, peer)]
        pairs.append({"features float32": bench.ratios(*figures)})
    assert pairs[0] == {"features float32": {"speed": 2.0, "memory": 0.5}}
    assert bench.median_ratios(pairs) == {"features float32": {"speed": 2.0, "memory": 0.5}}


def test_the_order_of_a_pair_turns(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is first, then last, then second."""
    started: list[str] = []

    def run(self: Any, label: Any, world: Any, value: str, dtype: str, seed: int) -> dict[str, float]:
        started.append(value)
        return {"step_s": 2.0 if value == "peer" else 1.0, "peak_memory_mb": 10.0}

    monkeypatch.setattr(bench.Bench, "run", run)
    monkeypatch.setattr(bench.Bench, "world", lambda self, name: None)
    args = bench.arguments(["--dtypes", "float32", "--models", "gpt2"])
    pairs = [bench.Bench(args, Path()).pair("gpt2", number) for number in range(3)]
    first = ["peer", "features", "separate"]
    assert started == [*first, *("features", "separate", "peer"), *("separate", "peer", "features")]
    assert [pair["separate float32"]["speed"] for pair in pairs] == [2.0, 2.0, 2.0]


def test_a_chunk_is_the_products_own(bench: ModuleType) -> None:
    assert bench.CHUNK_ELEMENTS == LOGIT_ELEMENTS


def test_the_matrices_are_those_that_torch_multiplies(bench: ModuleType, world: Any) -> None:
    model = load_causal_lm(str(world.policy))
    matrices: Counter[tuple[int, int]] = bench.layer_matrices(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.base_model(input_ids=torch.ones(3, 4, dtype=torch.long))
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        count for operation, count in counts.items() if "mm" in str(operation) and "bmm" not in str(operation)
    )
    assert products == 3 * 4 * 2 * sum(n * k * count for (n, k), count in matrices.items())


def test_the_floor_of_an_update(bench: ModuleType, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one operation a second: 3 products of everything in each of 2 epochs, a second trunk for `separate`."""
    monkeypatch.setattr(bench, "product_rate", lambda *_: 1.0)
    monkeypatch.setattr(bench, "timed", lambda _: 1.0)
    args = bench.arguments(["--microbatch", "2"])
    layers, head = 2 * 2 * 12 * 16 * 16, 2 * 16 * 50  # operations: of a token in 2 layers, of a state
    tokens, states = 2 * (4 + 4 - 1), 2 * 4
    update = bench.floors(world, args, "features", "float32", 4.0)["update_s"]
    assert update == 2 * 3 * (tokens * layers + states * head)
    separate = bench.floors(world, args, "separate", "float32", 4.0)["update_s"]
    assert separate - update == 2 * 3 * tokens * layers
    monkeypatch.setitem(bench.CHUNK_ELEMENTS, "cpu", 7 * 50)  # a pass of 8 states has two chunks
    assert bench.floors(world, args, "features", "float32", 4.0)["update_s"] - update == 2 * states * head


@pytest.mark.slow
def test_phases(bench: ModuleType, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bench.json"
    monkeypatch.setattr(bench, "make_world", lambda *_: dataclasses.replace(world, epochs=1))
    sizes = ["--models", "gpt2", "--updates", "3", "--values", "features", "--dtypes", "float32"]
    bench.main(["phases", *sizes, "--out", str(out)])
    (run,) = json.loads(out.read_text())["phases"]
    assert run["samples_per_s"] == pytest.approx(2 / run["step_s"])
    assert run["peak_memory_mb"] > 100
    assert run["share_of_update_s"] == pytest.approx(run["floor_of_update_s"] / run["update_s"])


def test_a_policy_that_never_ends_a_text(bench: ModuleType, world: Any, tmp_path: Path) -> None:
    """Its other logits stay as they were."""
    before = load_causal_lm(str(world.policy))
    torch.nn.init.normal_(before.transformer.ln_f.bias, generator=torch.Generator().manual_seed(0))  # as training does
    save_model(before, load_tokenizer(str(world.policy)), tmp_path / "trained")
    world = dataclasses.replace(world, policy=tmp_path / "trained")
    after = load_causal_lm(str(bench.endless(world, tmp_path).policy))
    ids = torch.randint(2, 50, (16, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, changed = before(input_ids=ids).logits, after(input_ids=ids).logits
    assert float(changed.softmax(-1)[..., 1].max()) < 1e-6
    assert float(plain.softmax(-1)[..., 1].max()) > 1e-4
    torch.testing.assert_close(changed[..., 2:], plain[..., 2:], rtol=1e-5, atol=1e-5)
