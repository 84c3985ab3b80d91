"""The names of a classifier's outputs."""

from __future__ import annotations

from typing import Any

from rlhf_kl.errors import InputError


def labels(config: Any) -> list[str]:
    """The name of each output, in the order of the outputs: a config may list its numbers in any order."""
    return [str(config.id2label.get(number, f"LABEL_{number}")) for number in range(config.num_labels)]


def check_label(model: Any, label: str | None) -> None:
    """Errors: InputError if a model has several outputs and `label` names none, or has one output and a label."""
    names = labels(model.config)
    if len(names) > 1 and label not in names:
        given = "set reward.label to one of them" if label is None else f"none of them is reward.label, {label!r}"
        raise InputError(f"has {len(names)} outputs ({', '.join(names[:6])}): {given}")
    if len(names) == 1 and label is not None:
        raise InputError(f"has only one output, so reward.label must be null: {label!r}")
