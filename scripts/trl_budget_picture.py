"""A toy GRPO (or RLOO) run of TRL with a constant beta and with a KL budget, as a picture of KL over steps.

    python scripts/trl_budget_picture.py OUT.png [--trainer rloo] [--short | --watch]
    python scripts/trl_budget_picture.py --json scripts/results/trl_budget.json [--python PYTHON]...

Needs `pip install 'rlhf-kl[trl]'`. The model is a random GPT-2 over sixteen letters, the reward how many of up to
sixteen letters are one of four. --short: their share of what was written, which short answers exploit, so that the
KL per token rises by itself. --watch: beta 0, the KL that the budget logs beside the exact one, and a stop. The KL is
the exact one, over the whole vocabulary at the states of each rollout. --json: every figure of the guide, one set for
each PYTHON, the interpreter of an environment with a version of TRL; what is there already is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import string
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

LETTERS = string.ascii_lowercase[:16]
WANTED = set("abcd")
LENGTH = 16
TARGET = 0.1
STOP = 0.2
STARTS = {"grpo": (0.04, 4.0), "rloo": (0.015, 1.5)}


def make_model(folder: str) -> None:
    """Saves a random GPT-2 and a tokenizer of one token a letter."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    letters = Tokenizer(WordLevel(ids, unk_token="<eos>"))
    letters.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(ids), "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **special)).save_pretrained(folder)


def wanted(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in WANTED for letter in text) / LENGTH for text in completions]


def share_of_wanted(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in WANTED for letter in text) / max(len(text), 1) for text in completions]


def share_times_brevity(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "klmn" for letter in text) / max(len(text), 1) ** 1.5 for text in completions]


def brevity(completions: list[str], **_: Any) -> list[float]:
    return [-len(text) / LENGTH for text in completions]


REWARDS = {"wanted": wanted, "share": share_of_wanted, "share_times_brevity": share_times_brevity, "brevity": brevity}


def replace_triton() -> None:
    """TRL 1.15 has only a Triton kernel for the log-probs: without a GPU, the same in PyTorch."""
    import torch
    from trl.trainer import utils

    def apply(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *_: Any) -> Any:
        logs = (torch.nn.functional.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
        log_probs = logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return log_probs, -(logs.exp() * logs).sum(-1).detach(), None, None, None

    if metadata.version("trl").startswith("1.15.") and not torch.cuda.is_available():
        utils._ChunkedLogProbFunction = SimpleNamespace(apply=apply)


def make_trainer(
    kind: str,
    model: str,
    output_dir: str,
    beta: float,
    seed: int = 0,
    reward: str = "wanted",
    peft_config: Any = None,
    **options: Any,
) -> Any:
    """A GRPOTrainer ("grpo") or RLOOTrainer ("rloo"): 150 steps of 64 responses of up to 16 tokens."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    replace_triton()
    config, trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[kind]
    settings: dict[str, Any] = {
        "output_dir": output_dir,
        "beta": beta,
        "seed": seed,
        "max_steps": 150,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": LENGTH,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    prompts = Dataset.from_dict({"prompt": [first + second for first in LETTERS for second in LETTERS]})
    made = trainer(
        model=model,
        reward_funcs=REWARDS[reward],
        args=config(**settings | options),
        train_dataset=prompts,
        peft_config=peft_config,
    )
    made.remove_callback(PrinterCallback)  # a line for every step
    return made


def record_exact_kl(trainer: Any) -> list[float]:
    """A list that gets the exact KL, nats per token, of every rollout from here on."""
    import torch

    kls: list[float] = []
    inner = trainer._generate_and_score_completions

    def rollout(inputs: Any) -> Any:
        output = inner(inputs)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attended = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        length = output["completion_ids"].shape[1]
        logs = []
        with torch.no_grad():
            for model in (trainer.accelerator.unwrap_model(trainer.model), trainer.ref_model):
                hidden = model.transformer(ids, attention_mask=attended).last_hidden_state[:, -length - 1 : -1]
                logs.append(model.lm_head(hidden).log_softmax(-1))
        kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)  # (B, T)
        mask = output["completion_mask"]
        kls.append(float((kl * mask).sum() / mask.sum()))
        return output

    trainer._generate_and_score_completions = rollout
    return kls


def tail_error(kls: list[float]) -> float:
    """Mean |KL/target - 1| over the second half."""
    return fmean(abs(kl / TARGET - 1.0) for kl in kls[len(kls) // 2 :])


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def train(kind: str, beta: float, seed: int = 0, reward: str = "wanted", budget: Any = None, **options: Any) -> Any:
    """(exact KLs, the trainer); `budget`: KLBudget's options, None = no budget."""
    from rlhf_kl.integrations.trl import KLBudget

    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        trainer = make_trainer(kind, folder, f"{folder}/run", beta, seed, reward, **options)
        if budget is not None:
            KLBudget.attach(trainer, **{"target": TARGET} | budget)
        kls = record_exact_kl(trainer)
        trainer.train()
    return kls, trainer


# ---- figures


def held(rows: list[list[float]]) -> dict[str, Any]:
    errors = [round(tail_error(kls), 4) for kls in rows]
    return {"tail_error": round(fmean(errors), 4), "tail_errors": errors, "highest": round(max(map(max, rows)), 4)}


def figures(seeds: int) -> dict[str, Any]:
    """Of the version of TRL that is installed here."""
    found: dict[str, Any] = {"seeds": list(range(seeds))}
    for kind, starts in STARTS.items():
        for start, beta in zip(("low", "high"), starts, strict=True):
            rows = [train(kind, beta, seed, budget={})[0] for seed in range(seeds)]
            found[f"{kind} from a {start} beta"] = held(rows)
        watched = []
        for seed in range(seeds):
            kls, trainer = train(kind, 0.0, seed, budget={"stop_at": STOP})
            own = logged(trainer, "kl_budget/kl")
            last = {"stop_kl": round(own[-1], 4), "exact_stop_kl": round(kls[-1], 4), "step": len(own)}
            watched.append(last | {"logged_over_exact": round(sum(own) / sum(kls), 4)})
        found[f"{kind} with beta 0, stop_at {STOP:g}"] = watched
    return found


SHORT = [("share", 1e-3), ("share", 5e-4), ("share", 2e-3), ("share_times_brevity", 1e-3), ("brevity", 1e-3)]


def short_figures(seeds: int) -> dict[str, Any]:
    """Rewards that pay for stopping early. Constants were chosen with `share` at a rate of 1e-3, seeds 0 and 1."""
    found = {}
    for reward, rate in SHORT:
        for kind in ("rloo", "grpo") if rate == 1e-3 else ("rloo",):
            rows = []
            for seed in range(2, 2 + seeds):
                rows.append(train(kind, STARTS[kind][seed % 2], seed, reward, {}, learning_rate=rate)[0])
            found[f"{kind}, {reward}, rate {rate:g}"] = held(rows) | {"seeds": list(range(2, 2 + seeds))}
    return found


def write_figures(path: Path, pythons: list[str], seeds: int) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"figures": {}}
    made_at = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True)
    commit = made_at.stdout.strip()
    for python in pythons:
        code = (
            "import importlib.metadata as m, json, sys; sys.path.insert(0, sys.argv[1]); "
            "import trl_budget_picture as toy; v = m.version('trl'); n = int(sys.argv[2]); "
            "f = toy.figures(n); f |= toy.short_figures(n) if v.startswith('1.16') else {}; "
            "print(json.dumps({'TRL ' + v: f}))"
        )
        command = [python, "-c", code, str(Path(__file__).parent), str(seeds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for version, found in json.loads(done.stdout.splitlines()[-1]).items():
            document["figures"][version] = {"commit": commit} | found
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(": ")[2]
        for line in (info.read_text() if info.exists() else "").splitlines()
        if line.startswith("model name")
    ]
    document = {
        "what": f"KLBudget in TRL's trainers, toy of {__file__.rpartition('/')[2]}; target {TARGET} nats per token; "
        "exact KL, error over the second half of 150 steps",
        "command": "python scripts/trl_budget_picture.py --json scripts/results/trl_budget.json --python PYTHON...",
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{len(names)} cores, {names[0]}, 1 thread" if names else platform.platform(),
        "seeds": list(range(seeds)),
        "figures": document["figures"],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path, nargs="?")
    parser.add_argument("--trainer", choices=sorted(STARTS), default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", action="append")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.json:
        write_figures(arguments.json, arguments.python or [sys.executable], arguments.seeds)
    if arguments.image:
        draw(arguments)


def draw(arguments: argparse.Namespace) -> None:
    from rlhf_kl.report.drawing import Chart, Line, save_sheet

    kind, seed = arguments.trainer, arguments.seed
    reward = "share" if arguments.short else "wanted"

    def line(name: str, tint: str, kls: list[float]) -> Line:
        return Line(name, tint, range(1, len(kls) + 1), [max(kl, 1e-3) for kl in kls])

    def chart(name: str, lines: list[Line]) -> Chart:
        axes = {"xlabel": "step", "log": "y", "ylim": (2e-3, 3.0), "target": TARGET}
        return Chart(name, name, "KL, nats per token", lines, **axes)

    charts = []
    if arguments.watch:
        kls, trainer = train(kind, 0.0, seed, reward, {"stop_at": STOP})
        lines = [line("exact", "s1", kls), line("kl_budget/kl", "s5", logged(trainer, "kl_budget/kl"))]
        charts.append(chart(f"beta 0, stop_at={STOP:g}", lines))
    for name, budget in () if arguments.watch else (("constant beta", None), ("KLBudget", {})):
        lines = []
        for beta, tint in zip(STARTS[kind], ("s1", "s5"), strict=True):
            kls = train(kind, beta, seed, reward, budget)[0]
            print(f"{name} from beta {beta:g}: tail error {tail_error(kls):.3f}, highest {max(kls):.3f}")
            lines.append(line(f"beta {beta:g}", tint, kls))
        charts.append(chart(name, lines))
    heading = f"KL of a toy {kind.upper()} run of TRL; the band is the target ± 25 %"
    save_sheet(charts, arguments.image, columns=len(charts), heading=heading)


if __name__ == "__main__":
    main()
