"""Tests on the outside, the candidate program on the inside, plain data between them.

    serve(connection, names)       inside: do what is asked with the candidate's functions and objects
    Link(connection).names("f")    outside: stand-ins for them, which the tests (`judge.py`) use as if they were here

Whoever compares must not share a process with what is compared: a candidate could lie in `__eq__`, patch a
builtin, walk frames to the expected value, or end the process with a friendly exit status. So the inside hears
only the arguments of a call, and what it sends back is read as plain data (`wire.py`). A value that is none stays
inside; the tests get a `Handle`, which asks for it. Nothing that the inside sends is run, unless a test does that.

Four rules keep a handle from judging itself. It never equals plain data by its own word, and is not ordered
against it. It takes part in arithmetic with plain data, or becomes a number, only if the tests built it: called a
class, by a name with a capital letter, or went on calculating with such an object. What two handles of other
origin make in arithmetic stays a handle. Predicates of text and sets, asked with the tests' data (`startswith`,
...), are refused on what a function returned. Else `abs(f(x) - 0.5) < 1e-6` could be answered by an object that
always agrees.

As in any Python test, arguments that the candidate changes in place are changed for the tests too, and an
exception of the candidate is raised in the tests, under its builtin name or as a stand-in of its own class.

Left out: functions and objects of the tests as arguments, subclassing the candidate's classes in a test. A test
that needs these cannot be run, which is the tests' failure and not the candidate's: `infra_error`. Unnoticed: what
the candidate prints is dropped; `type(x)` of a handle is no class of the candidate; changing a list that is an
attribute changes a copy; `__exit__` hears of no exception.

Standard library only, as this runs in a process that starts anew for each response (`sandbox.py`).
"""

import builtins
import collections.abc
import copy
import importlib
import operator
import sys
from collections.abc import Callable
from typing import NoReturn

from wire import decode, encode, receive, send

MUTABLE = (list, dict, set, bytearray, collections.deque)

QUESTIONS = "len iter next bool str repr hash".split()
NUMBERS = "int float index neg pos abs invert".split()
ORDER = "lt le gt ge".split()
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
IN_PLACE = [f"i{name}" for name in ARITHMETIC]
OPERATIONS = {
    **{name: getattr(builtins, name) for name in [*QUESTIONS, "int", "float", "round", "isinstance", "issubclass"]},
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "delattr")},
    **{name: getattr(operator, f"__{name}__") for name in [*NUMBERS[2:], "eq", *ORDER, *ARITHMETIC, *IN_PLACE]},
    **{name: getattr(operator, name) for name in ("contains", "getitem", "setitem", "delitem")},
    "call": lambda function, *args, **options: function(*args, **options),
    "copy": copy.deepcopy,
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
}
ORIGINS = ("class", "name", "built", "part", "result")
PREDICATES = {"startswith", "endswith", "issubset", "issuperset", "isdisjoint"}


class Unsupported(BaseException):
    """The tests hand over something that cannot cross; no `except Exception` of a test may hide it."""


class Died(BaseException):
    """The candidate's process ended, or sent what is no message, while the tests waited for it."""


# ---- the inside -----------------------------------------------------------------------------------------------


def serve(connection, names: dict) -> None:
    """Do what the tests ask with the candidate's `names` until they hang up."""
    objects = Objects()
    while True:
        try:
            do, args, options, keep = receive(connection)
        except EOFError:
            return
        try:
            if do == "names":
                reply = {"value": encode({name: names[name] for name in args if name in names}, objects.describe)}
            elif do == "plain":
                reply = {"value": plain(objects.find(args[0]))}
            else:
                values = [decode(arg, objects.find) for arg in args]
                named = {name: decode(option, objects.find) for name, option in options.items()}
                result = OPERATIONS[do](*values, **named)
                reply = {"value": (objects.number if keep else lambda value: encode(value, objects.describe))(result)}
                if do == "call":
                    passed = [*values, *named.values()]
                    reply["after"] = [encode(v, objects.describe) if isinstance(v, MUTABLE) else None for v in passed]
            send(connection, reply)
        except BaseException as error:  # the candidate's own, or a result that cannot cross: the tests get to see it
            args, fields = (encode(part, objects.describe) for part in (list(error.args), dict(vars(error))))
            send(connection, {"raise": [lineage(type(error)), args, fields, str(error)[:10_000]]})


def plain(value):
    """The builtin value under an object whose class extends a builtin one, for a comparison outside; else None."""
    return encode(tuple(value) if isinstance(value, tuple) else value, lambda _: None)


def lineage(kind: type) -> list[list[str]]:
    """The classes from which this one descends, itself first."""
    return [[base.__module__, base.__qualname__] for base in kind.__mro__]


class Objects:
    """What stays inside, by numbers that the outside knows."""

    def __init__(self):
        self.all: list = []
        self.numbers: dict[int, int] = {}  # by id, which stays an object's own while `all` holds it

    def number(self, value) -> dict:
        """An object as the outside hears of it."""
        number = self.numbers.setdefault(id(value), len(self.all))
        if number == len(self.all):
            self.all.append(value)
        return {"handle": number}

    def describe(self, value) -> dict:
        """The same, except for classes and coroutines, which the outside can have as its own."""
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": lineage(value)}
        if isinstance(value, collections.abc.Coroutine):
            return {"coroutine": self.number(value)["handle"]}
        return self.number(value)

    def find(self, description: dict):
        """What the outside means."""
        ((name, what),) = description.items()
        if name == "builtin":
            return getattr(builtins, what)
        if name == "array":
            return importlib.import_module("numpy").array(decode(what[1], self.find), what[0])
        return self.all[what]


# ---- the outside ----------------------------------------------------------------------------------------------


class Link:
    """The outside's end of the connection."""

    def __init__(self, connection):
        self.connection, self.dead = connection, False
        self.handles: dict[int, Handle] = {}
        self.exceptions: dict[str, type] = {}

    def names(self, *wanted: str) -> dict:
        """Those of the candidate's names that are wanted, and never another."""
        found = self.ask("names", *wanted, origin="name")
        for name in wanted if isinstance(found, dict) else ():
            if isinstance(found.get(name), Handle) and name[0].isupper():
                object.__setattr__(found[name], "_origin", "class")
        return {name: found[name] for name in wanted if name in found} if isinstance(found, dict) else {}

    def ask(self, do: str, *args, origin: str = "result", keep: bool = False, **options):
        """The result of an operation inside, its handles of this origin; `keep`: a handle in any case.

        Raises what was raised there, Died, or Unsupported for arguments that cannot cross.
        """
        try:
            if self.dead:
                raise EOFError
            passed = [encode(arg, _describe) for arg in args]
            send(self.connection, [do, passed, {k: encode(v, _describe) for k, v in options.items()}, keep])
        except (EOFError, OSError):
            self.dead = True
            raise Died from None
        except (Unsupported, ValueError) as error:  # the latter: too long
            if isinstance(args[0], Handle) and args[0]._origin == "result":
                raise TypeError(str(error)) from None  # an object in place of a list or text: not the tests' fault
            raise Unsupported(str(error)) from None
        try:
            reply = receive(self.connection)
            error = self.error(*reply["raise"]) if "raise" in reply else None
            if error is None:
                value = decode(reply["value"], lambda data: self.find(data, origin))
                after = [decode(data, self.find) for data in reply.get("after", [])]
        except (EOFError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError):
            self.dead = True
            raise Died from None
        if error is not None:
            self.blame(error, do)
        for old, new in zip([*args, *options.values()], after, strict=False):
            if isinstance(old, MUTABLE) and type(old) is type(new):
                overwrite(old, new)
        return value

    def blame(self, error: BaseException, do: str) -> NoReturn:
        """Raise the candidate's exception, marked as its own."""
        if isinstance(error, StopIteration) and do != "next":
            error = RuntimeError("StopIteration")  # would end a loop of the tests early, and with it their checks
        error.candidate = True
        raise error

    def error(self, classes: list, args, fields, text: str) -> BaseException:
        """The candidate's exception: of the same builtin class or of a stand-in, with its arguments and attributes."""
        kind, args, fields = self.exception(classes), decode(args, self.find), decode(fields, self.find)
        try:
            error = kind(*args)
        except TypeError:  # a class that wants more than it keeps in `args`
            error = kind.__new__(kind)
        vars(error).update({name: value for name, value in fields.items() if not name.startswith("__")}, text=text)
        return error

    def exception(self, classes: list) -> type:
        """The exception class of this lineage: Python's own, or stand-ins one below the other under Python's own."""
        (module, name), *bases = classes
        known = sys.modules.get(module) if module.partition(".")[0] in sys.stdlib_module_names else None
        kind = getattr(known, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
        if f"{module}.{name}" not in self.exceptions:
            own = {"__str__": lambda error: vars(error).get("text", Exception.__str__(error)), "stand_in": True}
            self.exceptions[f"{module}.{name}"] = type(name, (self.exception(bases),), own)
        return self.exceptions[f"{module}.{name}"]

    def find(self, data: dict, origin: str = "result"):
        """What the inside describes: a handle, a class of Python's, an exception class, an array, a coroutine."""
        ((name, what),) = data.items()
        if name == "builtin" and isinstance(getattr(builtins, what), type):
            return getattr(builtins, what)
        if name == "exception":
            return self.exception(what)
        if name == "array":  # a list, for tests that do not use numpy
            values = decode(what[1], self.find)
            return sys.modules["numpy"].array(values, what[0]) if "numpy" in sys.modules else values
        if name == "coroutine":
            return self.wait(Handle(self, operator.index(what), "result"))
        if name != "handle":
            raise ValueError(f"{name} is nothing that the inside can send")
        handle = self.handles.setdefault(operator.index(what), Handle(self, what, origin))
        if ORIGINS.index(origin) > ORIGINS.index(handle._origin):
            object.__setattr__(handle, "_origin", origin)  # once a function has returned it, it is what it returned
        return handle

    async def wait(self, coroutine: "Handle"):
        """Stands for a coroutine, which runs inside as a whole."""
        return self.ask("await", coroutine)


class Handle:
    """Stands for an object that stays inside; what may be asked of it, the module's docstring says.

    `_origin`: how the tests came to it. "class": a name of the candidate's that begins with a capital letter;
    "name": another name; "built": they called such a class; "part": an attribute of these; "result": all else.
    """

    __slots__ = ("_link", "_number", "_origin")

    def __init__(self, link: Link, number: int, origin: str):
        for name, value in dict(_link=link, _number=number, _origin=origin).items():
            object.__setattr__(self, name, value)

    def __call__(self, *args, **options):
        if self._origin == "class":
            return self._link.ask("call", self, *args, origin="built", keep=True, **options)
        return self._link.ask("call", self, *args, **options)

    def __getattr__(self, name: str):
        if (name.startswith("__") and name not in ("__name__", "__dict__")) or (name in PREDICATES and not self._built):
            raise AttributeError(name)
        origin = "result" if self._origin == "result" else "class" if name[0].isupper() else "part"
        return self._link.ask("getattr", self, name, origin=origin)

    def __setattr__(self, name: str, value) -> None:
        self._link.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._link.ask("delattr", self, name)

    def __getitem__(self, key):
        return self._link.ask("getitem", self, key)

    def __setitem__(self, key, value) -> None:
        self._link.ask("setitem", self, key, value)

    def __delitem__(self, key) -> None:
        self._link.ask("delitem", self, key)

    def __contains__(self, item) -> bool:
        return self._link.ask("contains", self, item) is True if self._built else any(item == mine for mine in self)

    def __instancecheck__(self, instance) -> bool:
        return isinstance(instance, Handle) and self._link.ask("isinstance", instance, self) is True

    def __subclasscheck__(self, other) -> bool:
        return isinstance(other, Handle) and self._link.ask("issubclass", other, self) is True

    def __mro_entries__(self, bases: tuple) -> NoReturn:
        raise Unsupported("the tests subclass a class of the candidate's")

    def __enter__(self):
        return self._link.ask("getattr", self, "__enter__")()

    def __exit__(self, *error) -> None:
        self._link.ask("getattr", self, "__exit__")(None, None, None)

    def __deepcopy__(self, memo: dict):
        return self._link.ask("copy", self, origin=self._origin, keep=True)

    def __round__(self, *digits):
        return self._link.ask("round", self._number_like(), *digits, origin="built")

    def __eq__(self, other) -> bool:
        if isinstance(other, Handle):
            return self._link.ask("eq", self, other) is True
        value = self._link.ask("plain", self)
        return value is not None and value == other

    @property
    def _built(self) -> bool:
        return self._origin == "built"

    def _number_like(self) -> "Handle":
        """Itself, if it may become a number; else a result could answer anew each time that it is looked at."""
        if not self._built:
            raise TypeError("an object that the candidate returned is no number")
        return self


def _describe(value) -> dict:
    """How the outside names an object to the inside."""
    if isinstance(value, Handle):
        return {"handle": value._number}
    if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        return encode(list(value), _describe)
    if getattr(builtins, getattr(value, "__name__", ""), None) is value:
        return {"builtin": value.__name__}
    theirs = getattr(value, "cr_code", None) is Link.wait.__code__ or hasattr(value, "stand_in")
    if theirs:  # of the candidate's making, so no fault of the tests
        raise TypeError(f"a {type(value).__name__} cannot go back")
    raise Unsupported(f"the tests pass a {type(value).__name__}, which is no plain data")


def _question(name: str) -> Callable:
    return lambda self: self._link.ask(name, self)


def _number(name: str) -> Callable:
    return lambda self: self._link.ask(name, self._number_like())


def _order(name: str) -> Callable:
    return lambda self, other: self._link.ask(name, self, other) if isinstance(other, Handle) else NotImplemented


def _arithmetic(name: str, swapped: bool = False) -> Callable:
    def method(self, other):
        built = self._built or (isinstance(other, Handle) and other._built)
        if not built and not isinstance(other, Handle):
            return NotImplemented
        origin = "built" if built else "result"
        return self._link.ask(name, *((other, self) if swapped else (self, other)), origin=origin, keep=not built)

    return method


for _names, _make in (
    (QUESTIONS, _question),
    (NUMBERS, _number),
    (ORDER, _order),
    (ARITHMETIC + IN_PLACE, _arithmetic),
):
    for _name in _names:
        setattr(Handle, f"__{_name}__", _make(_name))
for _name in ARITHMETIC:
    setattr(Handle, f"__r{_name}__", _arithmetic(_name, swapped=True))


def overwrite(old, new) -> None:
    """Make an argument of the tests what the candidate made of its copy, nested containers in place."""
    if isinstance(old, list):
        for index, (mine, theirs) in enumerate(zip(old, new, strict=False)):
            if isinstance(mine, MUTABLE) and type(mine) is type(theirs):
                overwrite(mine, theirs)
                new[index] = mine
        old[:] = new
    elif isinstance(old, dict):
        for key in old.keys() & new.keys():
            if isinstance(old[key], MUTABLE) and type(old[key]) is type(new[key]):
                overwrite(old[key], new[key])
                new[key] = old[key]
        old.clear()
        old.update(new)
    else:
        old.clear()
        (old.update if isinstance(old, set) else old.extend)(new)
