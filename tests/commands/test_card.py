"""The model card in `final/`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.commands.card import model_card
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.run.jsonl import read_jsonl


def test_a_run_has_one_with_its_figures(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (tiny_run / "final" / "README.md").read_text()
    closing = read_jsonl(tiny_run / "metrics.jsonl")[-1]
    cells = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", card, flags=re.MULTILINE))
    assert float(cells["held-out perplexity"]) == pytest.approx(closing["eval/perplexity"], rel=0.01)
    assert float(cells["forgetting"].split()[0]) == pytest.approx(closing["eval/forward_kl_token"], abs=5e-4)
    assert str(tiny_run.parent) not in card  # cards are made to be shared
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(tiny_run / "final")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"].config.vocab_size == len(names["tokenizer"])


@pytest.mark.parametrize(("lora", "library"), [(None, "transformers"), ({"r": 4}, "peft")])
def test_what_the_hub_reads_of_it(lora: Any, library: str, tiny_settings: Callable[..., Any]) -> None:
    config = TrainConfig.model_validate(
        {"policy": {"model": "owner/base", "lora": lora}, "reward": {"model": "owner/score"}}
        | {"data": {"prompts": "owner/prompts"}, "eval": {"texts": "owner/texts"}}
    )
    card = model_card(config, [{"kl/token": 0.5, "kl/coef": 2.0}] * 3, {"eval/perplexity": 3.0})
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["library_name"]) == ("owner/base", library)
    assert "| KL reached | 0.500 nats per token |" in card
    assert ("peft=." in card) == (lora is not None)
