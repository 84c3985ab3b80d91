"""Runs one command line in every process of a group; the second would make a pass of each row by itself.

At its end the first one tells after how many of the passes gradients were summed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rlhf_kl import cli
from rlhf_kl.ops.packing import Layout
from rlhf_kl.ppo import step

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        groups = Layout.groups

        def one_by_one(self: Layout, rows: Any, *, most_rows: int, most_tokens: int) -> Any:
            return groups(self, rows, most_rows=1, most_tokens=most_tokens)

        Layout.groups = one_by_one  # type: ignore[method-assign]
    step.WHOLE = int(os.environ["WHOLE"])
    summed: list[bool] = []
    sum_gradients = step.sum_gradients

    def counting(modules: Any, now: bool) -> None:
        summed.append(now)
        sum_gradients(modules, now)

    step.sum_gradients = counting  # type: ignore[attr-defined]
    code = cli.run(sys.argv[1:])
    if os.environ["RANK"] == "0":
        print(f"summed after {sum(summed)} of {len(summed)}")
    if code:
        sys.exit(code)
