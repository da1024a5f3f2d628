"""Plain data between two processes that do not trust each other: numbers, text, containers of these.

    send(connection, message), receive(connection)     JSON behind its length
    encode(value, describe), decode(data, find)        what JSON does not know: tuples, sets, keys that are no text,
                                                       complex and long numbers, bytes, dates, slices, ...

What is read is rebuilt as exact builtin types, so nothing of a sender's own can decide a comparison, and nothing
of it is run: pickle would. A value that is no plain data is left to `describe`, and its description to `find`.

Standard library only.
"""

import collections
import datetime
import decimal
import fractions
import json
import struct
from collections.abc import Callable

MAX_MESSAGE = 2**24  # bytes; above it a value is the candidate's failure

# Plain data that JSON does not know: name -> (type, its parts, back from its parts). A class stands before its bases.
FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, tuple, set, dict, bool)}
PLAIN = {
    "defaultdict": (
        collections.defaultdict,
        lambda d: [getattr(d.default_factory, "__name__", ""), dict(d)],
        lambda parts: collections.defaultdict(FACTORIES.get(parts[0]), parts[1]),
    ),
    "Counter": (collections.Counter, dict, collections.Counter),
    "OrderedDict": (
        collections.OrderedDict,
        lambda d: [[key, value] for key, value in d.items()],
        collections.OrderedDict,
    ),
    "slice": (slice, lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    "complex": (complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "dict": (dict, lambda d: [[key, value] for key, value in d.items()], dict),
    "bytes": (bytes, lambda b: b.hex(), bytes.fromhex),
    "bytearray": (bytearray, lambda b: b.hex(), bytearray.fromhex),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "deque": (collections.deque, list, collections.deque),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda f: [f.numerator, f.denominator], lambda parts: fractions.Fraction(*parts)),
    "datetime": (datetime.datetime, lambda d: d.isoformat(), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda d: d.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda d: d.isoformat(), datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda d: [d.days, d.seconds, d.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}


def encode(value, handle: Callable[[object], dict]):
    """Plain data as what JSON can carry; anything else becomes what `handle` makes of it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {"int": hex(value)} if abs(value) >= 2**63 else int(value)  # decimal digits are limited, and slow
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, handle) for item in value]
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return handle(value)  # a named tuple
    for name, (kind, parts, _) in PLAIN.items():
        if isinstance(value, kind):
            return {name: encode(parts(value), handle)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # without importing numpy
        plain = encode(value.tolist(), handle)
        return {"array": [value.dtype.str, plain]} if isinstance(plain, list) else plain
    return handle(value)


def decode(data, resolve: Callable[[dict], object]):
    """What `encode` was given; `resolve` gets the descriptions of handles. Raises ValueError and its like."""
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, parts),) = data.items()
    if name == "int":
        return int(parts, 16)
    if name in PLAIN:
        return PLAIN[name][2](decode(parts, resolve))
    return resolve(data)


def send(connection, message) -> None:
    """One message: its length, then JSON. Raises ValueError where it is too long."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a value of {len(data)} bytes is too long to be handed over")
    connection.sendall(struct.pack(">I", len(data)) + data)


def receive(connection):
    """One message; raises EOFError at the end, ValueError where it is none."""
    (size,) = struct.unpack(">I", _exactly(connection, 4))
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_exactly(connection, size))


def _exactly(connection, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
