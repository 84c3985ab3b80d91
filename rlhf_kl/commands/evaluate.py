"""`rlhf-kl eval`: held-out perplexity of any causal LM; with a run or a reference, both side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlhf_kl import ui
from rlhf_kl.commands.options import Json, Model, Pickle, Plugins, Quiet, RemoteCode, Step, StoredRun
from rlhf_kl.errors import InputError
from rlhf_kl.text import hanging, scorer_label, stdout_width, text_table, with_error

LABELS = {
    "kl_token": "KL per token",
    "kl_sequence": "KL per response",
    "forward_kl_token": "forgetting",
    "length": "response length",
    "eos_rate": "share with an EOS",
    "distinct_2": "distinct word pairs",
    "prompts": "prompts",
    "responses": "  responses",
    "perplexity": "held-out perplexity",
    "nats_per_token": "  nats per token",
    "bits_per_byte": "  bits per byte",
    "tokens": "  tokens",
    "bytes": "  bytes",
    "documents": "  documents",
}


def evaluate(
    run: StoredRun = None,
    model: Model = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The starting policy of a config.")] = None,
    checkpoint: Step = None,
    reference: Annotated[str | None, typer.Option(metavar="DIR-or-id", help="Model to compare with.")] = None,
    texts: Annotated[str | None, typer.Option(metavar="FILE", help="Held-out texts; default: the config's.")] = None,
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the text.")] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Held-out responses; default: one to each prompt.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also which tokens carry the KL.")] = False,
    as_json: Json = False,
    plugins: Plugins = False,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> None:
    """Held-out perplexity; of a run also exact KL, scores, length and more, beside its reference."""
    from rlhf_kl.builtin.world import is_builtin
    from rlhf_kl.commands.stored import Permissions, check_given, of_a_run
    from rlhf_kl.config.schema.sections import refuse
    from rlhf_kl.monitors.kl_shares import kl_shares
    from rlhf_kl.report.texts import grouped

    # Errors of the options come before torch is imported.
    sources = {"--run": run, "--model": model, "--config": config}
    if len(given := [option for option, value in sources.items() if value is not None]) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other: name one thing to evaluate")
    if model is not None or config is not None:
        refuse(*of_a_run(plugins=plugins, checkpoint=checkpoint))
    if model is not None and tokens:
        raise InputError("--tokens needs held-out prompts, which a --model has not: name a --run or a --config")
    if model is not None and texts is None and not is_builtin(model):
        raise InputError("--model needs --texts, the held-out texts: a file, a hub id, or builtin:NAME")
    ui.start(quiet)
    permissions = Permissions(plugins, trust_remote_code, allow_pickle)
    settings, folder = permissions.opened(run, model, checkpoint, config)
    models = {"--model": model, "--reference": reference}
    check_given(models, "--texts", texts, column or settings.eval.column, settings)
    permissions.tell_changed(folder, settings, *["eval.texts"] * (texts is not None))
    with ui.progress("loading torch"):
        from rlhf_kl.commands.subject import Subject, different
        from rlhf_kl.ppo.heldout import own_figures
        from rlhf_kl.run.log import encode_json
        from rlhf_kl.training.samples import heldout_rows, token_parts

    options: dict[str, Any] = {"texts": texts, "column": column, "model": model, "checkpoint": checkpoint}
    subject = Subject(settings, folder, permissions, **options, reference=reference, stored=config is None)
    held = subject.held_out(samples, several=True)
    figures = subject.of_texts(held, "policy")
    if subject.reference is not None:
        figures["reference"] = subject.of_texts(held, "reference")
    if model is None:
        found, own, other = subject.of_prompts(held, "policy and reference")
        rows = heldout_rows(held, own, other)
        figures |= found | {"prompts": different(held.prompts), "responses": len(held.firsts), "texts": grouped(rows)}
        figures["reference"] |= own_figures(other.pick(held.firsts))
        figures |= {"kl_by_token": kl_shares(token_parts(held, own.pick(held.firsts)))} if tokens else {}
    if as_json:
        print(encode_json(figures, indent=2).decode())
    else:
        _show(figures)


def _show(figures: dict[str, Any]) -> None:
    """Print the table, texts, and which tokens carry the KL."""
    from rich.console import Console

    from rlhf_kl.report.texts import titled_answers
    from rlhf_kl.report.token_tables import tables_text

    print(_table(figures))
    Console(highlight=False).print(titled_answers(figures.get("texts", [])))
    if "kl_by_token" in figures:
        print(f"\n{tables_text(figures['kl_by_token'], stdout_width() or 80)}")


def _table(figures: dict[str, Any]) -> str:
    """Name, value and standard error, beside those of the reference where there is one."""
    from rlhf_kl.config.schema.eval import scorer_names

    columns = [figures, figures["reference"]] if "reference" in figures else [figures]
    labels = {"scores": "score", **{name: scorer_label(name) for name in scorer_names(figures)}, **LABELS}
    known = [key for key in labels if any(of.get(key) is not None for of in columns)]
    rows = [[labels[key], *(_shown(of, key) for of in columns)] for key in known]
    table = text_table(["", "policy", "reference"][: len(columns) + 1], rows)
    notes = f"±: one standard error over the {'prompts and ' * ('prompts' in figures)}documents."
    if figures.get("prompts") == 1:
        notes += " A single prompt tells no error."
    if "forward_kl_token" in figures:
        notes += " KL in nats. Forgetting: KL of the reference to the policy, per token."
        notes += " Distinct word pairs are fewer among more responses."
    return f"{table}\n{hanging(notes, stdout_width() or 80, 0)}"


def _shown(figures: dict[str, Any], key: str) -> str:
    value = figures.get(key)
    return str(value) if isinstance(value, int) else with_error(value, figures.get(f"{key}_stderr"))
