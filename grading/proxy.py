"""Tests on the outside, the candidate program on the inside, plain data between them.

    serve(connection, names)         inside: do what is asked with the candidate's functions and objects
    Link(connection).names(["f"])    outside: stand-ins for them, which the tests (`judge.py`) use like the real ones

The comparison must not share a process with what is compared: a candidate could lie in `__eq__`, patch a builtin, walk
frames to the expected value, or end the process with a friendly exit status. So the inside gets only the arguments of a
call, and what it sends back is read as plain data (`wire.py`). Any other value stays inside, and the tests get a
`Handle` that asks for it. Nothing that the inside sends is run, unless a test runs it.

Four rules keep a handle from judging itself. Otherwise an object that always agrees could answer
`abs(f(x) - 0.5) < 1e-6`.
  - It never equals plain data by its own word, and it is not ordered against plain data.
  - It takes part in arithmetic with plain data, or becomes a number, only if the tests built it: they called a class,
    which is a name with a capital letter, or went on calculating with such an object.
  - Arithmetic between two handles that the tests did not build gives a handle.
  - It answers predicates of text and sets, such as `startswith`, only if the tests built it.

As in any Python test, an argument that the candidate changes in place changes for the tests too, and the candidate's
exceptions are raised in the tests, under their builtin names or as stand-ins of classes of its own.

Left out: functions and objects of the tests as arguments, and subclassing the candidate's classes in a test. A test
that needs these cannot be run: `infra_error`. Also, what the candidate prints is dropped; `type(x)` of a handle is no
class of the candidate; changing a list that is an attribute changes a copy; `__exit__` gets no exception.

Standard library only, because this runs in a process that starts anew for each response (`sandbox.py`).
"""

import builtins
import collections.abc
import copy
import importlib
import operator
import sys
from collections.abc import Callable, Collection
from typing import NoReturn

from wire import decode, encode, receive, send

MUTABLE = (list, dict, set, bytearray, collections.deque)
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))

# A handle passes these operations on to its object; those of the other kinds only under the rules above.
PASSED_ON = "len iter next bool str repr hash getitem setitem delitem setattr delattr".split()
NUMBERS = "int float index neg pos abs invert".split()
ORDER = "lt le gt ge".split()
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
IN_PLACE = [f"i{name}" for name in ARITHMETIC]
OTHERS = "eq contains round isinstance issubclass getattr".split()

# What the inside does for each operation: the builtin of that name, or else the operator.
OPERATIONS = {
    "call": lambda function, *args, **options: function(*args, **options),
    "copy": copy.deepcopy,
    "await": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
}
for _name in PASSED_ON + NUMBERS + ORDER + ARITHMETIC + IN_PLACE + OTHERS:
    OPERATIONS[_name] = getattr(builtins, _name, None) or getattr(operator, f"__{_name}__")

# How the tests came to a handle. "class": a name of the candidate's that begins with a capital letter; "name": another
# name; "built": they called such a class; "part": an attribute of these; "result": all else. It only moves right.
ORIGINS = ("class", "name", "built", "part", "result")
PREDICATES = {"startswith", "endswith", "issubset", "issuperset", "isdisjoint"}


class Unsupported(BaseException):
    """The tests hand over something that cannot cross; no `except Exception` of a test may hide it."""


class Died(BaseException):
    """The candidate's process ended, or sent no valid message, while the tests waited for it."""


# ---- the inside -----------------------------------------------------------------------------------------------


def serve(connection, names: dict) -> None:
    """Do what the tests ask with the candidate's `names` until they hang up."""
    objects = Objects()
    while True:
        try:
            operation, args, options, keep = receive(connection)
        except EOFError:
            return
        try:
            if operation == "names":
                reply = {"value": objects.encode({name: names[name] for name in args if name in names})}
            elif operation == "plain":
                reply = {"value": plain(objects.resolve(args[0]))}
            else:
                values = [objects.decode(arg) for arg in args]
                named = {name: objects.decode(option) for name, option in options.items()}
                result = OPERATIONS[operation](*values, **named)
                reply = {"value": objects.number(result) if keep else objects.encode(result)}
                if operation == "call":
                    values += named.values()
                    reply["after"] = [objects.encode(v) if isinstance(v, MUTABLE) else None for v in values]
            send(connection, reply)
        except BaseException as error:  # the tests get the candidate's exception, or that a result cannot cross
            args = objects.encode(list(error.args))
            fields = objects.encode(dict(vars(error)))
            send(connection, {"raise": [lineage(type(error)), args, fields, str(error)[:10_000]]})


def plain(value):
    """The builtin value under an object whose class extends a builtin one, for a comparison outside; else None."""
    return encode(tuple(value) if isinstance(value, tuple) else value, lambda _: None)


def lineage(kind: type) -> list[list[str]]:
    """The classes from which this one descends, itself first."""
    return [[base.__module__, base.__qualname__] for base in kind.__mro__]


class Objects:
    """The objects that stay inside, by numbers that the outside knows."""

    def __init__(self):
        self.all: list = []
        self.numbers: dict[int, int] = {}  # by id, which stays an object's own while `all` holds it

    def number(self, value) -> dict:
        """The description of an object by its number."""
        number = self.numbers.setdefault(id(value), len(self.all))
        if number == len(self.all):
            self.all.append(value)
        return {"handle": number}

    def describe(self, value) -> dict:
        """As `number`, except for classes and coroutines, of which the outside can have its own."""
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": lineage(value)}
        if isinstance(value, collections.abc.Coroutine):
            return {"coroutine": self.number(value)["handle"]}
        return self.number(value)

    def resolve(self, description: dict):
        """The object that the outside describes."""
        ((kind, content),) = description.items()
        if kind == "builtin":
            return getattr(builtins, content)
        if kind == "array":
            return importlib.import_module("numpy").array(self.decode(content[1]), content[0])
        return self.all[content]

    def encode(self, value):
        return encode(value, self.describe)

    def decode(self, data):
        return decode(data, self.resolve)


# ---- the outside ----------------------------------------------------------------------------------------------


class Link:
    """The outside's end of the connection."""

    def __init__(self, connection):
        self.connection = connection
        self.dead = False
        self.handles: dict[int, Handle] = {}
        self.exceptions: dict[str, type] = {}

    def names(self, wanted: Collection[str]) -> dict:
        """Those of the wanted names that the candidate has, in the order wanted, and never another."""
        reply = self.ask("names", *wanted, origin="name")
        names: dict = {}
        if not isinstance(reply, dict):
            return names
        for name in wanted:
            if name in reply:
                names[name] = reply[name]
                if isinstance(reply[name], Handle) and name[0].isupper():
                    object.__setattr__(reply[name], "_origin", "class")
        return names

    def ask(self, operation: str, *args, origin: str = "result", keep: bool = False, **options):
        """The result of an operation inside, with this origin for its handles; `keep`: a handle in any case.

        Raises the candidate's exception, Died, or Unsupported for arguments that cannot cross.
        """
        try:
            if self.dead:
                raise EOFError
            values = [encode(arg, _describe) for arg in args]
            named = {name: encode(option, _describe) for name, option in options.items()}
            send(self.connection, [operation, values, named, keep])
        except (EOFError, OSError):
            self.dead = True
            raise Died from None
        except (Unsupported, ValueError) as error:  # ValueError: too long
            if isinstance(args[0], Handle) and args[0]._origin == "result":
                raise TypeError(str(error)) from None  # an object in place of a list or text: not the tests' fault
            raise Unsupported(str(error)) from None
        try:
            reply = receive(self.connection)
            error = self.exception(*reply["raise"]) if "raise" in reply else None
            if error is None:
                value = decode(reply["value"], lambda description: self.resolve(description, origin))
                after = [decode(data, self.resolve) for data in reply.get("after", [])]
        except (EOFError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError):
            self.dead = True  # the other errors: the message is forged
            raise Died from None
        if error is not None:
            if isinstance(error, StopIteration) and operation != "next":
                error = RuntimeError("StopIteration")  # would end a loop of the tests early, and with it their checks
            error.candidate = True
            raise error
        for old, new in zip(list(args) + list(options.values()), after, strict=False):
            overwrite(old, new)
        return value

    def exception(self, classes: list, args, fields, text: str) -> BaseException:
        """The candidate's exception: of the same builtin class or of a stand-in, with its arguments and attributes."""
        kind = self.exception_class(classes)
        args = decode(args, self.resolve)
        fields = decode(fields, self.resolve)
        try:
            error = kind(*args)
        except TypeError:  # a class that wants more than it keeps in `args`
            error = kind.__new__(kind)
        vars(error).update({name: value for name, value in fields.items() if not name.startswith("__")}, text=text)
        return error

    def exception_class(self, classes: list) -> type:
        """The exception class of this lineage: Python's own, or a stand-in below the class of the rest."""
        module, name = classes[0]
        is_python = module.partition(".")[0] in sys.stdlib_module_names
        kind = getattr(sys.modules.get(module), name, None) if is_python else None
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
        full_name = f"{module}.{name}"
        if full_name not in self.exceptions:
            own = {"__str__": lambda error: vars(error).get("text", Exception.__str__(error)), "stand_in": True}
            self.exceptions[full_name] = type(name, (self.exception_class(classes[1:]),), own)
        return self.exceptions[full_name]

    def resolve(self, description: dict, origin: str = "result"):
        """What the inside describes: a handle, a class of Python's, an exception class, an array, a coroutine."""
        ((kind, content),) = description.items()
        if kind == "builtin" and isinstance(getattr(builtins, content), type):
            return getattr(builtins, content)
        if kind == "exception":
            return self.exception_class(content)
        if kind == "array":  # a list, for tests that do not use numpy
            values = decode(content[1], self.resolve)
            return sys.modules["numpy"].array(values, content[0]) if "numpy" in sys.modules else values
        if kind == "coroutine":
            return self.wait(Handle(self, operator.index(content), "result"))
        if kind != "handle":
            raise ValueError(f"the inside cannot send {kind}")
        handle = self.handles.setdefault(operator.index(content), Handle(self, content, origin))
        if ORIGINS.index(origin) > ORIGINS.index(handle._origin):
            object.__setattr__(handle, "_origin", origin)  # once a function has returned it, it is a result
        return handle

    async def wait(self, coroutine: "Handle"):
        """Stands for a coroutine, which runs inside as a whole."""
        return self.ask("await", coroutine)


class Handle:
    """Stands for an object that stays inside, under the rules of the module's docstring; `_origin`: see ORIGINS."""

    __slots__ = ("_link", "_number", "_origin")

    def __init__(self, link: Link, number: int, origin: str):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_origin", origin)

    def __call__(self, *args, **options):
        if self._origin == "class":
            return self._link.ask("call", self, *args, origin="built", keep=True, **options)
        return self._link.ask("call", self, *args, **options)

    def __getattr__(self, name: str):
        if (name.startswith("__") and name not in ("__name__", "__dict__")) or (name in PREDICATES and not self._built):
            raise AttributeError(name)
        origin = "result" if self._origin == "result" else "class" if name[0].isupper() else "part"
        return self._link.ask("getattr", self, name, origin=origin)

    def __contains__(self, item) -> bool:
        if self._built:
            return self._link.ask("contains", self, item) is True
        return any(item == mine for mine in self)

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
        """Itself, if it may become a number; a result could answer differently each time that it is asked."""
        if not self._built:
            raise TypeError("an object that the candidate returned is no number")
        return self


def _describe(value) -> dict:
    """How the outside describes an object to the inside."""
    if isinstance(value, Handle):
        return {"handle": value._number}
    if isinstance(value, VIEWS):
        return encode(list(value), _describe)
    if getattr(builtins, getattr(value, "__name__", ""), None) is value:
        return {"builtin": value.__name__}
    if getattr(value, "cr_code", None) is Link.wait.__code__ or hasattr(value, "stand_in"):
        raise TypeError(f"a {type(value).__name__} cannot go back")  # of the candidate, so no fault of the tests
    raise Unsupported(f"the tests pass a {type(value).__name__}, which is no plain data")


def _passed_on(name: str) -> Callable:
    return lambda self, *args: self._link.ask(name, self, *args)


def _number(name: str) -> Callable:
    return lambda self: self._link.ask(name, self._number_like())


def _order(name: str) -> Callable:
    return lambda self, other: self._link.ask(name, self, other) if isinstance(other, Handle) else NotImplemented


def _arithmetic(name: str, swapped: bool = False) -> Callable:
    def method(self, other):
        built = self._built or (isinstance(other, Handle) and other._built)
        if not built and not isinstance(other, Handle):
            return NotImplemented
        left, right = (other, self) if swapped else (self, other)
        return self._link.ask(name, left, right, origin="built" if built else "result", keep=not built)

    return method


for _name in PASSED_ON:
    setattr(Handle, f"__{_name}__", _passed_on(_name))
for _name in NUMBERS:
    setattr(Handle, f"__{_name}__", _number(_name))
for _name in ORDER:
    setattr(Handle, f"__{_name}__", _order(_name))
for _name in ARITHMETIC + IN_PLACE:
    setattr(Handle, f"__{_name}__", _arithmetic(_name))
for _name in ARITHMETIC:
    setattr(Handle, f"__r{_name}__", _arithmetic(_name, swapped=True))


def overwrite(old, new) -> bool:
    """Give an argument of the tests the content of the candidate's copy, nested containers in place.

    False, without a change, if they are not mutable containers of one type.
    """
    if not isinstance(old, MUTABLE) or type(old) is not type(new):
        return False
    keys = ()
    if isinstance(old, list):
        keys = range(min(len(old), len(new)))
    elif isinstance(old, dict):
        keys = old.keys() & new.keys()
    for key in keys:
        if overwrite(old[key], new[key]):
            new[key] = old[key]
    old.clear()
    if isinstance(old, dict | set):
        old.update(new)
    else:
        old.extend(new)
    return True
