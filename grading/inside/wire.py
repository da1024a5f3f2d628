"""Plain data between tests and a candidate that they do not trust: numbers, text, containers.

    send(file, message), receive(file)  one line of JSON
    encode(value, describe)             a value in JSON's types: (1, {2}) becomes
                                        {"tuple": [[1, {"set": [[2]]}]]}
    decode(data, resolve)               the value again
    overwrite(old, new)                 what a call changed in an argument, into the tests' object

JSON lacks tuples, sets, keys that are not text, complex numbers, bytes, dates, slices and others;
`encode` adds them. Two functions of the caller handle all other values: `describe` makes a
description of a value, a dict of one entry, and `resolve` makes a value of a description.

`decode` builds only classes of Python's own, so no class of the sender's can decide a comparison,
and unlike pickle it runs none of the sender's code.

Standard library only: each response is tested in a new process, which should start fast.
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

MAX_MESSAGE = 2**24  # bytes; a candidate that sends more fails
UNLIMITED = 2**32 - 1  # bytes; more than any message has
MUTABLE = (list, dict, set, bytearray, collections.deque)  # what a call can change in place
Value = Any  # a value of the tests or the candidate, of any type

# The types that JSON lacks (dict: for its keys) -> a function from a value to the arguments that
# rebuild it; the types of one `fromkeys` share a function. A subclass stands before its bases,
# since the first match counts.
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
# A type's name -> the function that rebuilds its values: the type, or `fromisoformat` for dates.
MAKERS: dict[str, Callable] = {
    kind.__name__: getattr(kind, "fromisoformat", kind) for kind in PLAIN
}
# its factory crosses by name, and is lost if it is not one of TYPES
MAKERS["defaultdict"] = lambda factory, items: collections.defaultdict(TYPES.get(factory), items)
EXACT = PLAIN.keys() | {type(None), bool, int, float, str, list}  # the types that `decode` builds
TYPES: dict[str, type] = {kind.__name__: kind for kind in EXACT | {type}}  # by name


def encode(value: Value, describe: Callable[[object], dict | None]) -> Value:
    """The value in JSON's types; a value that is not plain data becomes what `describe` returns.

    If its class extends one of EXACT, it is encoded as a value of that type, unless it is a member
    of an enum or a named tuple.
    """
    if value is None or isinstance(value, bool):
        return value
    # members of an enum, even if it extends int, and what stands for a candidate's object
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
        return str.__str__(value)  # not a subclass's own `__str__`
    if isinstance(value, list):
        return [encode(item, describe) for item in value]
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return describe(value)  # a named tuple
    for kind, arguments in PLAIN.items():
        if isinstance(value, kind):
            return {kind.__name__: encode(arguments(value), describe)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # without importing numpy
        plain = value.tolist()
        if type(plain) is type(value):  # a long double, which Python lacks
            plain = complex(value) if value.dtype.kind == "c" else float(value)
        plain = encode(plain, describe)
        return {"array": [value.dtype.str, plain]} if isinstance(plain, list) else plain
    return describe(value)


def decode(data: object, resolve: Callable[[dict], object]) -> Value:
    """The value that `encode` was given; `resolve` makes a value of a description.

    Forged data may raise any exception.
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

    A longer line than `limit` bytes is cut, so an object or a list in it is no JSON any more.
    Raises EOFError at the end, and ValueError or RecursionError for what is not JSON.
    """
    data = file.readline(limit + 1)
    if not data:
        raise EOFError
    return json.loads(data)


def overwrite(old: Value, new: Value) -> bool:
    """Update a test's argument in place to the content of the candidate's copy.

    Nested containers are updated, too. Returns False, without a change, unless both are mutable
    containers of the same type, or arrays of the same shape and dtype.
    """
    are_arrays = type(old).__name__ == type(new).__name__ == "ndarray"  # without importing numpy
    if are_arrays and old.shape == new.shape and old.dtype == new.dtype:
        old[...] = new
        return True
    if type(old) is not type(new) or not isinstance(old, MUTABLE):
        return False
    if isinstance(old, dict | list):
        keys = old.keys() & new.keys() if isinstance(old, dict) else range(min(len(old), len(new)))
        for key in keys:
            if overwrite(old[key], new[key]):
                new[key] = old[key]  # `old` keeps its own object, which others may refer to
    old.clear()
    if isinstance(old, dict | set):
        old.update(new)
    else:
        old.extend(new)
    return True
