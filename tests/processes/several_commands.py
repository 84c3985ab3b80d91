"""Runs command lines one after the other in every process of a group; their exit codes go to CODES.RANK."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rlhf_kl import cli
from tests import vllm_standin

if __name__ == "__main__":
    vllm_standin.install()
    commands, codes = Path(sys.argv[1]), Path(sys.argv[2])
    found = [cli.run(words) for words in json.loads(commands.read_text())]
    codes.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(found))
