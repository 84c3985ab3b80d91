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

from rlhf_kl.config.named import check_named
from rlhf_kl.config.paths import find_config
from rlhf_kl.config.problems import checked
from rlhf_kl.config.resolve import config_diff, detect_kind, load_config, parse_overrides, read_merged
from rlhf_kl.config.schema import Section, TrainConfig
from rlhf_kl.config.schema.sections import SEEDS, Name, inner, refuse
from rlhf_kl.config.yaml import located, read_yaml
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
    keeps: bool = False  # its checkpoints when it has finished

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


def load_compare(file: str | Path, *arguments: Any, **options: Any) -> ComparePlan:
    """`plan_comparison` of a file (`find_config`)."""
    path = find_config(file)
    return plan_comparison(read_yaml(path), path, *arguments, **options)


def plan_comparison(
    raw: Mapping[str, Any],
    path: Path,
    overrides: Sequence[str] = (),
    output_dir: Path | None = None,
    seed: int | None = None,
    *,
    updates: int | None = None,
) -> ComparePlan:
    """Check a comparison and lay out its runs.

    raw, path: the mapping and its file, beside which relative paths are looked for. overrides: `--set` for every run;
    they win over the variants. output_dir: default runs/NAME-OF-THE-FILE. seed: instead of those of the file.
    updates: of each run. Raises InputError with every problem.
    """
    kind = detect_kind(read_merged(path) if "extends" in raw else raw)
    if kind not in (None, "compare"):
        raise InputError(f"{path} is a config for `rlhf-kl {kind}`, not for `rlhf-kl compare`, which has variants")
    with blame(str(path)):
        config = checked(CompareConfig, {**raw, **({} if seed is None else {"seeds": [seed]})})
    with blame(f"{path}: base"):
        base = find_config(config.base, folder=path.parent, but=path)
        load_config("train", base)
    folder = Path(os.path.abspath(os.path.expanduser(output_dir or Path("runs") / path.stem)))
    fragments = {variant: located(each or {}, path.parent, Path.cwd()) for variant, each in config.variants.items()}
    by_variant = _configs(base, fragments, overrides)
    written = [read_merged(base), parse_overrides(overrides)[0]]
    keeps = {
        one: any("keep" in inner(raw, "checkpoint") for raw in (*written, each or {}))
        for one, each in config.variants.items()
    }
    runs = [
        PlannedRun(one, number, _placed(settings, folder, f"{one}-s{number}", number, updates), keeps[one])
        for number in config.seeds
        for one, settings in by_variant.items()
    ]
    notes = _unpaired(by_variant)
    return ComparePlan(path.stem, folder, runs, notes)


def _configs(
    base: Path, fragments: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]
) -> dict[str, TrainConfig]:
    """The config of each variant. Errors: InputError with every problem, two that are the same run among them."""
    configs: dict[str, TrainConfig] = {}
    problems = list[str]()
    for variant, changes in fragments.items():
        try:
            configs[variant] = load_config("train", base, overrides, changes)
        except InputError as error:
            problems += [line if line.startswith("--set") else f"variants.{variant}: {line}" for line in error.problems]
    problems += [
        f"variants: {name} and {other} are the same run"
        for name, other in combinations(configs, 2)
        if not differences(configs[name], configs[other])
    ]
    refuse(*dict.fromkeys(problems))
    return configs


def check_variants(plan: ComparePlan) -> None:
    """Check what every variant names. Errors: InputError with every problem."""
    problems = list[str]()
    for run in plan.runs:
        with collected(problems), blame(f"variants.{run.variant}"):
            check_named(run.config)
    refuse(*dict.fromkeys(problems))


def _placed(config: TrainConfig, folder: Path, name: str, seed: int, updates: int | None) -> TrainConfig:
    run = config.run.model_copy(update={"name": name, "output_dir": str(folder / "runs" / name), "seed": seed})
    episodes = config.ppo.total_episodes if updates is None else updates * config.rollout.batch_size
    return config.model_copy(update={"run": run, "ppo": config.ppo.model_copy(update={"total_episodes": episodes})})


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
