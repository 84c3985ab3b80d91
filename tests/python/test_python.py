"""`rlhf_kl.train` and `rlhf_kl.PPO`: what the command does, from Python."""

from __future__ import annotations

import copy
import gc
import json
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlhf_kl
from rlhf_kl.builtin.world import world_file
from rlhf_kl.commands.guide import FOLDER
from rlhf_kl.models.lm import LM
from tests.conftest import Outcome

pytestmark = pytest.mark.slow
SMALL = {
    "policy.model": "builtin:reviews-small",
    "rollout.batch_size": 8,
    "rollout.max_new_tokens": 8,
    "rollout.reference_samples": 32,
    "eval.responses": 8,
    "eval.max_documents": 4,
    "tracking.tensorboard": False,
}


WORDS = ("good", "bad", "long", "new", "old", "slow", "fast")
PROMPTS = [f"the {thing} was {word} and" for thing in ("film", "room", "food") for word in WORDS]
OWN = ("time/", "perf/", "eval/", "alerts")  # of a run alone, or of the clock


def count_a(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(response.count("a")) for response in responses]


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(OWN)} for row in json.loads(json.dumps(rows))
    ]


@pytest.fixture
def trained(tmp_path: Path) -> rlhf_kl.TrainedRun:
    given: dict[str, Any] = {"prompts": PROMPTS, "texts": ["the room was clean .", "we ate fish ."], "reward": count_a}
    return rlhf_kl.train("ppo_adaptive.yaml", SMALL, **given, output_dir=tmp_path / "one", updates=2, quiet=True)


def test_an_error_names_arguments_of_python_and_no_options(trained: rlhf_kl.TrainedRun) -> None:
    words = "holds a run: resume=True goes on with it, overwrite=True starts it anew, another output_dir keeps it"
    with pytest.raises(rlhf_kl.RlhfKlError, match=words) as found:
        rlhf_kl.train("ppo_adaptive.yaml", SMALL, output_dir=trained.folder, updates=2, quiet=True)
    assert "--" not in str(found.value)


def test_a_run_from_lists_and_a_function(trained: rlhf_kl.TrainedRun, rlhf_kl: Callable[..., Outcome]) -> None:
    assert [row["step"] for row in trained.metrics] == [1, 2, 3]
    assert len(trained.frame()) == 3
    assert trained.summary["steps"] == 2
    assert "2 updates, finished" in repr(trained)
    page = unescape(trained._repr_html_())
    assert "<svg" in page
    assert "prompts=..., texts=..., reward=..., output_dir=" in unescape(page)  # repeats it, and no command line does
    assert "rlhf-kl train --config" not in page
    ids = trained.tokenizer(PROMPTS[0], return_tensors="pt")
    assert trained.policy.generate(**ids, max_new_tokens=2).shape[1] == ids["input_ids"].shape[1] + 2
    config = (trained.folder / "config.yaml").read_text()
    assert all(f"python:{name}" in config for name in ("count_a", "prompts", "texts"))
    resumed = rlhf_kl("train", "--config", trained.folder / "config.yaml", "--output-dir", trained.folder, "--resume")
    assert resumed.code == 2
    assert "count_a was given in Python" in resumed.err
    assert rlhf_kl("report", trained.folder, "--quiet").code == 0


def test_a_frontier_needs_what_was_given(trained: rlhf_kl.TrainedRun) -> None:
    document = trained.frontier([0.001], samples=8, quiet=True)
    assert document["rows"][0]["target"] == 0.001
    assert (trained.folder / "scale.json").is_file()
    with pytest.raises(rlhf_kl.RlhfKlError, match="given in Python"):
        rlhf_kl.TrainedRun(trained.folder).frontier(samples=8)


def models_alive() -> int:
    gc.collect()
    return sum(type(x) is LM for x in gc.get_objects())


def test_a_second_call_goes_on_and_leaves_torch_and_memory_as_they_were(tmp_path: Path) -> None:
    calls: dict[str, Any] = {"reward": count_a, "output_dir": tmp_path / "one", "quiet": True}
    before = models_alive()  # of other tests
    torch.manual_seed(7)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    rlhf_kl.train("ppo_adaptive.yaml", SMALL | {"ppo.lr_schedule": "constant"}, **calls, updates=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    again = rlhf_kl.train("ppo_adaptive.yaml", SMALL | {"ppo.lr_schedule": "constant"}, **calls, updates=2, resume=True)
    assert again.summary["steps"] == 2
    assert models_alive() <= before


def test_outside_of_the_main_thread_no_signal_is_taken(tmp_path: Path) -> None:
    runs: list[rlhf_kl.TrainedRun] = []
    call = lambda: runs.append(rlhf_kl.train(SMALL_CONFIG, output_dir=tmp_path / "one", updates=1, quiet=True))  # noqa: E731
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert runs[0].summary["steps"] == 1


SMALL_CONFIG: dict[str, Any] = {
    "policy": {"model": "builtin:reviews-small"},
    "rollout": {"batch_size": 8, "max_new_tokens": 8, "reference_samples": 32},
    "eval": {"responses": 8, "max_documents": 4},
    "tracking": {"tensorboard": False},
}


@pytest.mark.parametrize(
    ("config", "changes", "options", "named"),
    [
        ("ppo_adaptve.yaml", {}, {}, "ppo_adaptive.yaml"),
        ({"kl": {"targt": 1}}, {}, {}, "kl.target"),
        ({"extends": "ppo_adaptive.yaml", "kl": {"target": -1}}, {}, {}, "kl.target"),
        ("ppo_adaptive.yaml", {"kl..target": 1}, {}, "kl..target"),
        ("ppo_adaptive.yaml", {}, {"prompts": "one text"}, "prompts"),
        ("ppo_adaptive.yaml", {}, {"prompts": {"prompt": "one row"}}, "prompts"),
        ("ppo_adaptive.yaml", {}, {"updates": 0}, "updates"),
        ("ppo_adaptive.yaml", {}, {"reward": lambda texts: texts}, "reward.kind"),
        ("ppo_adaptive.yaml", {}, {"prompts": []}, "prompts"),
        ("sft_reviews.yaml", {}, {}, "sft"),
    ],
)
def test_errors_are_of_one_class_and_name_what_is_wrong(
    config: Any, changes: dict[str, Any], options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(rlhf_kl.RlhfKlError, match=re.escape(named)):
        rlhf_kl.train(config, changes, **options, output_dir=tmp_path / "one", quiet=True)
    assert not (tmp_path / "one").exists()


# ---- a loop of the caller's


def loop(updates: int, **options: Any) -> rlhf_kl.PPO:
    return rlhf_kl.PPO("ppo_adaptive.yaml", SMALL | options.pop("changes", {}), updates=updates, quiet=True, **options)


def test_the_rows_of_a_loop_are_those_of_a_run_and_a_loaded_one_goes_on(tmp_path: Path) -> None:
    run = rlhf_kl.train("ppo_adaptive.yaml", SMALL, reward=count_a, output_dir=tmp_path / "one", updates=4, quiet=True)
    ppo, file = loop(4, scorer=count_a), tmp_path / "state.pt"
    for step in range(1, 5):
        rollout = ppo.rollout(ppo.setup.prompts.batch(step).texts)
        given = count_a(rollout.prompts, rollout.responses) if step % 2 else None  # else by the scorer
        ppo.step(rollout, given)
        if step == 2:
            torch.save(ppo.state_dict(), file)
    assert figures(ppo.metrics) == figures(run.metrics[:4])
    state, others = torch.load(file), [loop(4, scorer=count_a) for _ in range(2)]
    for other in others:
        other.load_state_dict(state)
    for other in others:  # one after the other: they share nothing
        for _ in range(2):
            other.step(other.rollout())
        assert figures(other.metrics) == figures(ppo.metrics)
    with pytest.raises(rlhf_kl.RlhfKlError, match="updates"):
        other.rollout()
    saved = other.save(tmp_path / "final")
    assert {"model.safetensors", "tokenizer_config.json", "README.md"} <= {file.name for file in saved.iterdir()}


def test_scores_of_ones_own_are_not_mixed_with_those_of_another_scale(tmp_path: Path) -> None:
    """The scale came from the caller's scores; a step without any once took the config's reward on it."""
    ppo, other = loop(3), loop(3)
    rollout = ppo.rollout()
    ppo.step(rollout, [1000.0 * score for score in count_a(rollout.prompts, rollout.responses)])
    torch.save(ppo.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for each in (ppo, other):
        rollout = each.rollout()
        with pytest.raises(rlhf_kl.RlhfKlError, match="each step"):
            each.step(rollout)
        each.step(rollout, count_a(rollout.prompts, rollout.responses))


def test_a_loaded_loop_draws_the_numbers_that_its_scorer_would_have_drawn() -> None:
    def noisy(prompts: list[str], responses: list[str]) -> list[float]:
        return (torch.rand(len(responses)) + random.random() + np.random.rand()).tolist()

    ppo, other = loop(2, scorer=noisy), loop(2, scorer=noisy)
    ppo.step(ppo.rollout())
    state = copy.deepcopy(ppo.state_dict())
    ppo.step(ppo.rollout())
    other.load_state_dict(state)
    other.step(other.rollout())
    assert figures(other.metrics) == figures(ppo.metrics)


def test_terms_on_their_own_scale_in_a_loop(tmp_path: Path) -> None:
    """As in a run, and after a load; scores of the caller's have no terms, so they are refused."""
    (tmp_path / "mine.py").write_text("def size(prompts, responses):\n    return [100 * len(r) for r in responses]\n")
    terms = {"model": {"model": "builtin:reviews-small"}, "size": {"kind": f"{tmp_path}/mine.py:size"}}
    changes = SMALL | {"reward": {"kind": "sum", "normalize": "each", "terms": terms}}
    run = rlhf_kl.train("ppo_adaptive.yaml", changes, output_dir=tmp_path / "one", updates=2, quiet=True)
    ppo, other = loop(2, changes=changes), loop(2, changes=changes)
    rollout = ppo.rollout()
    with pytest.raises(rlhf_kl.RlhfKlError, match=r"reward\.normalize"):
        ppo.step(rollout, [1.0] * len(rollout))
    ppo.step(rollout)
    torch.save(ppo.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for each in (ppo, other):
        each.step(each.rollout())
        assert figures(each.metrics) == figures(run.metrics[:2])


def test_a_loop_reads_responses_once_for_their_scores_and_the_critic() -> None:
    """With the figures of a run, bit for bit: another pass would be rounded in another way on some processors."""
    ppo, rows = loop(2, changes={"reward.model": "builtin:reviews-small"}), list[int]()
    (reward,) = ppo.setup.scorers.trained.models.values()
    reward.model.base_model.register_forward_hook(lambda _, __, output: rows.append(len(output.last_hidden_state)))
    ppo.step(ppo.rollout())
    rows.clear()
    ppo.step(ppo.rollout())
    assert sum(rows) == SMALL["rollout.batch_size"]


@pytest.fixture
def free(tmp_path: Path) -> rlhf_kl.PPO:
    """A loop whose config names a model and nothing else."""
    folder = shutil.copytree(world_file("builtin:reviews-small", "policy"), tmp_path / "my-model")
    changes = SMALL | {"policy.model": folder, "rollout.samples_per_prompt": 2}
    return rlhf_kl.PPO("ppo_model.yaml", changes, updates=2, quiet=True)


def test_without_a_scorer_the_first_rollout_gives_the_scale_and_beta(free: rlhf_kl.PPO) -> None:
    rollout = free.rollout(PROMPTS[:4])
    assert rollout.prompts == [prompt for prompt in PROMPTS[:4] for _ in range(2)]
    assert rollout.exact_kl.shape == rollout.mask.shape == rollout.logprobs.shape
    scores = [float(i) for i in range(7)] + [None]  # one is not scored
    row = free.step(rollout, scores)
    assert row["objective/scores"] == pytest.approx(3.0)
    assert free.training is not None
    assert (free.training.shaping.mean, free.training.shaping.std) == (pytest.approx(3.0), pytest.approx(2.0))
    second = free.rollout([{"prompt": prompt, "answer": 1} for prompt in PROMPTS[4:8]])
    assert free.step(second, torch.arange(8.0))["step"] == 2


def test_a_loop_whose_prompts_come_later_goes_on_from_a_file(free: rlhf_kl.PPO, tmp_path: Path) -> None:
    changes = SMALL | {"policy.model": tmp_path / "my-model", "rollout.samples_per_prompt": 2}
    other = rlhf_kl.PPO("ppo_model.yaml", changes, updates=2, quiet=True)
    free.step(free.rollout(PROMPTS[:4]), range(8))
    torch.save(free.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for ppo in (free, other):
        ppo.step(ppo.rollout(PROMPTS[4:8]), range(8))
    assert figures(other.metrics) == figures(free.metrics)


def test_a_call_that_cannot_be_right_is_refused_and_changes_nothing(free: rlhf_kl.PPO) -> None:
    for prompts, named in (
        ("abcd", "prompts"),
        (PROMPTS[:3], "4 of them"),
        (["", *PROMPTS[:3]], "cannot be used"),
        (None, "prompts"),
    ):
        with pytest.raises(rlhf_kl.RlhfKlError, match=named):
            free.rollout(prompts)
    with pytest.raises(rlhf_kl.RlhfKlError, match="no update"):
        free.state_dict()
    first = free.rollout(PROMPTS[:4])
    rollout = free.rollout(PROMPTS[:4])
    assert rollout.responses == first.responses  # of the same update
    one_nan = [float("nan"), *range(7)]  # None is no score; NaN is a fault of the scorer
    for scores in ([1.0] * 7, ["good"] * 8, [float("inf")] * 8, one_nan, None):
        with pytest.raises(rlhf_kl.RlhfKlError, match="scores"):
            free.step(rollout, scores)
    with pytest.raises(rlhf_kl.RlhfKlError, match="rollout"):
        free.step(first, [1.0] * 8)
    assert free.updates == 0
    free.step(rollout, torch.arange(8.0).unsqueeze(-1))  # (B, 1), as a classifier gives them
    with pytest.raises(rlhf_kl.RlhfKlError, match="rollout"):
        free.step(rollout, range(8))


def test_a_folder_without_a_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(rlhf_kl.RlhfKlError, match="nothing"):
        rlhf_kl.TrainedRun(tmp_path / "nothing")


def test_a_few_prompts_are_not_called_held_out(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "prompts": PROMPTS[:8],
        "texts": ["the room was clean ."],
        "reward": lambda p, r: [0.0] * 8,
    }
    with pytest.raises(rlhf_kl.RlhfKlError, match="python:reward"):
        rlhf_kl.train("ppo_adaptive.yaml", SMALL, **given, output_dir=tmp_path / "one", updates=1, quiet=True)
    given["reward"] = count_a
    run = rlhf_kl.train("ppo_adaptive.yaml", SMALL, **given, output_dir=tmp_path / "one", updates=1, quiet=True)
    chosen = {row["chosen"] for row in map(json.loads, (run.folder / "samples.jsonl").read_text().splitlines())}
    assert "training prompt" in chosen
    assert "held out" not in chosen
    assert "Prompts of the training: they are too few to hold some out." in unescape(run._repr_html_())


# ---- the documents


def snippets() -> Iterator[str]:
    page = (FOLDER / "running.md").read_text(encoding="utf-8")
    yield from re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_snippets_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world_file("builtin:reviews-small", "policy"), tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    ran = [exec(compile(snippet, "running.md", "exec"), {"__name__": "__main__"}) for snippet in snippets()]
    assert len(ran) == 2
    assert "3 updates, finished" in capsys.readouterr().out
    assert (tmp_path / "final" / "model.safetensors").is_file()
