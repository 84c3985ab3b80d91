"""Paths of files in place of `builtin:NAME`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from rlhf_kl.builtin.world import is_builtin, world_file
from rlhf_kl.config.resolve import flat
from rlhf_kl.config.schema import Section

C = TypeVar("C", bound=Section)
PARTS = {  # of a world, by the config key that names it
    "policy.model": "policy",
    "reference.model": "policy",
    "reward.model": "reward",
    "data.prompts": "prompts",
    "eval.prompts": "heldout_prompts",
    "eval.texts": "heldout",
    "data.texts": "train",
    "data.eval_texts": "heldout",
    "data.pairs": "pairs",
    "data.eval_pairs": "heldout_pairs",
}
COMES_WITH = {  # keys that a world fills where the config leaves them null and names the world elsewhere
    "eval.prompts": ("data.prompts",),
    "data.eval_texts": ("data.texts",),
    "data.eval_pairs": ("data.pairs",),
}


def with_files(config: C, sections: Collection[str] | None = None) -> C:
    """The config with files and folders in place of each `builtin:NAME`.

    A world's own held-out rows stand in for those that the config leaves null. `sections`: only these.
    """
    values = flat(config.model_dump())

    def expand(value: Any, key: str) -> Any:
        if isinstance(value, Section):
            fields = {name: getattr(value, name) for name in type(value).model_fields}
            expanded = {name: expand(old, f"{key}.{name}".lstrip(".")) for name, old in fields.items()}
            return value.model_copy(update={name: new for name, new in expanded.items() if new is not fields[name]})
        if key in ("reward.terms", "eval.scorers") and value is not None:
            return {name: expand(scorer, "reward") for name, scorer in value.items()}
        if sections is not None and key.partition(".")[0] not in sections:
            return value
        if value is None:
            value = next((values[k] for k in COMES_WITH.get(key, ()) if is_builtin(values.get(k))), None)
        return world_file(value, PARTS[key]) if is_builtin(value) and key in PARTS else value

    expanded: C = expand(config, "")
    return expanded
