"""Real tiny models on disk, and what tests share."""

from __future__ import annotations

import os

# Before torch is imported anywhere: one thread gives the same sums every time and is fastest for tiny models.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import contextlib
import io
import logging
import signal
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from rlhf_kl.types import Prompts

# A shell starts a job in the background with Ctrl-C ignored, and so would be the tests' own processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Generated examples take longer on a busy machine, which is no fault.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# As in an activated environment: the program prints its own name, not a path.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
REPOSITORY = Path(__file__).parent.parent
CONVERSIONS = ("__float__", "__bool__", "__int__", "__index__")  # of a tensor to a number
LETTERS = "abcd"  # with pad, bos and eos a vocabulary of seven

# Tests with these fixtures train, start processes or a browser. The mathematics is tested without them.
SLOW_FIXTURES = {"train", "supervised", "compared", "doctor", "smoke", "launch", "together", "browser"}
SLOW_FILES = (
    *("processes/", "fake_cuda/", "fuzz/", "test_documents.py", "test_recipes.py", "test_gpu.py"),
    *("cli/test_read_run.py", "models/test_families.py"),
    *("commands/test_lora.py", "commands/test_reward_lora.py"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Marks as `slow` what takes seconds, but for tests marked `quick`: a few runs in which all parts work together."""
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        if item.get_closest_marker("quick"):
            continue
        if file.startswith(SLOW_FILES) or SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.slow)


class Outcome(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str


def command(*arguments: str | Path) -> Outcome:
    """One command line, in this process."""
    from rlhf_kl import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def rlhf_kl() -> Callable[..., Outcome]:
    """`rlhf_kl("train", "--config", ...)` -> exit code, stdout, stderr."""
    return command


# A test calls a model to compare with it, or loads one with a random head; kernels that are not installed.
OF_TESTS = ("loss_type=None", "recommend passing in an `attention_mask`", "LOAD REPORT", "is falling back to its ref")


class LibraryWarnings(logging.Handler):
    """Collects what libraries warn of through `logging`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not any(words in record.getMessage() for words in OF_TESTS):
            self.told.append(f"{record.name}: {record.getMessage()}")


LIBRARY_WARNINGS = LibraryWarnings()
for library in ("transformers", "datasets", "accelerate", "peft", "huggingface_hub"):
    logging.getLogger(library).addHandler(LIBRARY_WARNINGS)


@pytest.fixture(autouse=True)
def library_warnings() -> Iterator[list[str]]:
    """What libraries log as a warning is an error, as a Python warning is; a test that expects some takes it out."""
    LIBRARY_WARNINGS.told.clear()
    yield LIBRARY_WARNINGS.told
    assert LIBRARY_WARNINGS.told == []


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Converted models lie in a temporary folder, shared by the workers of a parallel run."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_KL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def letters() -> Any:
    """A tokenizer of seven tokens: pad, bos, eos and one for each of `abcd`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def new_model(letters: Any) -> Callable[..., Any]:
    """`new_model(seed=0, spread=0.5, context=32)`: a random GPT-2 over the seven letters.

    `spread` is the noise on its weights; without it a fresh model is all but uniform.
    """
    import torch

    from rlhf_kl.models.scratch import new_gpt2

    def make(seed: int = 0, spread: float = 0.5, context: int = 32, hidden_size: int = 16, layers: int = 1) -> Any:
        model = new_gpt2(
            vocab_size=len(letters),
            hidden_size=hidden_size,
            layers=layers,
            heads=2,
            context=context,
            tokenizer=letters,
            seed=seed,
        )
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=noise) * spread)
        return model

    return make


@pytest.fixture(scope="session")
def reads_of() -> Callable[..., list[str]]:
    """`reads_of(work)`: the calls of `work()` that wait for numbers of a device, by name."""
    from torch.overrides import TorchFunctionMode

    class Reads(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in {*("item", "tolist", "cpu", "numpy", "nonzero"), *CONVERSIONS}:
                self.seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def count(work: Callable[[], Any]) -> list[str]:
        with Reads() as reads:
            work()
        return reads.seen

    return count


@pytest.fixture(scope="session")
def prompts_of(letters: Any) -> Callable[..., Prompts]:
    """`prompts_of("ab", "a")`: a table of these prompts, with empty rows."""
    from rlhf_kl.models.tokens import encode_all
    from rlhf_kl.types import Prompts

    def make(*texts: str) -> Prompts:
        count = len(texts)
        return Prompts(list(texts), encode_all(letters, texts), [{}] * count, [()] * count)

    return make


@pytest.fixture(scope="session")
def own_logits() -> Callable[..., Any]:
    """`own_logits(model, row)`: (tokens, V) of one unpadded text, by the model's own forward pass in float64."""
    import copy

    import torch

    def read(model: Any, row: Any) -> Any:
        whole = copy.deepcopy(model).double()
        ids = torch.as_tensor(row).unsqueeze(0)
        with torch.no_grad():
            return whole(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].double()

    return read


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """`rows_read()`: a list that gets, from now on, the rows of each pass of a GPT-2."""
    from transformers import GPT2Model

    forward, passes = GPT2Model.forward, list[int]()

    def start() -> list[int]:
        def noting(self: Any, input_ids: Any = None, **settings: Any) -> Any:
            passes.append(len(input_ids))
            return forward(self, input_ids=input_ids, **settings)

        monkeypatch.setattr(GPT2Model, "forward", noting)
        return passes

    return start


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, letters: Any, new_model: Callable[..., Any]) -> Path:
    """The seven-letter GPT-2 as a folder that transformers loads; a context of 32."""
    from rlhf_kl.models.pretrained import save_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(new_model(spread=0.1), letters, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_reward_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, letters: Any) -> Path:
    """A reward model of the same letters, its head initialised but not trained."""
    from rlhf_kl.models.pretrained import load_causal_lm, save_model
    from rlhf_kl.models.scratch import classifier_from_lm, initialise_head

    model = classifier_from_lm(load_causal_lm(str(tiny_folder)), letters)
    initialise_head(model.score, seed=1)
    folder = tmp_path_factory.mktemp("models") / "tiny-reward"
    save_model(model, letters, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Files for the seven-letter models: prompts, texts, and a reward function in a .py file."""
    import json

    folder = tmp_path_factory.mktemp("data")
    prompts = [x + y for x in LETTERS for y in (*LETTERS, "ab", "dc")]
    texts = [(x + y) * n for x in LETTERS for y in LETTERS for n in (2, 5)]
    for name, rows in (("prompt", prompts), ("text", texts)):
        (folder / f"{name}s.jsonl").write_text("".join(json.dumps({name: row}) + "\n" for row in rows))
    (folder / "mine.py").write_text(
        "def count(prompts, responses, letter: str = 'a'):\n"
        "    return [response.count(letter) / 8 for response in responses]\n"
    )
    return SimpleNamespace(
        folder=folder,
        prompts=folder / "prompts.jsonl",
        texts=folder / "texts.jsonl",
        reward=f"{folder / 'mine.py'}:count",
    )


@pytest.fixture(scope="session")
def tiny_settings(tiny_folder: Path, tiny_data: SimpleNamespace) -> dict[str, Any]:
    """A `train` config of a second or so: the tiny model, files, and a reward function."""
    return {
        "run": {"name": "tiny", "device": os.environ.get("RLHF_KL_TEST_DEVICE", "cpu")},
        "policy": {"model": str(tiny_folder)},
        "reward": {"kind": tiny_data.reward, "missing_eos_penalty": 0.0},
        "data": {"prompts": str(tiny_data.prompts)},
        "rollout": {"batch_size": 16, "max_new_tokens": 6, "reference_samples": 64},
        "ppo": {
            "total_episodes": 96,
            "epochs": 2,
            "learning_rate": 2.0e-4,
            "lr_schedule": "constant",
            "minibatch_size": 16,
            "microbatch_size": 8,
        },
        "kl": {"controller": {"kind": "adaptive", "coef": 0.1}},
        "eval": {"every": 2, "texts": str(tiny_data.texts), "max_documents": 200},
        "checkpoint": {"every": 2, "keep": 10},
        "tracking": {"tensorboard": False, "samples_every": 2},
    }


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Models and texts of the wild, which are not part of the project; skips where they are missing."""
    folder = Path(os.environ.get("RLHF_KL_REAL") or REPOSITORY.parent / "shared" / "real")
    if not folder.is_dir():
        pytest.skip(f"no real models here: {folder} (set RLHF_KL_REAL)")
    return folder


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """`write_run("name", rows, samples, config, summary)`: a run folder with these records, no models."""
    import json

    from rlhf_kl.config.resolve import dump_config
    from rlhf_kl.config.schema import TrainConfig

    def write(
        name: str = "run",
        rows: list[dict[str, Any]] | None = None,
        samples: list[dict[str, Any]] | None = None,
        config: dict[str, Any] | None = None,
        summary: dict[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        settings = {**(config or {}), "run": {"name": name, **(config or {}).get("run", {})}}
        (folder / "config.yaml").write_text(dump_config(TrainConfig.model_validate(settings)))
        for file, records in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
            if records is not None:
                (folder / file).write_text("".join(json.dumps(row) + "\n" for row in records))
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps({"stopped_by": None, **summary}))
        return folder

    return write


@pytest.fixture(scope="session")
def metrics_rows() -> Callable[..., list[dict[str, Any]]]:
    """`metrics_rows([0.0, 0.1, ...], coef=0.2)`: updates with these KLs per token, and their evaluations.

    Responses have 20 tokens; the score gains sqrt(2 KL) of the sequence, the most that it can; evaluations are made
    of every tenth update and after the last.
    """

    def make(
        kls: list[float], coef: float = 0.2, target: float = 0.1, evaluated: bool = True, gold: bool = True
    ) -> list[dict[str, Any]]:
        rows = []
        for step, kl in enumerate(kls, start=1):
            gain = (2 * 20 * kl) ** 0.5
            row: dict[str, Any] = {
                "step": step,
                "episodes": 64 * step,
                "objective/scores": 1.0 + gain,
                "objective/scores_std": 1.0,
                "objective/scores_deciles": [gain + (i - 5) / 2 for i in range(11)],
                "objective/scores_shaped": gain,
                "kl/token": kl,
                "kl/sequence": 20 * kl,
                "kl/target": target,
                "kl/error": kl / target - 1,
                "kl/coef": coef,
                "kl/coef_next": coef,
                "kl/ceiling": 1.5 * target,
                "kl/backtrack_factor": 1.0,
                "policy/entropy": 1.2,
                "rollout/response_length": 20.0,
                "rollout/eos_rate": 0.9,
                "rollout/score_length_corr": 0.1,
                "alerts": [],
            }
            watched = {"eval/gold": 0.5 * gain - 0.1 * gain**2} if gold else {}
            if evaluated and step % 10 == 1:
                row |= {"eval/perplexity": 3.0 + kl, "eval/distinct_2": 0.3, **watched}
            rows.append(row)
        if evaluated and kls:
            end = {"step": len(kls) + 1, "episodes": 64 * len(kls)}
            rows.append({**end, "eval/perplexity": 3.0 + kls[-1], **watched})
        return rows

    return make
