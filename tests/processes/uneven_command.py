"""Runs one command line in every process of a group; the second would make a pass of each row by itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from rlhf_kl import cli
from rlhf_kl.ops.packing import Layout

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        groups = Layout.groups

        def one_by_one(self: Layout, rows: Any, *, most_rows: int, most_tokens: int) -> Any:
            return groups(self, rows, most_rows=1, most_tokens=most_tokens)

        Layout.groups = one_by_one  # type: ignore[method-assign]
    sys.exit(cli.run(sys.argv[1:]))
