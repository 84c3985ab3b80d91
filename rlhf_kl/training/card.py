"""The model card of a policy: README.md of its folder, which the hub shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.control.verdict import verdict_text
from rlhf_kl.monitors.facts import closing_figures, closing_note, control_figures, score_error
from rlhf_kl.shell import program_version, source_name
from rlhf_kl.text import format_number, score_text, scorer_label, start_to_end


def model_card(
    config: TrainConfig, rows: Sequence[Mapping[str, Any]], closing: Mapping[str, Any], *, adapter: bool
) -> str:
    """Markdown. `rows`: those of all updates; `closing`: the closing evaluation; `adapter`: the folder holds one."""
    control, reward = control_figures(rows, config.kl, config.ppo.value_warmup), config.reward
    scorers = config.eval.watched
    figures = closing_figures([*rows, closing], config.kl.unit, scorers)
    score, perplexity, forgetting, beta = (
        figures.get(name, (None, None)) for name in ("scores", "perplexity", "forward_kl_token", "beta")
    )
    table = {
        "base model": source_name(config.policy.model),
        "reference": source_name(config.reference.model) if config.reference.model else "the policy at the start",
        "prompts": source_name(config.data.prompts),
        "reward": ", ".join(reward.terms) if reward.terms else source_name(reward.model or reward.kind),
        "advantages": config.ppo.advantage,
        "KL reached": f"{format_number(control['kl'])} nats per {config.kl.unit}, {verdict_text(control)}",
        "controller": f"{config.kl.controller.kind}, beta {format_number(beta[1])} at the end",
        "score": score_text(score, score_error(rows)),
        **{scorer_label(name): start_to_end(figures[name]) for name in scorers if name in figures},
        "held-out perplexity": start_to_end(perplexity),
        "forgetting": f"{format_number(forgetting[1])} nats per token",
        "responses trained on": config.updates * config.rollout.batch_size,
        "seed": config.run.seed,
    }
    return _card(config, table, closing_note(len(rows)), adapter=adapter)


def scaled_card(config: TrainConfig, row: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The card of a policy that `rlhf-kl scale` wrote; `row` and `reference` as in scale.json."""
    pairs = {"score": "scores", "held-out perplexity": "perplexity", "distinct word pairs": "distinct_2"}
    table = {
        "base model": source_name(config.policy.model),
        "trained policy": f"of {config.run.name}",
        "scale": f"{row['scale']:.4g} of what training added to each weight of the reference",
        "KL": f"{format_number(row[f'kl_{config.kl.unit}'])} nats per {config.kl.unit}",
        **{label: start_to_end((reference[key], row[key])) for label, key in pairs.items()},
    }
    return _card(config, table, "reference -> this policy, on the prompts and texts of the evaluations", adapter=False)


def _card(config: TrainConfig, table: Mapping[str, Any], note: str, *, adapter: bool) -> str:
    base = source_name(config.policy.model)
    loaded = base.replace("@", ",revision=") if "/" in base else "FOLDER-OF-THE-BASE"
    loader = PackageLoader("rlhf_kl.training")
    pages = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return pages.get_template("card.md").render(
        name=config.run.name,
        base=base,
        version=program_version(),
        table=table,
        temperature=format_number(config.rollout.temperature),
        note=note,
        adapter=adapter,
        library="peft" if adapter else "transformers",
        auto="AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM",
        slug=re.sub(r"[^\w.-]+", "-", config.run.name),
        lm_eval=f"pretrained={loaded},peft=." if adapter else "pretrained=.",
    )
