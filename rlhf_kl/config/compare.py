"""The config of `rlhf-kl compare`: variants of one training run, each with several seeds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rlhf_kl.config.errors import check_mapping
from rlhf_kl.config.load import config_diff, detect_kind, load_any, load_variant
from rlhf_kl.config.paths import find_config
from rlhf_kl.config.plugins import check_plugins
from rlhf_kl.config.schema import SEEDS, Section, TrainConfig
from rlhf_kl.config.schema.base import Name, inner, refuse
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.errors import InputError, blame, collected

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")
# Keys that are equal in two runs with the same prompts in the same order.
PAIRED = ("data.", "rollout.batch_size", "policy.model")


class CompareConfig(Section):
    """Variants of one training run, each with several seeds."""

    base: Name
    """The config of `rlhf-kl train` that all variants start from."""
    seeds: list[Annotated[int, Field(ge=0, lt=SEEDS)]] = Field(default_factory=lambda: [0])
    """Each variant is trained with each of these seeds."""
    variants: dict[str, dict[str, Any] | None]
    """By name: what each changes of the base."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = [] if self.variants else ["variants must name at least one"]
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            problems.append(f"seeds must be a list of different numbers: {self.seeds}")
        for name, fragment in self.variants.items():
            if not NAME.fullmatch(name):
                problems.append(f"variants: a name has letters, digits and ._+- only: {name!r}")
            if "extends" in (fragment or {}):
                problems.append(f"variants.{name}.extends: all variants start from `base`")
            taken = sorted({"name", "seed", "output_dir"} & inner(fragment or {}, "run").keys())
            problems += [f"variants.{name}.run.{key}: set by the program, remove it" for key in taken]
        refuse(*problems)
        return self


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


def compare_schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors."""
    schema = CompareConfig.model_json_schema()
    schema["properties"]["variants"]["additionalProperties"] = {"$ref": "train.json"}
    return schema


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

    raw, path: the mapping and its file, beside which relative paths are looked for. overrides: `--set` for every run;
    they win over the variants. output_dir: default runs/NAME-OF-THE-FILE. seed: instead of those of the file.
    Raises InputError with every problem.
    """
    kind = load_any(path)[0] if "extends" in raw else detect_kind(raw)
    if kind not in (None, "compare"):
        raise InputError(f"{path} is a config for `rlhf-kl {kind}`, not for `rlhf-kl compare`, which has variants")
    _, config, problems = check_mapping(CompareConfig, {**raw, **({} if seed is None else {"seeds": [seed]})})
    if config is None or problems:
        raise InputError(*(f"{path}: {problem}" for problem in problems))
    with blame(f"{path}: base"):
        base = find_config(config.base, folder=path.parent, but=path)
        load_variant(base, {}, [])
    folder = Path(os.path.abspath(os.path.expanduser(output_dir or Path("runs") / path.stem)))
    by_variant: dict[str, TrainConfig] = {}
    for name, fragment in config.variants.items():
        try:
            by_variant[name] = load_variant(base, fragment or {}, [path.parent, Path.cwd()], overrides)
        except InputError as error:
            problems += [line if line.startswith("--set") else f"variants.{name}: {line}" for line in error.problems]
    problems += [
        f"variants: {name} and {other} are the same run"
        for name, other in combinations(by_variant, 2)
        if not differences(by_variant[name], by_variant[other])
    ]
    refuse(*dict.fromkeys(problems))
    runs = [
        PlannedRun(name, seed, _placed(by_variant[name], folder, f"{name}-s{seed}", seed))
        for seed in config.seeds
        for name in by_variant
    ]
    return ComparePlan(path.stem, folder, runs, _unpaired(by_variant))


def check_variants(plan: ComparePlan) -> None:
    """Import the plugins of every variant and check them. Errors: InputError with every problem."""
    problems = list[str]()
    for run in plan.runs:
        with collected(problems), blame(f"variants.{run.variant}"):
            check_plugins(run.config)
    refuse(*dict.fromkeys(problems))


def _placed(config: TrainConfig, folder: Path, name: str, seed: int) -> TrainConfig:
    run = config.run.model_copy(update={"name": name, "output_dir": str(folder / "runs" / name), "seed": seed})
    return config.model_copy(update={"run": run})


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
