"""The section `kl`: the penalty of a token, its controller, and the ceiling."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from rlhf_kl.config.schema.sections import NonNegative, Plugin, Positive, Section, refuse
from rlhf_kl.control import builtin_law, law_options, resolve_bounds, stored_name

PRESETS = {"conservative": 0.02, "moderate": 0.075, "aggressive": 0.15}  # nats per token


class ControllerSection(Section):
    model_config = ConfigDict(extra="allow")

    kind: Plugin = "adaptive"
    """A built-in controller, or a class as file.py:Class or module:Class; write its options beside this key."""
    coef: NonNegative | Literal["auto"] = "auto"
    """Starting beta; auto = computed from the scores and the KL of reference samples."""
    min_coef: Positive | None = None
    """Lower bound of beta; null = 1e-3 times its start."""
    max_coef: Positive | None = None
    """Upper bound of beta; null = 1e3 times its start."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of the kind."""
        return dict(self.model_extra or {})

    @property
    def arguments(self) -> dict[str, Any]:
        """Options of the kind, and the starting beta and its bounds where they are written."""
        written = {"coef": self.coef, "min_coef": self.min_coef, "max_coef": self.max_coef}
        return {name: value for name, value in written.items() if value not in (None, "auto")} | self.options

    @field_validator("kind")
    @classmethod
    def _stored_name(cls, kind: str) -> str:
        builtin_law(kind)
        return stored_name(kind)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        where = "kl.controller"
        problems = list[str]()
        if self.coef == 0 and self.kind != "fixed":
            problems.append(f"{where}.coef must be above 0: only kind fixed may hold beta at 0")
        if "target" in self.options:
            problems.append(f"{where}.target: unknown key; did you mean kl.target?")
        elif law := builtin_law(self.kind):
            problems += law_options(law, self.options, where)[1]
        start = self.coef if isinstance(self.coef, float) else self.min_coef or self.max_coef or 1.0
        try:
            resolve_bounds(start, self.min_coef, self.max_coef)
        except ValueError as error:
            problems.append(f"{where}: {error}")
        refuse(*problems)
        return self


class CeilingSection(Section):
    value: float | str = "1.5x"
    """Upper limit of the next rollout's KL: nats in kl.unit, or a multiple of the target such as 1.5x."""
    action: Literal["backtrack", "rollback", "stop"] = "backtrack"
    """backtrack shortens the update, rollback goes back to a checkpoint, stop ends the run."""

    @field_validator("value")
    @classmethod
    def _is_amount(cls, value: float | str) -> float | str:
        if isinstance(value, str) and not re.fullmatch(r"[0-9]{0,6}\.?[0-9]{1,6}x", value):
            raise ValueError(f"must be a number or a multiple such as 1.5x: {value!r}")
        if not isinstance(value, str) and value <= 0:
            raise ValueError(f"must be positive: {value:g}")
        return value


def _or_null(schema: dict[str, Any]) -> None:
    """For editors: null is allowed and replaced before the types are checked."""
    schema.update({"type": ["string", "null"], "enum": [*schema["enum"], None]})


class KLSection(Section):
    estimator: Literal["k1", "k2", "k3", "exact", "importance"] = Field(default="exact", json_schema_extra=_or_null)
    """Estimator of each token's KL in the penalty; null = exact, or k1 for reward."""
    placement: Literal["reward", "loss", "rao_blackwell"] = Field(default="rao_blackwell", json_schema_extra=_or_null)
    """Where the KL penalty is added; rao_blackwell needs the exact estimator.

    null = rao_blackwell, or reward if another estimator is set.
    """
    target: Positive | Literal["conservative", "moderate", "aggressive"] = 0.1
    """Target KL: nats in `unit`; or conservative (0.02), moderate (0.075), aggressive (0.15), per token only."""
    unit: Literal["token", "sequence"] = "token"
    """Unit of the target, the ceiling and the controller: nats per token or per sequence."""
    controller: ControllerSection = Field(default_factory=ControllerSection)
    """The controller of beta; with kind fixed beta is constant, and only the ceiling counts from the target."""
    ceiling: CeilingSection | None = Field(default_factory=CeilingSection)
    """An upper limit of the KL, in addition to the controller; null = none."""

    @model_validator(mode="before")
    @classmethod
    def _usual_pair(cls, raw: Any) -> Any:
        """If only one of estimator and placement is set, the other follows from it."""
        if not isinstance(raw, dict):
            return raw
        estimator, placement = raw.get("estimator"), raw.get("placement")
        usual = {
            "estimator": "k1" if placement == "reward" else "exact",
            "placement": "rao_blackwell" if estimator in (None, "exact") else "reward",
        }
        return raw | {key: value for key, value in usual.items() if raw.get(key) is None}

    @property
    def target_value(self) -> float:
        """The target in nats, in `unit`."""
        return PRESETS[self.target] if isinstance(self.target, str) else self.target

    @property
    def ceiling_value(self) -> float | None:
        """The ceiling in nats, in `unit`."""
        value = None if self.ceiling is None else self.ceiling.value
        return self.target_value * float(value[:-1]) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        problems = list[str]()
        if isinstance(self.target, str) and self.unit != "token":
            problems.append(f"kl.target must be a number where kl.unit is {self.unit}: {self.target!r}")
        if self.placement == "rao_blackwell" and self.estimator != "exact":
            problems.append(f"kl.estimator must be 'exact' where kl.placement is rao_blackwell: {self.estimator!r}")
        target = self.target_value
        limit = self.ceiling_value
        if self.ceiling is not None and limit is not None and limit <= target:
            problems.append(f"kl.ceiling.value must be above kl.target ({target:g}): {self.ceiling.value}")
        refuse(*problems)
        return self
