"""Which run may go on; that it then is the run that never ended is tests/commands/test_resume.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.run.resume import check_fingerprints, finished_summary
from rlhf_kl.run.run_folder import RunFolder, write_json


def test_only_a_run_that_came_to_its_end_is_finished(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert finished_summary(folder) is None
    write_json(folder.summary, {"stopped_by": None, "steps": 3})
    assert finished_summary(folder) is None  # no final model yet
    folder.final.mkdir()
    assert finished_summary(folder) == {"stopped_by": None, "steps": 3}
    write_json(folder.summary, {"stopped_by": "KL above the ceiling"})
    assert finished_summary(folder) is None


def test_content_that_is_another_is_named_by_its_keys() -> None:
    before = {"data.prompts": "1", "reward.model": "2", "gone": "3"}
    check_fingerprints(before, {"data.prompts": "1", "new": "4"}, "runs/a")
    with pytest.raises(InputError) as caught:
        check_fingerprints(before, {"data.prompts": "5", "reward.model": "6"}, "runs/a")
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["data.prompts", "reward.model"]
