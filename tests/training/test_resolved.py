"""What a config leaves open is decided before anything is built; the stored config tells it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.pretrained import load_causal_lm
from rlhf_kl.training.load import Loader
from rlhf_kl.training.resolved import resolve

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}d"
TALK = [{"role": "user", "content": "ab"}]


def test_the_stored_config_names_the_world_and_the_other_its_files() -> None:
    resolved = resolve(TrainConfig.model_validate({"run": {"device": "cpu", "dtype": "auto"}}))
    stored, config = resolved.stored, resolved.config
    assert stored.policy.model == stored.data.prompts == stored.eval.texts == "builtin:reviews"
    assert stored.eval.prompts is None
    assert Path(config.policy.model).is_dir()
    assert Path(config.data.prompts).is_file()
    assert config.eval.prompts is not None
    assert stored.run.dtype == config.run.dtype == "float32"
    assert stored.data.chat_template is config.data.chat_template is False
    assert resolved.rows[0][0].text
    assert resolved.texts


@pytest.mark.parametrize(("has_template", "rows", "chat"), [(1, [TALK], True), (0, [TALK], False), (1, ["ab"], False)])
def test_auto_is_decided_by_prompts_and_tokenizer(
    tiny_settings: dict[str, Any], tiny_folder: Path, tmp_path: Path, has_template: int, rows: list[Any], chat: bool
) -> None:
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    shutil.copytree(tiny_folder, model)
    if has_template:
        (model / "chat_template.jinja").write_text(CHAT)
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    own = {"policy": {"model": str(model)}, "data": {"prompts": str(prompts)}}
    resolved = resolve(TrainConfig.model_validate(tiny_settings | own))
    assert resolved.stored.data.chat_template is resolved.config.data.chat_template is chat


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(tiny_folder: Path, tmp_path: Path) -> None:
    base = load_causal_lm(str(tiny_folder))
    policy = add_adapter(base, r=2, alpha=4.0, target_modules=None, ref=str(tiny_folder), seed=0)
    policy.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer_config.json").exists()
    loader = Loader()
    whole = loader.tokenizer(str(tiny_folder), "policy.model")
    assert loader.tokenizer(str(tmp_path), "policy.model").get_vocab() == whole.get_vocab()
