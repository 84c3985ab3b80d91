"""What a reward model reads: as the config says, else as its folder says; what is guessed, or cut, is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_kl.config.schema.reward import ScorerSection
from rlhf_kl.data.rows import Labelled, Pair
from rlhf_kl.rewards.model import RewardModel, save_reward_model
from rlhf_kl.supervised.kinds import LabelTask, PairTask
from rlhf_kl.training.load import Loader
from tests.made import numbers, problem

CHAT = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT


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


@pytest.mark.parametrize("chat", [False, True])
def test_a_classifier_whose_padding_is_its_eos_is_read_as_transformers_reads_it(chatty: Path, chat: bool) -> None:
    """TRL trains such ones where a tokenizer has no pad token; the state of the EOS was never trained."""
    file = chatty / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 2, "eos_token_id": 2}))
    reward = loaded(chatty, chat_template=chat)
    reward.tokenizer.pad_token = reward.tokenizer.eos_token
    texts = ["a" + answer for answer in ("b", "cd", "dddc")]
    rows = [[*reward.tokenizer(text)["input_ids"], 2] for text in texts]
    with torch.no_grad():
        theirs = [float(reward.model(torch.tensor([row])).logits[0, 0]) for row in rows]
    if not chat:
        assert reward.score(["a"] * 3, ["b", "cd", "dddc"]).tolist() == pytest.approx(theirs, abs=1e-5)
        asked = loaded(chatty, chat_template=False, append_eos=True).score(["a"], ["b"])  # as the config says
        assert abs(float(asked[0]) - theirs[0]) > 1e-4
    assert all(row[-1] != 2 for row in reward.encode(["a"] * 3, ["b", "cd", "dddc"]))
    save_reward_model(reward, chatty.parent / "own")  # trained here, where an EOS ends each text
    assert json.loads((chatty.parent / "own" / "config.json").read_text()).get("pad_token_id") is None
    own = loaded(chatty.parent / "own")
    assert own.ignored is None
    assert own.form.append_eos


def test_an_eos_that_is_written_but_not_read_is_refused(encoder: Path, tiny_reward_folder: Path) -> None:
    words = problem(loaded, encoder, append_eos=True)
    assert words.startswith("reward.terms.a.model: ")
    assert "reward.terms.a.append_eos" in words
    assert loaded(encoder).encoder
    assert not loaded(tiny_reward_folder, append_eos=False).form.append_eos


def test_a_chat_template_that_is_not_used_is_told_unless_the_config_or_the_folder_decides(
    chatty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = loaded(chatty)
    assert "chat template" in reward.doubt
    assert reward.advice.startswith("reward.terms.a.chat_template=true")
    assert [line.partition(": ")[0] for line in caplog.messages] == ["reward.terms.a.model"]
    assert reward.encode(["ab"], ["c"]) == [[1, 3, 4, 5, 2]]
    caplog.clear()
    for chat, read in ((True, [3, 4, 2, 5, 2]), (False, [1, 3, 4, 5, 2])):
        reward = loaded(chatty, chat_template=chat)
        assert (reward.doubt, reward.encode(["ab"], ["c"])) == ("", [read])
    file = chatty / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rlhf_kl_format": {"chat": False}}))
    assert loaded(chatty).doubt == ""
    assert not caplog.messages


def test_a_likely_model_of_pairs_is_told_also_without_token_types(encoder: Path) -> None:
    assert "reward.terms.a.text_pair=true" in loaded(encoder).advice
    assert [loaded(encoder, text_pair=pair).doubt for pair in (True, False)] == ["", ""]
    file = encoder / "config.json"
    config = json.loads(file.read_text())
    for labels, told in ((["neg", "pos"], False), (["contradiction", "entailment"], True)):
        file.write_text(json.dumps(config | {"id2label": dict(enumerate(labels))}))
        weights = load_file(encoder / "model.safetensors")
        weights["classifier.out_proj.weight"] = torch.zeros(2, 8)
        weights["classifier.out_proj.bias"] = torch.zeros(2)
        save_file(weights, encoder / "model.safetensors")
        assert bool(loaded(encoder, label=labels[1]).doubt) == told


def test_what_is_read_is_shown_with_its_special_tokens(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_kl.rewards.model.EXAMPLE", (["a"], ["c"]))
    assert loaded(chatty).shown() == "<bos>ac<eos>"
    assert loaded(chatty, append_eos=False).shown() == "<bos>ac"
    assert loaded(chatty, chat_template=True).shown() == "a<eos>c<eos>"


def test_texts_that_lose_their_beginning_are_counted_and_told_once(
    tiny_reward_folder: Path, encoder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text that just fits is whole, and one that is a token longer is not."""
    cases: list[tuple[Path, dict[str, Any], list[str]]] = [
        (tiny_reward_folder, {}, ["a" * 29, "a" * 30, "a" * 90]),  # with bos, eos and the response's token: 32
        (encoder, {"text_pair": False}, ["a" * 15, "a" * 16, "a" * 90]),  # with bos and the response's token: 17
        (encoder, {"text_pair": True}, ["a" * 16, "a" * 17, "a" * 90]),  # here no bos is in the form of pairs
    ]
    for folder, keys, prompts in cases:
        reward = loaded(folder, **keys)
        assert reward.limit == len(reward.encode(prompts[:1], ["b"])[0])
        assert [reward.read(prompts[:n], ["b"] * n).shortened for n in (1, 2, 3)] == [0, 1, 2]
        assert not caplog.messages
        reward.score(prompts[:1], ["b"])
        assert not caplog.messages
        for _ in range(2):
            reward.score(prompts, ["b"] * 3)
        [line] = caplog.messages
        assert line.startswith("reward.terms.a.model: ")
        assert numbers(line) == [2, 3, reward.limit]
        caplog.clear()


def test_the_training_of_a_reward_model_tells_what_is_cut(
    tiny_reward_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [Pair("a" * 40, "b", "c"), Pair("a" * 29, "b", "cc"), Pair("a", "b", "c")]
    task = PairTask(loaded(tiny_reward_folder), pairs, pairs)
    assert task.lengths == [32, 32, 4]
    assert [(note.partition(":")[0], numbers(note)) for note in task.notes] == [("data.pairs", [3, 6, 32])]
    task.evaluate()
    assert not caplog.messages
    assert PairTask(loaded(tiny_reward_folder), pairs[2:]).notes == []
    task = LabelTask(loaded(tiny_reward_folder), [Labelled("a" * 40, 1.0), Labelled("b", 0.0)])  # type: ignore[assignment]
    assert [(note.partition(":")[0], numbers(note)) for note in task.notes] == [("data.labels", [1, 2, 32])]


@pytest.mark.parametrize("template", [CHAT, REFUSES])
def test_a_chat_has_the_system_message_of_the_policy_or_that_of_its_row(
    template: str, chatty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that the template refuses is left out, which is told once."""
    file = chatty / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    own = (("system", "c"), ("user", "a"))
    sections = {
        name: ScorerSection(model=str(chatty), chat_template=chat) for name, chat in (("a", True), ("b", False))
    }
    plain, system = Loader().scorers(sections).models, Loader().scorers(sections, system="d").models
    refused = template == REFUSES
    first = [[], []] if refused else [[6, 2], [5, 2]]
    assert plain["a"].encode(["a"], ["b"]) == [[3, 2, 4, 2]]
    assert not caplog.messages
    for _ in range(2):
        read = system["a"].encode(["a", own], ["b", "b"])
        assert read == [[*before, 3, 2, 4, 2] for before in first]
    assert [line.partition(":")[0] for line in caplog.messages] == ["a.model"] * refused
    assert system["b"].encode(["a"], ["b"]) == [[1, 3, 4, 2]]  # it reads texts, not chats
