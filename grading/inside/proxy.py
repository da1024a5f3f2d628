"""Tests on the outside, the candidate program on the inside, plain data between them.

    serve(file, names, stdout)  inside: do what is asked with the candidate's functions and objects
    Link(file).names(["f"])     outside: stand-ins for them, for the tests (`judge.py`)

The comparison must not share a process with what is compared: a candidate could lie in `__eq__`,
patch a builtin, walk frames to the expected value, or end the process with a friendly exit status.
So the inside gets only the arguments of a call, and what it sends back is read as plain data
(`wire.py`). Any other value stays inside, and the tests get a `Handle` (`handles.py`) that asks for
it. Nothing that the inside sends is run, unless a test runs it.

As in any Python test, an argument that the candidate changes in place changes for the tests too,
and the candidate's exceptions are raised in the tests, under their builtin names or as stand-ins of
classes of its own. Where the tests redirect standard output, they get what the candidate prints.
Threads of the tests take turns.

All checks must run and hold: an exception that a loop, asyncio or unittest takes for an end without
an error arrives as RuntimeError.

Left out: functions and objects of the tests as arguments, and subclassing the candidate's classes
in a test, except for exceptions. A test that needs these cannot be run: `infra_error`. Also,
nothing of the candidate's can be awaited; changing a list that is an attribute changes a copy;
`__exit__` gets no exception.

Standard library only, because this runs in a new process for each response (`sandbox.py`).
"""

import _thread  # `threading` takes longer to import
import builtins
import enum
import importlib
import io
import operator
import os
import sys
from collections.abc import Collection, ItemsView, KeysView, ValuesView

from handles import NUMBERS, OPERATIONS, ORIGINS, SPECIAL, Handle, Unsupported, class_with
from wire import EXACT, MUTABLE, TYPES, UNLIMITED, Value, decode, encode, overwrite, receive, send

# What the tests may hand over by its name.
BUILTINS = vars(builtins) | TYPES
# asyncio and loops take these for an end, not for an error.
QUIET = ("GeneratorExit", "CancelledError", "StopAsyncIteration")


class Died(BaseException):
    """The candidate's process ended, or sent no valid message, while the tests waited for it."""


# ---- the inside ----------------------------------------------------------------------------------


class Printed(io.TextIOWrapper):
    """The standard output of a program under tests."""

    def __init__(self) -> None:
        self.printed = io.BytesIO()
        super().__init__(self.printed, encoding="utf-8", errors="replace")

    def fileno(self) -> int:
        """The descriptor of the null device."""
        return 1

    def take(self) -> str:
        """What was printed since the last time."""
        try:
            self.flush()
            text = self.printed.getvalue().decode("utf-8", "replace")
            self.printed.truncate(self.printed.seek(0))
        except ValueError:  # the program has closed it
            return ""
        return text


def serve(file: io.BufferedRWPair, names: dict, stdout: Printed) -> None:
    """Do what the tests ask with the candidate's `names` until they hang up."""
    objects = Objects()
    while True:
        try:
            operation, given, keep = receive(file, UNLIMITED)
        except EOFError:
            return
        try:
            args, options = decode(given, objects.resolve)
            printed = stdout.take()
            after: list = []
            if operation == "printed":
                value: object = printed
            elif operation == "names":
                found = {name: names[name] for name in args if name in names}
                value = encode(found, objects.describe)
            elif operation == "plain":
                value = plain(*args)
            else:
                result = OPERATIONS[operation](*args, **options)
                keep = keep and (operation != "call" or is_instance(result, args[0]))
                value = objects.handle(result) if keep else encode(result, objects.describe)
                if operation == "call":  # the call may have changed its arguments
                    after = [
                        encode(v, objects.describe)
                        if isinstance(v, MUTABLE) or hasattr(v, "tolist")
                        else None
                        for v in [*args, *options.values()]
                    ]
            send(file, {"value": value, "after": after})
        # the tests get the candidate's exception, or that a result cannot cross
        except BaseException as error:
            send(file, {"raise": objects.describe(error)})


def is_instance(result: object, function: object) -> bool:
    """Whether a call of `function` made an instance of it that stays inside, and no plain data."""
    crosses = type(result) in EXACT or isinstance(result, BaseException)
    return isinstance(function, type) and not crosses and isinstance(result, function)


def plain(value: object) -> object:
    """The builtin value under an object whose class extends a builtin one; otherwise None.

    The outside compares with it.
    """
    for kind in (int, float, str) if isinstance(value, enum.Enum) else ():
        if isinstance(value, kind):
            return encode(getattr(kind, f"__{kind.__name__}__")(value), lambda _: None)
    return encode(tuple(value) if isinstance(value, tuple) else value, lambda _: None)


def is_python(module: str) -> bool:
    """Whether a module belongs to the standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


class Objects:
    """The objects that stay inside, by numbers that the outside knows."""

    def __init__(self) -> None:
        self.all: list = []
        self.numbers: dict[int, int] = {}  # by id, which stays an object's own while `all` holds it

    def number(self, value: object) -> int:
        """An object's number."""
        number = self.numbers.setdefault(id(value), len(self.all))
        if number == len(self.all):
            self.all.append(value)
        return number

    def handle(self, value: object) -> dict:
        """The description of an object by its number and its special methods."""
        names = set().union(*map(vars, type(value).__mro__))
        return {"handle": [self.number(value), list(SPECIAL.keys() & names)]}

    def describe(self, value: object) -> dict:
        """As `handle`, except for values of which the outside has or makes its own."""
        if isinstance(value, type) and TYPES.get(value.__name__) is value:
            return {"builtin": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": self.lineage(value)}
        if isinstance(value, BaseException):
            for error in (value, value.__context__):
                if error is not None:
                    error.__traceback__ = None  # `all` would keep what its frames hold
            number = None if is_python(type(value).__module__) else self.number(value)
            args = encode(list(value.args), self.part)
            return {"error": [number, self.lineage(type(value)), args]}
        return self.handle(value)

    def part(self, value: object) -> dict:
        """The description of what is in an exception, perhaps itself."""
        return self.handle(value) if isinstance(value, BaseException) else self.describe(value)

    def lineage(self, kind: type) -> list[list]:
        """The classes from which this one descends, itself first.

        Each is [module, name, number].
        """
        return [[base.__module__, base.__qualname__, self.number(base)] for base in kind.__mro__]

    def resolve(self, description: dict) -> Value:
        """The object that the outside describes."""
        ((kind, content),) = description.items()
        if kind == "builtin":
            return BUILTINS[content]
        if kind == "exception":
            return getattr(importlib.import_module(content[0]), content[1])
        if kind == "error":
            return self.resolve({"exception": content})(*decode(content[2], self.resolve))
        if kind == "array":
            return importlib.import_module("numpy").array(
                decode(content[1], self.resolve), content[0]
            )
        return self.all[content]


# ---- the outside ---------------------------------------------------------------------------------


class Link:
    """The outside's end of a connection, which is a file to read and write."""

    def __init__(self, file: io.BufferedRWPair) -> None:
        self.file = file
        self.dead = False
        self.lock = _thread.RLock()
        self.handles: dict[int, Handle] = {}
        self.errors: dict[int | None, BaseException] = {}
        self.exceptions: dict[int, type] = {}  # classes
        # numbers that handles have become since the last question of another kind
        self.numbers: dict[tuple, object] = {}
        self.constants: dict[tuple, object] = {}  # plain values of handles that cannot change

    def names(self, wanted: Collection[str]) -> dict:
        """The wanted names that the candidate has, with their values, in the order wanted.

        No other name is among them, whatever the inside sends.
        """
        reply = self.ask("names", *wanted, origin="name")
        names = {name: reply[name] for name in wanted if name in reply}
        for name, value in names.items():
            if isinstance(value, Handle) and name[0].isupper():
                object.__setattr__(value, "_origin", "class")
        return names

    def ask(
        self,
        operation: str,
        *args: object,
        origin: str = "result",
        keep: bool = False,
        options: dict | None = None,
    ) -> Value:
        """The result of an operation inside, with this origin for its handles.

        `options`: keyword arguments of a call. `keep`: a handle in any case; of a call,
        only for an instance of the class that is called. Raises Died, the candidate's exception, or
        Unsupported for arguments that cannot cross.
        """
        with self.lock:
            try:
                return self._ask(operation, args, options or {}, origin, keep)
            finally:
                # the tests may have redirected standard output
                if sys.stdout is not sys.__stdout__ and not self.dead:
                    sys.stdout.write(str(self._ask("printed", (), {}, origin, keep=False)))

    def _ask(self, operation: str, args: tuple, options: dict, origin: str, keep: bool) -> object:
        if self.dead:
            raise Died
        if operation not in (*NUMBERS, "plain", "printed"):
            self.numbers.clear()
        try:
            given = encode([list(args), options], _describe)
        except Unsupported as error:
            if isinstance(args[0], Handle) and args[0]._origin == "result":
                # an object in place of a list or text: not the tests' fault
                raise TypeError(str(error)) from None
            raise
        try:
            # unlimited, as it may hold what came from inside
            send(self.file, [operation, given, keep], UNLIMITED)
            reply = receive(self.file)
            raised = decode(reply["raise"], self.resolve) if "raise" in reply else None
            if raised is None:
                value = decode(
                    reply["value"], lambda description: self.resolve(description, origin)
                )
                after = [decode(data, self.resolve) for data in reply.get("after", [])]
                if keep and operation != "call" and not isinstance(value, Handle):
                    raise TypeError
            elif isinstance(raised, StopIteration) and operation != "next":
                raised = RuntimeError("StopIteration")
            if not isinstance(raised, BaseException | None):
                raise TypeError
        except Exception:  # it has ended, or the message is forged
            self.dead = True
            raise Died from None
        if isinstance(raised, FileNotFoundError) and os.listdir():
            raise Unsupported("the tests write files")
        if raised is not None:
            raise raised
        for old, new in zip([*args, *options.values()], after, strict=False):
            overwrite(old, new)
        return value

    def error(self, number: int | None, classes: list, args: list) -> BaseException:
        """The candidate's exception, with its arguments.

        It is of the same builtin class, or of a stand-in.
        """
        kind = self.exception_class(classes)
        error = self.errors.get(number)
        if not isinstance(error, kind):
            try:
                error = type.__call__(kind, *args)
            except TypeError:  # a class that wants more than it keeps in `args`
                error = kind.__new__(kind)
        vars(error)["candidate"] = True
        if number is not None:
            self.errors[number] = error
            vars(error)["_number"] = operator.index(number)
        return error

    def exception_class(self, classes: list) -> type[BaseException]:
        """The exception class of this lineage: Python's own, or a stand-in.

        A stand-in extends the class of the rest of the lineage.
        """
        module, name, number = classes[0]
        if is_python(module):
            if module.startswith("unittest") or name in QUIET:
                return RuntimeError
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind
        if number not in self.exceptions:

            def text(error: BaseException) -> str:  # the tests' own class below it has no number
                return (
                    self.ask("str", error)
                    if "_number" in vars(error)
                    else BaseException.__str__(error)
                )

            def attribute(error: BaseException, name: str) -> object:
                if name.startswith("__") or "_number" not in vars(error):
                    raise AttributeError(name)
                return self.ask("getattr", error, name)

            own = {
                "__str__": text,
                "__getattr__": attribute,
                "_link": self,
                "_number": operator.index(number),
            }
            self.exceptions[number] = ExceptionClass(
                name, (self.exception_class(classes[1:]),), own
            )
        return self.exceptions[number]

    def resolve(self, description: dict, origin: str = "result") -> Value:
        """The value that the inside describes.

        It is a handle, or the outside's own object where it can have one.
        """
        ((kind, content),) = description.items()
        if kind == "builtin":
            return TYPES[content]
        if kind == "exception":
            return self.exception_class(content)
        if kind == "array":  # a list, for tests that do not use numpy
            values = decode(content[1], self.resolve)
            # 1e9 is inf, and 3.14159 is 3.14, for half floats
            dtype = content[0].replace("f2", "f8")
            return sys.modules["numpy"].array(values, dtype) if "numpy" in sys.modules else values
        if kind == "error":
            number, classes, args = content
            return self.error(number, classes, decode(args, self.resolve))
        number = operator.index(content[0])
        handle = class_with(frozenset(content[1]))(self, number, origin)
        handle = self.handles.setdefault(number, handle)
        # once a function has returned it, it is a result
        object.__setattr__(handle, "_origin", max(origin, handle._origin, key=ORIGINS.index))
        return handle


class ExceptionClass(type):
    """The class of stand-ins for the candidate's exception classes.

    A call makes the instance inside.
    """

    stand_in = True

    def __call__(cls, /, *args: object, **options: object) -> object:
        if "_number" in vars(cls):
            return vars(cls)["_link"].ask("call", cls, *args, options=options)
        return super().__call__(*args, **options)  # the tests' own class below it


def _describe(value: object) -> dict:
    """How the outside describes an object to the inside."""
    if isinstance(value, Handle):
        return {"handle": value._number}
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return encode(list(value), _describe)
    name = getattr(value, "__name__", "")
    if BUILTINS.get(name) is value:
        return {"builtin": name}
    own = getattr(value, "__dict__", {})
    if "_number" in own and hasattr(type(value), "stand_in"):
        return {"handle": own["_number"]}
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, BaseException) and is_python(kind.__module__):
        path = [kind.__module__, kind.__qualname__]
        if isinstance(value, BaseException):
            return {"error": [*path, encode(list(value.args), _describe)]}
        return {"exception": path}
    raise Unsupported(f"the tests pass a {type(value).__name__}, which is no plain data")
