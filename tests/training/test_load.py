from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tokenizers import processors

from rlhf_kl.config.named import scorers_of
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.eval import EvalSection
from rlhf_kl.config.schema.reward import RewardSection, ScorerSection
from rlhf_kl.config.schema.supervised import PairsSection, SFTDataSection
from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data.rows import Labelled, Pair, PromptRow, read_texts
from rlhf_kl.errors import InputError
from rlhf_kl.training import sets
from rlhf_kl.training.load import Loader, check_reference
from rlhf_kl.training.setup import build_prompts
from rlhf_kl.training.world_files import with_files
from rlhf_kl.types import Prompts, Responses
from tests.made import Make, problem
from tests.runs import jsonl

SMALL = "builtin:reviews-small"
HELD = EvalSection(texts="t.txt")


@pytest.fixture
def loader() -> Loader:
    return Loader()


def test_a_built_in_world_stands_behind_its_name(loader: Loader) -> None:
    config = with_files(TrainConfig.model_validate({"policy": {"model": SMALL}}))
    assert {*loader.tokenizer(config.policy.model, "policy.model").get_vocab()} > {"\u0120hotel", "\u0120because"}
    train, kept = sets.prompts(config.data, config.eval)
    assert len(train) == 400
    assert len(kept) == 64
    assert not {row.text for row in train} & {row.text for row in kept}
    read = partial(read_texts, column="text")
    assert len(sets.load("eval.texts", config.eval.texts, "test", read)) == 60
    assert len(sets.load("eval.texts", config.eval.texts, "test", read, 7)) == 7
    scorers = loader.scorers(scorers_of(config))
    assert scorers.model is not None
    assert scorers.judge(answered("The hotel in Oslo:", ""), {})["gold"] == [-4.0]


@pytest.mark.parametrize("base", ["/home/ana/old/llama", "./llama"])
def test_the_file_that_names_a_base_which_has_moved_is_named(loader: Loader, base: str, tmp_path: Path) -> None:
    for task in ("CAUSAL_LM", "SEQ_CLS"):
        text = json.dumps({"base_model_name_or_path": base, "task_type": task})
        (tmp_path / "adapter_config.json").write_text(text)
        (tmp_path / "adapter_model.safetensors").touch()
        load = loader.language_model if task == "CAUSAL_LM" else partial(loader.reward_model, section=ScorerSection())
        words = problem(load, str(tmp_path), "policy.model")
        assert words.startswith(f"policy.model: {tmp_path}/adapter_config.json: base_model_name_or_path: ")
        assert f"folder: {base}" in words


def test_prompts_that_are_all_the_same_to_the_tokenizer(new_model: Make, letters: Any) -> None:
    config = TrainConfig.model_validate({"policy": {"model": SMALL}, "rollout": {"max_new_tokens": 4}})
    rows = [PromptRow(text, {}) for text in "xyz"]  # which it does not know
    words = problem(build_prompts, config, (rows[:2], rows[2:]), new_model(), letters)
    assert words.startswith("data.prompts: ")
    assert "of 'x' than [1, 0]" in words  # what its tokenizer makes of it


def answered(prompt: str, response: str) -> Responses:
    return Responses(Prompts([prompt], [[]], [{}], [()]), [response], [[]])


def prompts(path: str) -> PromptsSection:
    return PromptsSection(prompts=path, column="q")


def test_of_a_file_some_prompts_are_kept_apart_and_none_leaks(tmp_path: Path) -> None:
    rows = [{"q": f"prompt {i % 40}"} for i in range(100)]  # each of 40 two or three times
    train, kept = sets.prompts(prompts(jsonl(tmp_path / "p.jsonl", rows)), HELD)
    assert len(kept) == 4
    assert not {row.text for row in train} & {row.text for row in kept}
    assert {row.text for row in train + kept} == {row["q"] for row in rows}
    few = prompts(jsonl(tmp_path / "few.jsonl", rows[:2]))  # which serve for both
    assert [[row.text for row in part] for part in sets.prompts(few, HELD)] == [["prompt 0", "prompt 1"]] * 2


def test_held_out_prompts_that_are_named_win(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "p.jsonl", [{"q": f"{i}"} for i in range(40)])
    own = jsonl(tmp_path / "h.jsonl", [{"q": "mine"}])
    assert sets.prompts(prompts(train), EvalSection(texts="t.txt", prompts=own))[1] == [("mine", {"q": "mine"}, ())]


def test_a_slice_and_the_name_of_a_split_are_read_for_a_file(tmp_path: Path, caplog: Any) -> None:
    file = jsonl(tmp_path / "p.jsonl", [{"q": f"{i}", "text": f"{i}"} for i in range(40)])
    own = jsonl(tmp_path / "h.jsonl", [{"q": f"mine {i}"} for i in range(6)])
    section = prompts(file)
    train, _ = sets.prompts(section.model_copy(update={"split": "train[30:]"}), HELD)
    assert [row.text for row in train] == [str(i) for i in range(30, 40)]
    held = EvalSection(texts="t.txt", prompts=own, split="test[:2]")
    assert [row.text for row in sets.prompts(section, held)[1]] == ["mine 0", "mine 1"]
    other = section.model_copy(update={"split": "test"})
    words = problem(sets.prompts, other, HELD)
    assert words.startswith(f"data.prompts: {file}: ")
    assert "'test' (data.split)" in words
    held = EvalSection(texts="t.txt", prompts=own, split="validation[:1]")
    assert "(eval.split)" in problem(sets.prompts, section, held)
    held = held.model_copy(update={"texts": "owner/name"})  # whose split it names
    assert [row.text for row in sets.prompts(section, held)[1]] == ["mine 0"]
    texts = SFTDataSection(texts=file, eval_texts=file, eval_split="tset")
    assert "(data.eval_split)" in problem(sets.documents, texts)


def test_files_of_a_folder_that_are_not_read_are_told(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (folder := tmp_path / "mine").mkdir()
    jsonl(folder / "a.jsonl", [{"q": "a"}])
    (folder / "b.csv").write_text("q\nb\n")
    section = prompts(str(folder))
    assert sets.load("data.prompts", section.prompts, "train", sets.prompt_reader(section)) == [("a", {"q": "a"}, ())]
    [line] = [line for line in caplog.messages if line.startswith("data.prompts: ")]
    assert "b.csv" in line


def test_some_rows_are_drawn_from_all_of_a_sorted_file() -> None:
    few = sets.drawn(range(1000), 50)
    assert few == sorted(set(few)) == sets.drawn(range(1000), 50)
    assert 300 < fmean(few) < 700


def test_pairs_of_a_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"p": "a", "good": "b", "bad": "c"}, {"p": "d", "good": "x", "bad": "y"}])
    kept = jsonl(tmp_path / "y.jsonl", [{"p": "d", "good": "e", "bad": "f"}])  # its prompt is not trained on
    section = PairsSection(pairs=path, eval_pairs=kept, prompt_column="p", chosen_column="good", rejected_column="bad")
    assert sets.pairs(section) == ([Pair("a", "b", "c")], [Pair("d", "e", "f")])


def test_what_is_held_out_by_name_is_not_trained_on(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "t.jsonl", [{"text": "a"}, {"text": "b"}, {"text": "c"}])
    kept = jsonl(tmp_path / "h.jsonl", [{"text": "b"}])
    assert sets.documents(SFTDataSection(texts=train, eval_texts=kept)) == (["a", "c"], ["b"])
    with pytest.raises(InputError, match=r"^data\.texts: every row"):
        sets.documents(SFTDataSection(texts=kept, eval_texts=kept))
    labels = jsonl(tmp_path / "l.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": 0}])
    apart = jsonl(tmp_path / "m.jsonl", [{"text": "b", "label": 0}])
    rest, held = sets.labelled(PairsSection(labels=labels, eval_pairs=apart))
    assert (rest, held) == ([Labelled("a", 1.0)], [Labelled("b", 0.0)])


def test_prompts_in_the_form_of_conversations_and_of_columns(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]
    rows = [{"q": turns}, {"q": [*turns, turns[0]]}, {"q": "plain"}]
    file = jsonl(tmp_path / "c.jsonl", rows)
    plain = PromptsSection(prompts=file, column="q", chat_template=False)
    assert [row.text for row in sets.prompts(plain, HELD)[0]] == ["why?", "plain"]
    assert [len(row.messages) for row in sets.prompts(prompts(file), HELD)[0]] == [1, 3, 0]
    posts = jsonl(tmp_path / "t.jsonl", [{"title": "T", "post": "P {x}"}])
    section = PromptsSection(prompts=posts, template="{{{title}}} {post}\nTL;DR:")
    assert sets.prompts(section, HELD)[0][0].text == "{T} P {x}\nTL;DR:"
    with pytest.raises(InputError, match=r"'ttle'.* title\?"):
        sets.prompts(PromptsSection(prompts=posts, template="{ttle}"), HELD)


def test_several_scorers_with_weights(loader: Loader, tiny_data: Any, tiny_reward_folder: Path) -> None:
    terms = {
        "a": {"kind": tiny_data.reward, "weight": 2.0},
        "b": {"kind": tiny_data.reward, "letter": "b", "weight": -1.0},
        "model": {"model": str(tiny_reward_folder), "weight": 0.5},
    }
    watched = {"same": {"model": str(tiny_reward_folder)}, "count": {"kind": tiny_data.reward, "letter": "b"}}
    raw = {"reward": {"kind": "sum", "terms": terms}, "eval": {"texts": "t.txt", "scorers": watched}}
    together = loader.scorers(scorers_of(TrainConfig.model_validate(raw | {"data": {"prompts": "p.txt"}})))
    one = answered("x", "aab")
    alone = float(loader.scorers({"reward": RewardSection(model=str(tiny_reward_folder))})(one)["reward"])
    assert float(together(one)["reward"]) == pytest.approx(2 * 0.25 - 0.125 + 0.5 * alone, rel=1e-5)
    reward = float(together(one)["reward"])
    assert together.judge(one, {}) == {"reward": [reward], "same": [alone], "count": [0.125]}
    assert together.column_names == ["letter"]  # it has a default, which a column of the data would replace


def test_two_models_have_a_kl_where_only_the_bos_of_their_tokenizers_differs(letters: Any, new_model: Any) -> None:
    """Both read the policy's tokens."""
    model, plain = new_model(), copy.deepcopy(letters)
    plain.backend_tokenizer.post_processor = processors.Sequence([])
    assert (letters("ab")["input_ids"], plain("ab")["input_ids"]) == ([1, 3, 4], [3, 4])
    check_reference(model, letters, model, plain, ["ab"])
    check_reference(model, plain, model, letters, ["ab"])
