from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_kl.components import is_reference, load_attribute, nearest
from rlhf_kl.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mine.py:f", True),
        ("a.b:C", True),
        ("builtin:reviews", False),
        ("adaptive", False),
        (":x", False),
        ("a:", False),
        ("C:\\x.py:f", True),
        ("org/model", False),
    ],
)
def test_references_and_names(text: str, expected: bool) -> None:
    assert is_reference(text) is expected


def test_nearest_ignores_case_and_gives_up_on_the_unlike() -> None:
    assert nearest("ADAPTVE", ["adaptive", "fixed"]) == "adaptive"
    assert nearest("zzz", ["adaptive", "fixed"]) is None


def test_a_file_is_taken_from_the_first_folder_that_has_it(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / "mine.py").write_text(f"WHO = {folder.name!r}\n")
    assert load_attribute("mine.py:WHO", search=[first, second]) == "a"
    assert load_attribute("mine.py:WHO", search=[tmp_path, second]) == "b"
    assert load_attribute(f"{second}/mine.py:WHO", search=[first]) == "b"


def test_a_file_runs_once_until_it_changes_and_leaves_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class A: pass\n")
    path_before = list(sys.path)
    assert load_attribute("mine.py:A", search=[tmp_path]) is load_attribute("mine.py:A", search=[tmp_path])
    file.write_text("class A: x = 1\n")
    assert load_attribute("mine.py:A", search=[tmp_path]).x == 1
    assert sys.path == path_before
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.py"]


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "rlhf_kl_test_neighbour.py").write_text("X = 7\n")
    (tmp_path / "mine.py").write_text("from rlhf_kl_test_neighbour import X\n")
    assert load_attribute("mine.py:X", search=[tmp_path]) == 7


def test_modules_of_the_working_directory_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlhf_kl_test_module.py").write_text("def reward(): ...\n")
    monkeypatch.chdir(tmp_path)
    assert load_attribute("rlhf_kl_test_module:reward", search=[]).__name__ == "reward"
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("x = 1\n\ny = 1 / 0\n", ["ZeroDivisionError", "line 3"]),
        ("x = 1\ndef broken(:\n", ["SyntaxError", "line 2"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit", "line 2"]),
        ("import rlhf_kl_no_such_module\n", ["ModuleNotFoundError", "line 1"]),
        ("raise ValueError('two\\nlines')\n", ["ValueError: two lines", "line 1"]),
    ],
)
def test_a_file_that_raises_is_one_line_with_its_place(tmp_path: Path, source: str, parts: list[str]) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(InputError) as caught:
        load_attribute("mine.py:f", search=[tmp_path])
    [line] = caught.value.problems
    assert "\n" not in line
    assert "mine.py" in line
    for part in parts:
        assert part in line


def test_a_module_that_raises_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlhf_kl_test_raises.py").write_text("\n\n{}['key']\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"KeyError.*line 3"):
        load_attribute("rlhf_kl_test_raises:f", search=[])


def test_a_missing_name_comes_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def brevity(prompts, responses): ...\n")
    with pytest.raises(InputError, match=r"no 'brevty'; did you mean brevity\?"):
        load_attribute("mine.py:brevty", search=[tmp_path])
    with pytest.raises(InputError, match=r"no such file: other\.py"):
        load_attribute("other.py:f", search=[tmp_path])
    with pytest.raises(InputError, match="no module 'rlhf_kl_nowhere'"):
        load_attribute("rlhf_kl_nowhere:f", search=[])
