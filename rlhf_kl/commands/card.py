"""The model card of a trained policy: `README.md` in `final/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.report.control import end
from rlhf_kl.run.figures import format_number, read_number

CARD = """---
{front}---

# {name}

{base}, trained with PPO toward a reward while the KL divergence to the reference was held, by
rlhf-kl {version}.

| | |
|---|---|
{table}

The KL is exact, over the whole vocabulary, and its mean is over the last ten updates. Forgetting is the KL of the
reference to the policy, on samples of the reference.

## Load it

```python
{load}
```

## Repeat it

`config.yaml` of the run holds every setting.

```bash
rlhf-kl train --config {name}.yaml
```

## Share and evaluate it

```bash
hf upload OWNER/{name} .                        # from this folder
lm_eval --model hf --model_args {lm_eval} --tasks hellaswag
```
"""


def model_card(config: TrainConfig, rows: Sequence[Mapping[str, Any]], closing: Mapping[str, Any]) -> str:
    """Markdown. `rows`: those of all updates; `closing`: the closing evaluation."""
    kl, name = config.kl, config.run.name
    base = _hub_name(config.policy.model)
    front: dict[str, Any] = {"tags": ["rlhf", "ppo", "rlhf-kl"], "library_name": "transformers"}
    adapter = config.policy.lora is not None
    if adapter:
        front["library_name"] = "peft"
    if "/" in base and not base.startswith("builtin:"):
        front["base_model"] = base
    unit = f"nats per {kl.unit}"
    reached = _mean(end(rows), f"kl/{kl.unit}")
    lines = {
        "base model": base,
        "reference": _hub_name(config.reference.model) if config.reference.model else "the base model",
        "prompts": _hub_name(config.data.prompts or ""),
        "reward": _hub_name(config.reward.model or config.reward.kind),
        "KL target": f"{format_number(kl.target_value)} {unit}",
        "KL reached": f"{format_number(reached)} {unit}",
        "controller": f"{kl.controller.kind}, beta {format_number(_mean(end(rows), 'kl/coef'))} at the end",
        "score": format_number(_mean(end(rows), "objective/scores")),
        "held-out perplexity": format_number(read_number(closing, "eval/perplexity")),
        "forgetting": f"{format_number(read_number(closing, 'eval/forward_kl_token'))} nats per token",
        "responses trained on": str(config.updates * config.rollout.batch_size),
        "seed": str(config.run.seed),
    }
    return CARD.format(
        front=yaml.safe_dump(front, sort_keys=True),
        name=name,
        base=base,
        version=_version(),
        table="\n".join(f"| {key} | {value} |" for key, value in lines.items()),
        load=(LOAD_ADAPTER if adapter else LOAD).strip(),
        lm_eval=f"pretrained={base},peft=." if adapter else "pretrained=.",
    )


LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder, or its hub id
tokenizer = AutoTokenizer.from_pretrained(".")
"""
LOAD_ADAPTER = """
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained(".")  # this folder, or its hub id
tokenizer = AutoTokenizer.from_pretrained(".")
"""


def _hub_name(source: str) -> str:
    """A hub id unchanged; of a local path only the last part, since a card is made to be shared."""
    return Path(source).name if Path(source).is_absolute() else source


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [value for row in rows if (value := read_number(row, key)) is not None]
    return sum(values) / len(values) if values else None


def _version() -> str:
    try:
        return version("rlhf-kl")
    except PackageNotFoundError:
        return "from a checkout"
