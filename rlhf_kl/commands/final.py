"""What a finished run leaves: `final/` with its model card, and with `--merge` a merged adapter, `merged/`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_kl.build.load import Loader
from rlhf_kl.build.parts import Setup
from rlhf_kl.config.schema import RewardModelConfig, SFTConfig, TrainConfig
from rlhf_kl.config.schema.reward import ScorerSection
from rlhf_kl.distributed import tensors_of
from rlhf_kl.errors import InputError
from rlhf_kl.models.load import save_generation, save_model
from rlhf_kl.models.lora import is_adapter
from rlhf_kl.models.value import ActorCritic
from rlhf_kl.report.control import (
    StartEnd,
    closing_figures,
    closing_note,
    control_figures,
    is_update,
    source_name,
    start_to_end,
    verdict_text,
)
from rlhf_kl.rewards.model import save_reward_model
from rlhf_kl.run.folder import RunFolder, write_folder
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.text import format_number
from rlhf_kl.ui import log

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


def write_final(folder: Path, model: ActorCritic, setup: Setup, card: str, *, keep: bool) -> None:
    """A folder that plain transformers loads, with a model card; the value function in a file of its own.

    All processes call it together, since each may hold a part of the weights; the one with `keep` writes.
    """

    def whole(module: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.cpu().contiguous() for name, tensor in tensors_of(module) if keep}

    parts = model.modules
    policy: Any = parts.pop("policy")
    tensors, value = whole(policy) if setup.sharded else None, whole(parts)

    def write(place: Path) -> None:
        save_model(policy, setup.tokenizer, place, tensors)
        save_file(value, place / "value.safetensors")
        (place / "README.md").write_text(card, encoding="utf-8")

    if keep:
        if changed := save_generation(policy, setup.sampling):
            log.info(f"{folder.name}/generation_config.json is that of the rollouts: {changed}")
        write_folder(folder, write)


def require_adapter(config: TrainConfig | SFTConfig | RewardModelConfig) -> None:
    """Errors: InputError if the run trains a whole model; called before the run."""
    model = config.policy.model
    # A reward model begins with the adapter of its language model merged.
    local = model is not None and Path(model).is_dir() and not isinstance(config, RewardModelConfig)
    if config.policy.lora is None and not (local and is_adapter(str(model))):
        raise InputError("--merge: the run trains no adapter, so final/ is already the whole model: leave --merge out")


def merge_final(config: TrainConfig | SFTConfig | RewardModelConfig) -> None:
    """Write `merged/` from `final/`."""
    folder = RunFolder(Path(config.run.output_dir))
    loader, final = Loader.for_run(config.run, "cpu"), str(folder.final)
    if isinstance(config, RewardModelConfig):
        reward = loader.reward_model(final, "--merge", ScorerSection())
        write_folder(folder.merged, lambda place: save_reward_model(reward, place))
    else:
        loaded = loader.language_model(final, "--merge")

        def write(place: Path) -> None:
            save_model(loaded.model, loaded.tokenizer, place)
            if isinstance(config, TrainConfig):
                rows = list(read_jsonl(folder.metrics))
                card = model_card(config, [row for row in rows if is_update(row)], rows[-1], adapter=False)
                (place / "README.md").write_text(card, encoding="utf-8")

        write_folder(folder.merged, write)
    log.info(f"{folder.merged} holds the merged model")


def model_card(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], closing: Mapping[str, Any], *, adapter: bool
) -> str:
    """Markdown. `rows`: those of all updates; `closing`: the closing evaluation; `adapter`: the folder holds one."""
    base = source_name(config.policy.model)
    figures = control_figures(rows, config.kl)
    table = _card_table(config, base, figures, closing_figures([*rows, closing], config.kl.unit))
    return _card(config, table, closing_note(len(rows)), adapter=adapter)


def scaled_card(config: TrainConfig, row: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The card of a policy that `rlhf-kl scale` wrote; `row` and `reference` as in scale.json."""
    pairs = {"score": "scores", "held-out perplexity": "perplexity", "distinct word pairs": "distinct_2"}
    table = {
        "base model": source_name(config.policy.model),
        "trained policy": f"of {config.run.name}",
        "scale": f"{row['scale']:.4g} of what training added to each weight of the reference",
        "KL": f"{format_number(row['kl'])} nats per {config.kl.unit}",
        **{label: start_to_end((reference[key], row[key])) for label, key in pairs.items()},
    }
    return _card(config, table, "reference -> this policy, on held-out prompts and texts", adapter=False)


def _card(config: TrainConfig, table: Mapping[str, str], note: str, *, adapter: bool) -> str:
    name, base = config.run.name, source_name(config.policy.model)
    on_hub = "/" in base
    front: dict[str, Any] = {"tags": ["rlhf", "ppo", "rlhf-kl"], "library_name": "peft" if adapter else "transformers"}
    if on_hub:
        front |= {"base_model": base.partition("@")[0], "base_model_relation": "adapter" if adapter else "finetune"}
    loaded = base.replace("@", ",revision=") if on_hub else "FOLDER-OF-THE-BASE"
    return CARD.format(
        front=yaml.safe_dump(front, sort_keys=True),
        name=name,
        base=base,
        version=version("rlhf-kl"),
        table="\n".join(f"| {key} | {value} |" for key, value in table.items()),
        temperature=format_number(config.rollout.temperature),
        note=note,
        library=front["library_name"],
        auto=f"Auto{'Peft' * adapter}ModelForCausalLM",
        local_base=LOCAL_BASE.format(base=base) if adapter and not on_hub else "",
        slug=re.sub(r"[^\w.-]+", "-", name),
        lm_eval=f"pretrained={loaded},peft=." if adapter else "pretrained=.",
    )


def _card_table(
    config: TrainConfig, base: str, figures: Mapping[str, Any], closing: Mapping[str, StartEnd]
) -> dict[str, str]:
    kl, unit, missing = config.kl, f"nats per {config.kl.unit}", (None, None)
    _, beta = closing.get("beta", missing)
    terms = config.reward.terms
    reward = ", ".join(terms) if terms else source_name(config.reward.model or config.reward.kind)
    return {
        "base model": base,
        "reference": source_name(config.reference.model) if config.reference.model else "the policy at the start",
        "prompts": source_name(config.data.prompts),
        "reward": reward,
        "advantages": config.ppo.advantage,
        "KL reached": f"{format_number(figures['kl'])} {unit}, {verdict_text(figures)}",
        "controller": f"{kl.controller.kind}, beta {format_number(beta)} at the end",
        "score": start_to_end(closing.get("score", missing)),
        "held-out perplexity": start_to_end(closing.get("perplexity", missing)),
        "forgetting": f"{format_number(closing.get('forgetting', missing)[1])} nats per token",
        "responses trained on": str(config.updates * config.rollout.batch_size),
        "seed": str(config.run.seed),
    }
