"""A key that nothing reads would be a promise that nothing keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlhf_kl
from rlhf_kl.config.schema import MODELS, Section, section_of

PACKAGE = Path(rlhf_kl.__file__).parent


# Local names that sections go by in the package, beside their own.
ALIASES = {"cfg", "section", "settings", "shape", "data", "scorer"}


def reads(but: str) -> set[tuple[str, str]]:
    """(owner, name) of every `owner.name` that is read in the package outside the folder `but`."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != but:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                    found.add((owner, node.attr))
    return found


def keys(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        yield f"{prefix}{name}"
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")


# Read under another name, by a property that stands beside the key.
THROUGH = {
    "kl.target": ("kl", "target_value"),
    "kl.ceiling.value": ("kl", "ceiling_value"),
    "ppo.total_episodes": ("config", "updates"),
    "ppo.minibatch_size": ("config", "minibatch_size"),
    "rollout.reference_samples": ("config", "reference_samples"),
    "ppo.critic_lam": ("config", "critic_lam"),
    "policy.value": ("config", "critic"),
    "kl.controller.min_coef": ("section", "arguments"),
    "kl.controller.max_coef": ("section", "arguments"),
}
READ = reads(but="config")


def is_read(path: str) -> bool:
    if path in THROUGH:
        return THROUGH[path] in READ
    owner, _, name = path.rpartition(".")
    owners = {owner.rpartition(".")[2] or "config", *ALIASES}
    return any((one, name) in READ for one in owners)


@pytest.mark.parametrize("kind", MODELS)
def test_every_key_is_read_outside_the_config(kind: str) -> None:
    paths = list(keys(MODELS[kind], ""))
    assert len(paths) > 20
    assert [path for path in paths if not is_read(path)] == []


def test_an_unread_key_would_be_found() -> None:
    assert not is_read("ppo.nonsense")
    assert not is_read("ppo.path")  # read elsewhere, but not of this section
