"""Handles, which stand for a candidate's objects in the tests, and what they may decide there.

    Handle(link, number, origin)     used like the object; asks the inside through `proxy.Link.ask`

A handle has the special methods that its object has. What is plain data comes back as plain data,
whatever its function is called, except for an instance of a class that the tests call: it stays
inside, even if the class extends a builtin one. Five rules keep a handle from judging itself.
Otherwise an object that always agrees could answer `abs(f(x) - 0.5) < 1e-6`.
  - It equals plain data only by the builtin value under its class, and it is not ordered against
    plain data.
  - It takes part in arithmetic, or becomes a number, only if the tests built it: they called a
    class, which is a name with a capital letter, or went on calculating with such an object. Other
    arithmetic of two handles gives a handle.
  - Arithmetic with plain data gives an object that neither becomes a number, a length or a truth
    value, nor equals plain data, for it has seen what the test expects. Where the builtin value
    under the class gives the same result, that is the result.
  - It gives the same number, and the same builtin value, until the tests do anything else with the
    candidate. The builtin value of an immutable one is read once.
  - It holds plain data if the builtin value under its class does, or if one of its items equals
    that data; its own `__contains__` is asked only about another handle. Predicates such as
    `startswith` are the builtin value's. Its own answers count once the tests have used it as no
    immutable plain data can be used (`trie.insert(word)`).

Standard library only.
"""

import builtins
import contextlib
import copy
import functools
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from wire import Value

if TYPE_CHECKING:
    from proxy import Link

# A handle passes these operations on to its object. It passes on other kinds only under the rules
# above.
PASSED_ON = (
    "len iter next reversed bool str repr format hash getitem setitem delitem setattr delattr"
).split()
NUMBERS = "int float index neg pos abs invert round".split()
ORDER = "lt le gt ge".split()
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
IN_PLACE = [f"i{name}" for name in ARITHMETIC]
OTHERS = "eq contains isinstance issubclass getattr divmod type".split()

# What the inside does for each operation: the builtin of that name, or else the operator.
OPERATIONS: dict[str, Callable] = {
    "call": lambda function, /, *args, **options: function(*args, **options),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
for _name in PASSED_ON + NUMBERS + ORDER + ARITHMETIC + IN_PLACE + OTHERS:
    OPERATIONS[_name] = getattr(builtins, _name, None) or getattr(operator, f"__{_name}__")

# How the tests came to a handle. "class": a name of the candidate's that begins with a capital
# letter; "name": another name; "built": they called such a class; "mixed": arithmetic of these with
# plain data; "part": an attribute of these; "result": all else. An origin only moves right.
ORIGINS = ("class", "name", "built", "mixed", "part", "result")
IMMUTABLE = (str, bytes, int, float, complex, tuple, frozenset, range, types.MappingProxyType)
# Attributes of a result that may be plain data.
READING = {name for kind in IMMUTABLE for name in dir(kind)}
PREDICATES = {name for name in READING if name.startswith("is") or name.endswith("with")}


class Unsupported(KeyboardInterrupt):
    """The tests hand over something that cannot cross.

    No `except Exception` of a test may hide it. It extends KeyboardInterrupt because, of the other
    exceptions, unittest and asyncio let this one pass.
    """


class Handle:
    """Stands for an object that stays inside, under the rules of the module's docstring.

    `_origin`: see ORIGINS. `_used`: the tests have used it as no immutable plain data can be used.
    """

    __slots__ = ("_link", "_number", "_origin", "_used")
    _link: "Link"
    _number: int
    _origin: str
    _used: bool
    stand_in = True

    def __init__(self, link: "Link", number: int, origin: str) -> None:
        for name, value in zip(Handle.__slots__, (link, number, origin, False), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> object:
        if name == "__signature__":
            raise Unsupported("the tests ask for signatures")
        # numpy would read memory where an `__array_interface__` says
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(name)
        if name in PREDICATES and not (self._built and self._used):
            return getattr(self._plain() if self._built else None, name)  # None has no predicates
        if name not in READING:
            object.__setattr__(self, "_used", True)
        origin = "result" if self._origin == "result" else "class" if name[0].isupper() else "part"
        return self._link.ask("getattr", self, name, origin=origin)

    def __instancecheck__(self, instance: object) -> bool:
        return (
            hasattr(type(instance), "stand_in")
            and self._link.ask("isinstance", instance, self) is True
        )

    def __subclasscheck__(self, other: object) -> bool:
        return isinstance(other, Handle) and self._link.ask("issubclass", other, self) is True

    def __mro_entries__(self, bases: tuple) -> NoReturn:
        raise Unsupported("the tests subclass a class of the candidate's")

    def __copy__(self) -> object:
        return self._link.ask("copy", self, origin=self._origin, keep=True)

    def __deepcopy__(self, memo: dict) -> object:
        return self._link.ask("deepcopy", self, origin=self._origin, keep=True)

    def __divmod__(self, other: Value) -> object:
        # with plain data as two operations, since a pair from inside would hold numbers
        both = isinstance(other, Handle)
        return _arithmetic("divmod")(self, other) if both else (self // other, self % other)

    def __rdivmod__(self, other: Value) -> object:
        return other // self, other % self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Handle):
            return self._link.ask("eq", self, other) is True
        value = self._plain()
        return value is not None and value == other

    @property
    def _built(self) -> bool:
        return self._origin in ("built", "mixed")

    def _plain(self) -> Value:
        """The builtin value under its class, or None.

        None if there is no such value, or if the object has seen what the test expects.
        """
        if self._origin == "mixed":
            return None
        key = ("plain", self._number)
        for kept in (self._link.constants, self._link.numbers):
            if key in kept:
                return kept[key]
        value = self._link.ask("plain", self)
        kept = self._link.constants if isinstance(value, IMMUTABLE) else self._link.numbers
        kept[key] = value
        return value

    def _with_plain(self, name: str, other: object, swapped: bool) -> object:
        """Arithmetic with plain data.

        The result is plain where the builtin value under the class gives the same.
        """

        def operands(own: object) -> tuple:
            return (other, own) if swapped else (own, other)

        value = self._plain()
        result = self._link.ask(name, *operands(self), origin="built", keep=True)
        if value is not None:
            with contextlib.suppress(TypeError, ValueError, ArithmeticError):
                expected = OPERATIONS[name](*operands(value))
                if result == expected:
                    return expected
        object.__setattr__(result, "_origin", "mixed")
        return result


del Handle.__annotations__  # a handle has those of its object


def _passed_on(name: str) -> Callable:
    def method(self: Handle, *args: object) -> object:
        if self._origin == "mixed" and (
            name in ("len", "bool") or (name == "format" and args != ("",))
        ):
            raise TypeError("arithmetic with plain data gives no number")
        if name.startswith(("set", "del")):
            object.__setattr__(self, "_used", True)
        return self._link.ask(name, self, *args)

    return method


def _number(name: str) -> Callable:
    def method(self: Handle, *digits: object) -> object:
        if not self._built:
            raise TypeError("a result is no number")
        key = (name, self._number, *digits)
        if key not in self._link.numbers:
            self._link.numbers[key] = self._link.ask(
                name, self, *digits, origin=self._origin, keep=self._origin == "mixed"
            )
        return self._link.numbers[key]

    return method


def _order(name: str) -> Callable:
    return lambda self, other: (
        self._link.ask(name, self, other) if isinstance(other, Handle) else NotImplemented
    )


def _arithmetic(name: str, swapped: bool = False) -> Callable:
    def method(self: Handle, other: object) -> object:
        if not isinstance(other, Handle):
            return self._with_plain(name, other, swapped) if self._built else NotImplemented
        left, right = (other, self) if swapped else (self, other)
        origins = {self._origin, other._origin}
        origin = "mixed" if "mixed" in origins else "built" if "built" in origins else "result"
        return self._link.ask(name, left, right, origin=origin, keep=origin != "built")

    return method


def class_of(value: object) -> object:
    """`type(value)`: the candidate's class for an object of the candidate's."""
    return (
        value._link.ask("type", value, origin="class") if isinstance(value, Handle) else type(value)
    )


def _call(self: Handle, /, *args: object, **options: object) -> object:
    builds = self._origin == "class"
    origin = "built" if builds else "result"
    return self._link.ask("call", self, *args, origin=origin, keep=builds, options=options)


def _contains(self: Handle, item: object) -> bool:
    if self._built and (self._used or isinstance(item, Handle)):
        return self._link.ask("contains", self, item) is True
    value = self._plain() if self._built else None
    return (
        any(item == mine for mine in OPERATIONS["iter"](self)) if value is None else item in value
    )


def _exit(self: Handle, *error: object) -> None:
    self._link.ask("getattr", self, "__exit__")(None, None, None)


SPECIAL: dict[str, object] = {
    "__call__": _call,
    "__contains__": _contains,
    "__doc__": property(lambda self: self._link.ask("getattr", self, "__doc__")),
    "__enter__": lambda self: self._link.ask("getattr", self, "__enter__")(),
    "__exit__": _exit,
}
for _make, _names in (
    (_passed_on, PASSED_ON),
    (_number, NUMBERS),
    (_order, ORDER),
    (_arithmetic, ARITHMETIC + IN_PLACE),
):
    SPECIAL |= {f"__{name}__": _make(name) for name in _names}
SPECIAL |= {f"__r{name}__": _arithmetic(name, swapped=True) for name in ARITHMETIC}
READABLE = SPECIAL.keys() | {
    "__annotations__",
    "__dict__",
    "__name__",
    "__qualname__",
    "__wrapped__",
}


@functools.cache
def class_with(names: frozenset) -> type[Handle]:
    """The class of handles for objects with these special methods."""
    names |= {"__bool__", "__getitem__"}  # the rules on `bool`; generic classes
    methods = {name: SPECIAL[name] for name in names}
    return type("Handle", (Handle,), {"__slots__": ()} | methods)
