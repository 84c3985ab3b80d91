"""What is shown at the end of a run: a few figures, and where to look next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_kl.kl_controllers import adjusts
from rlhf_kl.program import shell_command, short_path
from rlhf_kl.run.collapse import collapsed
from rlhf_kl.status import duration
from rlhf_kl.trainers.reward_figures import sketch

Closing = tuple[dict[str, object], list[str]]


def train_closing(summary: dict[str, Any], folder: str) -> Closing:
    """Figures and next steps after `train`. folder: where the run is now, which its summary may not know."""
    final, place = summary["final"], short_path(folder)
    kl, control, share = summary["config"]["kl"], summary["control"], summary.get("tilt_share")
    same = collapsed(final)  # which a gain in score does not make good
    verdict = _verdict(kl["controller"]["kind"], final["kl/target"], control)
    shown: dict[str, str | None] = {
        "updates": f"{summary['steps']} in {duration(summary['seconds'])}",
        "score": _number(final.get("objective/scores"), ".2f"),
        "score gain": None if same or share is None else f"{share:.0%} of the most that this KL allows",
        "responses": "nearly all are the same text" if same else None,
        "gold": _number(final.get("objective/gold"), ".2f"),
        f"KL per {kl['unit']}": None if control["kl"] is None else f"{control['kl']:.3f}, {verdict}",
        "beta": _number(final.get("kl/coef_next"), ".4g"),
        "held-out perplexity": _number(final.get("eval/perplexity"), ".2f"),
    }
    return {name: text for name, text in shown.items() if text is not None}, [
        f"{shell_command()} report {place}",
        f"{shell_command()} eval --run {place}",
        f"{shell_command('tensorboard')} --logdir {place}",
        f"{place}/samples.jsonl  responses, token by token",
        f"{place}/final          the policy",
    ]


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


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
    figures: dict[str, object] = {"steps": f"{summary['steps']} in {duration(summary['seconds'])}"}
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
    place = short_path(folder)
    return figures, [f"{shell_command('tensorboard')} --logdir {place}", f"{place}/final  the model"]
