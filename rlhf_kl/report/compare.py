"""Runs put side by side: variants, their spread over seeds, scores at equal KL, and a verdict in words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from rlhf_kl.config.load import config_diff
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.report.run import RunFigures, RunResult, Series, figures, read_run

INTERVAL_FROM = 5  # seeds: fewer are shown as points only
FIGURES = tuple(field.name for field in fields(RunFigures))
# Where these differ scores are on different scales, or KLs to different references.
SCALE = ("reward.", "policy.model", "reference.", "rollout.temperature")
NOT_THE_RUN = ("run.name", "run.output_dir", "run.seed", "checkpoint.", "tracking.")


@dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed only."""

    name: str
    family: str  # variants that differ in their (starting) beta only are one family
    runs: dict[int, RunResult]  # by seed

    @property
    def config(self) -> TrainConfig:
        return next(iter(self.runs.values())).config

    @cached_property
    def figures(self) -> dict[int, RunFigures]:
        """By seed."""
        return {seed: figures(run) for seed, run in self.runs.items()}

    def values(self, name: str) -> list[float]:
        """A figure of all seeds that have it."""
        return [value for found in self.figures.values() if (value := getattr(found, name)) is not None]

    def mean(self, name: str) -> float | None:
        """Mean over seeds; None where a seed has none."""
        values = self.values(name)
        return fmean(values) if values and len(values) == len(self.runs) else None

    def sd(self, name: str) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        values = self.values(name)
        if len(values) < 2 or len(values) < len(self.runs):
            return None
        return stdev(values) if all(map(math.isfinite, values)) else None

    @property
    def constant_coef(self) -> float | None:
        """Beta where it is held constant, and the same for all seeds; else their mean where each holds its own."""
        found = [run.constant_coef for run in self.runs.values()]
        known = [coef for coef in found if coef is not None]
        return fmean(known) if known and len(known) == len(found) else None

    def series(self, key: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """Updates, mean, and mean -+ one standard deviation over seeds, where all seeds have the key."""
        return over_seeds([run.series(key) for run in self.runs.values()])


def over_seeds(series: Sequence[Series]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Mean and spread of curves at the x that all of them have."""
    tables = [dict(zip(*one, strict=True)) for one in series]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    columns = [[table[x] for table in tables] for x in shared]
    means = [fmean(column) for column in columns]
    spread = [stdev(column) if len(column) > 1 else 0.0 for column in columns]
    low = [m - s for m, s in zip(means, spread, strict=True)]
    high = [m + s for m, s in zip(means, spread, strict=True)]
    return shared, means, low, high


@dataclass(frozen=True)
class EqualKL:
    """Scores of `points` less those that `curve` has at the same KL, by seed."""

    points: str  # a variant, or a family: then means over its variants
    curve: str  # a family
    measure: str  # scores_shaped | gold
    differences: dict[int, float]
    left_out: int  # pairs whose KL lies outside of the curve: nothing is extrapolated

    @property
    def comparable(self) -> bool:
        return bool(self.differences)

    @property
    def mean(self) -> float | None:
        return fmean(self.differences.values()) if self.differences else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean difference, from five seeds on."""
        return mean_interval(list(self.differences.values()))

    def to_json(self) -> dict[str, Any]:
        """The entry in compare.json."""
        return {
            "points": self.points,
            "curve": self.curve,
            "measure": self.measure,
            "comparable": self.comparable,
            "differences": {str(seed): value for seed, value in self.differences.items()},
            "mean": self.mean,
            "interval": self.interval,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class Comparison:
    """All variants, in order, and what a reader must know about them."""

    variants: list[Variant]
    notes: list[str]

    @property
    def families(self) -> dict[str, list[Variant]]:
        found: dict[str, list[Variant]] = {}
        for variant in self.variants:
            found.setdefault(variant.family, []).append(variant)
        return found

    @property
    def unit(self) -> str:
        return self.variants[0].config.kl.unit

    @property
    def target(self) -> float | None:
        """The target in nats; None where variants have different ones."""
        targets = {variant.config.kl.target_value for variant in self.variants}
        return targets.pop() if len(targets) == 1 else None

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for variant in self.variants for seed in variant.runs})

    @cached_property
    def sweep(self) -> list[Variant]:
        """The largest family of at least three constant betas, by beta; empty without one."""
        families = [
            family for family in self.families.values()
            if len(family) > 2 and all(variant.constant_coef for variant in family)
        ]  # fmt: skip
        largest: list[Variant] = max(families, key=len, default=[])
        return sorted(largest, key=lambda variant: variant.constant_coef or 0.0)

    @cached_property
    def equal_kl(self) -> list[EqualKL]:
        """Every variant, and every family as a whole, against every family that spans more KL."""
        found = []
        for curve, members in self.families.items():
            for points, others in self.families.items():
                if points == curve or len(members) < 2 or _span(others) >= _span(members):
                    continue
                if _scales(members[0], others[0]):
                    continue
                for measure in ("scores_shaped", "gold"):
                    each = [equal_kl(variant, members, measure) for variant in others]
                    found += each if len(each) > 1 else []
                    found.append(_whole_family(points, each))
        return [entry for entry in found if entry.differences or entry.left_out]

    def to_json(self, verdict: Sequence[str]) -> dict[str, Any]:
        """compare.json."""
        return {
            "target": self.target,
            "unit": self.unit,
            "variants": {variant.name: variant_json(variant) for variant in self.variants},
            "equal_kl": [entry.to_json() for entry in self.equal_kl],
            "verdict": "\n".join(verdict),
            "notes": self.notes,
        }


def variant_json(variant: Variant) -> dict[str, Any]:
    """A variant's figures by seed, their mean and standard deviation."""
    numbers = [name for name in FIGURES if name != "settled"]
    return {
        "family": variant.family,
        "seeds": {
            str(seed): asdict(found) | {"run": str(variant.runs[seed].path), "status": variant.runs[seed].status}
            for seed, found in variant.figures.items()
        },
        "mean": {name: variant.mean(name) for name in numbers},
        "sd": {name: variant.sd(name) for name in numbers},
    }


# ---- reading


def read_comparison(paths: Sequence[Path], names: Mapping[Path, str] | None = None) -> Comparison:
    """Runs from their folders; a folder of a comparison stands for its runs.

    names: the variant of each path where it is known; else it is told from the configs. Raises InputError.
    """
    runs = [read_run(path) for path in _expanded(paths)]
    units = {run.unit for run in runs}
    if len(units) > 1:
        raise InputError("the runs count KL in different units (token, sequence): compare them separately")
    grouped: list[tuple[str, list[RunResult]]] = []
    for run in runs:
        name = (names or {}).get(run.path) or re.sub(r"-s\d+$", "", run.path.resolve().name)
        known = (names or {}).get(run.path)
        for label, members in grouped:
            if (known == label) if known else same_but_seed(run.config, members[0].config):
                members.append(run)
                break
        else:
            grouped.append((_free(name, {label for label, _ in grouped}), [run]))
    families = _families(grouped)
    variants = [Variant(name, families[name], _by_seed(name, members)) for name, members in grouped]
    return Comparison(variants, _notes(variants))


def same_but_seed(a: TrainConfig, b: TrainConfig) -> bool:
    """Whether two runs differ in nothing that shapes their figures but the seed."""
    return not any(not line.startswith(NOT_THE_RUN) for line in config_diff(a, b))


def _expanded(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted((path / "runs").glob("*/config.yaml")) if not (path / "config.yaml").is_file() else []
        found += [config.parent for config in inside] or [path]
    return list(dict.fromkeys(found))


def _free(name: str, taken: set[str]) -> str:
    numbered = (f"{name}-{i}" for i in range(2, 10_000))
    return name if name not in taken else next(label for label in numbered if label not in taken)


def _families(grouped: Sequence[tuple[str, list[RunResult]]]) -> dict[str, str]:
    """Variant -> family: the part that the names of its members share, else its first member's name."""
    families: list[list[tuple[str, TrainConfig]]] = []
    for name, members in grouped:
        config = members[0].config
        for family in families:
            lines = config_diff(family[0][1], config)
            if all(line.startswith((*NOT_THE_RUN, "kl.controller.coef")) for line in lines):
                family.append((name, config))
                break
        else:
            families.append([(name, config)])
    found: dict[str, str] = {}
    for family in families:
        names = [name for name, _ in family]
        label = _shared_start(names) or family[0][1].kl.controller.kind
        label = _free(label, set(found.values()))
        found |= dict.fromkeys(names, label)
    return found


def _shared_start(names: Sequence[str]) -> str:
    """What all names begin with, without a number or a dash at its end; of one name all of it."""
    if len(names) == 1:
        return names[0]
    length = next((i for i, column in enumerate(zip(*names, strict=False)) if len(set(column)) > 1), 0)
    return re.sub(r"[-_. \d]+$", "", names[0][:length])


def _by_seed(name: str, members: Sequence[RunResult]) -> dict[int, RunResult]:
    found: dict[int, RunResult] = {}
    for run in members:
        if run.seed in found:
            raise InputError(f"{found[run.seed].path} and {run.path} are the same run: {name}, seed {run.seed}")
        found[run.seed] = run
    return dict(sorted(found.items()))


def _notes(variants: Sequence[Variant]) -> list[str]:
    notes = []
    runs = [run for variant in variants for run in variant.runs.values()]
    lengths = sorted({len(run.updates) for run in runs})
    if len(lengths) > 1:
        notes.append(
            f"the runs have between {lengths[0]} and {lengths[-1]} updates: curves end where the shortest seed of "
            "a variant ends, and each run is judged by its own second half"
        )
    seeds = {variant.name: set(variant.runs) for variant in variants}
    everything = set.union(*seeds.values())
    if len(everything) == 1:
        notes.append("one seed: there is no spread to judge a difference by")
    for name, mine in seeds.items():
        if missing := sorted(everything - mine):
            notes.append(f"{name}: seed {', '.join(map(str, missing))} missing")
    for run in runs:
        notes += [f"{run.path.name}: {note}" for note in run.notes]
    for other in variants[1:]:
        if changed := _scales(variants[0], other):
            notes.append(f"scores of {variants[0].name} and {other.name} are not comparable at equal KL: {changed[0]}")
    targets = sorted({variant.config.kl.target_value for variant in variants})
    if len(targets) > 1:
        notes.append(f"the variants have different targets: {', '.join(f'{target:g}' for target in targets)}")
    return notes


# ---- equal KL


def _scales(a: Variant, b: Variant) -> list[str]:
    """What keeps the scores and KLs of two variants from being compared."""
    return [line for line in config_diff(a.config, b.config) if line.startswith(SCALE)]


def _span(family: Sequence[Variant]) -> float:
    kls = [kl for variant in family if (kl := variant.mean("kl_sequence")) is not None]
    return max(kls) - min(kls) if kls else 0.0


def equal_kl(variant: Variant, curve: Sequence[Variant], measure: str) -> EqualKL:
    """The variant's score less that of the curve at its KL, seed by seed, linear between the curve's endpoints.

    The curve runs over sqrt(KL), against which scores rise almost straight (Gao et al. 2022).
    """
    differences, left_out = {}, 0
    for seed, found in variant.figures.items():
        points = [
            (math.sqrt(other.kl_sequence), getattr(other, measure))
            for member in curve
            if (other := member.figures.get(seed)) is not None
            and other.kl_sequence is not None
            and getattr(other, measure) is not None
        ]
        value, kl = getattr(found, measure), found.kl_sequence
        if value is None or kl is None or len(points) < 2:
            continue
        there = interpolate(points, math.sqrt(kl))
        if there is None:
            left_out += 1
        else:
            differences[seed] = value - there
    return EqualKL(variant.name, curve[0].family, measure, differences, left_out)


def _whole_family(name: str, entries: Sequence[EqualKL]) -> EqualKL:
    """Means over the variants of a family, seed by seed, where all of them are comparable."""
    seeds = set.intersection(*(set(entry.differences) for entry in entries)) if entries else set()
    differences = {seed: fmean(entry.differences[seed] for entry in entries) for seed in sorted(seeds)}
    return EqualKL(name, entries[0].curve, entries[0].measure, differences, sum(entry.left_out for entry in entries))


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x on the straight lines between the points; None outside of them."""
    ordered = sorted(points)
    for (x0, y0), (x1, y1) in pairwise(ordered):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of the mean; None of fewer than five values."""
    if len(values) < INTERVAL_FROM:
        return None
    half = student_t((1 + level) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def student_t(p: float, freedom: int) -> float:
    """Quantile of Student's t by the expansion in 1/freedom (Abramowitz and Stegun 26.7.5); good from 4 on."""
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
