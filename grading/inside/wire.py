"""Plain data between tests and a candidate that they do not trust: numbers, text, containers.

    send(file, message), receive(file)  one line of JSON
    encode(value, describe)             a value in JSON's types: (1, {2}) becomes
                                        {"tuple": [[1, {"set": ...}], null]}
    decode(data, resolve)               the value again
    overwrite(old, new)                 what a call changed in an argument, into the tests' object

JSON lacks tuples, sets, keys that are not text, complex numbers, bytes, dates, slices and others;
`encode` adds them. Two functions of the caller handle all other values: `describe` makes a
description of a value, a dict of one entry, and `resolve` makes a value of a description.

`decode` builds only classes of Python's own and named tuples, so no class of the sender's can
decide a comparison, and unlike pickle it runs none of the sender's code.

Standard library only: each response is tested in a new process, which should start fast.
"""

import collections
import datetime
import decimal
import enum
import fractions
import importlib
import json
import time
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

MAX_MESSAGE = 2**26  # bytes that a candidate may send at once
MUTABLE = (list, dict, set, bytearray, collections.deque)  # what a call can change in place
Value = Any  # a value of the tests or the candidate, of any type


class TooLong(ValueError):
    """A message of more than MAX_MESSAGE bytes."""


# Types that JSON lacks, each rebuilt from what `__reduce_ex__` tells of it: arguments, items of a
# list, pairs of a dict. A subclass stands before its bases, since the first match counts.
REDUCED = (
    collections.defaultdict,
    collections.Counter,
    collections.OrderedDict,
    collections.deque,
    dict,
    set,
    frozenset,
    bytearray,
    complex,
    slice,
    range,
    decimal.Decimal,
    fractions.Fraction,
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    time.struct_time,
)
# The types that `decode` builds, but for named tuples.
EXACT = {*REDUCED, tuple, bytes, type(None), bool, int, float, str, list}
TYPES: dict[str, type] = {kind.__name__: kind for kind in EXACT | {type}}  # by name


def encode(value: Value, describe: Callable[[object], dict | None]) -> Value:
    """The value in JSON's types; a value that is not plain data becomes what `describe` returns.

    If its class extends one of EXACT, it is encoded as a value of that type, unless it is a member
    of an enum. A named tuple keeps its fields.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):  # even if it extends int
        return describe(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, str):
        return str.__str__(value)  # not a subclass's own `__str__`
    if isinstance(value, list):
        return [encode(item, describe) for item in value]
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    for kind in REDUCED:
        if isinstance(value, kind):
            parts: list = [*kind.__reduce_ex__(value, 2), None, None, None]
            make, args, _, items, pairs = parts[:5]
            skip = make.__name__ == "__newobj__"  # its first argument is the class
            content = [list(args[skip:]), list(items or ()), list(map(list, pairs or ()))]
            return {kind.__name__: encode(content, describe)}
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)  # of a named tuple
        name = type(value).__name__
        return {"tuple": encode([[*value], fields and [name, [*fields]]], describe)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # without importing numpy
        plain = value.tolist()
        if type(plain) is type(value):  # a long double, which Python lacks
            plain = complex(value)
        plain = encode(plain, describe)
        return {"array": [plain, value.dtype.str]} if isinstance(plain, list) else plain
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
    if name == "bytes":
        return content.encode("latin-1")
    if name not in TYPES and name != "array":
        return resolve(data)
    parts = decode(content, resolve)
    if name == "array":
        values, dtype = parts
        # 1e9 is inf, and 3.14159 is 3.14, for half floats
        return importlib.import_module("numpy").array(values, dtype.replace("f2", "f8"))
    if name == "tuple":
        items, named = parts
        return collections.namedtuple(*named)(*items) if named else tuple(items)
    args, items, pairs = parts
    value = TYPES[name](*args)
    for item in items:
        value.append(item)
    for key, item in pairs:
        value[key] = item
    return value


def send(file: BufferedRWPair, message: object) -> None:
    """Send a message as a line of JSON."""
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def receive(file: BufferedRWPair, limit: int = -1) -> Value:
    """Receive the next message, of less than about `limit` bytes.

    Raises EOFError at the end, TooLong, and ValueError or RecursionError for what is not JSON.
    """
    data = file.readline(limit)
    if not data:
        raise EOFError
    if len(data) >= limit > 0:
        raise TooLong
    return json.loads(data)


def is_mutable(value: object) -> bool:
    """Whether a call can change the value in place: a container, or an array of numpy's."""
    return isinstance(value, MUTABLE) or type(value).__name__ == "ndarray"


def overwrite(old: Value, new: Value) -> bool:
    """Update a test's argument in place to the content of the candidate's copy.

    Nested containers are updated, too. Returns False, without a change, unless both are mutable
    containers of the same type, or arrays. Raises ValueError for an array of another shape.
    """
    if type(old) is not type(new) or not is_mutable(old):
        return False
    if not isinstance(old, MUTABLE):
        old[...] = new
        return True
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
