"""The controller that a config names: a built-in, or a class of the user's, made with its options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlhf_kl.errors import InputError, blame, suggestion
from rlhf_kl.kl_controllers import (
    CONTROLLER_PROVIDED,
    CONTROLLERS,
    SYNONYMS,
    KLController,
    build_controller,
    stored_name,
)
from rlhf_kl.plugins import checked_options, explain, is_reference, load_attribute, takes, users_line


def controller_class(kind: str) -> type:
    """The class of a controller kind. Errors: InputError if there is none."""
    key, name = "kl.controller.kind", stored_name(kind)
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    if not is_reference(kind):
        hint = suggestion(kind, [*CONTROLLERS, *SYNONYMS])
        raise InputError(f"{key}: unknown name {kind!r}{hint} (or write file.py:Class or module:Class)")
    with blame(key):
        law = load_attribute(kind)
    if not inspect.isclass(law):
        raise InputError(f"{key}: {kind!r} is not a class: a controller is one with coef and update(kl, episodes)")
    return law


def load_controller(kind: str, options: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """The class of a controller, and its arguments. Errors: InputError with every problem."""
    law = controller_class(kind)
    written = {key: value for key, value in options.items() if takes(law, key) or key not in ("min_coef", "max_coef")}
    arguments, problems = checked_options(law, written, "kl.controller", provided=CONTROLLER_PROVIDED)
    try:
        inspect.signature(getattr(law, "update", None)).bind(None, 0.1, 64)  # type: ignore[arg-type]
    except TypeError:
        problems.append(f"kl.controller.kind: {law.__name__} has no update(kl, episodes): a law needs that and coef")
    except ValueError:  # written in C
        pass
    if problems:
        raise InputError(*problems)
    return law, dict(options) | arguments


def make_controller(kind: str, options: Mapping[str, Any], **sizes: Any) -> KLController:
    """The controller of this kind; `sizes` as for `build_controller`. Errors: InputError with all problems."""
    law, arguments = load_controller(kind, options)
    try:
        return build_controller(law, arguments, **sizes)
    except Exception as error:  # values that do not fit together, or an error in the user's code
        raised = f"{law.__name__} cannot be created: raised {explain(error)}" if users_line(error) else error
        raise InputError(f"kl.controller: {raised}") from error
