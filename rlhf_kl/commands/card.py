"""The model card of a trained policy: `README.md` in `final/`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import yaml

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.report import control
from rlhf_kl.report.control import source_name as _name
from rlhf_kl.text import format_number

CARD = """---
{front}---

# {name}

{base}, trained with PPO toward a reward by rlhf-kl {version}.

| | |
|---|---|
{table}

`a -> b`: {note}.
The KL is exact, over the whole vocabulary, at sampling temperature {temperature}. Forgetting is the KL of the reference
to the policy, on samples of the reference.

## Load it

```python
from {library} import {auto}
from transformers import AutoTokenizer

model = {auto}.from_pretrained(".")  # this folder, or its hub id
tokenizer = AutoTokenizer.from_pretrained(".")
```
{local_base}
## Repeat it

`config.yaml`, in the run folder that this folder comes from, holds every setting.

```bash
rlhf-kl train --config config.yaml --output-dir runs/again
```

## Share and evaluate it

```bash
hf upload OWNER/{slug} .                        # from this folder
lm_eval --model hf --model_args {lm_eval} --tasks hellaswag
```
"""
LOCAL_BASE = """
The adapter's base model, {base}, is not on the hub: `adapter_config.json` names its folder. To share the adapter,
upload the base too and write its hub id there; or train with `--merge`, and share `merged/`.
"""


def model_card(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], closing: Mapping[str, Any], *, adapter: bool
) -> str:
    """Markdown. `rows`: those of all updates; `closing`: the closing evaluation; `adapter`: the folder holds one."""
    first = config.reference.model if control.goes_on(config) else config.policy.model
    name, base = config.run.name, _name(first)
    on_hub = "/" in base
    front: dict[str, Any] = {"tags": ["rlhf", "ppo", "rlhf-kl"], "library_name": "peft" if adapter else "transformers"}
    if on_hub:
        front |= {"base_model": base.partition("@")[0], "base_model_relation": "adapter" if adapter else "finetune"}
    figures = control.control_figures(rows, config.kl)
    start_end = control.closing_figures([*rows, closing], config.kl.unit)
    loaded = base.replace("@", ",revision=") if on_hub else "FOLDER-OF-THE-BASE"
    return CARD.format(
        front=yaml.safe_dump(front, sort_keys=True),
        name=name,
        base=base,
        version=version("rlhf-kl"),
        table="\n".join(f"| {key} | {value} |" for key, value in _table(config, base, figures, start_end).items()),
        temperature=format_number(config.rollout.temperature),
        note=control.closing_note(len(rows), config),
        library=front["library_name"],
        auto=f"Auto{'Peft' * adapter}ModelForCausalLM",
        local_base=LOCAL_BASE.format(base=base) if adapter and not on_hub else "",
        slug=re.sub(r"[^\w.-]+", "-", name),
        lm_eval=f"pretrained={loaded},peft=." if adapter else "pretrained=.",
    )


def _table(
    config: TrainConfig, base: str, figures: Mapping[str, Any], closing: Mapping[str, control.StartEnd]
) -> dict[str, str]:
    kl, unit, missing = config.kl, f"nats per {config.kl.unit}", (None, None)
    _, beta = closing.get("beta", missing)
    terms = config.reward.terms
    reward = ", ".join(terms) if terms else _name(config.reward.model or config.reward.kind)
    return {
        "base model": base,
        **({"starting policy": f"of {_name(config.policy.model)}"} if control.goes_on(config) else {}),
        "reference": _name(config.reference.model) if config.reference.model else "the policy at the start",
        "prompts": _name(config.data.prompts),
        "reward": reward,
        "advantages": config.ppo.advantage,
        "KL reached": f"{format_number(figures['kl'])} {unit}, {control.verdict_text(figures)}",
        "controller": f"{kl.controller.kind}, beta {format_number(beta)} at the end",
        "score": control.start_to_end(closing.get("score", missing)),
        "held-out perplexity": control.start_to_end(closing.get("perplexity", missing)),
        "forgetting": f"{format_number(closing.get('forgetting', missing)[1])} nats per token",
        "responses trained on": str(config.updates * config.rollout.batch_size),
        "seed": str(config.run.seed),
    }
