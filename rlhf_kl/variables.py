"""`${NAME}` in an option of a plugin: read from the environment when it is used, stored as it is written.

`$${` is a literal `${`. The value of a variable appears in no file of the run and in no message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SECRETS = ("api_key", "token", "secret", "password")  # endings of options that need a variable
SHORTEST = 4  # characters: a shorter value is not a secret, and would match in every text
_VARIABLE = re.compile(r"\$(\$?)\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")


def variable_problems(options: Mapping[str, Any], where: str) -> list[str]:
    """Problems of options as written, without the environment: broken variables, secrets in plain text."""
    problems = []
    for key, value in _leaves(options, where):
        # A number is a count there: max_token: 5.
        endings = SECRETS if isinstance(value, str) else tuple(name for name in SECRETS if name != "token")
        if isinstance(value, str) and any(not m[1] and not m[2] for m in _VARIABLE.finditer(value)):
            problems.append(f"{key}: write a variable as ${{NAME}}, and a literal ${{ as $${{")
        elif value not in (None, "", True, False) and not names_in(value) and key.lower().endswith(endings):
            problems.append(
                f"{key}: a config is copied into every run, so it must not hold a secret: write ${{NAME}} and "
                "set NAME in the environment (if this is not a secret, rename the option)"
            )
    return problems


def missing_variables(options: Mapping[str, Any], where: str) -> list[str]:
    """Problems of variables that the environment lacks; `where` is the dotted path of the options."""
    return [
        f"{key}: the environment variable {name} is not set"
        for key, value in _leaves(options, where)
        for name in names_in(value)
        if not os.environ.get(name)
    ]


def names_in(value: Any) -> list[str]:
    """The variables in all texts of a value."""
    found = (m for _, text in _leaves(value, "") if isinstance(text, str) for m in _VARIABLE.finditer(text))
    return list(dict.fromkeys(m[2] for m in found if m[2] and not m[1]))


def filled(value: Any) -> Any:
    """A value with the variables in its texts filled in; one that is not set stays as written."""

    def fill(text: str) -> str:
        return _VARIABLE.sub(lambda m: m[0][1:] if m[1] else os.environ.get(m[2], m[0]), text)

    return change_texts(value, fill)


def secrets_of(options: Any) -> dict[str, str]:
    """Values of the variables of these options -> how they are written, the longest first."""
    values = {os.environ.get(name, ""): f"${{{name}}}" for name in names_in(options)}
    return {value: values[value] for value in sorted(values, key=len, reverse=True) if len(value) >= SHORTEST}


def hidden(text: str, secrets: Mapping[str, str]) -> str:
    """A text with variables as they are written in place of their values."""
    # In one pass: a secret may be a part of another one's name.
    return re.sub("|".join(map(re.escape, secrets)), lambda m: secrets[m[0]], text) if secrets else text


def restored(text: str, secrets: Mapping[str, str]) -> str:
    """`hidden` backwards, for state in a file: fills only the variables that the config writes."""
    return hidden(text, {written: value for value, written in secrets.items()})


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value with every text in its lists and mappings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: change_texts(item, change) for key, item in value.items()}
    return [change_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a value that is neither a list nor a mapping."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, key)
    else:
        yield key, value
