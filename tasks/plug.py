"""The doors by which modules from outside of the core change a run. The core imports none of them.

    --use MODULE[:NAME=VALUE,...]   imports a module or FILE.py, which may enter rules and tasks,
                                    and calls its `use(parts, NAME=VALUE, ...)`, if it has one
    --method NAME, --task NAME      a name that the core lacks is looked up there, then in `lab`

An option is a keyword argument: its default tells its type, `Literal` its choices.
"""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin

from tasks.errors import BadInput, bad_input_on_error

Entry = TypeVar("Entry")


def has_lab() -> bool:
    """Whether there is a `lab` beside the core."""
    return find_spec("lab") is not None


def look_up(
    table: dict[str, Entry], shelf: str, flag: str, name: str, modules: Sequence[str] = ()
) -> Entry:
    """The entry of a name in a table of the core.

    The `modules` of --use, or `lab.<shelf>`, enter others there on import. Raises BadInput for a
    name that none has.
    """
    if name not in table:
        for text in modules:
            module_of(text)
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
        given = text.partition(":")[2]
        change = getattr(module_of(text), "use", None)
        if not change and entries_in(source_of(text)):
            change = replace_nothing
        if not change:
            reason = "has no function use(parts), and enters no rule or task"
            raise BadInput(f"--use {text}: {reason}; leave it out")
        change(parts, **options_of(change, filter(None, given.split(",")), f"--use {text}"))


def replace_nothing(parts: Any) -> None:
    """The `use` of a module that enters rules or tasks, which importing it has done."""


def module_of(text: str) -> ModuleType:
    """The module that a value of --use names; raises BadInput where there is none."""
    source_of(text)
    return module_at(text.partition(":")[0])


def source_of(text: str) -> Path:
    """The file of the module that a value of --use names, without importing it.

    Raises BadInput where there is none.
    """
    place = text.partition(":")[0]
    with bad_input_on_error(f"--use {text}", "give MODULE or FILE.py"):
        if place.endswith(".py"):
            return Path(place).resolve(strict=True)
        spec = find_spec(place)
        if not spec or not spec.origin:
            raise ModuleNotFoundError(f"No module named {place!r}")
        return Path(spec.origin)


def entries_in(source: Path) -> list[str]:
    """The names under which a file enters rules and tasks, read in its text.

    To import it would import torch, which takes seconds.
    """
    return re.findall(r'^(?:@?rule\(|TASKS\[)\s*"([^"]+)"', source.read_text(), re.M)


def module_at(place: str) -> ModuleType:
    """The module in a file FILE.py, or the module of that name."""
    if place.endswith(".py"):
        return module_in(Path(place).resolve(strict=True))
    return importlib.import_module(place)


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
