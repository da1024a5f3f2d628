"""Plain data between two processes that do not trust each other: numbers, text, and containers of these.

    send(connection, message), receive(connection)     JSON behind its length
    encode(value, describe), decode(data, resolve)     for types that JSON lacks: tuples, sets, keys that are no text,
                                                       complex and long numbers, bytes, dates, slices, ...

`decode` builds exact builtin types, so nothing of the sender's own can decide a comparison, and it runs nothing, as
pickle would. `describe` describes a value that is no plain data, and `resolve` turns the description into a value.

Standard library only.
"""

import collections
import datetime
import decimal
import enum
import fractions
import json
import struct
from collections.abc import Callable

MAX_MESSAGE = 2**24  # bytes; a longer value is the candidate's failure
UNLIMITED = 2**32 - 1
MUTABLE = (list, dict, set, bytearray, collections.deque)

# The types that a defaultdict may make its values with.
FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, tuple, set, dict, bool)}


def _from_parts(kind: type) -> Callable[[list], object]:
    return lambda parts: kind(*parts)


# Plain data that JSON lacks: name -> (type, its parts, the value of the parts). A class stands before its bases.
PLAIN = {
    "defaultdict": (
        collections.defaultdict,
        lambda d: [getattr(d.default_factory, "__name__", ""), dict(d)],
        lambda parts: collections.defaultdict(FACTORIES.get(parts[0]), parts[1]),
    ),
    "Counter": (collections.Counter, dict, collections.Counter),
    "OrderedDict": (collections.OrderedDict, lambda d: [list(item) for item in d.items()], collections.OrderedDict),
    "slice": (slice, lambda s: [s.start, s.stop, s.step], _from_parts(slice)),
    "complex": (complex, lambda z: [z.real, z.imag], _from_parts(complex)),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "dict": (dict, lambda d: [list(item) for item in d.items()], dict),
    "bytes": (bytes, lambda b: b.hex(), bytes.fromhex),
    "bytearray": (bytearray, lambda b: b.hex(), bytearray.fromhex),
    "range": (range, lambda r: [r.start, r.stop, r.step], _from_parts(range)),
    "deque": (collections.deque, list, collections.deque),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda f: [f.numerator, f.denominator], _from_parts(fractions.Fraction)),
    "datetime": (datetime.datetime, lambda d: d.isoformat(), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda d: d.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda t: t.isoformat(), datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda d: [d.days, d.seconds, d.microseconds], _from_parts(datetime.timedelta)),
}

EXACT = {kind for kind, _, _ in PLAIN.values()} | {type(None), bool, int, float, str, list}


def encode(value, describe: Callable[[object], dict]):
    """Plain data as what JSON can carry; anything else becomes what `describe` makes of it."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) not in EXACT and (isinstance(value, enum.Enum) or hasattr(type(value), "stand_in")):
        return describe(value)
    if isinstance(value, int):
        return {"int": hex(value)} if abs(value) >= 2**63 else int(value)  # decimal digits are limited, and slow
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, describe) for item in value]
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return describe(value)  # a named tuple
    for name, (kind, parts_of, _) in PLAIN.items():
        if isinstance(value, kind):
            return {name: encode(parts_of(value), describe)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # without importing numpy
        plain = value.tolist()
        if type(plain) is type(value):  # a long double, which Python lacks
            plain = complex(value) if value.dtype.kind == "c" else float(value)
        plain = encode(plain, describe)
        return {"array": [value.dtype.str, plain]} if isinstance(plain, list) else plain
    return describe(value)


def decode(data, resolve: Callable[[dict], object]):
    """The value that `encode` was given; `resolve` gets the descriptions. Forged data raises ValueError and others."""
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, parts),) = data.items()
    if name == "int":
        return int(parts, 16)
    if name in PLAIN:
        from_parts = PLAIN[name][2]
        return from_parts(decode(parts, resolve))
    return resolve(data)


def send(connection, message, limit: int = MAX_MESSAGE) -> None:
    """Send a message: its length, then JSON. Raises ValueError if it is longer than `limit` bytes."""
    data = json.dumps(message).encode()
    if len(data) > limit:
        raise ValueError(f"a value of {len(data)} bytes is too long to be handed over")
    connection.sendall(struct.pack(">I", len(data)) + data)


def receive(connection, limit: int = MAX_MESSAGE):
    """The next message. Raises EOFError at the end, ValueError if it is longer than `limit` bytes or no JSON."""
    (size,) = struct.unpack(">I", _exactly(connection, 4))
    if size > limit:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_exactly(connection, size))


def _exactly(connection, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 2**20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


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
