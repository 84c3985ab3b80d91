"""What README and guide print works as it is printed: every YAML is valid, every command runs.

Sizes are cut by appended `--set`. A block under an HTML comment `validated only` needs a GPU, a hub or hours: its
configs are validated, its commands are not run.
"""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from rlhf_kl.builtin.world import world_file
from rlhf_kl.commands.guide import FOLDER, PAGES
from rlhf_kl.control import CONTROLLER_PROVIDED, CONTROLLERS
from rlhf_kl.data.files import read_rows
from rlhf_kl.monitors.alarms import falls
from rlhf_kl.remote import HttpReward
from rlhf_kl.report.texts import text_figures
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.text import scorer_label
from tests.servers import serving

WORLD = "builtin:reviews-small"
REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = [REPOSITORY / "README.md", *(FOLDER / f"{name}.md" for name in PAGES)]
BLOCK = re.compile(r"(<!-- validated only -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"# ([\w-]+\.(?:yaml|py))\b")
GENERATOR = runpy.run_path(str(REPOSITORY / "scripts" / "config_reference.py"))
SMALL = {
    "ppo.total_episodes": 16,
    "ppo.minibatch_size": 8,
    "rollout.batch_size": 8,
    "rollout.max_new_tokens": 24,
    "rollout.reference_samples": 16,
    "eval.max_documents": 4,
}


class Block(NamedTuple):
    language: str
    text: str
    runs: bool

    @property
    def name(self) -> str | None:
        """The file that its first line names."""
        found = NAME.match(self.text)
        return found[1] if found else None


def blocks(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [Block(language, body, not mark) for mark, language, body in BLOCK.findall(text)]


def files(document: Path) -> dict[str, str]:
    """The files that a document has a user write; blocks of one name go into one file."""
    found: dict[str, str] = {}
    for block in blocks(document):
        if block.name is not None:
            found[block.name] = found.get(block.name, "") + block.text
    return found


def commands(document: Path) -> list[list[str]]:
    """The lines of its shell blocks that are to run, as words."""
    shell = [block for block in blocks(document) if block.language in ("bash", "console") and block.runs]
    lines = [line.removeprefix("$ ") for block in shell for line in block.text.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """A working directory with what a document's user has: the files that it prints, a model, prompts and texts."""

    def make(document: Path) -> Path:
        shutil.copytree(world_file(WORLD, "policy"), tmp_path / "my-model")
        shutil.copytree(world_file(WORLD, "reward"), tmp_path / "other-reward-model")
        rows = [row | {"answer": "fine"} for row in read_rows(Path(world_file(WORLD, "prompts")))[:16]]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "prompts").mkdir()
        (tmp_path / "prompts" / "some.txt").write_text("".join(f"{row['prompt']}\n" for row in rows))
        texts = [row["text"] for row in read_rows(Path(world_file(WORLD, "heldout")))[:4]]
        (tmp_path / "heldout.txt").write_text("\n\n".join(texts))
        labelled = [{"text": text, "label": i % 2} for i, text in enumerate(texts)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
        for name, text in files(document).items():
            (tmp_path / name).write_text(text)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return make


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_yaml_and_every_python_block_is_valid(
    document: Path, place: Callable[[Path], Path], rlhf_kl: Any
) -> None:
    folder = place(document)
    for block in blocks(document):
        if block.language == "python":
            compile(block.text, str(document), "exec")
    for number, block in enumerate(block for block in blocks(document) if block.language == "yaml"):
        name = block.name
        if name is None:  # a part of a config
            name = f"part-{number}.yaml"
            (folder / name).write_text("extends: ppo_adaptive.yaml\n" + block.text)
        outcome = rlhf_kl("config", "validate", name)
        assert outcome.code == 0, (block.text, outcome.err)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_runs(document: Path, place: Callable[[Path], Path], rlhf_kl: Any) -> None:
    place(document)
    for words in commands(document):
        outcome = run(words, rlhf_kl)
        assert not outcome, f"{words}:\n{outcome}"


def run(words: list[str], rlhf_kl: Any) -> str:
    """Run a command as far as a test can; what went wrong."""
    program, *rest = words
    if program == "python":  # a file of the document, which says what it prints
        done = subprocess.run([sys.executable, *rest], capture_output=True, text=True, check=False)
        told = any(done.stdout.strip() in document.read_text(encoding="utf-8") for document in DOCUMENTS)
        return "" if done.stdout and told else done.stdout + done.stderr or "nothing printed"
    if program in ("git", "python3", "source", "pip"):  # a clone, and its environment
        return ""
    if program == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""
    assert program == "rlhf-kl", f"{words}: neither run here nor marked"
    if "--updates" in rest:  # fewer, by `cut`
        del rest[rest.index("--updates") : rest.index("--updates") + 2]
    if rest[0] in ("train", "compare", "doctor") and "--config" in rest:
        rest += cut(rest)
    outcome = rlhf_kl(*rest)
    return outcome.out + outcome.err if outcome.code else ""


def cut(words: list[str]) -> list[str]:
    """Options that make a command small: fewer responses, the small world."""
    config = Path(words[words.index("--config") + 1])
    values: dict[str, Any] = dict(SMALL)
    if "ppo_model.yaml" not in (config.read_text() if config.is_file() else ""):
        values["policy.model"] = WORLD
    if words[0] == "train":
        words = ["--overwrite", "--quiet"]
    elif words[0] == "compare":
        words = ["--quiet", "--seed", "0"]
    else:
        words = []
    return [*words, *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]


def test_the_controller_of_the_guide_does_what_it_is_written_to_do(place: Callable[[Path], Path], rlhf_kl: Any) -> None:
    place(FOLDER / "rewards_and_controllers.md")
    rows = json.loads(rlhf_kl("simulate", "--config", "linear.yaml", "--json").out)
    # Linear in the episodes seen, by hand: 64 an update, 3840 in all.
    assert [row["coef"] for row in rows[:3]] == pytest.approx([0.1 * (1 + 2 * 64 * k / 3840) for k in range(3)])


def test_a_loop_of_ones_own() -> None:
    names = {
        "scores": torch.tensor([1.0, 0.5]),
        "logprobs": torch.tensor([[-2.0, -2.5], [-3.0, 0.0]]),
        "ref_logprobs": torch.tensor([[-2.1, -2.3], [-2.8, 0.0]]),
        "mask": torch.tensor([[True, True], [True, False]]),
    }
    (code,) = (block.text for block in blocks(FOLDER / "rewards_and_controllers.md") if "rewards_with_kl" in block.text)
    exec(code, names)
    torch.testing.assert_close(names["rewards"], torch.tensor([[-0.01, 1.02], [0.52, 0.0]]))
    assert names["controller"].updates == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        if target.startswith("http"):
            continue
        there = (document.parent / path).resolve() if path else document
        assert there.is_file(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in slugs, (target, slugs)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_the_second_score_has_one_name(document: Path) -> None:
    """`gold` is a key; readers see the true score."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r".*\bgold\b.*", prose, flags=re.IGNORECASE) == []


def test_tables_and_pictures_call_it_the_true_score_too() -> None:
    words = [text_figures({"gold": 1.0})[0], scorer_label("gold"), falls("gold").text]
    assert all("true score" in each for each in words)
    assert not any(re.search(r"(?<![{\w])gold\b", each) for each in words)


def cells(page: str) -> list[list[str]]:
    """The cells of the rows of a page's tables."""
    lines = (FOLDER / f"{page}.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]


def test_the_page_of_metrics_names_what_a_run_writes(
    tmp_path: Path, tiny_settings: dict[str, Any], rlhf_kl: Any
) -> None:
    reward = {"terms": {"TERM": {"kind": tiny_settings["reward"]["kind"]}}, "length_penalty": 0.01}
    penalties = {"missing_eos_penalty": 1.0, "repetition_penalty": 0.1}
    shutil.copytree(tiny_settings["policy"]["model"], tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    moved = {name: tensor * 1.01 for name, tensor in weights.items()}  # a reference that is not the start
    save_file(moved, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    changes = {"reward": {"kind": "sum", **reward, **penalties}, "reference": {"model": str(tmp_path / "other")}}
    scorers = {"NAME": {"kind": tiny_settings["reward"]["kind"]}}
    changes["eval"] = tiny_settings["eval"] | {"scorers": scorers}
    changes["run"] = tiny_settings["run"] | {"dtype": "float16"}  # whose rows have the scale of the loss too
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_settings | changes))
    words = ["train", "--config", tmp_path / "run.yaml", "--output-dir", tmp_path / "run", "--quiet", "--updates", 2]
    assert rlhf_kl(*words).code == 0
    written = {key for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") for key in row}
    named = {name for names, *_ in cells("metrics") for name in re.findall(r"`([\w/]+)`", names)}
    penalties_written = {f"penalty/{name}" for name in ("missing_eos", "length", "repetition")}
    assert penalties_written <= written
    of_engines = {f"rollout/engine_{name}" for name in ("gap", "gap_max", "cut")}
    assert named - {"penalty/NAME"} == written - penalties_written | of_engines


def test_the_page_on_kl_names_every_option_of_a_controller_and_its_default() -> None:
    described = {name: row[-1] for row in cells("kl") for name in re.findall(r"`(\w+)`", row[0])}
    common = {*CONTROLLER_PROVIDED, "coef", "min_coef", "max_coef", "self"}
    for name, law in CONTROLLERS.items():
        options = {
            option: "null" if parameter.default is None else str(parameter.default)
            for option, parameter in inspect.signature(law).parameters.items()
            if option not in common
        }
        shown = dict(re.findall(r"`(\w+): ([\w.]+)`", described[name]))
        assert shown == options, name


def test_the_page_on_rewards_names_every_option_of_a_server_and_its_default() -> None:
    rows = {name: row[1] for row in cells("rewards_and_controllers") for name in re.findall(r"`(\w+)`", row[0])}
    for option, parameter in inspect.signature(HttpReward).parameters.items():
        default = "null" if parameter.default is None else str(parameter.default)
        assert rows[option] == ("needed" if parameter.default is parameter.empty else f"`{default}`"), option


def test_the_server_of_the_guide_gives_the_scores_of_a_run(
    place: Callable[[Path], Path], rlhf_kl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place(FOLDER / "rewards_and_controllers.md")
    with serving() as other:  # which finds a free port
        port = str(other.http.server_port)
    for name in ("server.py", "served.yaml"):
        (folder / name).write_text((folder / name).read_text().replace("8000", port))
    monkeypatch.setenv("RM_TOKEN", "sk-guide")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = subprocess.Popen([sys.executable, "server.py"], stderr=subprocess.DEVNULL)
    try:
        words = ["train", "--config", "served.yaml", "--output-dir", "run"]
        outcome = rlhf_kl(*words, *cut(words))
    finally:
        server.kill()
        server.wait()
    assert outcome.code == 0, outcome.err
    samples = [row for row in read_jsonl(folder / "run" / "samples.jsonl") if row["chosen"] != "held out"]
    assert samples
    assert all(row["score"] == -abs(sum(map(row["response"].count, ".!?")) - 5) for row in samples)


def test_the_page_on_running_names_the_environment_variables_that_the_program_reads() -> None:
    page = (FOLDER / "running.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\"(\w+)", source))
    assert "RLHF_KL_CACHE" in read
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_what_is_made_from_the_schema_is_fresh() -> None:
    made = GENERATOR["documents"]()
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "python scripts/config_reference.py"
