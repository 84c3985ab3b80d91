"""What a reward model reads: as the config says, else as its folder says; what is guessed, or cut, is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.config.schema.reward import ScorerSection
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.training.load import Loader
from tests.made import problem

CHAT = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"


@pytest.fixture
def chatty(tiny_reward_folder: Path, tmp_path: Path) -> Path:
    """A decoder whose tokenizer has a chat template."""
    folder = shutil.copytree(tiny_reward_folder, tmp_path / "chatty")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT}))
    return folder


@pytest.fixture
def encoder(letters: Any, tmp_path: Path) -> Path:
    """A RoBERTa with one output, as cross-encoders are: it has no token types."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = RobertaConfig(
        vocab_size=7, num_labels=1, max_position_embeddings=18, type_vocab_size=1, **special, **sizes
    )
    RobertaForSequenceClassification(config).save_pretrained(tmp_path / "encoder")
    letters.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def loaded(folder: Path, **keys: Any) -> RewardModel:
    section = ScorerSection(model=str(folder), **keys)
    return Loader().reward_model(str(folder), "reward.terms.a.model", section)


def test_an_eos_that_is_written_but_not_read_is_refused(encoder: Path, tiny_reward_folder: Path) -> None:
    words = problem(loaded, encoder, append_eos=True)
    assert words.startswith("reward.terms.a.model: ")
    assert "reward.terms.a.append_eos" in words
    assert loaded(encoder).encoder
    assert not loaded(tiny_reward_folder, append_eos=False).form.append_eos
