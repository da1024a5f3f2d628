"""Across the wall: tests on the outside, the candidate on the inside, plain data between them.

    serve(file, module, stdout)  inside: do what is asked with the objects of the program's module
    Link(file).names(["f"])      outside: the candidate's names, for the tests (`judge.py`)

The comparison must not share a process with what is compared: a candidate could lie in `__eq__`,
patch a builtin, walk frames to the expected value, or end the process with a friendly exit status.
So the inside gets only the arguments of a call, and what it sends back is read as plain data
(`wire.py`). Any other value stays inside, and the tests get a `Handle`. It can be called, shown,
iterated over, indexed and asked for its length, its truth and its attributes. It equals no plain
data, and what a function returned has no method that plain data has, too: it could answer what the
test expects. An object that the tests *built*, by a name with a capital letter, has its methods:
predicates such as `startswith`, and its own `__contains__`, once the tests have used it as no
constant can be used. There is no arithmetic, order or hash of handles.

As in any Python test, an argument that the candidate changes in place changes for the tests too.
The candidate's exceptions are raised in the tests with their text, attributes and cause. Their
classes are builtin ones, or stand-ins by the same names. Where the tests redirect standard output,
they get what the candidate prints. Threads of the tests take turns.

All checks must run and hold: an exception that a loop, asyncio or unittest takes for an end without
an error arrives as RuntimeError.

A function of the tests stays outside, and the inside gets a stand-in, whose calls cross the wall in
the other direction while the outside waits for a reply.

Left out: the tests' own objects as arguments, and subclasses of the candidate's classes but for
exceptions; these are `Unsupported`. What is one object in Python is two here.

Standard library only, because this runs in a new process for each response (`sandbox.py`).
"""

import _thread  # `threading` takes longer to import
import builtins
import contextlib
import io
import operator
import sys
import types
from collections.abc import Callable, Collection

from wire import (
    EXACT,
    MAX_MESSAGE,
    TYPES,
    TooLong,
    Value,
    decode,
    encode,
    is_mutable,
    overwrite,
    receive,
    send,
)

# Attributes of plain data, and those of plain data that cannot change.
OF_PLAIN_DATA = {"equals"}.union(*map(dir, EXACT))  # pandas has `equals`
CONSTANTS = (str, bytes, int, float, complex, tuple, frozenset, range, types.MappingProxyType)
OF_CONSTANTS = set().union(*map(dir, CONSTANTS))
# asyncio and loops take these for an end, not for an error.
QUIET = ("GeneratorExit", "CancelledError", "StopAsyncIteration")


class Died(BaseException):
    """The candidate's process ended, or sent no valid message, while the tests waited for it."""


class Unsupported(KeyboardInterrupt):
    """The tests hand over something that cannot cross.

    No `except Exception` of a test may hide it. It extends KeyboardInterrupt because, of the other
    exceptions, unittest and asyncio let this one pass.
    """


# ---- the inside ----------------------------------------------------------------------------------


class Inside:
    """The objects that stay here, by numbers that the outside knows; 0 is the program's module."""

    def __init__(self, file: io.BufferedRWPair, module: object, stdout: io.TextIOWrapper) -> None:
        self.file = file
        self.stdout = stdout
        self.objects = [module]
        self.numbers: dict[int, int] = {}  # by id, which an object keeps while `objects` holds it

    def answer(self, operation: str, args: list, options: dict, keep: bool) -> list:
        """The reply to a question: no error, a value, and what became of the arguments."""
        # the builtin of that name, or the operator
        function = getattr(builtins, operation, None) or getattr(operator, operation)
        result = function(*args, **options)
        # an object of the class that was called stays here, even if it extends a builtin one
        keep = keep and type(result) not in EXACT and not isinstance(result, BaseException)
        if keep and isinstance(args[0], type) and isinstance(result, args[0]):
            value = self.number(result)
        else:
            value = encode(result, self.describe)
        given = [*args, *options.values()]
        return [False, value, [encode(v, self.describe) if is_mutable(v) else 0 for v in given]]

    def number(self, value: object) -> dict:
        """The description of an object: its number and its special methods."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        names = set().union(*map(vars, type(value).__mro__))
        return {"object": [number, list(SPECIAL.keys() & names)]}

    def describe(self, value: Value) -> dict:
        """The description of what is no plain data."""
        if isinstance(value, type) and TYPES.get(value.__name__) is value:
            return {"builtin": value.__name__}
        kind = value if isinstance(value, type) else type(value)
        if not issubclass(kind, BaseException):
            return self.number(value)
        lineage = [[base.__module__, base.__qualname__] for base in kind.__mro__]
        if isinstance(value, type):
            return {"class": lineage}
        own = {name: getattr(value, name, None) for name in dir(value) if name[0] != "_"}
        own = {name: item for name, item in own.items() if not callable(item)}
        return {"error": encode([lineage, own, value.__cause__, str(value)], self.describe)}

    def resolve(self, description: dict) -> Value:
        """The value that the outside describes."""
        ((kind, content),) = description.items()
        if kind == "builtin":
            return TYPES.get(content) or getattr(builtins, content)
        if kind == "object":
            return self.objects[content]

        def function(*args: object, **options: object) -> Value:
            self.reply(None, encode([content, args, options], self.describe), [])
            return self.serve()

        function.__name__ = kind
        return function

    def reply(self, *reply: Value) -> None:
        """Send a reply and what the candidate has printed."""
        printed = ""
        with contextlib.suppress(ValueError):  # the candidate has closed it
            self.stdout.seek(0)
            printed = self.stdout.read()
            self.stdout.truncate(self.stdout.seek(0))
        send(self.file, [*reply, printed])

    def serve(self) -> Value:
        """Do what the tests ask until a function of theirs returns, whose value this is.

        Ends, too, when they hang up.
        """
        while True:
            try:
                question = receive(self.file)
            except EOFError:
                return None
            try:
                operation, args, options, keep = decode(question, self.resolve)
                if operation == "return":
                    return args
                reply = self.answer(operation, args, options, keep)
            # the tests get the candidate's exception, or that a result cannot cross
            except BaseException as error:
                error.__traceback__ = None
                reply = [True, self.describe(error), []]
            self.reply(*reply)


# ---- the outside ---------------------------------------------------------------------------------


class Link:
    """The outside's end of a connection, which is a file to read and write.

    `dead`: why the candidate answers no more, "crashed" or "output".
    """

    def __init__(self, file: io.BufferedRWPair) -> None:
        self.file = file
        self.dead = ""
        self.built = False  # whether the tests build what they ask for
        self.lock = _thread.RLock()
        self.handles: dict[int, Handle] = {}
        self.exceptions: dict[str, type] = {}  # stand-ins for classes
        self.functions: list[Callable] = []  # of the tests, which the candidate may call

    def names(self, wanted: Collection[str]) -> dict:
        """The wanted names that the candidate has, with their values.

        No other name is among them, whatever the inside sends.
        """
        names = {}
        module = self.resolve({"object": [0, []]})
        for name in wanted:
            with contextlib.suppress(AttributeError):
                names[name] = self.ask("getattr", module, name, keep=name[0].isupper())
        return names

    def ask(
        self, operation: str, *args: object, keep: bool = False, options: dict | None = None
    ) -> Value:
        """The result of an operation inside.

        `options`: keyword arguments of a call. `keep`: it builds an object. Raises Died, the
        candidate's exception, or Unsupported for arguments that cannot cross.
        """
        options = options or {}
        with self.lock:
            question = [operation, list(args), options, keep]
            failed = None
            while failed is None:
                if self.dead:
                    raise Died
                message = encode(question, self.describe)
                self.built = keep
                try:
                    send(self.file, message)
                    reply = receive(self.file, MAX_MESSAGE)
                    failed, value, after, printed = decode(reply, self.resolve)
                    if failed and not isinstance(value, BaseException):
                        raise TypeError
                    for old, new in zip([*args, *options.values()], after, strict=False):
                        overwrite(old, new)
                except Exception as error:  # it has ended, or the message is forged
                    self.dead = "output" if isinstance(error, TooLong) else "crashed"
                    raise Died from None
                sys.stdout.write(str(printed))  # the tests may have redirected it
                # what it raises goes to the tests, so that the candidate hides no failed check
                if failed is None:
                    number, values, names = value
                    question = ["return", self.functions[number](*values, **names), {}, False]
        if not failed:
            return value
        if isinstance(value, StopIteration) and operation != "next":
            raise RuntimeError("StopIteration")
        raise value

    def describe(self, value: object) -> dict:
        """The description of what is no plain data.

        It is a handle, what the inside has by its name, or a function that the inside may call.
        Raises Unsupported for an object of the tests'.
        """
        if isinstance(value, Handle):
            return {"object": value._number}
        if isinstance(value, type) and issubclass(value, Handle):
            raise TypeError("the type of an object that stays inside")
        name = getattr(value, "__name__", "")
        if value is TYPES.get(name) or value is getattr(builtins, name, None):
            return {"builtin": name}
        if isinstance(value, types.FunctionType):
            self.functions.append(value)
            return {name: len(self.functions) - 1}
        raise Unsupported(f"the tests pass a {type(value).__name__}, which is no plain data")

    def resolve(self, description: dict) -> Value:
        """The value that the inside describes."""
        ((kind, content),) = description.items()
        if kind == "builtin":
            return TYPES[content]
        if kind == "class":
            return self.exception_class(content)
        if kind == "object":
            number, names = content
            own = {name: SPECIAL[name] for name in [*names, "__getitem__"]}  # of generic classes
            own |= {"_link": self, "_number": int(number), "_built": self.built}
            return self.handles.setdefault(number, type("Handle", (Handle,), own)())
        lineage, own, cause, text = decode(content, self.resolve)
        error_class = self.exception_class(lineage)
        error = error_class.__new__(error_class, *own["args"])
        for name, item in own.items():
            with contextlib.suppress(AttributeError, TypeError):
                setattr(error, name, item)
        error.__cause__ = cause
        vars(error).update(candidate=True, text_inside=text)
        return error

    def exception_class(self, lineage: list) -> type[BaseException]:
        """The exception class of this lineage: Python's own, or a stand-in.

        A stand-in extends the class of the rest of the lineage.
        """
        module, name = lineage[0]
        if module.partition(".")[0] in sys.stdlib_module_names:
            kind = getattr(sys.modules.get(module), name, None)
            if module.startswith("unittest") or name in QUIET:
                return RuntimeError
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind
        if name not in self.exceptions:
            base = self.exception_class(lineage[1:])
            text = {"__str__": lambda error: vars(error).get("text_inside") or base.__str__(error)}
            self.exceptions[name] = type(name, (base,), text)
        return self.exceptions[name]


def _asked(operation: str) -> Callable:
    """A method that asks the inside about another handle and this one, as in `isinstance`."""

    def method(self: "Handle", other: object) -> bool:
        return isinstance(other, Handle) and self._link.ask(operation, other, self) is True

    return method


class Handle:
    """Stands for an object that stays inside.

    `_built`: the tests built it, or its name has a capital letter; `_used`: they have used it as no
    constant can be used, too.
    """

    _link: Link
    _number: int
    _built: bool
    _used = False
    __iter__: Callable

    def __getattr__(self, name: str) -> object:
        if name == "__signature__":
            raise Unsupported("the tests ask for signatures")
        # numpy would read memory where an `__array_interface__` says
        if name.startswith("__array"):
            raise AttributeError(name)
        value = self._link.ask("getattr", self, name)
        hidden = name in OF_PLAIN_DATA
        if self._built:
            hidden = name.startswith("is") or name.endswith("with")
            type(self)._used |= name not in OF_CONSTANTS
        if hidden and isinstance(value, Handle) and not self._used:
            raise AttributeError(name)
        return value

    __dict__ = property(lambda self: self.__getattr__("__dict__"))  # for `vars`
    __array__ = None  # it could change while numpy reads it

    __eq__ = _asked("eq")
    __instancecheck__ = _asked("isinstance")
    __subclasscheck__ = _asked("issubclass")


del Handle.__annotations__  # a handle has those of its object


def _passed_on(name: str) -> Callable:
    def method(self: Handle, *args: object) -> object:
        if name.startswith(("set", "del")):
            type(self)._used = self._built
        return self._link.ask(name, self, *args)

    return method


def _call(self: Handle, /, *args: object, **options: object) -> object:
    return self._link.ask("call", self, *args, keep=self._built, options=options)


def _contains(self: Handle, item: object) -> bool:
    if self._used:
        return self._link.ask("contains", self, item) is True
    return any(item == mine for mine in self)


# The special methods of handles; each has those of its object.
SPECIAL: dict[str, object] = {
    f"__{name}__": _passed_on(name)
    for name in "len iter next bool str repr format getitem setitem delitem setattr delattr".split()
}
SPECIAL |= {
    "__call__": _call,
    "__contains__": _contains,
    "__enter__": lambda self: self.__getattr__("__enter__")(),
    # the exception itself, which may hold what is expected, stays outside, and so does a new class
    "__exit__": lambda self, kind, *_: self.__getattr__("__exit__")(
        kind and getattr(builtins, kind.__name__, Exception), None, None
    ),
}
