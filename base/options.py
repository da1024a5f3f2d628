"""Rules and tasks by name, modules of `--use`, and options NAME=VALUE.

    look_up(table, ...)         an entry of RULES or TASKS: the core's, one of --use, or the lab's
    options_of(function, ...)   NAME=VALUE texts as a function's keyword arguments

An option is a keyword argument: its default tells its type, `Literal` its choices.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin

from base.errors import BadInput, bad_input_on_error

Entry = TypeVar("Entry")


def has_lab() -> bool:
    """Whether there is a `lab` beside the core."""
    return find_spec("lab") is not None


def look_up(
    table: dict[str, Entry], folder: str, flag: str, name: str, modules: Sequence[str] = ()
) -> Entry:
    """The entry of a name in a table of the core.

    The `modules` of --use, or `lab.<folder>`, enter others there on import. Raises BadInput for a
    name that none has.
    """
    if name not in table:
        for text in modules:
            module_of(text)
    if name not in table and has_lab():
        importlib.import_module(f"lab.{folder}")  # no other place of the core imports it
    if name not in table:
        raise BadInput(f"{flag} {name}: there is {', '.join(table)}; give one of these")
    return table[name]


def module_of(text: str) -> ModuleType:
    """The module that a value of --use names, MODULE or FILE.py; raises BadInput for none."""
    with bad_input_on_error(f"--use {text}", "give MODULE or FILE.py"):
        return module_at(text.partition(":")[0])


def module_at(place: str) -> ModuleType:
    """The module in a file FILE.py, or the module of that name.

    Raises ImportError for one that ends the program, whose status would be the run's.
    """
    try:
        if place.endswith(".py"):
            return module_in(Path(place).resolve(strict=True))
        return importlib.import_module(place)
    except SystemExit:
        raise ImportError("it ends the program") from None


@cache  # a file runs once
def module_in(path: Path) -> ModuleType:
    """The module in a file, which may import others of its folder."""
    # a name of its own: the file may be called as one of ours, such as rewards.py
    spec = spec_from_file_location(f"own_{path.stem}", path)
    assert spec and spec.loader  # it is a .py file
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for it
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def options_of(function: Callable, given: Iterable[str], blame: str) -> dict[str, Any]:
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
            options[name] = value_in(value, known[name].annotation, known[name].default)
        except ValueError as error:
            raise BadInput(f"{blame}: {name} {error}") from error
    return options


def value_in(text: str, hint: Any, default: Any) -> object:
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
