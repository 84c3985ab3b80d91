"""A copy of a GPT-2 whose logits all stand further from 0: `python scripts/shifted_model.py MODEL OUT [--shift -70]`.

The logits of real models stand at -35 to -100, where bfloat16 has steps of 0.25 to 0.5. A constant added to every
logit changes no probability, so a run on the copy must learn what a run on a copy with `--shift 0` learns, in any
precision. One channel of the last layer norm is made constant for it; the LM head is no longer tied.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rlhf_kl.models.load import load_causal_lm, load_tokenizer, save_model


def main() -> None:
    """Write the copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a GPT-2")
    parser.add_argument("out", type=Path, help="folder of the copy")
    parser.add_argument("--shift", type=float, default=-70.0, help="added to every logit")
    args = parser.parse_args()
    model, tokenizer = load_causal_lm(args.model), load_tokenizer(args.model)
    model.config.tie_word_embeddings = False
    norm = model.transformer.ln_f
    with torch.no_grad():
        head = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        channel = int((head.std(0) * norm.weight.abs()).argmin())  # the one that tells tokens apart least
        norm.weight[channel], norm.bias[channel] = 0.0, 1.0
        head[:, channel] = args.shift
        model.lm_head.weight = head
    args.out.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
