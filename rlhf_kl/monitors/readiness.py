"""What `doctor` judges before a run, in one table: when the facts are fine, their words, and what to change where not.

`commands/findings.py` measures the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlhf_kl.text import text_table

CLEARLY = 0.1  # above guessing
FEW_END = 0.1  # of the responses: fewer, and the penalty for the others is most of the score
FEW_VALUES = 5  # different scores
DECIDES = 0.9  # of the variance of a sum: a term with more decides it alone
RATE_FACTOR = 5.0  # rates in use lie within a factor of 3 of the usual one


class Finding(NamedTuple):
    """One line: level, topic, result of a check, and advice."""

    level: Literal["fine", "doubtful", "fatal"]
    topic: str
    text: str
    change: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the table; its texts have places for facts."""

    topic: str
    text: str
    fine: Callable[[Mapping[str, Any]], bool] = lambda _: False  # default: only told where it is doubtful
    good: str = ""  # follows the text where it is fine,
    doubt: str = ""  # and where it is not,
    change: str = ""  # with advice


SCORES = "shaped scores of {count} reference samples {low:.2f} [{bars}] {high:.2f}"
ENDINGS = "{rate:.0%} of responses end ({names}), {length:.0f} tokens long on average; "
CHECKS = {
    "shard": Check("config", "policy.shard and reference.shard have no effect in one process",
        change="doctor --processes N, with the N of the training"),
    "unused": Check("config", "{note}", change="leave the key out"),
    "dtype": Check("dtype", "{dtype} on {device}; master weights float32", lambda f: f["slowdown"] <= f["slower"],
        doubt="; a product takes {slowdown:.2g} times as long as in float32", change="run.dtype=float32"),
    "rate": Check("rate", "learning rate {rate:.2g} for {size}; usual is about {usual:.2g}",
        lambda f: 1 / RATE_FACTOR <= f["ratio"] <= RATE_FACTOR,
        doubt=", so it is {ratio:.2g} times that", change="ppo.learning_rate={usual:g}, or auto"),
    "context": Check("context", "longest prompt {longest} tokens and {new} new ones", lambda f: f["limit"] is not None,
        " fit into {limit}", "; the model's config names no limit",
        "make sure that the model was trained on texts of this length"),
    "chat": Check("prompts", "the policy has a chat template, and plain prompts do not use it",
        change="data.chat_template=true, if it was trained on chats; else false"),
    "reads": Check("reads", "{key} reads {shown}", lambda f: not f["doubt"], doubt="; {doubt}", change="{advice}"),
    "reward context": Check("context", "{key} reads {limit} tokens; with {new} new ones {cut} of {count} prompts are "
        "longer and lose their beginning", change="a lower rollout.max_new_tokens, or shorter prompts"),
    "no accuracy": Check("reward", "the accuracy of the reward model is unknown",
        change="measure it: doctor --pairs FILE"),
    "accuracy": Check("reward", "the reward model is right on {accuracy:.0%} of {where}, and guessing on {chance:.0%}",
        lambda f: f["accuracy"] >= f["chance"] + CLEARLY, change="train it on more pairs, or use another reward.model"),
    "start": Check("start", "the policy {begins} its reference, padding changes nothing, no tensor is shared",
        lambda f: f["same"], change="reference.model=null, if the policy shall stay near its start: a policy far away "
        "loses what it has learned"),
    "scores": Check("scores", SCORES, lambda f: not f["warning"], doubt="; {warning}"),  # which ends with advice
    "few scores": Check("scores", SCORES + "; only {different} different values", lambda f: not f["critic"],
        change="ppo.advantage=rloo with rollout.samples_per_prompt=4, which compares responses to one prompt"),
    "terms": Check("terms", "{table}", lambda f: f["share"] <= DECIDES,
        doubt="\n{term} decides {share:.0%} of the sum", change="{advice}"),
    "samples": Check("samples", "{shown}", lambda f: 2 * f["most"] <= f["count"],
        doubt="; {share:.0%} of {count} responses are the same text, {text!r}",
        change="prompts that end where the model's training texts go on (a space at the end may be too much, or "
        "missing)"),
    "free endings": Check("EOS", ENDINGS + "not to end costs nothing", lambda _: True),
    "endings": Check("EOS", ENDINGS + "the others lose {lost:g} (reward.missing_eos_penalty)",
        lambda f: f["rate"] > FEW_END,
        change="a larger rollout.max_new_tokens, or reward.missing_eos_penalty=0: else it learns to end before all "
        "else"),
    "eval": Check("eval", "held-out perplexity {perplexity:.4g} after this update, on {texts} texts",
        lambda f: f["perplexity"] < 2 * f["words"], doubt=": worse than a guess among the {words:,} tokens",
        change="eval.texts in the language that the model was trained on"),
    "checkpoint": Check("checkpoint", "{often}; {count} of them take {need}, of {room} that are free",
        lambda f: f["fits"], change="room on the disk, another run.output_dir or checkpoint.keep=1"),
    "memory": Check("memory", "{peak:.2f} GiB at the peak of an update with {tokens:.0%} of the most tokens possible, "
        "measured; {room:.1f} GiB to use", lambda f: f["peak"] <= f["room"],
        change="a smaller ppo.microbatch_size, {share}policy.lora={{}} or policy.gradient_checkpointing=true"),
}  # fmt: skip


def judge(name: str, **facts: Any) -> Finding:
    """The finding of a line of the table."""
    check = CHECKS[name]
    if check.fine(facts):
        return Finding("fine", check.topic, (check.text + check.good).format_map(facts))
    return Finding(
        "doubtful", check.topic, (check.text + check.doubt).format_map(facts), check.change.format_map(facts)
    )


def judge_terms(weights: Mapping[str, float], figures: Mapping[str, Mapping[str, Any]], *, each: bool) -> Finding:
    """Of a sum: what its terms are like on reference samples, and whether one decides it alone.

    `figures`: of `term_figures`. `each`: the terms are on one scale already.
    """
    forms = {"mean": ".3g", "std": ".3g", "scored": ".0%", "share": "z.0%"}
    rows = []
    for name, found in figures.items():
        cells = [(found[key], form) for key, form in forms.items()]
        cells += [(found["correlation"].get(other), "z.2f") for other in figures]
        shown = ["-" if value is None else format(value, form) for value, form in cells]
        rows.append([name, f"{weights[name]:g}", *shown])
    head = ["term", "weight", "mean", "spread", "scored", "share", *(f"corr. {name}" for name in figures)]
    shares = {name: figures[name]["share"] or 0.0 for name, weight in weights.items() if weight}
    name = max(shares, key=lambda one: shares[one])
    share = shares[name] if len(shares) > 1 else 0.0  # one term alone is the sum
    scale = "" if each else "reward.normalize=each, which scales every term before its weight, or "
    advice = f"{scale}a lower reward.terms.{name}.weight"
    return judge("terms", table=text_table(head, rows), term=name, share=share, advice=advice)
