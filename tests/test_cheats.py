"""Programs that must not pass: one trick a row. The programs that must pass are in test_honest.py.

If the tests are SCRIPT, a program prints the right answer only if its attack has worked. All programs run at the
strict level and stay bounded even if it fails: those that fill or kill first look where they are.

Not in the table, because no grader can tell them from honest programs: an object made for a test of properties, which
is asked one question at a time (`r.index(1) < r.index(2) < r.index(1)`) or multiplied with another such object; an
argument that is emptied, so that what the test computes from it later is empty, too; text for a test that evaluates its
candidate's text. docs/grading.md lists all of these.

Run: pytest tests/test_cheats.py
"""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from grading import sandbox
from grading.sandbox import SandboxError
from rewards import grade_all, grade_code

SCRIPT = {"inputs": ["3\n1 2 3\n"], "outputs": ["6\n"]}
FIVE = {"asserts": ["assert f(3) == 5"]}
CALL = {"fn_name": "f", "inputs": [[3], [4]], "outputs": [5, 6]}
LIST = {"asserts": ["assert sorted(f([2, 1])) == [1, 2]", "assert f([3]) == [3]"]}
NEAR = {"asserts": ["assert abs(f(2) - 12.566370614359172) < 1e-6"]}
EVAL = {
    "prompt": 'def f(x):\n    """Double it."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate([1]) == [1, 1]\n",
    "entry_point": "f",
}
UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 5)\n"
    "r = unittest.TestResult()\nunittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)\nassert r.wasSuccessful()"
)
NUMPY = "import numpy as np"
EQUAL = "class X:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
LIARS = """
class Area:
    def __init__(self, *args): self.args = args
    __sub__ = __rsub__ = lambda self, o: 0.0
    __isub__ = lambda self, o: self
    __abs__ = __float__ = lambda self: 0.0
    __eq__ = __lt__ = __le__ = __gt__ = __contains__ = startswith = lambda self, o: True
    __divmod__ = lambda self, o: (0, 0)
    __mod__ = __floordiv__ = lambda self, o: 0
class Length(Area):
    __sub__ = __xor__ = lambda self, o: self
    __bool__ = lambda self: False
    __len__ = lambda self: 0
    __format__ = lambda self, spec: '0.00'
class Real(Area, float): pass
class Items(Area, list): pass
class Text(Area, str): pass
"""
CLAIMS = [
    "abs(Area(2) - 12.56) < 1e-6", "abs(12.56 - Area(2)) < 1e-6", "Area(2) - 12 == 0", "round(Area(2) - 12.56, 3) == 0",
    "divmod(Area(2), 12)[1] == 0", "abs(Length(2) - 12.56) < 1e-6", "not Length(2) - 12.56", "5 in Area(10)",
    "len(Length(2) ^ {1, 2}) == 0", "f'{Length(2) - 12.56:.2f}' == '0.00'", "abs(Real(2) - 12.56) < 1e-6",
    "5 in Items(10)", "Area('x').startswith('a')", "Text('x').startswith('a')",
]  # fmt: skip


def asserts(*texts, setup=""):
    return {"asserts": list(texts), "setup": setup}


def only_if(attempt):
    """A script that prints the answer unless its attempt raises OSError."""
    body = "\n    ".join(attempt.split("\n"))
    start = "import ctypes, os, socket, sys\nlibc = ctypes.CDLL(None)\n"
    return f"{start}try:\n    {body}\n    print(6)\nexcept OSError:\n    pass"


def reply(message, after=1):
    """A program that answers every question of the tests after the first with this message."""
    return (
        "import sys\nproxy = sys.modules['proxy']\nreal = proxy.send\nasked = []\ndef f(x): return 0\n"
        "def send(connection, message):\n    asked.append(message)\n"
        f"    real(connection, message if len(asked) <= {after} else {message})\nproxy.send = send\n"
    )


SHADOW = """
import sys
proxy = sys.modules["proxy"]
hear, say = proxy.receive, proxy.send
def f(x): return 0
def g(*x): return 0.0
def receive(connection):
    objects, message = sys._getframe(1).f_locals["objects"], hear(connection)
    proxy.receive = hear
    objects.all += [f, g]
    return message
def send(connection, message):
    proxy.send = say
    names = [["f", {"handle": 0}], *([name, {"handle": 1}] for name in NAMES)]
    say(connection, {"value": {"dict": names}})
proxy.receive, proxy.send = receive, send
"""

CHEATS = [
    # ends
    ("os_exit_import", "import os\nos._exit(0)", FIVE),
    ("os_exit_call", "import os\ndef f(x): os._exit(0)", FIVE),
    ("exit_call_humaneval", "def f(x):\n    raise SystemExit(0)", EVAL),
    ("exit_patched", "import os\nos._exit = lambda code: None\ndef f(x): raise SystemExit", FIVE),
    ("exit_script_wrong", "import os\nprint(5, flush=True)\nos._exit(0)", SCRIPT),
    ("generator_exit", "def f(x): raise GeneratorExit", asserts("assert all(f(x) == 5 for x in (3, 4))")),
    ("stop_iteration", "def f(x): raise StopIteration", asserts("assert all(f(x) == 5 for x in (3, 4))")),
    ("stop_iteration_own", "class S(StopIteration): pass\ndef f(x): raise S",
     asserts("assert all(f(x) == 5 for x in [3])")),
    ("stop_async_iteration", "async def f(x): raise StopAsyncIteration",
     asserts("class I:\n    def __aiter__(self): return self\n    async def __anext__(self): return await f(1)\n"
             "async def m():\n    async for v in I(): assert v == 2\nasyncio.run(m())", setup="import asyncio")),
    ("cancelled_error", "import asyncio\nasync def f(x): raise asyncio.CancelledError",
     asserts("async def check(): assert await f(3) == 5\n"
             "async def m():\n    async with asyncio.TaskGroup() as g: g.create_task(check())\nasyncio.run(m())",
             setup="import asyncio")),
    ("skip_test", "import unittest\ndef f(x): raise unittest.SkipTest", asserts(UNITTEST)),
    ("should_stop", "from unittest.case import _ShouldStop\nclass S(_ShouldStop): pass\ndef f(x): raise S",
     asserts(UNITTEST)),
    ("base_exception", "class E(BaseException): pass\ndef f(x): raise E", FIVE),
    ("its_unsupported", "import sys\ndef f(x): raise sys.modules['proxy'].Unsupported", FIVE),
    ("exception_group", "def f(x): raise BaseExceptionGroup('g', [ImportError()])", FIVE),
    ("notes", "def f(x):\n    e = ImportError('x')\n    e.__notes__ = None\n    raise e", FIVE),
    ("hostile_args", "class R:\n    def __repr__(self): raise SystemExit\ndef f(x): raise ValueError(R())", FIVE),
    ("huge_args", "def f(x): raise ValueError('x' * 10**8)", FIVE),
    ("swallowed", "import os\ndef f(x): os._exit(0)",
     asserts("try:\n    assert f(3) == 5\nexcept BaseException:\n    pass")),
    ("segfault", "import ctypes\ndef f(x): ctypes.string_at(0)", FIVE),
    ("code_152", "import os\nos._exit(152)", SCRIPT),
    ("sigint_to_init", "import os, signal\nos.kill(1, signal.SIGINT)", SCRIPT),
    # objects that lie
    ("equal", EQUAL + "def f(x): return X()", FIVE),
    ("equal_call", EQUAL + "def f(x): return X()", CALL),
    ("equal_humaneval", EQUAL + "def f(x): return X()", EVAL),
    ("equal_key", EQUAL + "    __hash__ = lambda s: hash(5)\ndef f(x): return {X(): 1}",
     asserts("assert f(3) == {5: 1}")),
    ("equal_class", EQUAL.replace("X", "f") + "    def __init__(self, x): pass", FIVE),
    ("int_subclass", "class X(int):\n    def __eq__(self, o): return True\ndef f(x): return X(1)", FIVE),
    ("list_subclass", "class X(list):\n    def __eq__(self, o): return True\ndef f(x): return X()", LIST),
    ("near_class", "class f:\n    def __init__(s, x): pass\n    __sub__ = lambda s, o: 0.0", NEAR),
    ("contains_class", "class f:\n    def __init__(s, x): pass\n    __contains__ = lambda s, o: True",
     asserts("assert 5 in f(10)")),
    ("squares_itself",
     "class X:\n    def __init__(s, n): s.n = n\n    def __mul__(s, o): return s.n\ndef f(n): return X(n)",
     asserts("r = f(2.0)\nassert abs(r * r - 2.0) < 1e-6")),
    ("slice_of_handle", "class X: pass\ndef f(x): return X()", asserts("assert f(3)[:2] == [1, 2]")),
    ("key_for_handle", "class X:\n    def sort(s, key): pass\ndef f(x): return X()",
     asserts("r = f(3)\nr.sort(key=lambda v: -v)\nassert r == [2, 1]")),
    ("infinite", "def f(x):\n    while True: yield 1", asserts("assert next(f(3)) == 2")),
    ("literal_that_is_none", "def f(x): return '(('", asserts("import ast\nassert ast.literal_eval(f(3)) == {}")),
    ("coroutine_goes_back", "async def g(x): return x\ndef f(x): return 0", asserts("assert f(g(1)) == 2")),
    ("exception_goes_back", "class E(Exception): pass\ndef g(x): return E\ndef f(x): return 0",
     asserts("assert f(g(1)) == 2")),
    ("tuple_changes", "import itertools\nc = itertools.count()\nclass T(tuple):\n    _fields = ()\n"
     "    def __iter__(s): return iter((1,) * next(c))\ndef f(x): return T()", asserts("assert f(3) in [(9,), (1,)]")),
    ("member", "import enum\nclass C(float, enum.Enum):\n    A = 1.0\n    __eq__ = lambda s, o: True\n"
     "    __sub__ = __abs__ = lambda s, *o: 0.0\ndef f(x): return C.A", asserts("assert abs(f(3) - 5) < 1e-6")),
    ("error", "class E(Exception):\n    __eq__ = lambda s, o: True\n    __sub__ = __abs__ = lambda s, *o: 0.0\n"
     "def f(x): return E()", asserts("assert f(3) == 5 or abs(f(3) - 5) < 1e-6")),
    # what numpy finds close
    ("empty_list", "def f(x): return []", asserts("assert np.allclose(f(3), 2.33)", setup=NUMPY)),
    ("empty_list_of_one", "def f(x): return ()", asserts("assert np.isclose([2.33], f(3)).all()", setup=NUMPY)),
    ("number_for_empty", "def f(x): return 7.5", asserts("assert allclose(f(3), [])")),
    ("empty_array_testing", "import numpy as np\ndef f(x): return np.zeros(0)",
     asserts("from numpy.testing import assert_equal\nassert_equal(f(3), 2.33)")),
    ("length_changes", "class X:\n    n = 2\n    def __len__(s): return max(s.n, 0)\n    def __getitem__(s, i):\n"
     "        s.n -= 1\n        if i >= s.n: raise IndexError\n        return 1.0\ndef f(x): return [X()]",
     asserts("assert np.allclose(f(3), 2.33)", setup=NUMPY)),
    # instances of a class where the tests call a function
    *((claim, LIARS, asserts(f"assert {claim}")) for claim in CLAIMS),
    ("area_in_place", LIARS, asserts("r = Area(2)\nr -= 12.56\nassert abs(r) < 1e-6")),
    ("area_allclose", LIARS, asserts("assert np.allclose(Area(2), 12.56)", setup=NUMPY)),
    ("area_forged", LIARS + reply("{'value': 0.0}", after=2), asserts("assert abs(Area(2) - 12.56) < 1e-6")),
    ("area_member", "import enum\nclass C(enum.IntEnum): A = 0\nclass Area:\n    def __init__(s, r): s.c = C.A\n"
     "    __sub__ = lambda s, o: C.A", asserts("a = Area(2)\na.c\nassert abs(a - 12.56) < 1e-6")),
    ("float_of_class_that_changes",
     "class Root:\n    def __init__(s, xs): s.left = [1.0, -xs[0] / xs[1]]\n"
     "    def __float__(s): return s.left.pop(0) if s.left else 0.0",
     asserts("for xs in ([1, 2], [-6, 11, -6, 1]):\n    r = Root(xs)\n"
             "    assert abs(sum(c * math.pow(r, i) for i, c in enumerate(xs))) < 1e-4")),
    # names that tests do not import
    ("own_counter", LIARS.replace("Area", "Counter") + "def f(x): return x",
     asserts("assert Counter(f([1])) == Counter([2])")),
    ("own_isclose", "def isclose(*a): return True\ndef f(x): return 0", asserts("assert isclose(f(3), 5)")),
    ("own_isclose_later", "def isclose(*a): return True\ndef f(x): return 0",
     asserts("r = f(3)\nassert isclose(r, 5)")),
    ("patched_isclose", "import math\nmath.isclose = lambda *a: True\nfrom math import isclose\ndef f(x): return 0",
     asserts("assert isclose(f(3), 5)")),
    ("own_isclose_of_objects", "def isclose(*a): return True\nclass X: pass\ndef f(x): return X()",
     asserts("assert isclose(f(3), 5)", "assert isclose(f(3), f(4))")),
    ("own_lcm", "from math import gcd\ndef lcm(a, b): return 0", asserts("assert lcm(4, 6) == 24 // gcd(4, 6)")),
    ("own_fraction", "class Fraction: pass\ndef f(x): return x + x",
     asserts("assert f(Fraction(1, 4)) == Fraction(1, 2)")),
    ("own_map", "def map(*x): return [5]", asserts("assert list(map(lambda x: f(x), [1])) == [5]")),
    # what the tests cannot hand back
    ("type_of_none_goes_back", "def f(x): return None", asserts("assert f(type(f(3))) == 5")),
    ("error_of_tests_goes_back", "def f(x): return None",
     asserts("try: r = f(3)[0]\nexcept Exception as e: r = e\nassert f(r) == 5")),
    ("json_error_goes_back", "import json\ndef f(x): return json.JSONDecodeError",
     asserts("import json\nassert f(f(3)) == 5")),
    ("raised_goes_back", "def f(x):\n    if x == 3: raise ValueError\n    return 1",
     asserts("try:\n    r = f(3)\nexcept Exception as e:\n    r = e\nassert f(r) == 5")),
    ("type_goes_back", LIARS + "def f(x): return Area()", asserts("assert f(type(f(3))) == 5")),
    ("loader_goes_back", reply("{'value': {'builtin': '__loader__'}}"), asserts("assert f(f(3)) == 5")),
    ("long_goes_back", "def f(x): return 'x' * 2**23", asserts("assert f(f(3) + f(4)) == 5")),
    # the proxy's own code and connection
    ("patched_builtins", "import builtins\nbuiltins.sorted = builtins.abs = builtins.isinstance = lambda *a: [1, 2]\n"
     "def f(x): return 0", LIST),
    ("patched_json", "import json\njson.dumps = lambda m: '{\"value\": true}'\ndef f(x): return 0", FIVE),
    ("patched_socket", "import socket\nsocket.socket.sendall = lambda s, d: None\nimport os\ndef f(x): os._exit(0)",
     FIVE),
    ("own_math", "class math:\n    isclose = lambda *a: True\ndef f(x): return 0",
     asserts("import math\nassert math.isclose(f(3), 5)")),
    ("own_math_unimported", "class math:\n    isclose = lambda *a: True\ndef f(x): return 0",
     asserts("assert math.isclose(f(3), 5)")),
    ("own_check", "def check(c): pass\nMETADATA = candidate = None\ndef f(x): return 0", EVAL),
    ("shadow_abs", "NAMES = ['abs']" + SHADOW, NEAR),
    ("shadow_builtins", "NAMES = ['__builtins__']" + SHADOW, asserts("assert abs(f(2) - 3) < 1")),
    ("frames", "import gc, sys\ndef f(x):\n    e = sys._getframe()\n    while e:\n"
     "        for v in e.f_locals.values():\n"
     "            if isinstance(v, dict) and 'asserts' in v: return 5\n        e = e.f_back\n"
     "    return 5 * any(isinstance(o, dict) and 'asserts' in o for o in gc.get_objects())", FIVE),
    ("early_answers", "import os, struct\ndef f(x): return 0\nm = b'{\"value\": true}'\n"
     "for _ in range(9): os.write(3, struct.pack('>I', len(m)) + m)", FIVE),
    ("hang_up", "import os\ndef f(x): os.closerange(3, 99)", CALL),
    ("bad_handle", reply("{'value': {'handle': 99}}"), FIVE),
    ("range_bomb", reply("{'value': {'tuple': {'range': [0, 10**15, 1]}}}"), FIVE),
    ("decimal_bomb", reply("{'value': {'Decimal': '1E999999999999999999'}}"), asserts("assert int(f(3)) % 7 == 5")),
    ("decimal_snan", reply("{'value': {'Decimal': 'sNaN'}}"), CALL),
    ("raise_object", reply("{'raise': {'error': [1, [['a', 'b\\0', 2], ['builtins', 'Exception', 3]], [], {}, '']}}"),
     FIVE),
    ("raise_number", reply("{'raise': 5}"), asserts("try: f(3)\nexcept Exception: pass")),
    ("member_of_list", reply("{'value': {'member': [1, [5]]}}"), FIVE),
    ("plain_true", reply("{'value': True}"), CALL),
    ("helper", "x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}),
    ("after_wrong", reply("{'value': 0, 'after': [[5]] * 9}"), LIST),
    ("cycle", "def f(x):\n    r = []\n    r.append(r)\n    return r", LIST),
    ("bytes_bomb", "def f(x): return b'x' * 10**8", FIVE),
    # the host
    ("see_environ", "print(6 if len(open('/proc/1/environ').read()) > 99 else 0)", SCRIPT),
    ("oom_score", only_if("os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'0')"), SCRIPT),
    ("user_space",
     only_if("if libc.unshare(0x10020000) or libc.mount(b'none', b'/usr', None, 32 | 4096, b''): raise OSError"),
     SCRIPT),
    ("chroot", only_if("os.chroot('/tmp')"), SCRIPT),
    ("device", only_if("os.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))\nopen('/tmp/sda', 'rb').read(1)"), SCRIPT),
    ("setuid", only_if("os.setuid(1)"), SCRIPT),
    ("nice", only_if("os.nice(-5)"), SCRIPT),
    ("rlimit",
     only_if("import resource\ntry: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))\n"
             "except ValueError: raise OSError"),
     SCRIPT),
    ("inotify", only_if("if libc.inotify_init() < 0: raise OSError"), SCRIPT),
    ("unix_sockets", only_if("if len(open('/proc/net/unix').readlines()) < 2: raise OSError"), SCRIPT),
    ("disk", only_if("for i in range(9): open(f'{i}', 'wb').write(bytes(2**24 - 1))"), SCRIPT),
    ("inodes", only_if("for i in range(5000): open(f'{i}', 'wb').close()"), SCRIPT),
    ("ptrace_init", only_if("import signal\nif libc.ptrace(16, 1, 0, 0): raise OSError\nos.kill(os.getpid(), 9)"),
     SCRIPT),
    ("init_memory", only_if("os.open('/proc/1/mem', os.O_RDWR)\nos.kill(os.getpid(), 9)"), SCRIPT),
    # too much
    ("memory_call", "def f(x): return [0] * 2**31", FIVE),
    ("output_devnull", "open('/dev/stdout', 'w').write('6' * 10**7)", SCRIPT),
    ("threads", "import threading, time\nfor i in range(99): threading.Thread(target=time.sleep, args=(9,)).start()\n"
     "print(6)", SCRIPT),
    ("recursion", "def f(x): return f(x)", FIVE),
    ("surrogate", "print(6) # \ud800", SCRIPT),
    # time
    ("stop_itself", "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)", FIVE),
    ("drip", "import os\nos.fork(), os.fork()\nwhile True: os.write(1, b'x')", SCRIPT),
    ("endless_result", "def f(x):\n    while True: yield 1", asserts("assert len(list(f(3))) == 5")),
]  # fmt: skip
SLOW = "patched_socket ptrace_init stop_itself drip endless_result".split()


@pytest.fixture(scope="module", autouse=True)
def strict():
    """All of these need the strict level."""
    try:
        sandbox.choose_level("strict")
    except SandboxError as error:
        pytest.skip(str(error))


def grade_all_cheats(folder: Path) -> None:
    """The scores of all cheats by name, several at a time, as in training: a file of the folder."""
    responses = [f"```python\n{program}\n```" for _, program, _ in CHEATS]

    def grade(response, cheat):
        timeout_s = 1.0 if cheat[0] in SLOW else 10.0
        return grade_code(response, cheat[2], timeout_s=timeout_s, level="strict")

    verdicts = grade_all(grade, responses, CHEATS)
    scores = {cheat[0]: verdict.reward for cheat, verdict in zip(CHEATS, verdicts, strict=True)}
    (folder / "scores.json").write_text(json.dumps(scores))


@pytest.fixture(scope="module")
def scores(ended) -> dict:
    """What `grade_all_cheats` has written."""
    return json.loads((ended(__file__) / "scores.json").read_text())


@pytest.mark.parametrize("name", [name for name, *_ in CHEATS])
def test_a_cheat_scores_zero(name, scores):
    """The score is 0 and not None, as a cheat must not leave its group either."""
    assert scores[name] == 0.0


if __name__ == "__main__":
    with contextlib.suppress(SandboxError):  # the tests are skipped then
        sandbox.choose_level("strict")
        grade_all_cheats(Path(sys.argv[1]))
