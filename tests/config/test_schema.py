from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_kl.config.schema import MODELS, KLSection, Section, SFTConfig, TrainConfig, section_of


def fields(model: type[Section]) -> list[tuple[str, Any]]:
    pairs = []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        pairs += [(name, field)] if section is None else fields(section)
    return pairs


@pytest.mark.parametrize("model", MODELS.values())
def test_every_key_is_described_and_has_a_default(model: type[Section]) -> None:
    assert [name for name, field in fields(model) if not field.description] == []
    # But for what a policy of one's own must be given.
    required = {name for name, field in fields(model) if field.is_required()}
    needed = {TrainConfig: {"model", "prompts", "texts"}, SFTConfig: {"texts"}}
    assert required == needed.get(model, set())


def test_the_documented_defaults() -> None:
    config = TrainConfig()
    assert (config.kl.target, config.kl.unit, config.kl.estimator) == (0.1, "token", "exact")
    assert (config.kl.controller.kind, config.kl.controller.coef) == ("adaptive", "auto")
    assert (config.ppo.total_episodes, config.ppo.learning_rate, config.ppo.lam) == (3840, "auto", 0.95)
    assert config.updates == 60
    assert config.run.output_dir == "runs/run"


@pytest.mark.parametrize(("episodes", "updates"), [(1, 1), (64, 1), (65, 2), (3840, 60)])
def test_episodes_round_up_to_whole_batches(episodes: int, updates: int) -> None:
    assert TrainConfig.model_validate({"ppo": {"total_episodes": episodes}}).updates == updates


@pytest.mark.parametrize(("word", "nats"), [("conservative", 0.02), ("moderate", 0.075), ("aggressive", 0.15)])
def test_a_preset_is_nats_per_token(word: str, nats: float) -> None:
    assert KLSection.model_validate({"target": word}).target_value == nats
    with pytest.raises(ValidationError):
        KLSection.model_validate({"target": word, "unit": "sequence"})


@pytest.mark.parametrize(
    ("ceiling", "nats"),
    [({"value": "1.5x"}, 0.3), ({"value": "2x"}, 0.4), ({"value": 0.25}, 0.25), (None, None)],
)
def test_a_ceiling_is_nats_or_a_multiple_of_the_target(ceiling: Any, nats: float | None) -> None:
    kl = KLSection.model_validate({"target": 0.2, "ceiling": ceiling})
    assert kl.ceiling_value == (None if nats is None else pytest.approx(nats))


def test_static_is_stored_as_fixed_and_may_hold_beta_at_zero() -> None:
    kl = KLSection.model_validate({"controller": {"kind": "static", "coef": 0}})
    assert (kl.controller.kind, kl.controller.coef) == ("fixed", 0.0)
    with pytest.raises(ValidationError):
        KLSection.model_validate({"controller": {"kind": "pid", "coef": 0}})


def test_the_reward_models_name_is_only_there_for_a_model() -> None:
    assert TrainConfig().reward.model == "builtin:reviews"
    reward = TrainConfig.model_validate({"reward": {"kind": "mine.py:f", "words": 3}}).reward
    assert reward.model is None
    assert reward.options == {"words": 3}


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\\b", "a\nb"])
def test_a_run_name_is_one_folder(name: str) -> None:
    with pytest.raises(ValidationError):
        SFTConfig.model_validate({"run": {"name": name}})


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "gpu", "CPU", "cuda:0 "])
def test_devices_are_the_known_ones(device: str) -> None:
    assert TrainConfig.model_validate({"run": {"device": "cuda:1"}}).run.device == "cuda:1"
    with pytest.raises(ValidationError):
        TrainConfig.model_validate({"run": {"device": device}})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        TrainConfig().run.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "placement", "estimator"),
    [
        ({}, "rao_blackwell", "exact"),
        ({"placement": None, "estimator": None}, "rao_blackwell", "exact"),
        ({"estimator": "exact"}, "rao_blackwell", "exact"),
        ({"placement": "rao_blackwell"}, "rao_blackwell", "exact"),
        ({"placement": "reward"}, "reward", "k1"),
        ({"placement": "loss"}, "loss", "k1"),
        ({"estimator": "k3"}, "reward", "k3"),
        ({"estimator": "k1", "placement": None}, "reward", "k1"),
        ({"placement": "reward", "estimator": "exact"}, "reward", "exact"),
    ],
)
def test_placement_and_estimator_follow_from_each_other(
    written: dict[str, Any], placement: str, estimator: str
) -> None:
    section = KLSection.model_validate(written)
    assert (section.placement, section.estimator) == (placement, estimator)


def test_the_schema_for_editors_allows_the_null_of_the_shipped_config() -> None:
    for key in ("placement", "estimator"):
        schema = KLSection.model_json_schema()["properties"][key]
        assert None in schema["enum"]
        assert "null" in schema["type"]
