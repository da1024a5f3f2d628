"""Plain data between two processes that do not trust each other: numbers, text, their containers.

`send` and `receive` transfer one line of JSON. `encode` and `decode` add the types that JSON lacks:
tuples, sets, keys that are not text, complex and long numbers, bytes, dates, slices and others.

`decode` builds exact builtin types, so no class of the sender's can decide a comparison; unlike
pickle it runs none of the sender's code. `describe` turns a value that is not plain data into a
description, and `resolve` turns a description into a value.

Standard library only.
"""

import collections
import datetime
import decimal
import enum
import fractions
import json
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

MAX_MESSAGE = 2**24  # bytes; a longer value is the candidate's failure
UNLIMITED = 2**32 - 1
MUTABLE = (list, dict, set, bytearray, collections.deque)
Value = Any  # a value of the tests or the candidate, of any type

# The types that JSON lacks, each with a function from a value to the arguments that rebuild it. A
# subclass stands before its bases, since the first match counts.
PLAIN: dict[type, Callable[..., list]] = {
    collections.defaultdict: lambda d: [getattr(d.default_factory, "__name__", ""), dict(d)],
    collections.Counter: lambda c: [dict(c)],
    collections.OrderedDict: lambda d: [dict(d)],
    **dict.fromkeys((slice, range), lambda s: [s.start, s.stop, s.step]),
    complex: lambda z: [z.real, z.imag],
    **dict.fromkeys((tuple, set, frozenset), lambda items: [list(items)]),
    dict: lambda d: [[list(item) for item in d.items()]],
    **dict.fromkeys((bytes, bytearray), lambda b: [b.decode("latin-1"), "latin-1"]),
    collections.deque: lambda d: [list(d), d.maxlen],
    decimal.Decimal: lambda d: [str(d)],
    fractions.Fraction: lambda f: [f.numerator, f.denominator],
    **dict.fromkeys((datetime.datetime, datetime.date, datetime.time), lambda d: [d.isoformat()]),
    datetime.timedelta: lambda d: [d.days, d.seconds, d.microseconds],
}
MAKERS: dict[str, Callable] = {
    kind.__name__: getattr(kind, "fromisoformat", kind) for kind in PLAIN
}
MAKERS["defaultdict"] = lambda factory, items: collections.defaultdict(TYPES.get(factory), items)
EXACT = PLAIN.keys() | {type(None), bool, int, float, str, list}
# The classes that both processes know by name.
TYPES: dict[str, type] = {kind.__name__: kind for kind in EXACT | {type}}


def encode(value: Value, describe: Callable[[object], dict | None]) -> Value:
    """The value as JSON can carry it; a value that is not plain data as `describe` describes it."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) not in EXACT and (
        isinstance(value, enum.Enum) or hasattr(type(value), "stand_in")
    ):
        return describe(value)
    if isinstance(value, int):
        # hexadecimal, as Python limits decimal digits and converts them slowly
        return {"int": hex(value)} if abs(value) >= 2**63 else int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, describe) for item in value]
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return describe(value)  # a named tuple
    for kind, arguments in PLAIN.items():
        if isinstance(value, kind):
            return {kind.__name__: encode(arguments(value), describe)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # without importing numpy
        plain = value.tolist()
        if type(plain) is type(value):  # a long double: Python has no such type
            plain = complex(value) if value.dtype.kind == "c" else float(value)
        plain = encode(plain, describe)
        return {"array": [value.dtype.str, plain]} if isinstance(plain, list) else plain
    return describe(value)


def decode(data: object, resolve: Callable[[dict], object]) -> Value:
    """The value that `encode` was given.

    `resolve` turns descriptions into values. Forged data may raise ValueError or any other
    exception.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name == "int":
        return int(content, 16)
    return MAKERS[name](*decode(content, resolve)) if name in MAKERS else resolve(data)


def send(file: BufferedRWPair, message: object, limit: int = MAX_MESSAGE) -> None:
    """Send a message as a line of JSON.

    Raises ValueError if it is longer than `limit` bytes.
    """
    data = json.dumps(message).encode()
    if len(data) > limit:
        raise ValueError(f"a value of {len(data)} bytes is too long")
    file.write(data + b"\n")
    file.flush()


def receive(file: BufferedRWPair, limit: int = MAX_MESSAGE) -> Value:
    """Receive the next message.

    Raises EOFError at the end, ValueError if it is not JSON or is longer than `limit` bytes.
    """
    data = file.readline(limit + 1)
    if not data:
        raise EOFError
    return json.loads(data)


def overwrite(old: Value, new: Value) -> bool:
    """Update a test's argument in place to the content of the candidate's copy.

    Nested containers are updated, too. Returns False, without a change, unless both are mutable
    containers of the same type.
    """
    if type(old).__name__ == type(new).__name__ == "ndarray" and (old.shape, old.dtype) == (
        new.shape,
        new.dtype,
    ):
        old[...] = new
        return True
    if type(old) is not type(new) or not isinstance(old, MUTABLE):
        return False
    if isinstance(old, dict | list):
        keys = old.keys() & new.keys() if isinstance(old, dict) else range(min(len(old), len(new)))
        for key in keys:
            if overwrite(old[key], new[key]):
                new[key] = old[key]
    old.clear()
    (old.update if isinstance(old, dict | set) else old.extend)(new)
    return True
