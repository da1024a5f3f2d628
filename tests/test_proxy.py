"""grading/wire.py, proxy.py, judge.py: what crosses between tests and candidate, and who decides a comparison.

Run: pytest tests/test_proxy.py
"""

import collections
import datetime
import decimal
import fractions
import math
import socket
import struct
import sys
import threading

import judge
import numpy
import proxy
import pytest


@pytest.fixture
def link():
    """`link(source)`: a Link to a process-like thread that serves the names of a program."""
    ends = []

    def make(source: str) -> proxy.Link:
        names: dict = {}
        exec(source, names)
        inside, outside = socket.socketpair()
        threading.Thread(target=proxy.serve, args=(inside, names, proxy.Printed()), daemon=True).start()
        ends.append(outside)
        return proxy.Link(outside)

    yield make
    for end in ends:
        end.close()


def names(link, source: str, *wanted: str):
    """What the tests get for these names of a program: one value, or a list of several."""
    candidates = link(source).names(wanted)
    return candidates[wanted[0]] if len(wanted) == 1 else [candidates[name] for name in wanted]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**63), 2**70, 1.5, math.inf, 1 + 2j, "a\ud800\0é", b"\x00\xff", range(3, 9, 2),
        [1, [2, []]], (1, (2,), ()), {1, 2}, frozenset({(1, 2)}), {(1, 2): {3}, None: [4], 1.5: {"a": ()}},
        collections.deque([1, 2]), decimal.Decimal("1.10"), fractions.Fraction(1, 3),
        datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5), datetime.timedelta(days=1, microseconds=2),
        [{"a": [True, False]}, {"tuple": 1}, {"handle": [0, False]}],
    ],
)  # fmt: skip
def test_plain_data_crosses_unchanged(value, link):
    """The same value and the same types, to the innermost, there and back."""
    back = names(link, "def same(x): return x", "same")(value)
    assert back == value and repr(back) == repr(value)


def test_an_integer_of_many_digits_crosses(link):
    """Python limits the decimal digits that it reads and writes; the wire uses none."""
    assert names(link, "def f(): return 10 ** 5000", "f")() == 10**5000


def test_nan_and_subclasses_cross_as_plain_data(link):
    """A subclass of a builtin type comes back as the builtin, so nothing of its own can decide a comparison."""
    source = """
import collections, enum, math
class Int(int):
    def __eq__(self, other): return True
class Color(enum.IntEnum): RED = 3
def f(): return math.nan
def g(): return [Int(1), Color.RED, collections.defaultdict(list, {1: [2]}), collections.Counter("aab")]
"""
    f, g = names(link, source, "f", "g")
    assert math.isnan(f())
    back = g()
    assert back == [1, 3, {1: [2]}, {"a": 2, "b": 1}]
    assert [type(item) for item in back if item != 3] == [int, collections.defaultdict, collections.Counter]
    assert isinstance(back[1], int) and back[1].name == "RED"
    assert back[0] != 2


def test_numpy_results_are_read_as_python_numbers(link):
    """An honest `np.sum` is not wrong for being no int."""
    f = names(link, "import numpy as np\ndef f(): return np.float64(0.5), np.bool_(True), np.array(3)", "f")
    assert f() == (0.5, True, 3)


def test_arrays_are_arrays_for_tests_that_use_numpy_and_lists_for_others(link, monkeypatch):
    """`assert f() == [0, 1]` and `np.allclose(f(), ...)` both mean what their authors meant; arguments are arrays."""
    f = names(link, "def f(x): return x * 2", "f")
    assert f(numpy.arange(2)).shape == (2,)
    assert isinstance(proxy.Link(None).resolve({"array": ["<i8", [0, 1]]}), numpy.ndarray)
    monkeypatch.delitem(sys.modules, "numpy")
    assert proxy.Link(None).resolve({"array": ["<i8", [0, 1]]}) == [0, 1]


AGREES = """
class Agrees:
    def __init__(self, *args): pass
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __sub__
    def __abs__(self): return 0
    def __getattr__(self, name): return lambda *args: True
    def __iter__(self): return iter([])
def f(*args): return Agrees()
"""


@pytest.mark.parametrize(
    "claim",
    [
        "f() == 1", "1 == f()", "not f() != 1", "f() < 1", "1 < f()", "abs(f() - 0.5) < 1e-6", "abs(0.5 - f()) < 1e-6",
        "f() + 1 == 2", "f() in [1, 2]", "1 in f()", "f().startswith('a')", "f().issubset({1})", "f() is True",
        "isinstance(f(), int)", "[f()] == [1]", "{'a': f()} == {'a': 1}", "sorted([f(), 1]) and False",
    ],
)  # fmt: skip
def test_an_object_that_always_agrees_never_passes(claim, link):
    """Whatever a test does with a result, its own data is not judged by the result's methods."""
    try:
        passed = eval(claim, {"f": names(link, AGREES, "f")})
    except (TypeError, AttributeError):
        passed = False
    assert not passed


CLASSES = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, factor): return Vector(self.x * factor, self.y * factor)
    __rmul__ = __mul__
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other): return self.x < other.x
    def __hash__(self): return hash((self.x, self.y))
    def __repr__(self): return f"<{self.x}, {self.y}>"
    def __len__(self): return 2
    def __getitem__(self, index): return (self.x, self.y)[index]
    def __contains__(self, item): return item in (self.x, self.y)
    def __enter__(self): self.x += 1; return self
    def __exit__(self, *error): self.y += 1
    @property
    def norm(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    @classmethod
    def unit(cls): return cls(1, 0)
    def plus(self, other): return self + other
class Stack(list):
    push = list.append
class Failure(ValueError): pass
def fail(): raise Failure("no", 3)
def count(n):
    for i in range(n): yield i
def adder(n): return lambda m: n + m
"""


@pytest.mark.parametrize(
    "claim",
    [
        "Vector(1, 2) + Vector(3, 4) == Vector(4, 6)",
        "Vector(1, 2) != Vector(4, 6)",
        "(Vector(1, 2) * 3).x == 3 and (3 * Vector(1, 2)).y == 6",
        "Vector(1, 2) < Vector(2, 0) and sorted([Vector(2, 0), Vector(1, 0)])[0].x == 1",
        "repr(Vector(1, 2)) == str(Vector(1, 2)) == '<1, 2>' and len(Vector(1, 2)) == 2",
        "list(Vector(1, 2)) == [1, 2] and Vector(1, 2)[1] == 2 and 2 in Vector(1, 2) and 3 not in Vector(1, 2)",
        "Vector(3, 4).norm == 5 and Vector.unit().x == 1 and Vector(1, 2).plus(Vector(1, 1)).y == 3",
        "len({Vector(1, 2), Vector(1, 2)}) == 1 and isinstance(Vector(1, 2), Vector) and not isinstance(1, Vector)",
        "Stack([1]) == [1] and Stack([1]) != [2] and len(Stack()) == 0 and not Stack()",
        "list(count(3)) == [0, 1, 2] and next(count(3)) == 0 and sum(count(4)) == 6",
        "adder(3)(4) == 7",
        "hasattr(Vector(1, 2), 'x') and not hasattr(Vector(1, 2), 'z')",
    ],
)
def test_a_test_can_use_the_candidates_classes(claim, link):
    """By operators, attributes, iteration, inheritance from builtins, generators and closures."""
    wanted = ("Vector", "Stack", "count", "adder")
    assert eval(claim, dict(zip(wanted, names(link, CLASSES, *wanted), strict=True)))


def test_statements_on_the_candidates_objects(link):
    """Attributes are set where the object lives; a context manager's two ends are called."""
    vector, stack = names(link, CLASSES, "Vector", "Stack")
    one = vector(1, 2)
    one.x = 5
    with one as same:
        assert same.x == 6
    assert (one.x, one.y) == (6, 3)
    items = stack()
    items.push(3)
    items[0] = 4
    assert items == [4] and items.pop() == 4 and items == []


def test_exceptions_arrive_under_their_names(link):
    """A builtin one as itself, the candidate's own as a class that the tests can name, with its arguments."""
    fail, failure = names(link, CLASSES, "fail", "Failure")
    with pytest.raises(failure) as error:
        fail()
    assert isinstance(error.value, ValueError) and error.value.args == ("no", 3)
    with pytest.raises(ZeroDivisionError):
        names(link, "def f(): return 1 / 0", "f")()


def test_a_stop_iteration_does_not_end_a_loop_of_the_tests(link):
    """Raised by a function, it would make `list(map(f, cases))` empty, and with it all checks on it."""
    f = names(link, "def f(x): raise StopIteration", "f")
    with pytest.raises(RuntimeError):
        list(map(f, [1, 2]))


def test_arguments_are_changed_in_place(link):
    """As in any Python test: the list that was passed is the list that was changed, and so are those in it."""
    f = names(link, "def f(x, d, s): x.sort(); x[0].append(1); d['b'] = 2; s.clear()", "f")
    inner, table, group = [0], {"a": 1}, {1, 2}
    outer = [[5], inner]
    assert f(outer, table, group) is None
    assert outer == [[0, 1], [5]] and table == {"a": 1, "b": 2} and group == set()


@pytest.mark.parametrize(
    "message",
    [
        b"", b"not json", b"NaX", b"\xff", b"[" * 100_000, b'{"tuple": [  ' * 7_000, b"3", b"[1]", b"null", b"{}",
        b'"raise"', b'{"value": {"set": [[1]]}}', b'{"value": {"dict": [[[], 1]]}}', b'{"value": {"unknown": 1}}',
        b'{"value": {"a": 1, "b": 2}}', b'{"value": {"int": "zz"}}', b'{"value": {"handle": ["a", false]}}',
        b'{"value": {"Decimal": "x"}}', b'{"raise": [["object"], []]}', b'{"raise": 1}', None,
    ],
)  # fmt: skip
def test_what_is_no_message_is_the_candidates_end(message):
    """A forged message of any kind and length is a failure, and the link stays dead."""
    inside, outside = socket.socketpair()
    with inside, outside:
        inside.sendall(struct.pack(">I", 2**31) if message is None else struct.pack(">I", len(message)) + message)
        link = proxy.Link(outside)
        for _ in range(2):
            with pytest.raises(proxy.Died):
                link.ask("call", 1)
        assert link.dead


@pytest.mark.parametrize(
    "source, asserts, reason",
    [
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 3"], "correct"),
        ("def f(x): return x", ["assert f(1) == 2"], "wrong"),
        ("def f(x): return x", ["assert g(1) == 2"], "wrong"),
        ("def f(x): return None", ["assert f(1)[0] == 2"], "wrong"),
        ("def f(x): return 1 / 0", ["assert f(1) == 2"], "crashed"),
        ("def f(x): raise MemoryError", ["assert f(1) == 2"], "memory"),
        ("def f(x): raise ImportError", ["assert f(1) == 2"], "crashed"),
        ("def f(x): raise SystemExit", ["assert f(1) == 2"], "crashed"),
        ("def f(x): raise KeyboardInterrupt", ["assert f(1) == 2"], "crashed"),
        ("def f(x): return x", ["assert f(1) = 2"], "infra_error"),
        ("def f(x): return x", ["import no_such_module"], "infra_error"),
        ("def f(x): return x(1)", ["assert f(lambda y: y) == 1"], "infra_error"),
        ("def f(x): return len(x)", ["assert f('x' * 2**25) == 2**25"], "correct"),
        ("def sum(a, b): return a * b", ["assert sum(2, 3) == 6"], "correct"),
        ("def sorted(x): return [1]\\ndef f(x): return x", ["assert sorted(f([2, 1])) == [1, 2]"], "correct"),
        ("def set(x): return 1\\ndef f(x): return x", ["assert set(f([1])) == set([2])"], "wrong"),
        ("class math:\\n isclose = lambda *a: True\\ndef f(): return 1", ["assert math.isclose(f(), 2)"], "wrong"),
        ("import math\\ndef f(): return 2.0", ["assert math.isclose(f(), 2)"], "correct"),
        ("def bisect(x): return x", ["assert bisect(1) == 1"], "correct"),
        ("def f(x): x.clear(); return 1", ["x = [1]\\nassert f(x) == 1 and x == []"], "correct"),
    ],
)
def test_asserts_are_judged_outside(source, asserts, reason, link):
    """The reason says whose fault a failure is; Python's `sorted` and `math` decide."""
    asserts = [text.replace("\\n", "\n") for text in asserts]
    assert judge.judge(link(source.replace("\\n", "\n")).connection, {"asserts": asserts})[0] == reason


@pytest.mark.parametrize(
    "value, expected, equal",
    [
        ((1, 2), [1, 2], True), ([(1, 2)], [[1, 2]], True), ([1], [1, 2], False), (0.1 + 0.2, 0.3, True),
        (1, 1.0, True), (0.30001, 0.3, False), (3, 4, False), (2.9999999999, 3, False), ("0.3", 0.3, False),
        (math.nan, math.nan, True), (math.inf, math.inf, True), ({1: (2.0,)}, {"1": [2.0]}, True),
        ({1: 2}, {"1": 3}, False), ({1: 2, 3: 4}, {"1": 2}, False), (None, [], False), ("ab", ["a", "b"], False),
        (True, True, True),
    ],
)  # fmt: skip
def test_results_of_calls_are_compared_as_the_data_sets_mean_it(value, expected, equal):
    """Expected values come from JSON: no tuples, keys are text, and floats are rounded."""
    assert judge.same(value, expected) is equal
