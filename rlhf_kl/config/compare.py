"""The config of `rlhf-kl compare`: variants of one training run, each with several seeds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_kl.components import nearest
from rlhf_kl.config.load import OWN_SECTIONS, config_diff, find_config, load_any, load_variant
from rlhf_kl.config.schema import KIND_NAMES, SEEDS, Kind, TrainConfig
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.errors import InputError

KEYS = ("base", "seeds", "variants")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")
# What must not differ between two runs for them to see the same prompts in the same order.
PAIRED = ("data.", "rollout.batch_size", "policy.model")


@dataclass(frozen=True)
class PlannedRun:
    """One training run of the grid."""

    variant: str
    seed: int
    config: TrainConfig

    @property
    def name(self) -> str:
        return self.config.run.name


@dataclass(frozen=True)
class ComparePlan:
    """All runs, variant by variant within each seed: an unfinished grid has whole pairs first."""

    name: str  # of the file
    folder: Path
    runs: list[PlannedRun]
    notes: list[str]  # what a reader of the comparison must know


def is_compare_config(path: Path) -> bool:
    """Whether a file has variants."""
    return "variants" in read_yaml(path)


def load_compare(
    file: str | Path, overrides: Sequence[str] = (), output_dir: Path | None = None, seed: int | None = None
) -> ComparePlan:
    """Read and check a comparison.

    overrides: `--set` for every run; they win over the variants. output_dir: default runs/NAME-OF-THE-FILE.
    seed: one seed instead of those of the file. Raises InputError with every problem found.
    """
    path = find_config(file)
    raw = read_yaml(path)
    _require_comparison(raw, path)
    problems = [f"{key}: unknown key{_hint(key)}" for key in raw if key not in KEYS]
    seeds = [seed] if seed is not None else _seeds(raw.get("seeds", [0]), problems)
    variants = _variants(raw.get("variants"), problems)
    base = raw.get("base")
    if not isinstance(base, str) or not base:
        problems.append("base must be the name of a train config" + ("" if "base" in raw else ": it is missing"))
    wrong_seed = [] if seed is None or _is_seed(seed) else [f"--seed must be a whole number below {SEEDS}: {seed}"]
    if problems:
        raise InputError(*wrong_seed, *(f"{path}: {problem}" for problem in problems))
    problems = wrong_seed
    parent = _base(str(base), path)
    folder = Path(os.path.abspath(os.path.expanduser(output_dir or Path("runs") / path.stem)))
    by_variant: dict[str, TrainConfig] = {}
    for name, fragment in variants.items():
        try:
            by_variant[name] = load_variant(parent, fragment, [path.parent, Path.cwd()], overrides)
        except InputError as error:
            problems += [
                problem if problem.startswith("--set") else f"variants.{name}: {problem}" for problem in error.problems
            ]
    problems += _twins(by_variant)
    if problems:
        raise InputError(*dict.fromkeys(problems))
    runs = [
        PlannedRun(name, seed, _placed(by_variant[name], folder, name, seed)) for seed in seeds for name in variants
    ]
    return ComparePlan(path.stem, folder, runs, _unpaired(by_variant))


def _require_comparison(raw: Mapping[str, Any], path: Path) -> None:
    """Errors: InputError for the config of another command, all of whose keys would be unknown."""
    if raw.keys() & set(KEYS):
        return
    kind: Kind | None = next((kind for kind in KIND_NAMES if OWN_SECTIONS[kind] & raw.keys()), None)
    if kind is None and "extends" in raw:  # what it extends tells
        kind = load_any(path)[0]
    if kind is not None:
        raise InputError(f"{path} is a config for `rlhf-kl {kind}`, not for `rlhf-kl compare`")


def _placed(config: TrainConfig, folder: Path, variant: str, seed: int) -> TrainConfig:
    name = f"{variant}-s{seed}"
    run = config.run.model_copy(update={"name": name, "output_dir": str(folder / "runs" / name), "seed": seed})
    return config.model_copy(update={"run": run})


def _seeds(value: Any, problems: list[str]) -> list[int]:
    if not isinstance(value, list) or not value or not all(_is_seed(seed) for seed in value):
        shown = json.dumps(value, default=str)
        problems.append(f"seeds must be a list of whole numbers from 0 on, below {SEEDS}: {shown}")
        return []
    if len(set(value)) < len(value):
        problems.append(f"seeds: each only once: {value}")
    return value


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < SEEDS


def _variants(value: Any, problems: list[str]) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not value:
        problems.append(
            "variants must be a mapping of names to config fragments" + (": it is missing" if value is None else "")
        )
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, fragment in value.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            problems.append(f"variants: a name has letters, digits and ._+- only: {name!r}")
        elif not isinstance(fragment, dict | None):
            problems.append(f"variants.{name} must be a config fragment (section: {{key: value}})")
        elif isinstance(fragment, dict) and "extends" in fragment:
            problems.append(f"variants.{name}.extends: all variants start from `base`")
        elif isinstance(fragment, dict) and isinstance(fragment.get("run"), dict) and _taken(fragment["run"]):
            problems += [f"variants.{name}.run.{key}: filled in by the program" for key in _taken(fragment["run"])]
        else:
            found[name] = fragment or {}
    return found


def _taken(run: Mapping[str, Any]) -> list[str]:
    return sorted({"name", "seed", "output_dir"} & run.keys())


def _base(name: str, path: Path) -> Path:
    try:
        base = find_config(name, folder=path.parent, but=path)
        load_variant(base, {}, [])
        return base
    except InputError as error:
        raise InputError(*(f"{path}: base: {problem}" for problem in error.problems)) from None


def _twins(variants: Mapping[str, TrainConfig]) -> list[str]:
    """Variants that are the same run, as where --set gives all of them the same controller."""
    problems, names = [], list(variants)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            if not differences(variants[name], variants[other]):
                problems.append(f"variants: {name} and {other} are the same run")
    return problems


def _unpaired(variants: Mapping[str, TrainConfig]) -> list[str]:
    names = list(variants)
    for other in names[1:]:
        changed = [line for line in differences(variants[names[0]], variants[other]) if line.startswith(PAIRED)]
        if changed:
            return [f"{names[0]} and {other} do not see the same prompts in the same order ({changed[0]}): unpaired"]
    return []


def differences(a: TrainConfig, b: TrainConfig) -> list[str]:
    """ "key: old -> new" of what shapes a run's figures; name, place and upkeep do not."""
    upkeep = ("run.name", "run.output_dir", "checkpoint.", "tracking.")
    return [line for line in config_diff(a, b) if not line.startswith(upkeep)]


def _hint(key: str) -> str:
    close = nearest(key, KEYS)
    return f"; did you mean {close}?" if close else f"; valid: {', '.join(KEYS)}"
