"""The config of `rlhf-kl compare`: variants of one training run, each with several seeds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rlhf_kl.config.load import config_diff, kinds_of, load_any, load_variant
from rlhf_kl.config.paths import find_config
from rlhf_kl.config.plugins import check_plugins
from rlhf_kl.config.schema import SEEDS, TrainConfig
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.errors import InputError, suggestion

COMPARE_SCHEMA: dict[str, Any] = {
    "title": "A comparison",
    "type": "object",
    "additionalProperties": False,
    "required": ["base", "variants"],
    "properties": {
        "base": {"type": "string", "description": "The config of `rlhf-kl train` that all variants start from."},
        "seeds": {"type": "array", "items": {"type": "integer", "minimum": 0}, "description": "A run for each."},
        "variants": {
            "type": "object",
            "description": "By name: what each changes of the base.",
            "additionalProperties": {"$ref": "train.json"},
        },
    },
}
KEYS = ("base", "seeds", "variants")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")
# Keys that are equal in two runs with the same prompts in the same order.
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

    name: str  # name of the file
    folder: Path
    runs: list[PlannedRun]
    notes: list[str]  # shown with the comparison


def is_compare_config(path: Path) -> bool:
    """Whether the file has variants."""
    return "variants" in read_yaml(path)


def load_compare(
    file: str | Path, overrides: Sequence[str] = (), output_dir: Path | None = None, seed: int | None = None
) -> ComparePlan:
    """`plan_comparison` of a file (`find_config`)."""
    path = find_config(file)
    return plan_comparison(read_yaml(path), path, overrides, output_dir, seed)


def plan_comparison(
    raw: Mapping[str, Any],
    path: Path,
    overrides: Sequence[str] = (),
    output_dir: Path | None = None,
    seed: int | None = None,
) -> ComparePlan:
    """Check a comparison and lay out its runs.

    raw, path: the mapping and its file. Relative paths in the mapping are looked for beside that file.
    overrides: `--set` for every run; they win over the variants. output_dir: default runs/NAME-OF-THE-FILE.
    seed: one seed instead of those of the file. Raises InputError with every problem.
    """
    _require_comparison(raw, path)
    problems = [f"{key}: unknown key{suggestion(key, KEYS)}" for key in raw if key not in KEYS]
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


def check_variants(plan: ComparePlan) -> None:
    """Import the plugins of every variant and check them. Errors: InputError with every problem."""
    problems = []
    for run in plan.runs:
        try:
            check_plugins(run.config)
        except InputError as error:
            problems += [f"variants.{run.variant}: {problem}" for problem in error.problems]
    if problems:
        raise InputError(*dict.fromkeys(problems))


def _require_comparison(raw: Mapping[str, Any], path: Path) -> None:
    """Errors: InputError for the config of another command, all of whose keys would be unknown."""
    if raw.keys() & set(KEYS):
        return
    kinds = kinds_of(raw)
    if not kinds and "extends" in raw:
        kinds = [load_any(path)[0]]
    if kinds:
        raise InputError(f"{path} is a config for `rlhf-kl {kinds[0]}`, not for `rlhf-kl compare`")


def _placed(config: TrainConfig, folder: Path, variant: str, seed: int) -> TrainConfig:
    name = f"{variant}-s{seed}"
    run = config.run.model_copy(update={"name": name, "output_dir": str(folder / "runs" / name), "seed": seed})
    return config.model_copy(update={"run": run})


def _seeds(value: Any, problems: list[str]) -> list[int]:
    if not isinstance(value, list) or not value or not all(_is_seed(seed) for seed in value):
        shown = json.dumps(value, default=str)
        problems.append(f"seeds must be a list of whole numbers from 0 to {SEEDS - 1}: {shown}")
        return []
    if len(set(value)) < len(value):
        problems.append(f"seeds must not repeat: {value}")
    return value


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < SEEDS


def _variants(value: Any, problems: list[str]) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not value:
        problems.append(
            "variants must be a mapping of names to config fragments" + (": it is missing" if value is None else "")
        )
        return {}
    variants: dict[str, dict[str, Any]] = {}
    for name, fragment in value.items():
        fragment = {} if fragment is None else fragment
        if not isinstance(name, str) or not NAME.fullmatch(name):
            problems.append(f"variants: a name has letters, digits and ._+- only: {name!r}")
        elif not isinstance(fragment, dict):
            problems.append(f"variants.{name} must be a config fragment (section: {{key: value}})")
        elif "extends" in fragment:
            problems.append(f"variants.{name}.extends: all variants start from `base`")
        else:
            run = fragment.get("run")
            taken = sorted({"name", "seed", "output_dir"} & run.keys()) if isinstance(run, dict) else []
            problems += [f"variants.{name}.run.{key}: set by the program, remove it" for key in taken]
            variants[name] = fragment
    return variants


def _base(name: str, path: Path) -> Path:
    try:
        base = find_config(name, folder=path.parent, but=path)
        load_variant(base, {}, [])
        return base
    except InputError as error:
        raise InputError(*(f"{path}: base: {problem}" for problem in error.problems)) from None


def _twins(variants: Mapping[str, TrainConfig]) -> list[str]:
    """Variants that are the same run, for example when --set gives all of them the same controller."""
    return [
        f"variants: {name} and {other} are the same run"
        for name, other in combinations(variants, 2)
        if not differences(variants[name], variants[other])
    ]


def _unpaired(variants: Mapping[str, TrainConfig]) -> list[str]:
    first, *others = variants
    for other in others:
        changed = [line for line in differences(variants[first], variants[other]) if line.startswith(PAIRED)]
        if changed:
            return [f"{first} and {other} do not see the same prompts in the same order ({changed[0]}): unpaired"]
    return []


def differences(a: TrainConfig, b: TrainConfig) -> list[str]:
    """ "key: old -> new" for the keys that change a run's figures."""
    neutral = ("run.name", "run.output_dir", "checkpoint.", "tracking.")
    return [line for line in config_diff(a, b) if not line.startswith(neutral)]
