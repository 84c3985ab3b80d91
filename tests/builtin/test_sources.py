"""A part of the built-in world that other code made is not taken for one of this code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_kl.builtin.sources import PACKAGE, PASSED_OVER, code_of, imported_sources
from rlhf_kl.commands.world import BUILDER, WRITER

# Every file with a function that is called while both models of a tiny world are made.
CALLED = """
import sys
from rlhf_kl.builtin.corpus import CorpusSizes
from rlhf_kl.builtin.world import WORLDS, WorldSpec
from rlhf_kl.commands.world import World
from rlhf_kl.run.display import TrainingDisplay

sizes = CorpusSizes(train_texts=200, heldout_texts=20, prompts=20, heldout_prompts=10, pairs=40, heldout_pairs=20)
shape = "policy.architecture={hidden_size: 16, layers: 1, heads: 1, vocab_size: 300}"
WORLDS["tiny"] = WorldSpec("tiny", sizes, sft=(shape, "sft.epochs=0.2"), reward_model=("reward_model.epochs=0.5",))
called = set()
sys.setprofile(lambda frame, event, argument: called.add(frame.f_code.co_filename))
World("builtin:tiny", TrainingDisplay(quiet=True)).reward_model()
sys.setprofile(None)
print("\\n".join(called))
"""


def test_the_key_covers_all_code_that_building_runs(tmp_path: Path) -> None:
    environment = os.environ | {"RLHF_KL_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CALLED], env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    paths = {Path(line) for line in done.stdout.splitlines() if line.startswith(str(PACKAGE))}
    called = {path for path in paths if path.relative_to(PACKAGE).with_suffix("").parts[0] not in PASSED_OVER}
    assert {PACKAGE / "ops" / "losses.py", PACKAGE / "rewards" / "model.py"} <= called
    assert called - imported_sources(PACKAGE / BUILDER) == set()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.parametrize("file", ["ops/losses.py", "rewards/model.py", "models/lm.py", "seeding.py", "builtin/gold.py"])
def test_other_code_is_another_key(file: str, package: Path) -> None:
    with (package / file).open("a") as source:
        source.write("\n\nLATER = 1\n")
    assert code_of(BUILDER, package) != code_of(BUILDER)
    assert (code_of(WRITER, package) != code_of(WRITER)) == (file == "builtin/gold.py")


def test_words_and_what_only_shows_are_the_same_key(package: Path) -> None:
    assert code_of(BUILDER, package) == code_of(BUILDER)
    losses, display = package / "ops" / "losses.py", package / "run" / "display.py"
    losses.write_text("# A comment.\n" + losses.read_text().replace('"""', '"""Other words. ', 1))
    display.write_text(display.read_text() + "\nLATER = 1\n")
    code_of.cache_clear()
    assert code_of(BUILDER, package) == code_of(BUILDER)
