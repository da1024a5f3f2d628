"""Tests on the outside, the candidate program on the inside, plain data between them.

    serve(connection, names)         inside: do what is asked with the candidate's functions and objects
    Link(connection).names(["f"])    outside: stand-ins for them, which the tests (`judge.py`) use like the real ones

The comparison must not share a process with what is compared: a candidate could lie in `__eq__`, patch a builtin, walk
frames to the expected value, or end the process with a friendly exit status. So the inside gets only the arguments of a
call, and what it sends back is read as plain data (`wire.py`). Any other value stays inside, and the tests get a
`Handle` (`handles.py`) that asks for it. Nothing that the inside sends is run, unless a test runs it.

As in any Python test, an argument that the candidate changes in place changes for the tests too, and the candidate's
exceptions are raised in the tests, under their builtin names or as stand-ins of classes of its own.

Left out: functions and objects of the tests as arguments, and subclassing the candidate's classes in a test. A test
that needs these cannot be run: `infra_error`. Also, what the candidate prints is dropped; `type(x)` of a handle is no
class of the candidate; changing a list that is an attribute changes a copy; `__exit__` gets no exception.

Standard library only, because this runs in a process that starts anew for each response (`sandbox.py`).
"""

import builtins
import collections.abc
import importlib
import operator
import sys
from collections.abc import Collection

from handles import NUMBERS, OPERATIONS, ORIGINS, Handle, Unsupported
from wire import EXACT, MUTABLE, UNLIMITED, decode, encode, overwrite, receive, send

VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class Died(BaseException):
    """The candidate's process ended, or sent no valid message, while the tests waited for it."""


# ---- the inside -----------------------------------------------------------------------------------------------


def serve(connection, names: dict) -> None:
    """Do what the tests ask with the candidate's `names` until they hang up."""
    objects = Objects()
    while True:
        try:
            operation, args, options, keep = receive(connection, UNLIMITED)
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
                keep = keep and (operation != "call" or is_instance(result, values[0]))
                reply = {"value": objects.number(result) if keep else objects.encode(result)}
                if operation == "call":
                    values += named.values()
                    reply["after"] = [objects.encode(v) if isinstance(v, MUTABLE) else None for v in values]
            send(connection, reply)
        except BaseException as error:  # the tests get the candidate's exception, or that a result cannot cross
            args = objects.encode(list(error.args))
            fields = objects.encode(dict(vars(error)))
            send(connection, {"raise": [lineage(type(error)), args, fields, str(error)[:10_000]]})


def is_instance(result, function) -> bool:
    """Whether a call of `function` made an instance of it, and no plain data."""
    return isinstance(function, type) and isinstance(result, function) and type(result) not in EXACT


def plain(value):
    """The builtin value under an object whose class extends a builtin one, for a comparison outside; else None."""
    return encode(tuple(value) if isinstance(value, tuple) else value, lambda _: None)


def is_python(module: str) -> bool:
    """Whether a module belongs to the standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


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
        if kind == "exception":
            return getattr(importlib.import_module(content[0]), content[1])
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
        self.numbers: dict[tuple, object] = {}  # that handles have become since the last question of another kind

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
        """The result of an operation inside, with this origin for its handles.

        `keep`: a handle in any case; of a call, only for an instance of the class that is called. Raises Died, the
        candidate's exception, or Unsupported for arguments that cannot cross.
        """
        if operation not in NUMBERS:
            self.numbers.clear()
        try:
            if self.dead:
                raise EOFError
            values = [encode(arg, _describe) for arg in args]
            named = {name: encode(option, _describe) for name, option in options.items()}
            send(self.connection, [operation, values, named, keep], UNLIMITED)  # they may hold what came from inside
        except (EOFError, OSError):
            self.dead = True
            raise Died from None
        except Unsupported as error:
            if isinstance(args[0], Handle) and args[0]._origin == "result":
                raise TypeError(str(error)) from None  # an object in place of a list or text: not the tests' fault
            raise Unsupported(str(error)) from None
        try:
            reply = receive(self.connection)
            error = self.exception(*reply["raise"]) if "raise" in reply else None
            if error is None:
                value = decode(reply["value"], lambda description: self.resolve(description, origin))
                after = [decode(data, self.resolve) for data in reply.get("after", [])]
                if keep and operation != "call":
                    operator.index(value._number)
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
        kind = getattr(sys.modules.get(module), name, None) if is_python(module) else None
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
        if kind == "builtin" and content[0] != "_" and isinstance(getattr(builtins, content), type):
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


def _describe(value) -> dict:
    """How the outside describes an object to the inside."""
    if isinstance(value, Handle):
        return {"handle": value._number}
    if isinstance(value, VIEWS):
        return encode(list(value), _describe)
    if getattr(builtins, getattr(value, "__name__", ""), None) is value:
        return {"builtin": value.__name__}
    mine = getattr(value, "cr_code", None) is Link.wait.__code__
    if mine or hasattr(value, "stand_in") or hasattr(value, "candidate"):
        raise TypeError(f"a {type(value).__name__} cannot go back")  # of the candidate, so no fault of the tests
    if isinstance(value, type) and issubclass(value, BaseException) and is_python(value.__module__):
        return {"exception": [value.__module__, value.__qualname__]}
    raise Unsupported(f"the tests pass a {type(value).__name__}, which is no plain data")
