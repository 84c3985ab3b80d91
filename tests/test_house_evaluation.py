"""How far a prompt walks through an evaluation: its stays (functions) and rooms (files) from the call to the figures.

A stay is a function of this package, called in an evaluation, that has the prompt in its arguments, its variables or
what it returns: its text, its tokens, or the samples that it became. A call into a layer that others share (models,
rewards, data, distributed, and the rollout's own `sample`, `response_layout` and `measure`) is one stay, whatever it
calls. Counted is an evaluation in the middle of a run; the rows of samples.jsonl and tokens.jsonl are made after the
figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import rlhf_kl
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.ppo.heldout import Samples
from rlhf_kl.training.evaluation import evaluate_policy
from rlhf_kl.training.resolved import resolve
from rlhf_kl.training.setup import build_setup
from rlhf_kl.training.start import prepare_training

PACKAGE = Path(rlhf_kl.__file__).parent
SHARED = ("models/", "ops/", "rewards/", "data/", "distributed.py", "types.py", "ppo/rollout.py", "ppo/states.py")
PASSES_ON = {"Ranks.each", "Ranks.run"}  # they call back
PROMPT = "ddc"
MOST_STAYS, MOST_ROOMS = 19, 7


def holds(x: Any, ids: list[int], depth: int = 6) -> bool:
    """Whether the prompt is in it: as text, as tokens, or as the samples of a model."""
    if depth < 0 or isinstance(x, int | float | torch.nn.Module | None):
        return False
    if isinstance(x, str):
        return PROMPT in x
    if isinstance(x, Samples):
        return True
    if isinstance(x, torch.Tensor):
        return x.dtype == torch.long and x.dim() > 0 and holds(x.tolist(), ids, depth)
    if isinstance(x, list | tuple):
        if all(type(one) is int for one in x):
            return any(list(x[i : i + len(ids)]) == ids for i in range(len(x)))
        return any(holds(one, ids, depth - 1) for one in x)
    if isinstance(x, Mapping):
        return any(holds(one, ids, depth - 1) for one in x.values())
    return any(holds(one, ids, depth - 1) for one in getattr(x, "__dict__", {}).values())


def walk(work: Callable[[], Any], ids: list[int]) -> set[tuple[str, str]]:
    """The file and the name of each stay."""
    frames: list[tuple[FrameType, str]] = []
    found = set[tuple[str, str]]()

    def note(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        place = code.co_filename.removeprefix(f"{PACKAGE}/")
        if event == "call":
            frames.append((frame, place))
            return
        frames.pop()
        inside = any(at.startswith(SHARED) and one.f_code.co_qualname not in PASSES_ON for one, at in frames)
        nested = bool(frames) and frames[-1][1] == place == "distributed.py"
        if inside or nested or code.co_name.startswith("<"):
            return
        seen = {name: one for name, one in frame.f_locals.items() if name != "self"}
        if holds(seen, ids) or holds(value, ids):
            found.add((place, code.co_qualname))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.slow
def test_a_prompt_has_a_short_walk_to_its_figures(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (PROMPT, "ab", "cd")))
    config = TrainConfig.model_validate(
        tiny_settings | {"eval": tiny_settings["eval"] | {"prompts": str(prompts), "responses": 3}}
    )
    held = prepare_training(config, build_setup(resolve(config), torch.device("cpu"))).heldout
    ids = held.prompts.ids[held.prompts.texts.index(PROMPT)]
    evaluate_policy(held, True, 1, [])
    for name in ("heldout_rows", "token_parts"):
        monkeypatch.setattr(f"rlhf_kl.training.evaluation.{name}", lambda *_: [])
    found = walk(lambda: evaluate_policy(held, True, 3, []), ids)
    met = {name for _, name in found}
    assert {"HeldOut.draw", "HeldOut.measure", "HeldOut.score", "figures_of", "LM.sample"} - met == {"LM.sample"}
    assert len(found) <= MOST_STAYS, sorted(found)
    assert len({place for place, _ in found}) <= MOST_ROOMS, sorted(found)
