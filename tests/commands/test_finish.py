"""The end of a run: the model card in `final/`, and the figures shown."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlhf_kl.commands.train import train_closing
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.monitors.facts import closing_figures, control_figures
from rlhf_kl.ppo.reference import ReferenceScores
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.training.card import model_card
from rlhf_kl.training.loop import TrainLoop


def test_a_run_has_one_with_its_figures(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (tiny_run / "final" / "README.md").read_text()
    closing = read_jsonl(tiny_run / "metrics.jsonl")[-1]
    cells = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", card, flags=re.MULTILINE))
    assert float(cells["held-out perplexity"].split(" -> ")[1]) == pytest.approx(closing["eval/perplexity"], rel=0.01)
    assert float(cells["forgetting"].split()[0]) == pytest.approx(closing["eval/forward_kl_token"], abs=5e-4)
    assert str(tiny_run.parent) not in card  # cards are made to be shared
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(tiny_run / "final")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"].config.vocab_size == len(names["tokenizer"])


def card_of(kls: list[float], *, adapter: bool = False, **sections: Any) -> str:
    """The card of a run with these KLs per token."""
    config = TrainConfig.model_validate(
        {"policy": {"model": "owner/base@v2"}, "reward": {"model": "owner/score"}}
        | {"data": {"prompts": "owner/prompts"}, "eval": {"texts": "owner/texts"}}
        | sections
    )
    rows = [{"kl/token": kl, "kl/coef": 2.0, "kl/error": kl / config.kl.target_value - 1} for kl in kls]
    rows = [row | {"objective/scores": float(i)} for i, row in enumerate(rows)]
    return model_card(config, rows, {"eval/perplexity": 3.0}, adapter=adapter)


@pytest.mark.parametrize(
    ("adapter", "library", "kind"), [(False, "transformers", "finetune"), (True, "peft", "adapter")]
)
def test_what_the_hub_reads_of_it(adapter: bool, library: str, kind: str) -> None:
    card = card_of([0.5] * 3, adapter=adapter)
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["base_model_relation"], front["library_name"]) == ("owner/base", kind, library)
    assert "| base model | owner/base@v2 |" in card
    assert "at sampling temperature 0.700" in card_of([0.5] * 3, rollout={"temperature": 0.7})
    assert "| KL reached | 0.500 nats per token, 500% of " in card
    assert "| score | 0 -> 1.50 |" in card
    assert ("pretrained=owner/base,revision=v2,peft=." in card) == adapter


def test_an_adapter_on_a_local_base_needs_the_base_too() -> None:
    card = card_of([0.1] * 40, adapter=True, policy={"model": "/home/me/runs/my_sft/final"})
    assert "my_sft, trained with PPO" in card
    assert "/home/me" not in card
    assert "base_model" not in yaml.safe_load(card.split("---")[1])
    assert "upload the base" in card
    assert "pretrained=FOLDER-OF-THE-BASE,peft=." in card


# ---- what the end of a run shows


def summary(kls: list[float]) -> dict[str, Any]:
    config = TrainConfig.model_validate({"kl": {"target": 0.1, "controller": {"kind": "adaptive"}}}).kl
    rows = [{"kl/token": kl, "kl/error": kl / 0.1 - 1, "objective/scores": 10 * kl} for kl in kls]
    return {
        "final": rows[-1],
        "steps": len(kls),
        "seconds": 1.0,
        "tilt_share": 0.95,
        "control": control_figures(rows, config),
        "closing": closing_figures([*rows, {"eval/perplexity": 3.5}]),
    }


GAIN = "95% of the most that this KL allows"


@pytest.mark.parametrize(
    ("kls", "mean_of", "kl", "score", "gain"),
    [
        ([0.1] * 20 + [0.11] * 20, 10, r"0\.110, .* 0\.1 held \(.* 10% ", "1.00 -> 1.10", GAIN),
        ([0.02, 0.04, 0.06, 0.08], 2, r"0\.070, 70% of .* 0\.1 ", "0.200 -> 0.700", None),
    ],
)
def test_the_verdict_on_the_target(kls: list[float], mean_of: int, kl: str, score: str, gain: str | None) -> None:
    """The KL of a short run is noise."""
    figures, _ = train_closing(summary(kls), TrainConfig())
    assert re.match(kl, str(figures["KL per token"]))
    assert (figures["score"], figures["held-out perplexity"], figures.get("score gain")) == (score, "3.50", gain)
    assert f"last {mean_of}" in figures["figures"]
    figures, _ = train_closing(summary(kls) | {"score_error": 0.012}, TrainConfig())
    assert figures["score"] == f"{score} (±0.012 at the end)"


def test_the_share_of_the_most_is_that_of_the_gain_over_the_reference() -> None:
    """Gaussian scores around 5: a KL of 0.5 can raise them by sqrt(2 * 0.5) = 1."""
    scores = [5.0 + NormalDist().inv_cdf((i + 0.5) / 2048) for i in range(2048)]
    training = SimpleNamespace(reference_scores=ReferenceScores(scores, [i % 64 for i in range(2048)], 10.0))
    loop: Any = SimpleNamespace(training=training)
    closing = {"kl_sequence": (0.0, 0.5), "scores_shaped": (5.0, 5.6)}
    assert TrainLoop.tilt_share(loop, closing, 0.1) == pytest.approx(0.6, rel=0.05)
    assert TrainLoop.tilt_share(loop, closing, 0.6) is None  # the most that this KL allows is within the noise
    assert TrainLoop.tilt_share(loop, closing | {"kl_sequence": (0.0, 1e-8)}, 0.01) is None


def test_a_collapsed_run_is_not_praised() -> None:
    run = summary([0.1] * 40)
    run["final"] |= {"rollout/distinct_responses": 0.02}
    figures, after = train_closing(run, TrainConfig.model_validate({"reward": {"kind": "mine.py:f"}}))
    assert [line.endswith(" --plugins") for line in after] == [" eval " in line for line in after]
    assert "score gain" not in figures
    assert "the same text" in figures["responses"]
