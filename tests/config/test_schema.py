"""Keys, defaults, and what follows from other values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_kl.config.resolve import gradient_notes, unused_notes
from rlhf_kl.config.schema import MODELS, Section, SFTConfig, TrainConfig, section_of
from rlhf_kl.config.schema.control import KLSection
from rlhf_kl.config.schema.reward import RewardSection
from rlhf_kl.config.schema.supervised import PairsSection, SFTDataSection, SFTPolicySection


@pytest.mark.parametrize("model", MODELS.values())
def test_every_key_is_described_and_has_a_default(model: type[Section]) -> None:
    assert [key for key, field in leaves(model) if not field.description] == []
    # But for what a policy of one's own must be given.
    required = {key.rpartition(".")[2] for key, field in leaves(model) if field.is_required()}
    assert required == {TrainConfig: {"model", "prompts", "texts"}, SFTConfig: {"texts"}}.get(model, set())


def leaves(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from leaves(section, f"{prefix}{name}.")


@pytest.mark.parametrize(
    ("raw", "name", "value"),
    [
        *(({"ppo": {"total_episodes": n}}, "updates", u) for n, u in ((1, 1), (64, 1), (65, 2), (3840, 60))),
        *(
            ({"rollout": {"batch_size": b}}, "minibatch_size", m)
            for b, m in ((64, 16), (6, 2), (10, 5), (7, 7), (1, 1))
        ),
        *(
            ({"ppo": {"total_episodes": n}}, "reference_samples", s)
            for n, s in ((64, 64), (384, 96), (640, 128), (3840, 480), (51200, 1024))
        ),
        ({"rollout": {"reference_samples": 7}}, "reference_samples", 7),
        ({"ppo": {"total_episodes": 128, "value_warmup": 1}}, "controlled_updates", 1),
        ({"ppo": {"advantage": "grpo"}, "rollout": {"samples_per_prompt": 4}}, "critic", None),
        ({}, "critic_lam", 1.0),
        ({"policy": {"value": "head"}, "ppo": {"lam": 0.9}}, "critic_lam", 0.9),
    ],
)
def test_what_follows_from_other_keys(raw: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(TrainConfig.model_validate(raw), name) == value


EXACT = {"placement": "rao_blackwell", "estimator": "exact"}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"target": "conservative"}, {"target_value": 0.02}),
        ({"target": "moderate"}, {"target_value": 0.075}),
        ({"target": "aggressive"}, {"target_value": 0.15}),
        ({"target": 0.2, "ceiling": {"value": "1.5x"}}, {"ceiling_value": pytest.approx(0.3)}),
        ({"target": 0.2, "ceiling": {"value": 0.25}}, {"ceiling_value": 0.25}),
        ({"ceiling": None}, {"ceiling_value": None}),
        # placement and estimator follow from each other
        ({}, EXACT),
        ({"placement": None, "estimator": None}, EXACT),
        ({"estimator": "exact"}, EXACT),
        ({"placement": "rao_blackwell"}, EXACT),
        ({"placement": "reward"}, {"placement": "reward", "estimator": "k1"}),
        ({"placement": "loss"}, {"placement": "loss", "estimator": "exact"}),
        ({"estimator": "k3"}, {"placement": "reward", "estimator": "k3"}),
        ({"placement": "reward", "estimator": "exact"}, {"placement": "reward", "estimator": "exact"}),
    ],
)
def test_what_a_section_on_kl_leaves_out(written: dict[str, Any], expected: dict[str, Any]) -> None:
    section = KLSection.model_validate(written)
    assert {name: getattr(section, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("kl", "noted"),
    [
        ({}, False),
        ({"placement": "loss", "estimator": "k2"}, False),
        ({"placement": "loss", "estimator": "exact"}, False),
        ({"estimator": "k3"}, True),
        ({"placement": "reward", "estimator": "exact"}, True),
        ({"placement": "loss", "estimator": "k1"}, True),
        ({"estimator": "importance"}, True),
        ({"estimator": "importance", "controller": {"kind": "fixed", "coef": 0.0}}, False),
    ],
)
def test_choices_that_are_no_kl_gradient_are_said(kl: dict[str, Any], noted: bool) -> None:
    assert len(gradient_notes(TrainConfig.model_validate({"kl": kl}))) == noted


LABELS = {"labels": "l.csv"}
RESPONSES = {"texts": "t.jsonl", "response_column": "answer"}
MODEL = {"model": "m"}


@pytest.mark.parametrize(
    ("section", "raw", "key", "reader"),
    [
        (PairsSection, LABELS | {"template": "{title}"}, "data.template", "data.pairs"),
        (PairsSection, LABELS | {"chat_template": True}, "data.chat_template", "data.pairs"),
        (PairsSection, LABELS | {"chosen_column": "a"}, "data.chosen_column", "data.pairs"),
        (PairsSection, {"pairs": "p.csv", "label_column": "a"}, "data.label_column", "data.labels"),
        (PairsSection, {"pairs": "p.csv", "eval_split": "a"}, "data.eval_split", "data.eval_pairs"),
        (SFTDataSection, RESPONSES | {"column": "body"}, "data.column", "data.response_column"),
        (SFTDataSection, RESPONSES | {"system": "c"}, "data.system", "data.chat_template"),
        (SFTDataSection, {"texts": "t.jsonl", "prompt_column": "p"}, "data.prompt_column", "data.response_column"),
        (SFTDataSection, {"texts": "t.jsonl", "eval_split": "dev"}, "data.eval_split", "data.eval_texts"),
        (SFTPolicySection, MODEL | {"architecture": {"layers": 4}}, "policy.architecture", "policy.model"),
        (
            RewardSection,
            MODEL | {"chat_template": True, "append_eos": True},
            "reward.append_eos",
            "reward.chat_template",
        ),
        (RewardSection, MODEL | {"chat_template": True, "text_pair": True}, "reward.text_pair", "reward.chat_template"),
        (RewardSection, MODEL | {"text_pair": True, "append_eos": False}, "reward.append_eos", "reward.text_pair"),
        (RewardSection, MODEL | {"interface": "trl"}, "reward.interface", "reward.kind"),
        (RewardSection, {"kind": "m.py:f", "append_eos": True}, "reward.append_eos", "reward.kind"),
    ],
)
def test_a_written_key_that_nothing_reads_is_refused(
    section: type[Section], raw: dict[str, Any], key: str, reader: str
) -> None:
    """A stored config writes every key: one with the value of its default is none."""
    with pytest.raises(ValidationError) as caught:
        section.model_validate(raw)
    assert re.search(rf"{key} .* {reader} ", str(caught.value))
    name = key.partition(".")[2]
    default = section.model_fields[name].get_default(call_default_factory=True)
    section.model_validate(raw | {name: default})


RLOO = {"rollout": {"samples_per_prompt": 2}}


@pytest.mark.parametrize(
    ("raw", "unused"),
    [
        ({}, []),
        ({"ppo": {"vf_coef": 0.5, "critic_epochs": 2}}, ["ppo.vf_coef"]),
        ({"policy": {"value": "head"}, "ppo": {"vf_coef": 0.5, "critic_epochs": 2}}, ["ppo.critic_epochs"]),
        ({"ppo": {"scale_by_group_std": False}}, ["ppo.scale_by_group_std"]),
        (RLOO | {"policy": {"value": "head"}, "ppo": {"advantage": "rloo", "lam": 0.5}}, ["ppo.lam", "policy.value"]),
        ({"rollout": {"engine_options": {"seed": 1}}}, ["rollout.engine_options"]),
        ({"rollout": {"engine": "vllm", "engine_options": {"seed": 1}}}, []),
    ],
)
def test_keys_that_the_run_does_not_use_are_said(raw: dict[str, Any], unused: list[str]) -> None:
    config = TrainConfig.model_validate(raw)
    assert [note.partition(" ")[0] for note in unused_notes(config)] == unused
