"""The doors by which modules from outside of the core change a run. The core imports none of them.

    --method NAME, --task NAME      a name that the core lacks is looked up in `lab`
    --use MODULE[:NAME=VALUE,...]   calls the module's `use(parts, NAME=VALUE, ...)`

An option is a keyword argument: its default tells its type, `Literal` its choices.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args, get_origin

from tasks.errors import BadInput, cause

Entry = TypeVar("Entry")


def has_lab() -> bool:
    """Whether there is a `lab` beside the core."""
    return find_spec("lab") is not None


def look_up(table: dict[str, Entry], shelf: str, flag: str, name: str) -> Entry:
    """The entry of a name in a table of the core, or what `lab.<shelf>` enters there on import.

    Raises BadInput for a name that neither has.
    """
    if name not in table and has_lab():
        importlib.import_module(f"lab.{shelf}")  # no other place of the core imports it
    if name not in table:
        raise unknown(flag, name, table)
    return table[name]


def unknown(flag: str, name: str, names: Iterable[str]) -> BadInput:
    """The error for a name that is none of these."""
    return BadInput(f"{flag} {name}: there is {', '.join(names)}; give one of these")


def use(parts: Any, modules: Sequence[str]) -> None:
    """Let the modules of `--use` replace functions of `parts`, in their order; raises BadInput."""
    for text in modules:
        name, _, given = text.partition(":")
        try:
            change = importlib.import_module(name).use
        except (ImportError, AttributeError) as error:
            raise BadInput(
                f"--use {text}: {cause(error)}; give a module with a function use(parts)"
            ) from error
        change(parts, **options_of(change, filter(None, given.split(",")), f"--use {text}"))


def options_of(function: Callable, given: Any, blame: str) -> dict[str, Any]:
    """The options NAME=VALUE that are given for a function; raises BadInput.

    They are its keyword-only arguments, each with a default.
    """
    known = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            known[name] = parameter
    options = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            has = ", ".join(f"{name}={entry.default}" for name, entry in known.items()) or "none"
            raise BadInput(f"{blame}: no option {name!r}; there is {has}")
        try:
            options[name] = read(value, known[name].annotation, known[name].default)
        except ValueError as error:
            raise BadInput(f"{blame}: {name} {error}") from error
    return options


def read(text: str, hint: Any, default: Any) -> object:
    """The value in a text, by an option's type; raises ValueError."""
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise ValueError(f"must be one of {', '.join(get_args(hint))}")
        return text
    if isinstance(default, bool):
        if text not in ("yes", "no"):
            raise ValueError("must be yes or no")
        return text == "yes"
    value = type(default)(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be finite")
    return value
