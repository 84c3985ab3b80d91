"""How often each promise of reliability was put to the test, and kept.

    python scripts/reliability.py [--kills 50] [--fuzz 10000] [--out runs/reliability]

Kills runs (crash_test.py), runs the tests named below, and draws configs and data files (tests/fuzz). Into --out:
reliability.json, by row the number of cases, and of those that ended as promised. Exit 1 where one did not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from rlhf_kl.run.log import write_json
from rlhf_kl.text import text_table

ROOT = Path(__file__).resolve().parents[1]
TESTS = {  # row -> its tests
    "a process of two killed or stopped": (
        "tests/processes/test_kills.py",
        "tests/processes/test_failures.py::test_a_signal_to_one_process_stops_both_after_the_update",
    ),
    "two processes beside one": (
        "tests/processes/test_train.py::test_two_processes_make_the_run_of_one",
        "tests/processes/test_train.py::test_a_run_goes_on_with_or_without_shards",
        "tests/processes/test_supervised.py",
        "tests/processes/test_two_launchers.py",
    ),
    "full disk": (
        "tests/run/test_run.py::test_a_checkpoint_that_does_not_fit_leaves_the_one_before",
        "tests/processes/test_failures.py::test_a_disk_that_is_full_for_the_part_of_one_process_ends_both",
    ),
    "NaN or infinity": (
        "tests/commands/test_guards.py::test_scores_that_are_not_finite_turn_the_run_back_and_then_end_it",
        "tests/commands/test_guards.py::test_a_policy_that_overflows_ends_the_run_and_spares_the_checkpoints",
        "tests/commands/test_guards.py::test_weights_that_are_lost_turn_the_run_back_at_once",
        "tests/commands/test_supervised.py::test_gradients_that_stay_infinite_end_the_run",
        "tests/ppo/test_step.py::test_a_rollout_that_is_not_finite_changes_nothing",
        "tests/ppo/test_step.py::test_an_update_with_a_gradient_that_is_not_finite_says_so",
    ),
    "bad command or config": (
        "tests/cli/test_first_run.py::test_a_mistake_is_told_with_its_key_its_value_and_the_next_step",
        "tests/config/test_variants.py::test_each_mistake_is_one_line",
        "tests/config/test_resolve.py::test_a_problem_names_the_key_the_value_and_the_expected_one",
        "tests/config/test_resolve.py::test_every_key_refuses_what_no_key_can_be",
        "tests/config/test_named.py::test_problems_of_plugins",
        "tests/config/test_yaml.py::test_every_mistake_is_one_line_with_its_place",
    ),
}


def killed(kills: int) -> tuple[int, int]:
    """Runs that were killed, and those that went on as if nothing had been."""
    command = [sys.executable, "scripts/crash_test.py", "--kills", str(kills)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    words = done.stdout.split()
    return (int(words[-2]), int(words[-1])) if words else (kills, 0)


def tested(names: Sequence[str], report: Path, **environment: str) -> tuple[int, int]:
    """Cases of tests, and those that passed."""
    options = ["-q", "-m", "slow or not slow", "--timeout", "0", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *names]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=sys.stderr, check=False)
    if done.returncode > 1:  # 1: a test failed
        raise SystemExit(f"pytest could not run {', '.join(names)}")
    cases = ET.parse(report).findall(".//testcase")
    return len(cases), sum(len(case) == 0 or case[0].tag.startswith("system") for case in cases)


def main() -> int:
    """Try everything, write and print the counts; the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--fuzz", type=int, default=10_000, help="generated configs and data files")
    parser.add_argument("--out", type=Path, default=Path("runs/reliability"))
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found = {"killed at a random moment": killed(args.kills)}
    for row, names in TESTS.items():
        found[row] = tested(names, out / f"{row.replace(' ', '-')}.xml")
    cases, passed = tested(["tests/fuzz"], out / "fuzz.xml", RLHF_KL_FUZZ=str(args.fuzz))
    found["generated config or data file"] = args.fuzz, args.fuzz * passed // cases  # a test has its share of them
    figures = {row: {"cases": cases, "kept": kept} for row, (cases, kept) in found.items()}
    write_json(out / "reliability.json", figures)
    print(text_table(("", "cases", "ended as promised"), [[row, *map(str, each)] for row, each in found.items()]))
    return int(any(kept < cases for cases, kept in found.values()))


if __name__ == "__main__":
    sys.exit(main())
