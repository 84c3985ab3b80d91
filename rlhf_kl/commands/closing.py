"""What is shown at the end of a run: a few figures, and where to look next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rlhf_kl.kl_controllers import adjusts
from rlhf_kl.trainers.reward_figures import sketch

Closing = tuple[dict[str, object], list[str]]


def train_closing(summary: dict[str, Any], folder: str) -> Closing:
    """Figures and next steps after `train`. folder: where the run is now, which its summary may not know."""
    final, place = summary["final"], shlex.quote(folder)
    unit = summary["config"]["kl"]["unit"]
    figures: dict[str, object] = {"updates": f"{summary['steps']} in {summary['seconds']:.0f} s"}
    control = summary.get("control")  # not of a run by an earlier version
    if control is not None and control["kl"] is not None:
        verdict = _verdict(summary["config"]["kl"]["controller"]["kind"], final["kl/target"], control)
        figures[f"KL per {unit}"] = f"{control['kl']:.3f}, {verdict}"
    rows = (
        ("score", "objective/scores", ".2f"),
        ("gold", "objective/gold", ".2f"),
        ("beta", "kl/coef_next", ".4g"),
        ("held-out perplexity", "eval/perplexity", ".2f"),
    )
    for name, key, form in rows:
        if final.get(key) is not None:
            figures[name] = format(final[key], form)
    if summary.get("tilt_share") is not None:
        figures["score gain"] = f"{summary['tilt_share']:.0%} of the most that this KL allows"
    return figures, [
        f"rlhf-kl report {place}",
        f"rlhf-kl eval --run {place}",
        f"tensorboard --logdir {place}",
        f"{folder}/samples.jsonl holds responses token by token, {folder}/final the policy",
    ]


def _verdict(kind: str, target: float, control: Mapping[str, Any]) -> str:
    """Whether the run held its target; see `report.control.held`."""
    goal = f"target {target:g}"
    if control["held"] is None:
        return goal
    if not adjusts(kind):
        return f"{goal} {'reached' if control['held'] else 'not reached'} (beta does not depend on the KL)"
    return f"{goal} {'held' if control['held'] else 'missed'} (within {control['tail_error']:.0%} on average)"


def supervised_closing(summary: dict[str, Any], folder: str) -> Closing:
    """Figures and next steps after `sft` and `reward-model`, as `train_closing`."""
    final = summary["final"]
    figures: dict[str, object] = {"steps": f"{summary['steps']} in {summary['seconds']:.0f} s"}
    figures |= {
        f"held-out {key.removeprefix('eval/').replace('_', ' ')}": f"{value:.3f}"
        for key, value in final.items()
        if key.startswith("eval/")
    }
    histogram = summary.get("heldout", {}).get("histogram", {})
    for name, counts in histogram.items():
        if name != "edges":
            low, high = histogram["edges"][0], histogram["edges"][-1]
            figures[f"scores, {name}"] = f"{low:.2f} [{sketch(counts)}] {high:.2f}"
    return figures, [f"{folder}/final is the model", f"tensorboard --logdir {shlex.quote(folder)}"]
