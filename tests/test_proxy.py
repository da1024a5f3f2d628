"""wire.py, proxy.py and judge.py of grading/inside/, between tests and candidate.

What crosses the wall between the two, and who decides a comparison.
"""

import collections
import contextlib
import datetime
import decimal
import fractions
import io
import math
import socket
import sys
import threading

import judge
import numpy
import proxy
import pytest


@pytest.fixture
def link(monkeypatch):
    """`link(source)`: a Link to a process-like thread that serves the names of a program."""
    monkeypatch.setitem(sys.modules, "__main__", None)  # tests run as this module
    with contextlib.ExitStack() as at_end:

        def make(source: str) -> proxy.Link:
            module = type(sys)("program")
            exec(source, vars(module))
            inside, outside = socket.socketpair()
            stdout = io.TextIOWrapper(io.BytesIO())
            serving = proxy.Inside(inside.makefile("rwb"), module, stdout)
            threading.Thread(target=serving.serve, daemon=True).start()
            return proxy.Link(at_end.enter_context(outside).makefile("rwb"))

        yield make


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**63), math.inf, 1 + 2j, "a\ud800\0é", b"\x00\xff", bytearray(b"a"), range(3, 9, 2),
        (1, [2, ()]), frozenset({(1, 2)}), {(1, 2): {3}, None: [4], 1.5: {"a": ()}}, {"tuple": 1}, {"object": [0, []]},
        collections.deque([1]), collections.Counter("aab"), collections.OrderedDict(b=1, a=2), collections.defaultdict(list, a=[1]),
        collections.namedtuple("Point", "x y")(1, (2,)), decimal.Decimal("1.10"), fractions.Fraction(1, 3),
        datetime.datetime(2026, 1, 2), datetime.timezone(datetime.timedelta(hours=1)),
    ],
)  # fmt: skip
def test_plain_data_crosses_unchanged(value, link):
    """A value keeps its types, to the innermost, there and back."""
    back, there = link("def f(x): return x, repr(x)").names(["f"])["f"](value)
    assert back == value and repr(back) == there == repr(value)


def test_arrays_stay_arrays(link):
    """Arrays keep their types and a change in place; half floats get longer."""
    f = link("def f(x): return x.__imul__(2)").names(["f"])["f"]
    argument = numpy.arange(2, dtype="i2")
    result = f(argument)
    assert result.dtype == argument.dtype == "i2"
    assert (result == argument).all() and argument[1] == 2
    assert f(numpy.zeros(1, "f2")).dtype == "f8"


AGREES = """
class Agrees:
    def __eq__(self, other): return True
    __lt__ = __gt__ = __contains__ = __eq__
    def __sub__(self, other): return self
    __rsub__ = __sub__
    def __abs__(self): return 0
    __float__ = __abs__
    def __getattr__(self, name): return lambda *args: True
    def __iter__(self): return iter([])
def f(*args): return Agrees()
"""


@pytest.mark.parametrize(
    "claim",
    [
        "f() == 1", "1 == f()", "not f() != 1", "f() < 1", "1 < f()", "abs(f() - 0.5) < 1e-6", "float(f()) == 0",
        "f() in [1, 2]", "1 in f()", "f().startswith('a')", "f() is True", "isinstance(f(), int)",
        "[f()] == [1]", "{'a': f()} == {'a': 1}",
    ],
)  # fmt: skip
def test_an_object_that_always_agrees_never_passes(claim, link):
    """A test's own data is not judged by the methods of a result, whatever the test does with it."""
    try:
        passed = eval(claim, link(AGREES).names(["f"]))
    except (TypeError, AttributeError):
        passed = False
    assert not passed


@pytest.mark.parametrize(
    "value",
    [
        b"not json", b"\xff", b"[" * 100_000, b'{"tuple": [  ' * 7_000, b"1", b'{"set": [[[[1]]], [], []]}',
        b'{"unknown": 1}', b'{"a": 1, "b": 2}', b'{"set": [[], [1], []]}', b'{"Decimal": [["x"], [], []]}',
        b'{"object": ["a", []]}', b'{"object": [0, ["__add__"]]}', b'{"builtin": "print"}',
        b'{"class": [["builtins", "print"]]}', b'{"tuple": [[1], ["P", ["class"]]]}',
        b'{"error": [[["builtins", "print"]], {"dict": [[], [], []]}, null, ""]}',
    ],
)  # fmt: skip
def test_a_forged_message_is_the_candidates_end(value):
    """A forged message kills the link, whatever its kind and length, as an exception or alone."""
    for message in (b'[true, %s, [], ""]', b"%s"):
        inside, outside = socket.socketpair()
        with inside, outside:
            inside.sendall(message % value + b"\n")
            link = proxy.Link(outside.makefile("rwb"))
            for _ in range(2):
                with pytest.raises(proxy.Died):
                    link.ask("call", 1)
            assert link.dead == "crashed"


@pytest.mark.parametrize(
    "body, asserts, reason",
    [
        ("return x + 1", ["assert f(1) == 2", "assert f(2) == 3"], "correct"), ("return x", ["assert f(1) == 2"], "wrong"),
        ("return None", ["assert f(1)[0] == 2"], "wrong"), ("return 1 / 0", ["assert f(1) == 2"], "crashed"),
        ("raise MemoryError", ["assert f(1) == 2"], "memory"), ("raise SystemExit", ["assert f(1) == 2"], "crashed"),
        ("return x", ["assert f(1) = 2"], "infra_error"), ("return x", ["import no_such_module", "assert f(1)"], "unsupported"),
        ("return x(1)", ["assert f(lambda y: y) == 1"], "correct"), ("return x(1)", ["assert f({}.get) == 1"], "unsupported"),
        ("return 'x' * x", ["assert len(f(2**26)) == 2**26"], "output"),
    ],
)  # fmt: skip
def test_asserts_are_judged_outside(body, asserts, reason, link):
    """The reason says whose fault a failure is."""
    assert judge.across(link(f"def f(x): {body}").file, {"asserts": asserts})[0] == reason


@pytest.mark.parametrize(
    "value, expected, equal",
    [
        ([(1, 2)], [[1, 2]], True), ([1], [1, 2], False), (0.1 + 0.2, 0.3, True), (0.30001, 0.3, False),
        (1, 1.0, True), (2.9999999999, 3, False), ("0.3", 0.3, False), ("ab", ["a", "b"], False),
        (math.nan, math.nan, True), ({1: (2.0,)}, {"1": [2.0]}, True), ({1: 2, "1": 2}, {"1": 2}, False),
        (1000.0005, 1000.0, True), (1000.002, 1000.0, False), (5e-7, 0.0, True), (2e-6, 0.0, False),
    ],
)  # fmt: skip
def test_results_of_calls_are_compared_as_the_data_sets_mean_it(value, expected, equal):
    """Expected values come from JSON: there are no tuples, and keys are text.

    Floats may differ by a millionth, and beside 0 by a millionth of 1.
    """
    assert judge.same(value, expected) is equal
