"""`rlhf-kl simulate`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_kl.commands.options import Set, local, numbers
from rlhf_kl.errors import InputError
from rlhf_kl.text import text_table

if TYPE_CHECKING:
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.control.plant import SimulatedUpdate

MOST_ROWS = 20  # of the table
PLANT_NATS = 2.0  # per sequence: the target of a plant whose unit is the token


def simulate(
    controller: Annotated[
        str | None, typer.Option(metavar="KIND", help="Name of a controller, file.py:Class or module:Class.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Take controller, target and sizes from this config.")
    ] = None,
    sets: Set = None,
    kl: Annotated[str | None, typer.Option(metavar="KL,KL,...", help="Measured KLs: no policy is simulated.")] = None,
    speed: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="Policy: share of the way to its final KL in one update.")
    ] = 0.2,
    noise: Annotated[float, typer.Option(min=0.0, help="Policy: relative spread of a measured KL.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Policy: seed of its noise.")] = 0,
    episodes: Annotated[int | None, typer.Option(min=1, help="Responses per update (64).")] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Updates to simulate (60).")] = None,
    target: Annotated[float | None, typer.Option(min=1e-9, help="Target KL in nats.")] = None,
    coef: Annotated[float | None, typer.Option(help="Starting beta.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list of rows.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", callback=local, help="Draw KL and beta.")] = None,
) -> None:
    """Run a KL controller on given KLs or on a simulated policy: no model, in seconds."""
    from rlhf_kl.config.resolve import load_config
    from rlhf_kl.control import CONTROLLER_PROVIDED, law_class, make_controller, option_names, stored_name
    from rlhf_kl.control.plant import Plant, example_scores, simulate_plant, simulate_sequence, tilt_law
    from rlhf_kl.events import worded

    if sets and config is None:
        raise InputError("--set changes a config: it needs --config")
    kls = None if kl is None else numbers("--kl", kl)
    options: dict[str, Any] = {}
    total, length = None, None
    if config is not None:  # what the command line does not say
        run: TrainConfig = load_config("train", config, sets or [])
        section = run.kl.controller
        if controller is None or stored_name(controller) == section.kind:
            controller = section.kind
            options = {name: value for name, value in section.arguments.items() if name != "coef"}
        if coef is None and not isinstance(section.coef, str):
            coef = section.coef
        target = target or run.kl.target_value
        length = 1.0 if run.kl.unit == "sequence" else None
        if episodes is None and updates is None:
            total = max(1, run.ppo.total_episodes - run.ppo.value_warmup * run.rollout.batch_size)
        episodes, updates = episodes or run.rollout.batch_size, updates or run.controlled_updates
    kind = stored_name(controller or "adaptive")
    episodes = episodes or 64
    updates = updates or (60 if kls is None else len(kls))
    if coef is not None and "coef" in option_names(law_class(kind)):
        options["coef"] = coef
    sizes = {"target": target, "total_episodes": total or episodes * updates, "batch_size": episodes}
    control = make_controller(kind, options, **sizes)
    own = (getattr(control.law, name, None) for name in CONTROLLER_PROVIDED["target"])
    target = float(target or next(filter(None, own), 0.1))
    notes: list[str] = []
    if kls is None:
        policy = Plant(tilt_law(example_scores()), speed, noise, length or PLANT_NATS / target, seed)
        notes += worded(control.start_events(updates, episodes))
        rows = simulate_plant(control, policy, updates, episodes)
    else:
        rows = simulate_sequence(control, kls, episodes, notes)
    for note in notes:
        print(note, file=sys.stderr)
    if plot is not None:
        try:
            _draw(rows, target, plot)
        except ValueError as error:
            raise InputError(f"--plot {plot}: {error}") from None
    if as_json:
        # NaN is no JSON: a KL that was not measured is null, as in metrics.jsonl
        print(json.dumps([{k: v if math.isfinite(v) else None for k, v in r._asdict().items()} for r in rows]))
    else:
        print(f"{kind}, target {target:g} nats, {episodes} responses per update\n")
        _show(rows, target)


def _show(rows: list[SimulatedUpdate], target: float) -> None:
    from rlhf_kl.control.plant import conclusion, in_range

    every = -(-len(rows) // MOST_ROWS)
    body = []
    for step, kl, coef, coef_next in rows:
        if step % every == 0 or step in (1, len(rows)):
            ratio = kl / target
            band = "in range" if in_range(ratio) else ""
            body.append([str(step), f"{kl:.4f}", f"{ratio:.2f}", band, f"{coef:.4f}", f"{coef_next:.4f}"])
    print(text_table(("update", "KL", "KL/target", "", "beta", "next beta"), body))
    if every > 1:
        print(f"(1 update in {every}; --json has all)")
    print("", *conclusion(rows, target), sep="\n")


def _draw(rows: list[SimulatedUpdate], target: float | None, file: Path) -> None:
    """KL with its target above, beta below. The format is that of the file's suffix."""
    from rlhf_kl.report.drawing import Chart, Line, log_if_wide, save_sheet

    steps, coefs = [row.step for row in rows], [row.coef for row in rows]
    kl = Chart("kl", "KL", "nats", [Line("KL", "kl", steps, [row.kl for row in rows])], target=target)
    log = log_if_wide(min(coefs), max(coefs))
    save_sheet([kl, Chart("beta", "Beta", "beta", [Line("beta", "beta", steps, coefs)], log=log)], file)
