"""`${NAME}` in an option of a plugin: read from the environment when it is used, stored as it is written.

`$${` is a literal `${`. The value of a variable appears in no file of the run and in no message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from rlhf_kl.errors import InputError

SECRETS = ("*api_key", "*token", "*secret", "*password")  # options that need a variable
SHORTEST = 4  # characters: a shorter value is not a secret, and would match in every text
_VARIABLE = re.compile(r"\$(\$?)\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")
_STORED = re.compile(r"\x00\$\{([A-Za-z_][A-Za-z0-9_]*)\}\x00")


def filled(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options with the values of their variables. Errors: InputError names the variables that are not set."""
    if problems := missing_variables(options, where):
        raise InputError(*problems)

    def fill(text: str) -> str:
        return _VARIABLE.sub(lambda m: m[0][1:] if m[1] else os.environ[m[2]], text)

    return {key: _each_text(value, fill) for key, value in options.items()}


def missing_variables(options: Mapping[str, Any], where: str) -> list[str]:
    """Problems of variables that the environment lacks; `where` is the dotted path of the options."""
    return [
        f"{key}: the environment variable {name} is not set"
        for key, text in _texts(options, where)
        for name in dict.fromkeys(_names(text))
        if not os.environ.get(name)
    ]


def variable_problems(options: Mapping[str, Any], where: str) -> list[str]:
    """Problems of the options as written, without the environment: broken variables, secrets in plain text."""
    problems = []
    for key, _ in _numbers(options, where):
        if any(fnmatch(key.rpartition(".")[2].lower(), pattern) for pattern in SECRETS if pattern != "*token"):
            problems.append(_secret_problem(key))  # a number is a count there: max_token: 5
    for key, text in _texts(options, where):
        name = key.rpartition(".")[2].lower()
        if any(not m[1] and not m[2] for m in _VARIABLE.finditer(text)):
            problems.append(f"{key}: write a variable as ${{NAME}}, and a literal ${{ as $${{")
        elif text and not _names(text) and any(fnmatch(name, pattern) for pattern in SECRETS):
            problems.append(_secret_problem(key))
    return problems


def _secret_problem(key: str) -> str:
    return (
        f"{key}: a config is copied into every run, so it must not hold a secret: write ${{NAME}} and "
        "set NAME in the environment (if this is not a secret, rename the option)"
    )


def secrets_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Values of the variables of these options -> how they are written, the longest first."""
    names = {name for _, text in _texts(options, "") for name in _names(text)}
    values = {os.environ[name]: f"${{{name}}}" for name in names if len(os.environ.get(name, "")) >= SHORTEST}
    return dict(sorted(values.items(), key=lambda item: -len(item[0])))


def hidden(text: str, secrets: Mapping[str, str]) -> str:
    """A message without the values of the variables."""
    if not secrets:
        return text
    # In one pass: a secret may be a part of another one's name.
    return re.sub("|".join(map(re.escape, secrets)), lambda match: secrets[match[0]], text)


def stored(value: Any, secrets: Mapping[str, str]) -> Any:
    """State for a file, with marks in place of secrets."""
    marks = {secret: f"\x00{written}\x00" for secret, written in secrets.items()}
    return _each_text(value, lambda text: hidden(text, marks)) if marks else value


def restored(value: Any) -> Any:
    """State from a file, with the current values of the variables."""
    return _each_text(value, lambda text: _STORED.sub(lambda m: os.environ.get(m[1], m[0]), text))


def _names(text: str) -> list[str]:
    return [m[2] for m in _VARIABLE.finditer(text) if m[2] and not m[1]]


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with every text changed, keys of mappings too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    return [_each_text(item, change) for item in value] if isinstance(value, (list, tuple)) else value


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


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    return ((name, leaf) for name, leaf in _leaves(value, key) if isinstance(leaf, str))


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    return (
        (name, leaf)
        for name, leaf in _leaves(value, key)
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    )
