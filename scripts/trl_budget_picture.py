"""A toy GRPO (or RLOO) run of TRL with a constant beta and with a KL budget, as a picture of KL over steps.

    python scripts/trl_budget_picture.py OUT.png [--trainer rloo]

Needs `pip install 'rlhf-kl[trl]'`. The model is a random GPT-2 over sixteen letters, the reward how many of up to
sixteen letters are one of four. --short: their share of what was written, which short answers exploit, so that the
KL per token rises by itself. The KL is the exact one, over the whole vocabulary at the states of each rollout.
"""

from __future__ import annotations

import argparse
import os
import string
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

LETTERS = string.ascii_lowercase[:16]
WANTED = set("abcd")
LENGTH = 16
TARGET = 0.1
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


def make_trainer(
    kind: str, model: str, output_dir: str, beta: float, seed: int = 0, short: bool = False, **options: Any
) -> Any:
    """A GRPOTrainer ("grpo") or RLOOTrainer ("rloo"): 150 steps of 64 responses of up to 16 tokens."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

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
    reward = share_of_wanted if short else wanted
    made = trainer(model=model, reward_funcs=reward, args=config(**settings | options), train_dataset=prompts)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("--trainer", choices=sorted(STARTS), default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()

    from rlhf_kl.integrations.trl import KLBudget
    from rlhf_kl.report.drawing import Chart, Line, save_sheet

    seed, short = arguments.seed, arguments.short
    charts = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        for name in ("constant beta", "KLBudget"):
            lines = []
            for beta, tint in zip(STARTS[arguments.trainer], ("s1", "s5"), strict=True):
                trainer = make_trainer(arguments.trainer, folder, f"{folder}/run", beta, seed, short)
                kls = record_exact_kl(trainer)
                if name == "KLBudget":
                    KLBudget.attach(trainer, target=TARGET)
                trainer.train()
                print(f"{name} from beta {beta:g}: tail error {tail_error(kls):.3f}, highest {max(kls):.3f}")
                lines.append(Line(f"beta from {beta:g}", tint, range(1, len(kls) + 1), [max(kl, 1e-3) for kl in kls]))
            charts.append(
                Chart(name, name, "KL, nats per token", lines, xlabel="step", log="y", ylim=(2e-3, 3.0), target=TARGET)
            )
    heading = f"KL of a toy {arguments.trainer.upper()} run of TRL"
    save_sheet(charts, arguments.image, columns=2, heading=heading, footer="Band: target ± 25 %.")


if __name__ == "__main__":
    main()
