from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.builtin.world import world_file
from rlhf_kl.commands.evaluate import _table
from rlhf_kl.commands.evaluate import evaluate as command
from rlhf_kl.data.files import read_rows
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.models.perplexity import perplexity_of, text_sums
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer, save_model
from rlhf_kl.models.scratch import new_gpt2
from rlhf_kl.monitors.kl_shares import kl_shares
from rlhf_kl.report.one_run import read_run
from rlhf_kl.report.texts import held_out_texts
from rlhf_kl.run.log import read_jsonl


def with_errors(*names: str) -> set[str]:
    return {*names, *(f"{name}_stderr" for name in names)}


TEXT_KEYS = with_errors("perplexity", "nats_per_token") | {"bits_per_byte", "tokens", "bytes", "documents"}
OF_BOTH = with_errors("scores", "length", "eos_rate", "distinct_2")
POLICY_KEYS = OF_BOTH | with_errors("kl_token", "kl_sequence", "forward_kl_token")
POLICY_KEYS |= {"unscored", "prompts", "responses", "texts"}


def evaluate(**options: Any) -> dict[str, Any]:
    of_run = not options.keys() & {"model", "config"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        command(**options, plugins=of_run, as_json=True, quiet=True)  # plugins: the reward function of the tiny run
    return dict(json.loads(out.getvalue()))


def problem(**options: Any) -> str:
    with pytest.raises(InputError) as caught:
        evaluate(**options)
    return str(caught.value)


def test_any_model_on_any_texts_and_a_reference_beside_it(
    tiny_folder: Path, tiny_run: Path, tiny_data: Any, tmp_path: Path
) -> None:
    found = evaluate(model=str(tiny_folder), texts=str(tiny_data.texts))
    assert found.keys() == TEXT_KEYS
    texts = [row["text"] for row in read_jsonl(tiny_data.texts)]
    folder = str(tiny_folder)
    direct = perplexity_of([text_sums(LM(load_causal_lm(folder)), load_tokenizer(folder), texts)])
    assert found["perplexity"] == pytest.approx(direct.perplexity)
    assert found["documents"] == len(texts)
    beside = evaluate(model=str(tiny_run / "final"), reference=folder, texts=str(tiny_data.texts))
    assert beside["reference"] == found
    assert beside["perplexity"] != found["perplexity"]
    (tmp_path / "x.csv").write_text("body\nabcd\n")
    assert evaluate(model=str(tiny_folder), texts=str(tmp_path / "x.csv"), column="body")["tokens"] == 4


def test_the_texts_of_a_built_in_world_are_its_held_out_ones() -> None:
    world = "builtin:reviews-small"
    found = evaluate(model=world, texts=world)
    rows = read_rows(Path(world_file(world, "heldout")))
    assert (found["documents"], found["bytes"]) == (len(rows), sum(len(row["text"].encode()) for row in rows))


def test_a_run_agrees_with_its_own_last_evaluation(tiny_run: Path) -> None:
    found = evaluate(run=tiny_run)
    assert found.keys() == TEXT_KEYS | POLICY_KEYS | {"reference"}
    last = json.loads((tiny_run / "summary.json").read_text())["final"]
    assert found["perplexity"] == pytest.approx(last["eval/perplexity"], rel=1e-5)
    assert found["reference"]["perplexity"] == pytest.approx(
        read_jsonl(tiny_run / "metrics.jsonl")[0]["eval/perplexity"], rel=1e-5
    )
    assert found["kl_token"] > 0
    assert found["reference"].keys() == TEXT_KEYS | OF_BOTH


def test_the_texts_of_a_run_are_those_of_its_training_and_its_start_is_the_reference(tiny_run: Path) -> None:
    kept, read = held_out_texts(tiny_run), evaluate(run=tiny_run)
    assert kept
    for one, other in zip(kept, read["texts"], strict=True):
        assert [text["step"] for text in one["policy"]] == [1, 3, 5, 7]
        assert one["policy"][0]["text"] == one["reference"]["text"]
        assert one["policy"][0]["kl"] == pytest.approx(0.0, abs=1e-5)
        assert one["policy"][0]["score"] == pytest.approx(one["reference"]["score"])
        assert (one["prompt"], one["reference"]["text"]) == (other["prompt"], other["reference"]["text"])
        last, now = one["policy"][-1], other["policy"][0]
        assert (last["text"], last["kl"]) == (now["text"], pytest.approx(now["kl"], rel=1e-4))
        assert now["of"] == one["reference"]["of"] == 8
        assert last["score_mean"] == pytest.approx(now["score_mean"])
        assert last["kl"] == pytest.approx(sum(token["kl"] for token in last["tokens"]), rel=1e-5)
    start = evaluate(config=str(tiny_run / "config.yaml"))
    assert (start["kl_token"], start["perplexity"]) == pytest.approx((0.0, start["reference"]["perplexity"]), abs=1e-5)
    assert start["scores"] == pytest.approx(read["reference"]["scores"])
    assert start["length_stderr"] == pytest.approx(read["reference"]["length_stderr"])


def test_a_single_held_out_prompt_tells_no_error(train: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The errors of an evaluation in the run are those of `eval`; those of texts are over the documents."""
    (tmp_path / "one.jsonl").write_text('{"prompt": "ab"}\n')
    last = train(tmp_path / "run", f"eval.prompts={tmp_path}/one.jsonl")["final"]
    found = evaluate(run=tmp_path / "run", samples=40)
    assert (found["prompts"], found["responses"]) == (1, 40)
    assert {name for name, error in found.items() if name.endswith("_stderr") and error is not None} == {
        "perplexity_stderr",
        "nats_per_token_stderr",
    }
    assert last["eval/perplexity_stderr"] == pytest.approx(found["perplexity_stderr"], rel=1e-4)
    assert last["eval/scores_stderr"] is last["eval/kl_token_stderr"] is None
    table = " ".join(_table(found).split())
    several = " ".join(_table(found | {"prompts": 2}).split())
    assert "tells no error" in table
    assert "tells no error" not in several


def test_the_tokens_that_carry_the_kl_of_a_run_and_of_its_evaluation(tiny_run: Path) -> None:
    """In the run's file, in its report and from `eval`: they add up to the KL that is logged."""
    found = evaluate(run=tiny_run, tokens=True)
    table = found.pop("kl_by_token")
    assert found == evaluate(run=tiny_run)
    assert {row["text"] for row in table["tokens"]} <= {*"abcd", "<eos>", "<pad>", "<bos>"}
    kinds = {row["text"]: row["kind"] for row in table["tokens"]}
    assert (kinds["a"], kinds["<eos>"]) == ("token", "eos")
    assert "special" in kinds.values()  # this policy draws pad and bos too
    count = sum(row["count"] for row in table["tokens"])
    assert count == round(found["length"] * found["responses"]) == table["all"]["count"]
    assert math.fsum(row["kl"] for row in table["tokens"]) / count == pytest.approx(found["kl_token"], rel=1e-12)
    kept = kl_shares(read_run(tiny_run).token_parts)
    assert kept is not None
    last = json.loads((tiny_run / "summary.json").read_text())["final"]
    assert kept["all"]["mean_kl"] == pytest.approx(last["eval/kl_token"], rel=1e-12)
    assert {row["step"] for row in read_jsonl(tiny_run / "tokens.jsonl")} == {7}
    assert "--tokens" in problem(model="x", tokens=True)


def test_a_checkpoint_is_the_policy_after_its_update(tiny_run: Path, tmp_path: Path) -> None:
    last, early = evaluate(run=tiny_run, checkpoint=6), evaluate(run=tiny_run, checkpoint=2)
    assert last == evaluate(run=tiny_run)
    assert early["kl_token"] != last["kl_token"]
    row = next(row for row in read_jsonl(tiny_run / "metrics.jsonl") if row["step"] == 3)
    assert early["perplexity"] == pytest.approx(row["eval/perplexity"], rel=1e-5)
    assert "no such checkpoint" in problem(run=tiny_run, checkpoint=5)


def test_an_unfinished_run_is_its_newest_checkpoint_and_may_have_another_reference(
    tiny_run: Path, tmp_path: Path, letters: Any, new_model: Callable[..., Any]
) -> None:
    save_model(new_model(seed=9, spread=0.2), letters, tmp_path / "other")
    copy = Path(shutil.copytree(tiny_run, tmp_path / "copy"))
    shutil.rmtree(copy / "final")
    assert evaluate(run=copy) == evaluate(run=tiny_run)
    assert evaluate(run=copy, reference=str(tmp_path / "other"))["kl_token"] > 0.01
    save_model(
        new_gpt2(vocab_size=9, hidden_size=8, layers=1, heads=1, context=32, tokenizer=letters, seed=0),
        letters,
        tmp_path / "larger",
    )
    assert "another vocabulary" in problem(run=copy, reference=str(tmp_path / "larger"))
    shutil.rmtree(copy / "checkpoints")
    assert re.search(f"{copy}: .*checkpoint", problem(run=copy))
