"""Programs that must not pass, one trick per row, and honest ones that graders get wrong, one
reason per row.

If a cheat's tests are SCRIPT, it prints the right answer only if its attack has worked. Cheats run
at the strict level and stay bounded even if it fails: those that fill or kill first look where they
are.

Not in the table, because no grader can tell them from honest programs: an object made for a test of
properties, which is asked one question at a time (`r.index(1) < r.index(2) < r.index(1)`) or
multiplied with another such object; an argument that is emptied, so that what the test computes
from it later is empty, too; text for a test that evaluates its candidate's text. docs/records/grading.md
lists all of these.
"""

import ast

import pytest

from grading import sandbox
from grading.sandbox import SandboxError
from rewards import grade_all, grade_code

SCRIPT = {"inputs": ["3\n1 2 3\n", "1\n6\n"], "outputs": ["6\n", "6\n"]}
EVAL = {
    "prompt": 'from typing import List\n\n\ndef f(x: int) -> int:\n    """Add one.\n    >>> f(1)\n '
    '   2\n    """\n',
    "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n",
    "entry_point": "f",
}
FIVE = "f(3) == 5"
SHARED = [[1]]  # one object in several places
CALL = {"fn_name": "f", "inputs": [[3], [4]], "outputs": [5, 6]}
LIST = ("sorted(f([2, 1])) == [1, 2]", "f([3]) == [3]")
NEAR = "abs(f(2) - 12.566370614359172) < 1e-6"
CASE = (
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 5)\n"
)
UNITTEST = CASE + (
    "r = unittest.TestResult()\nunittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)\nassert "
    "r.wasSuccessful()"
)
NUMPY = "import numpy as np"
PLAIN = "class X: pass\ndef f(x): return X()"
EQUAL = "class X:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"


def in_our_form(column) -> dict:
    """Tests as `grade_code` takes them, of the third column: one text or several, where an
    expression is asserted.
    """
    if isinstance(column, dict):
        return column
    texts = [column] if isinstance(column, str) else column
    return {"asserts": [f"assert {text}" if is_expression(text) else text for text in texts]}


def call(*pairs):
    return {
        "fn_name": "f",
        "inputs": [args for args, _ in pairs],
        "outputs": [value for _, value in pairs],
    }


def is_expression(text: str) -> bool:
    body = ast.parse(text).body
    return len(body) == 1 and isinstance(body[0], ast.Expr)


# ---- programs that must not pass -----------------------------------------------------------------

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


def only_if(attempt):
    """A script that prints the answer unless its attempt raises OSError."""
    body = "\n    ".join(attempt.split("\n"))
    start = "import ctypes, os, socket, sys\nlibc = ctypes.CDLL(None)\n"
    return f"{start}try:\n    {body}\n    print(6)\nexcept OSError:\n    pass"


def reply(message, after=1):
    """A program that answers every question of the tests after the first with this message."""
    return (
        "import sys\nproxy = sys.modules['proxy']\nreal = proxy.send\nasked = []\ndef f(x): return "
        "0\n"
        "def send(connection, message):\n    asked.append(message)\n"
        f"    real(connection, message if len(asked) <= {after} else {message})\nproxy.send = "
        "send\n"
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
    names = [["f", {"handle": [0, ["__call__"]]}], *([name, {"handle": [1, ["__call__"]]}] for name in NAMES)]
    say(connection, {"value": {"dict": [names]}})
proxy.receive, proxy.send = receive, send
"""

CHEATS = [
    # ends
    ("os_exit_import", "import os\nos._exit(0)", FIVE),
    ("os_exit_call", "import os\ndef f(x): os._exit(0)", FIVE),
    ("exit_call_humaneval", "def f(x):\n    raise SystemExit(0)", EVAL),
    ("exit_patched", "import os\nos._exit = lambda code: None\ndef f(x): raise SystemExit", FIVE),
    ("exit_script_wrong", "import os\nprint(5, flush=True)\nos._exit(0)", SCRIPT),
    ("generator_exit", "def f(x): raise GeneratorExit", "all(f(x) == 5 for x in (3, 4))"),
    ("stop_iteration", "def f(x): raise StopIteration", "all(map(lambda x: f(x) == 5, (3, 4)))"),
    ("stop_iteration_own", "class S(StopIteration): pass\ndef f(x): raise S", "all(map(lambda x: f(x) == 5, [3]))"),
    ("stop_async_iteration", "def f(x): raise StopAsyncIteration",
     ("import asyncio",
      "class I:\n    def __aiter__(self): return self\n    async def __anext__(self): return f(1)\n"
      "async def m():\n    async for v in I(): assert v == 2\nasyncio.run(m())")),
    ("cancelled_error", "import asyncio\ndef f(x): raise asyncio.CancelledError",
     ("import asyncio", "async def check(): assert f(3) == 5\n"
      "async def m():\n    async with asyncio.TaskGroup() as g: "
      "g.create_task(check())\nasyncio.run(m())")),
    ("skip_test", "import unittest\ndef f(x): raise unittest.SkipTest", UNITTEST),
    ("should_stop", "from unittest.case import _ShouldStop\nclass S(_ShouldStop): pass\ndef f(x): "
                    "raise S", UNITTEST),
    ("base_exception", "class E(BaseException): pass\ndef f(x): raise E", FIVE),
    ("its_unsupported", "import sys\ndef f(x): raise sys.modules['proxy'].Unsupported", FIVE),
    ("exception_group", "def f(x): raise BaseExceptionGroup('g', [ImportError()])", FIVE),
    ("notes", "def f(x):\n    e = ImportError('x')\n    e.__notes__ = None\n    raise e", FIVE),
    ("hostile_args", "class R:\n    def __repr__(self): raise SystemExit\ndef f(x): raise "
                     "ValueError(R())", FIVE),
    ("huge_args", "def f(x): raise ValueError('x' * 2**25)", FIVE),
    ("swallowed", "import os\ndef f(x): os._exit(0)", "try:\n    assert f(3) == 5\nexcept "
                                                      "BaseException:\n    pass"),
    ("unittest_main", "def f(x): return 0", CASE + "unittest.main(exit=False)"),
    ("unittest_run", "def f(x): return 0", CASE + "T('test').run()"),
    ("import_error_returned", "def f(x): return ImportError('x')", "raise f(3)"),
    ("nearly", "def f(x): return 4e-4", call(([1], 1e-4))),
    ("argument_is_expected", "def f(x): return x.clear() or []", call((SHARED, SHARED[0]))),
    ("exit_returned", "def f(x): return SystemExit(0)", "raise f(3)"),
    ("segfault", "import ctypes\ndef f(x): ctypes.string_at(0)", FIVE),
    ("code_152", "import os\nos._exit(152)", SCRIPT),
    ("sigint_to_init", "import os, signal\nos.kill(1, signal.SIGINT)", SCRIPT),
    # objects that lie
    ("equal", EQUAL + "def f(x): return X()", FIVE),
    ("equal_call", EQUAL + "def f(x): return X()", CALL),
    ("equal_humaneval", EQUAL + "def f(x): return X()", EVAL),
    ("equal_key", EQUAL + "    __hash__ = lambda s: hash(5)\ndef f(x): return {X(): 1}", "f(3) == {5: 1}"),
    ("equal_class", EQUAL.replace("X", "f") + "    def __init__(self, x): pass", FIVE),
    ("int_subclass", "class X(int):\n    def __eq__(self, o): return True\ndef f(x): return X(1)", FIVE),
    ("list_subclass", "class X(list):\n    def __eq__(self, o): return True\ndef f(x): return X()", LIST),
    ("near_class", "class f:\n    def __init__(s, x): pass\n    __sub__ = lambda s, o: 0.0", NEAR),
    ("contains_class", "class f:\n    def __init__(s, x): pass\n    __contains__ = lambda s, o: "
                       "True", "5 in f(10)"),
    ("squares_itself",
     "class X:\n    def __init__(s, n): s.n = n\n    def __mul__(s, o): return s.n\ndef f(n): "
     "return X(n)",
     "r = f(2.0)\nassert abs(r * r - 2.0) < 1e-6"),
    ("slice_of_handle", PLAIN, "f(3)[:2] == [1, 2]"),
    ("key_for_handle", "class X:\n    def sort(s, key): pass\ndef f(x): return X()",
     "r = f(3)\nr.sort(key=lambda v: -v)\nassert r == [2, 1]"),
    ("infinite", "def f(x):\n    while True: yield 1", "next(f(3)) == 2"),
    ("literal_that_is_none", "def f(x): return '(('", "import ast\nassert ast.literal_eval(f(3)) "
                                                      "== {}"),
    ("coroutine_goes_back", "async def g(x): return x\ndef f(x): return 0", "f(g(1)) == 2"),
    ("exception_goes_back", "class E(Exception): pass\ndef g(x): return E\ndef f(x): return 0", "f(g(1)) == 2"),
    ("tuple_changes", "import itertools\nc = itertools.count()\nclass T(tuple):\n    _fields = ()\n"
     "    def __iter__(s): return iter((1,) * next(c))\ndef f(x): return T()", "f(3) in [(9,), (1,)]"),
    ("member", "import enum\nclass C(float, enum.Enum):\n    A = 1.0\n    __eq__ = lambda s, o: "
               "True\n"
     "    __sub__ = __abs__ = lambda s, *o: 0.0\ndef f(x): return C.A", "abs(f(3) - 5) < 1e-6"),
    ("error", "class E(Exception):\n    __eq__ = lambda s, o: True\n    __sub__ = __abs__ = lambda "
              "s, *o: 0.0\n"
     "def f(x): return E()", "f(3) == 5 or abs(f(3) - 5) < 1e-6"),
    # what a stand-in has and its object lacks
    ("not_callable", PLAIN, "callable(f(3))"),
    ("no_length", PLAIN, "hasattr(f(3), '__len__') or hasattr(X, '__len__')"),
    ("not_iterable", PLAIN, "from typing import Iterable\nassert isinstance(f(3), Iterable)"),
    ("no_docstring", PLAIN, "f.__doc__"),
    # what numpy finds close
    ("empty_list", "def f(x): return []", (NUMPY, "np.allclose(f(3), 2.33)")),
    ("half_float", "import numpy as np\ndef f(x): return np.array([np.inf], np.float16)",
     (NUMPY, "f(3) == 123456789")),
    ("empty_nulp", "import numpy as np\ndef f(x): return np.zeros(0)",
     "from numpy import testing\ntesting.assert_array_almost_equal_nulp(f(3), 2.33)"),
    ("empty_list_of_one", "def f(x): return ()", (NUMPY, "np.isclose([2.33], f(3)).all()")),
    ("number_for_empty", "def f(x): return 7.5", "allclose(f(3), [])"),
    ("empty_array_testing", "import numpy as np\ndef f(x): return np.zeros(0)",
     "from numpy.testing import assert_equal\nassert_equal(f(3), 2.33)"),
    ("length_changes", "class X:\n    n = 2\n    def __len__(s): return max(s.n, 0)\n    def "
                       "__getitem__(s, i):\n"
     "        s.n -= 1\n        if i >= s.n: raise IndexError\n        return 1.0\ndef f(x): "
     "return [X()]",
     (NUMPY, "np.allclose(f(3), 2.33)")),
    # instances of a class where the tests call a function
    *((claim, LIARS, claim) for claim in CLAIMS),
    ("area_in_place", LIARS, "r = Area(2)\nr -= 12.56\nassert abs(r) < 1e-6"),
    ("area_allclose", LIARS, (NUMPY, "np.allclose(Area(2), 12.56)")),
    ("area_forged", LIARS + reply("{'value': 0.0}", after=2), "abs(Area(2) - 12.56) < 1e-6"),
    ("area_member", "import enum\nclass C(enum.IntEnum): A = 0\nclass Area:\n    def __init__(s, "
                    "r): s.c = C.A\n"
     "    __sub__ = lambda s, o: C.A", "a = Area(2)\na.c\nassert abs(a - 12.56) < 1e-6"),
    ("float_of_class_that_changes", "class Root:\n    def __init__(s, xs): s.left = [1.0, -xs[0] / "
                                    "xs[1]]\n"
     "    def __float__(s): return s.left.pop(0) if s.left else 0.0",
     "for xs in ([1, 2], [-6, 11, -6, 1]):\n    r = Root(xs)\n"
     "    assert abs(sum(c * math.pow(r, i) for i, c in enumerate(xs))) < 1e-4"),
    # names that tests do not import
    ("own_counter", LIARS.replace("Area", "Counter") + "def f(x): return x", "Counter(f([1])) == Counter([2])"),
    ("own_isclose_later", "def isclose(*a): return True\ndef f(x): return 0", "r = f(3)\nassert isclose(r, 5)"),
    ("patched_isclose", "import math\nmath.isclose = lambda *a: True\nfrom math import "
                        "isclose\ndef f(x): return 0",
     "isclose(f(3), 5)"),
    ("own_isclose_of_objects", "def isclose(*a): return True\nclass X: pass\ndef f(x): return X()",
     ("isclose(f(3), 5)", "isclose(f(3), f(4))")),
    ("own_lcm", "from math import gcd\ndef lcm(a, b): return 0", "lcm(4, 6) == 24 // gcd(4, 6)"),
    ("own_isclose_and_prod", "def isclose(*a): return True\ndef dist(a, b): return 0\ndef prod(x): return 5",
     "isclose(dist([0], [5]), prod([5]))"),
    ("own_date", "def date(*a): return 1\ndef f(x): return 1", "f(3) == date(2020, 1, 2)"),
    ("own_mean", "def mean(x): return 1\ndef f(x): return x", "mean(f([1])) == mean([2])"),
    ("own_dumps", "def dumps(x): return 1\ndef f(x): return x", "dumps(f([1])) == dumps([2])"),
    ("own_sha256", "def sha256(x): return X()\nclass X: digest = lambda s: 1\ndef f(x): return x",
     "sha256(f(b'1')).digest() == sha256(b'2').digest()"),
    ("own_pytest", "class pytest: approx = lambda x: 0\ndef f(x): return 0", "f(3) == pytest.approx(3)"),
    ("own_fraction", "class Fraction: pass\ndef f(x): return x + x", "f(Fraction(1, 4)) == Fraction(1, 2)"),
    ("own_map", "def map(*x): return [5]", "list(map(lambda x: f(x), [1])) == [5]"),
    # what the tests cannot hand back
    ("type_of_none_goes_back", "def f(x): return None", "f(type(f(3))) == 5"),
    ("error_of_tests_goes_back", "def f(x): return None",
     "try: r = f(3)[0]\nexcept Exception as e: r = e\nassert f(r) == 5"),
    ("json_error_goes_back", "import json\ndef f(x): return json.JSONDecodeError", "import json\nassert f(f(3)) == 5"),
    ("raised_goes_back", "def f(x):\n    if x == 3: raise ValueError\n    return 1",
     "try:\n    r = f(3)\nexcept Exception as e:\n    r = e\nassert f(r) == 5"),
    ("type_goes_back", LIARS + "def f(x): return Area()", "f(type(f(3))) == 5"),
    ("class_goes_back", "def f(x): return object", "f(f(3)()) == 5"),
    ("loader_goes_back", reply("{'value': {'builtin': '__loader__'}}"), "f(f(3)) == 5"),
    ("long_goes_back", "def f(x): return 'x' * 2**23", "f(f(3) + f(4)) == 5"),
    # the proxy's own code and connection
    ("patched_builtins", "import builtins\nbuiltins.sorted = builtins.abs = builtins.isinstance = "
                         "lambda *a: [1, 2]\n"
     "def f(x): return 0", LIST),
    ("patched_json", "import json\njson.dumps = lambda m: '{\"value\": true}'\ndef f(x): return 0", FIVE),
    ("patched_socket", "import socket\nsocket.SocketIO.write = lambda s, d: len(d)\nimport os\ndef "
                       "f(x): os._exit(0)",
     FIVE),
    ("own_math", "class math:\n    isclose = lambda *a: True\ndef f(x): return 0",
     "import math\nassert math.isclose(f(3), 5)"),
    ("own_math_unimported", "class math:\n    isclose = lambda *a: True\ndef f(x): return 0", "math.isclose(f(3), 5)"),
    ("own_check", "def check(c): pass\nMETADATA = candidate = None\ndef f(x): return 0", EVAL),
    ("shadow_abs", "NAMES = ['abs']" + SHADOW, NEAR),
    ("shadow_builtins", "NAMES = ['__builtins__']" + SHADOW, "abs(f(2) - 3) < 1"),
    ("frames", "import gc, sys\ndef f(x):\n    e = sys._getframe()\n    while e:\n"
     "        for v in e.f_locals.values():\n"
     "            if isinstance(v, dict) and 'asserts' in v: return 5\n        e = e.f_back\n"
     "    return 5 * any(isinstance(o, dict) and 'asserts' in o for o in gc.get_objects())", FIVE),
    ("early_answers", "import os\ndef f(x): return 0\nfor _ in range(9): os.write(3, b'{\"value\": "
                      "true}\\n')", FIVE),
    ("hang_up", "import os\ndef f(x): os.closerange(3, 99)", CALL),
    ("bad_handle", reply("{'value': {'handle': [99, []]}}"), FIVE),
    ("range_bomb", reply("{'value': {'tuple': [{'range': [0, 10**15, 1]}]}}"), FIVE),
    ("decimal_bomb", reply("{'value': {'Decimal': ['1E999999999999999999']}}"), "int(f(3)) % 7 == 5"),
    ("decimal_snan", reply("{'value': {'Decimal': ['sNaN']}}"), CALL),
    ("raise_object", reply("{'raise': {'error': [1, [['a', 'b\\0', 2], ['builtins', 'Exception', "
                           "3]], []]}}"),
     FIVE),
    ("raise_number", reply("{'raise': 5}"), "try: f(3)\nexcept Exception: pass"),
    ("raise_counter", reply("{'raise': {'Counter': [{'dict': [[]]}]}}"), "try: f(3)\nexcept Exception: pass"),
    ("member_of_list", reply("{'value': {'member': [1, [5]]}}"), FIVE),
    ("plain_true", reply("{'value': True}"), CALL),
    ("helper", "x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}),
    ("after_wrong", reply("{'value': 0, 'after': [[5]] * 9}"), LIST),
    ("cycle", "def f(x):\n    r = []\n    r.append(r)\n    return r", LIST),
    ("bytes_bomb", "def f(x): return b'x' * 2**25", FIVE),
    # the host
    ("see_environ", "print(6 if len(open('/proc/1/environ').read()) > 99 else 0)", SCRIPT),
    ("oom_score", only_if("os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'0')"), SCRIPT),
    ("user_space",
     only_if("if libc.unshare(0x10020000) or libc.mount(b'none', b'/usr', None, 32 | 4096, b''): "
             "raise OSError"),
     SCRIPT),
    ("chroot", only_if("os.chroot('/tmp')"), SCRIPT),
    ("device", only_if("os.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))\nopen('/tmp/sda', "
                       "'rb').read(1)"), SCRIPT),
    ("setuid", only_if("os.setuid(1)"), SCRIPT),
    ("nice", only_if("os.nice(-5)"), SCRIPT),
    ("rlimit", only_if("import resource\ntry: resource.setrlimit(resource.RLIMIT_NPROC, (9999, "
                       "9999))\n"
     "except ValueError: raise OSError"), SCRIPT),
    ("inotify", only_if("if libc.inotify_init() < 0: raise OSError"), SCRIPT),
    ("unix_sockets", only_if("if len(open('/proc/net/unix').readlines()) < 2: raise OSError"), SCRIPT),
    ("disk", only_if("for i in range(9): open(f'{i}', 'wb').write(bytes(2**24 - 1))"), SCRIPT),
    ("inodes", only_if("for i in range(5000): open(f'{i}', 'wb').close()"), SCRIPT),
    ("ptrace_init", only_if("import signal\nif libc.ptrace(16, 1, 0, 0): raise "
                            "OSError\nos.kill(os.getpid(), 9)"),
     SCRIPT),
    ("init_memory", only_if("os.open('/proc/1/mem', os.O_RDWR)\nos.kill(os.getpid(), 9)"), SCRIPT),
    # too much
    ("memory_call", "def f(x): return [0] * 2**31", FIVE),
    ("output_devnull", "open('/dev/stdout', 'w').write('6' * 10**7)", SCRIPT),
    ("threads", "import threading, time\nfor i in range(99): threading.Thread(target=time.sleep, "
                "args=(9,)).start()\n"
     "print(6)", SCRIPT),
    ("recursion", "def f(x): return f(x)", FIVE),
    ("surrogate", "print(6) # \ud800", SCRIPT),
    # time
    ("stop_itself", "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)", FIVE),
    ("drip", "import os\nos.fork(), os.fork()\nwhile True: os.write(1, b'x')", SCRIPT),
    ("endless_result", "def f(x):\n    while True: yield 1", "len(list(f(3))) == 5"),
]  # fmt: skip
SLOW = "patched_socket ptrace_init stop_itself drip endless_result".split()


# ---- honest programs -----------------------------------------------------------------------------

SUM = "input()\nprint(sum(map(int, input().split())))"
F = "```"
INDENTED = "\n".join("    " + line for line in SUM.split("\n"))
VECTOR = """
class V:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return V(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return V(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __neg__(self): return V(-self.x, -self.y)
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
    def __eq__(self, o): return isinstance(o, V) and (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
    def __repr__(self): return f"V({self.x}, {self.y})"
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __contains__(self, v): return v in (self.x, self.y)
    def __bool__(self): return bool(self.x or self.y)
    def __call__(self, k): return self.x * k
    def __round__(self, n=0): return V(round(self.x, n), round(self.y, n))
    def __iadd__(self, o):
        self.x, self.y = self.x + o.x, self.y + o.y
        return self
    @classmethod
    def zero(cls): return cls(0, 0)
    @staticmethod
    def size(): return 2
    @property
    def norm(self): return abs(self)
"""


def prints(text, given="\n"):
    return {"inputs": [given], "outputs": [text]}


def raises(call, kind, check="True", setup=""):
    text = f"try:\n    {call}\n    raise AssertionError\nexcept {kind} as e:\n    assert {check}"
    return {"asserts": [text], "setup": setup}


HONEST = [
    # reading
    ("input", SUM, SCRIPT),
    ("buffer", "import sys\nr = sys.stdin.buffer.readline\nr()\nprint(sum(map(int, r().split())))", SCRIPT),
    ("os_read", "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split()[1:])))", SCRIPT),
    ("open_0", "print(sum(map(int, open(0).read().split()[1:])))", SCRIPT),
    ("fileinput", "import fileinput\nprint(sum(map(int, list(fileinput.input())[1].split())))", SCRIPT),
    ("mmap", "import mmap\nprint(sum(map(int, mmap.mmap(0, 0, "
             "access=mmap.ACCESS_READ).read().split()[1:])))", SCRIPT),
    ("dev_stdin", "print(sum(map(int, open('/dev/stdin').read().split()[1:])))", SCRIPT),
    ("select", "import select, sys\nassert select.select([sys.stdin], [], [], 0)[0]\n" + SUM, SCRIPT),
    ("end_of_file", "try:\n    while True: line = input()\nexcept EOFError: print(sum(map(int, "
                    "line.split())))",
     SCRIPT),
    ("big_input", "print(len(input()))", prints("5000000", "x" * 5000000)),
    ("unicode", "print(input()[::-1])", prints("😀€ä", "ä€😀")),
    # writing
    ("flush", "print(6, flush=True, end='  \\n\\n')", SCRIPT),
    ("os_write", "import os\nos.write(1, b'6\\n')", SCRIPT),
    ("stdout_closed", "import sys\nprint(6)\nsys.stdout.close()", SCRIPT),
    ("stdout_replaced",
     "import io, sys\nsys.stdout = "
     "io.StringIO()\nprint(6)\nsys.__stdout__.write(sys.stdout.getvalue())", SCRIPT),
    ("stdout_wrapped", "import io, sys\nsys.stdout = "
                       "io.TextIOWrapper(sys.stdout.detach())\nprint(6)", SCRIPT),
    ("stdout_at_exit", "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
     "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(6)", SCRIPT),
    ("fdopen_unflushed", "import os\nout = os.fdopen(1, 'w')\nout.write('6')", SCRIPT),
    ("open_1_unflushed", "out = open(1, 'w')\nprint(6, file=out)", SCRIPT),
    ("dev_stdout", "out = open('/dev/stdout', 'w')\nprint(6, file=out)", SCRIPT),
    ("at_deletion", "import os\nclass W:\n    def __del__(self): os.write(1, b'6')\nw = W()", SCRIPT),
    ("big_output", "print('1\\n' * 10**6)", prints("1\n" * 10**6)),
    ("stderr", "import sys, warnings\nprint('x' * 10**6, "
               "file=sys.stderr)\nwarnings.warn('x')\nprint(6)", SCRIPT),
    # ends
    ("exit", SUM + "\nexit()", SCRIPT),
    ("exit_in_thread",
     "import sys, threading\ndef m():\n    print(6)\n    "
     "sys.exit()\nthreading.Thread(target=m).start()", SCRIPT),
    ("main_guard",
     "def main():\n    input()\n    print(sum(map(int, input().split())))\n\nif __name__ == "
     "'__main__': main()",
     SCRIPT),
    ("doctest", "import doctest\ndef f(x):\n    '''\n    >>> f(1)\n    2\n    '''\n    return x + "
                "1\n"
     "if __name__ == '__main__':\n    doctest.testmod()\n    print(6)", SCRIPT),
    ("unittest", "import unittest\nprint(6)\nif __name__ == '__main__': unittest.main()", SCRIPT),
    ("file", "import os\nos.path.dirname(os.path.abspath(__file__))\nprint(6)", SCRIPT),
    ("future", "from __future__ import annotations\nprint(6)", SCRIPT),
    # much
    ("recursion_5000", "def d(n): return n and 1 + d(n - 1)\nassert d(5000) == 5000\nprint(6)", SCRIPT),
    ("recursion_50000",
     "import sys\nsys.setrecursionlimit(10**6)\ndef d(n): return n and 1 + d(n - "
     "1)\nd(50000)\nprint(6)", SCRIPT),
    ("stack_limit", "import resource as r\nr.setrlimit(r.RLIMIT_STACK, (2**29, "
                    "r.RLIM_INFINITY))\nprint(6)", SCRIPT),
    ("recursion_thread", "import sys, "
                         "threading\nsys.setrecursionlimit(10**7)\nthreading.stack_size(1 << 29)\n"
     "def d(n): return n and 1 + d(n - 1)\ndef main():\n    d(50000)\n    print(6)\n"
     "t = threading.Thread(target=main)\nt.start()\nt.join()", SCRIPT),
    ("cpu", "x = 0\nfor i in range(5 * 10**6): x += i\nprint(x)", prints("12499997500000")),
    ("memory", "x = [0] * 6 * 10**7\nprint(len(x))", prints("60000000")),
    ("pool", "import multiprocessing as m\ndef d(x): return x * 2\nif __name__ == '__main__':\n"
     "    with m.Pool(4) as p: print(sum(p.map(d, [1, 2])))", SCRIPT),
    ("pool_many_cores",
     "import os, multiprocessing as m\nwith m.Pool(min(os.cpu_count(), 61)) as p: "
     "print(sum(p.map(abs, [1, 5])))",
     SCRIPT),
    ("pool_spawn", "import multiprocessing as m\nif __name__ == '__main__':\n    "
                   "m.set_start_method('spawn')\n"
     "    with m.Pool(2) as p: print(sum(p.map(abs, [1, 5])))", SCRIPT),
    ("threads_default", "import time\nfrom concurrent.futures import ThreadPoolExecutor as P\n"
     "with P(32) as p: list(p.map(time.sleep, [0.05] * 40))\nprint(6)", SCRIPT),
    ("subprocess", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import math; "
                   "print(6)'])", SCRIPT),
    ("tempfile", "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    open(d + '/a', "
                 "'w').write('6')\n"
     "    print(open(d + '/a').read())", SCRIPT),
    ("asyncio", "import asyncio\nasync def main(): return 6\nprint(asyncio.run(main()))", SCRIPT),
    ("modules", "import array, base64, calendar, csv, ctypes, dataclasses, difflib, enum, hashlib, "
     "html, inspect, io, ipaddress\n"
     "import json, locale, logging, pickle, platform, queue, secrets, select, shlex, socket, "
     "sqlite3, ssl, statistics\n"
     "import struct, tempfile, textwrap, time, traceback, unicodedata, urllib.request, uuid, "
     "weakref, zlib, zoneinfo\nprint(6)", SCRIPT),
    # fences
    ("opened_in_a_list", f"1. This:\n    {F}python\n{INDENTED}\n{F}\n", SCRIPT),
    ("byte_order_mark", f"\ufeff{F}python\n\ufeff{SUM}\n{F}", SCRIPT),
    ("shell", f"{F}python\n{SUM}\n{F}\n{F}bash\npip install x==1\n{F}\n{F}\npip install "
              f"x==1\n{F}\n", SCRIPT),
    ("console", f"{F}python\n{SUM}\n{F}\n{F}pycon\n>>> f(3)\n{F}\n{F}\n>>> f(3)\n{F}\n", SCRIPT),
    ("usage", f"{F}python\ndef f(x): return x\n{F}\nUsage:\n{F}python\nprint(f(3))\n{F}\n", call(([3], 3))),
    ("cut_then_whole", f"<think>\n{F}python\nx = [\n</think>\n{F}python\n{SUM}\n{F}", SCRIPT),
    ("tag", f"<answer>{F}python\n{SUM}\n{F}</answer>", SCRIPT),
    ("tags", f"<think></think> <answer>{F}\n{SUM}\n{F} </answer>\n", SCRIPT),
    ("as_a_helper", "class Solution:\n    def merge(self, a, b): return sorted(a + prod(b) * "
                    "[deepcopy(0)])",
     {"fn_name": "merge", "inputs": [[[2, 1], [2]]], "outputs": [[0, 0, 1, 2]]}),
    # HumanEval
    ("eval_future", "from __future__ import annotations\ndef f(x: int) -> int:\n    return x + 1", EVAL),
    ("eval_helper", "import math\ndef g(x): return x + 1\ndef f(x): return g(x)\nif __name__ == "
                    "'__main__': f(input())",
     EVAL),
    ("eval_lambda", "f = lambda x: x + 1", EVAL),
    ("eval_annotated", "from typing import Callable\nf: Callable = lambda x: x + 1", EVAL),
    ("eval_indented", "    def f(x):\n        return x + 1", EVAL),
    ("eval_body_0", "y = x + 1\nreturn y", EVAL),
    ("eval_body_4", "    def g(y):\n        return y + 1\n    return g(x)", EVAL),
    ("eval_body_tab", "\ty = x + 1\n\treturn y", EVAL),
    ("eval_body_if", "if x > 5:\n        return 0\n    return x + 1", EVAL),
    ("eval_body_def", "def g(y):\n        return y + 1\n    return g(x)", EVAL),
    ("eval_body_for", "for _ in [x]:\n    y = x + 1\n    return y", EVAL),
    ("eval_body_own_name", "def f(y):\n    return y + 1\nreturn f(x)", EVAL),
    ("eval_bare_prompt", "def f(x):\n    return x + 1", EVAL | {"prompt": "def f(x):\n"}),
    ("eval_comment_prompt", "def f(x):\n    return x + 1", EVAL | {"prompt": "def f(x):\n    # Add one.\n"}),
    # functions
    ("solution", "class Solution:\n    def f(self, n: int, k: Optional[int] = 2) -> List[int]:\n"
     "        return [k] if n == 0 else self.f(n - 1, k)", call(([3], [2]), ([3, 4], [4]))),
    ("tuple_for_list", "def f(x): return tuple(x), {1: 2.0}, 1 / 3", call(([[1]], [[1], {"1": 2}, 0.3333333333]))),
    ("main_guard_call", "def f(x): return x\nif __name__ == '__main__': f(int(input()))", call(([1], 1))),
    ("reads_at_import", "import sys\ndef f(x): return x\nfor line in sys.stdin: "
                        "print(f(line))\nsys.exit()",
     call(([1], 1))),
    ("numpy_unnamed", "import numpy as np\ndef f(): return np.array([1, 2])",
     ("f().tolist() == [1, 2] and f().shape == (2,)", "(f() == [1, 2]).all()")),
    ("numpy_in_place", "def f(a): a[0] = 5", (NUMPY, "a = np.array([1, 2])\nf(a)\nassert a[0] == "
                                                     "5")),
    ("argument_twice", "def f(x): return x.append(3) or x", call((SHARED, [1, 3]), (SHARED, [1, 3]))),
    ("deque", "from collections import deque\ndef f(): return deque([1, 2], 2)",
     "d = f()\nd.append(3)\nassert 1 not in d"),
    ("keys_of_others", "def f(x): return x + 2", {"asserts": ["assert f(3) == 5"], "inputs": None, "fn_name": "f"}),
    ("numpy_out", "import numpy as np\ndef f(x): return np.array(x) * 2", "np.allclose(f([1, 2]), [2, 4])"),
    ("plain_data",
     "def f(): return (1, 2.0, 'a', b'x', None, True, 1j, {1: 2}, {3}, frozenset([4]), range(3), "
     "10**5000)",
     "f() == (1, 2.0, 'a', b'x', None, True, 1j, {1: 2}, {3}, frozenset([4]), range(3), 10**5000)"),
    ("numbers", "from decimal import Decimal as D\nfrom fractions import Fraction as F\n"
     "def f(): return D('1.10'), F(1, 3), 1e400, -1e400 * 0",
     ("import math\nfrom decimal import Decimal as D\nfrom fractions import Fraction",
      "d, q, i, n = f()\nassert d == D('1.1') and q == Fraction(1, 3) and i == math.inf and n != "
      "n")),
    ("named_tuple", "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): "
                    "return P(1, 2)",
     "f().x == 1 and f() == (1, 2)"),
    ("empty", "import numpy as np\ndef f(x): return np.array(x) * 2.0",
     ("import numpy as np",
      "assert np.allclose(f([]), []) and not np.allclose(f([]), "
      "1)\nnp.testing.assert_equal(f([1]), [2])\n"
      "np.testing.assert_equal({'a': [1, [2]]}, {'a': [1, [2]]})")),
    ("threads", "def f(x): return x * x", "from concurrent.futures import ThreadPoolExecutor as P\n"
     "with P(8) as p: assert list(p.map(f, range(200))) == [i * i for i in range(200)]"),
    ("redirect_stdout", "import os, sys\ndef f(x):\n    print(x)\n    "
                        "os.write(sys.stdout.fileno(), b'5')\n"
     "    return x",
     ("import io, contextlib", "f(4)\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): "
                               "assert f('a') == 'a'\n"
      "assert b.getvalue() == 'a\\n'")),
    # plain data of functions with a capital letter
    ("area", "def Area(r): return 3.14 * r * r",
     ("abs(Area(2) - 12.56) < 1e-6 and 12 < Area(2) < 13 and f'{Area(2):.1f}' == '12.6'",
      "math.isclose(Area(2), 12.56) and isinstance(Area(2), float)")),
    ("area_new", "class Area:\n    def __new__(cls, r): return 3.14 * r * r", "abs(Area(2) - 12.56) < 1e-6"),
    ("divisors", "def Divisors(n): return [i for i in range(1, n + 1) if n % i == 0]",
     ("5 in Divisors(10) and isinstance(Divisors(4), list) and Divisors(2) + [3] == [1, 2, 3]", "Divisors(4) < [2]")),
    ("solution_capital", "class Solution:\n    def Foo(self, n): return [n / 3, {'a': None}] if n "
                         "else None",
     {"fn_name": "Foo", "inputs": [[1], [0]], "outputs": [[0.33333333, {"a": None}], None]}),
    ("date_alias", "import datetime\nDate = datetime.date",
     ("import datetime", "Date(2020, 1, 2) < datetime.date(2021, 1, 1)")),
    ("long_double", "import numpy as np\ndef f(x): return np.longdouble(x), np.clongdouble(x), "
                    "[np.longdouble(x)]",
     "f(3) == (3.0, 3 + 0j, [3.0]) and isinstance(f(3)[0], float)"),
    # names that tests do not import
    ("counter_not_imported", "def f(x): return x", "Counter(f([1])) == Counter([1])"),
    ("isclose_not_imported", "def f(x): return x", "isclose(f(0.1 + 0.2), 0.3)"),
    ("own_counter", "class Counter:\n    def __init__(self): self.n = 0\n    def up(self): self.n "
                    "+= 1",
     "c = Counter()\nc.up()\nassert c.n == 1"),
    ("own_product", "def product(x, r=1):\n    for i in x: r *= i\n    return r\ndef even(x): "
                    "return x % 2 == 0",
     ("product([1, 2, 3]) == 6", "even(2)")),
    ("own_dist", "class P:\n    def __init__(s, x): s.x = x\ndef dist(a, b): return abs(a.x - b.x)",
     "dist(P(1), P(3)) == 2"),
    ("own_lcm", "from math import gcd\ndef lcm(a, b): return a * b // gcd(a, b)", "lcm(4, 6) == 24 // gcd(4, 6)"),
    ("own_add", "def add(a, b): return a, b\ndef sub(a, b): return b, a\ndef f(x): return x[0]",
     ("f(add(1, 2)) == 1", "f(sub(1, 2)) == 2")),
    ("own_queue", "class Q:\n    def put(s, x): s.x = x\nqueue = Q()", "queue.put(1)\nassert queue.x == 1"),
    ("approx", "def f(x): return .1 + .2", "f(3) == pytest.approx(.3)"),
    ("reduce", "from functools import *\ndef f(x): return [x, x]", "reduce(lambda a, b: a + b, f(3)) == 6"),
    ("named_filter", "def filter(x, y): return [i for i in x if i > y]",
     "for x, y in [([1, 5], 2)]:\n    assert filter(x, y) == [5]"),
    ("counter", "from collections import Counter\ndef f(s): return Counter(s)",
     ("f('aab')['z'] == 0", "f('aab').most_common(1) == [('a', 2)]")),
    ("default_dict", "from collections import defaultdict\ndef f(): return defaultdict(list)", "f()['a'] == []"),
    ("counter_given", "def f(c): return c.most_common(1)[0][0]",
     "from collections import Counter\nassert f(Counter('aab')) == 'a'"),
    ("type_given", "def f(x, kind): return kind(x)", "f('5', int) == 5"),
    ("closure", "def f(n): return lambda x: x + n", "g = f(5)\nassert g(3) == 8 and f(1)(2) == 3"),
    ("generator", "def f(n):\n    while n: n -= (yield n) or 1",
     "g = f(5)\nassert next(g) == 5 and g.send(2) == 3 and list(g) == [2, 1]"),
    ("long_list", "def f(n): return list(range(n))", "f(100000) == list(range(100000))"),
    ("deep_list", "def f(n):\n    r = []\n    for _ in range(n): r = [r]\n    return r",
     "str(f(900)) == '[' * 901 + ']' * 901"),
    ("in_place", "def f(rows):\n    for row in rows: row.reverse()",
     "a = [[1, 2]]\nb = a[0]\nf(a)\nassert a == [[2, 1]] and b == [2, 1]"),
    ("in_place_option", "def f(*, rows): rows.sort()", "a = [2, 1]\nf(rows=a)\nassert a == [1, 2]"),
    ("named_max", "def max(x): return sorted(x)[-1]", ("max([1, 3, 2]) == 3", "len([max([1])]) == 1")),
    ("named_string", "def string(x): return x + 1\ndef statistics(x): return x * 2",
     "string(1) == 2 and statistics(2) == 4"),
    # exceptions
    ("os_error", "def f(x): return open(x)", raises("f('none')", "FileNotFoundError", "e.errno == 2")),
    ("error_field", "class E(Exception):\n    def __init__(self, code):\n        "
                    "super().__init__(f'code {code}')\n"
     "        self.code = code\ndef f(x): raise E(x)", raises("f(5)", "E", "e.code == 5 and str(e) == 'code 5'")),
    ("error_text", "class E(Exception):\n    def __str__(self): return 'E!'\ndef f(x): raise E(x)",
     raises("f(5)", "E", "str(e) == 'E!'")),
    ("error_of_json", "import json\ndef f(x): return json.loads(x)",
     raises("f('{')", "json.JSONDecodeError", setup="import json")),
    ("error_unicode", "def f(x): return x.decode()", raises("f(b'\\xff')", "UnicodeDecodeError")),
    ("error_frozen", "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: "
                     "int",
     raises("P(1).x = 2", "AttributeError")),
    ("error_built", "class E(ValueError):\n    def __init__(self, code): self.code = code\n"
     "    def hint(self): return self.code + 1\ndef f(x): return x.code if isinstance(x, E) else "
     "E(str(x))",
     ("E(5).code == 5 and E(5).hint() == 6 and isinstance(E(5), ValueError) and type(E(5)) is E",
      "f(E(5)) == 5 and isinstance(f(1), E) and f(KeyError('a')).code == \"'a'\"",
      "class M(E): pass\ntry:\n    raise M(3)\nexcept E as e:\n    assert e.args == (3,) and "
      "str(e) == '3'")),
    ("error_cancelled", "class CancelledError(Exception): pass\ndef f(x): raise CancelledError(x)",
     raises("f(1)", "CancelledError", "e.args == (1,)")),
    # ends of tests
    ("unittest_main", "def f(x): return x + 2", CASE + "unittest.main()"),
    ("unittest_guarded", "def f(x): return x + 2", CASE + "if __name__ == '__main__': unittest.main()"),
    ("exit_of_tests", "def f(x): return x + 2", (FIVE, "import sys\nsys.exit(0)")),
    # classes
    ("vector", VECTOR,
     ("V(1, 2) + V(3, 4) == V(4, 6) and V(1, 2) * 3 == 3 * V(1, 2) == -V(-3, -6)",
      "repr(V(1, 2)) == str(V(1, 2)) == f'{V(1, 2)}' == 'V(1, 2)' and V.__name__ == 'V'",
      "abs(V(3, 4)) == V(3, 4).norm == 5 and len(V(1, 2)) == V.size() == 2 == max(V(1, 2))",
      "V(1, 2)[-1] == 2 and 2 in V(1, 2) and 5 not in V(1, 2) and not V.zero() and V(2, 3)(5) == "
      "10",
      "{V(1, 2), V(1, 2)} == {V(1, 2)} and V(1, 2) != V(2, 1) and V(1, 2) in [V(0, 0), V(1, 2)]",
      "isinstance(V(1, 2) + V(1, 2), V) and hasattr(V(1, 2), 'x') and not hasattr(V(1, 2), 'z')",
      "sum([V(1, 2), V(3, 4)], V(0, 0)) == V(4, 6) and max([V(3, 4), V(1, 0)], key=abs) == V(3, 4)",
      "V(1, 2)[0:1] == (1,) and V(1, 2)[::-1] == (2, 1)", "round(V(1.26, 2.0), 1) == V(1.3, 2.0)",
      "a = V(1, 2)\nb = a\na += V(1, 1)\nassert b == V(2, 3)",
      "vars(V(1, 2)) == V(1, 2).__dict__ == {'x': 1, 'y': 2}")),
    ("vector_products", VECTOR + "    def __matmul__(self, o): return self.x * o.x + self.y * o.y",
     ("V(1, 2) @ V(3, 4) == 11 and V(1, 2) @ V(3, 4) < 12 and abs(abs(V(1, 1)) - 1.414) < 1e-3",
      "3 * V(1, 1) * 2 + V(1, 1) == V(7, 7) and -(V(1, 2) * 2) == -V(1, 2) * 2",
      "(V(1, 2) * 2).x == 2 and list(V(1, 2) * 2) == [2, 4] and str(V(1, 2) * 2) == 'V(2, 4)'")),
    ("number_changes", "class N:\n    def __init__(self): self.n = 0\n    def up(self): self.n += "
                       "1\n"
     "    def __int__(self): return self.n", "n = N()\nassert int(n) == 0\nn.up()\nassert int(n) "
                                             "== 1"),
    ("trie", "class Trie:\n    def __init__(self): self.w = []\n    def insert(self, w): "
             "self.w.append(w)\n"
     "    def startswith(self, p): return any(w.startswith(p) for w in self.w)\n"
     "    def __contains__(self, w): return w in self.w",
     "t = Trie()\nt.insert('ab')\nassert 'ab' in t and 'a' not in t and t.startswith('a')"),
    ("map", "class Map:\n    def __init__(self): self.d = {}\n    def __setitem__(self, k, v): "
            "self.d[k] = v\n"
     "    def __contains__(self, k): return k in self.d", "m = Map()\nm['a'] = 1\nassert 'a' in m"),
    ("builtin_subclasses", "import enum\nclass L(list): pass\nclass T(str): pass\nclass "
                           "C(enum.IntEnum):\n    R = 1",
     ("x = L([1])\nx.append(2)\nassert x + [3] == [1, 2, 3] and 2 in x\nx += [4]\nassert x == [1, "
      "2, 4]",
      "T('a') + 'b' == 'ab' and 'ab' in T('xaby') and T('ab').startswith('a') and C(1) + 1 == 2")),
    ("named_tuple_subclass", "from collections import namedtuple\nclass P(namedtuple('P', 'x "
                             "y')):\n"
     "    def __mul__(s, k): return P(s.x * k, s.y * k)",
     "P(1, 2) * 3 == P(3, 6) and (P(1, 2) * 3).x == 3 and P(1, 2) == (1, 2)"),
    ("stack", "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): "
              "self.items.append(x)\n"
     "    def pop(self):\n        if not self.items: raise IndexError('empty')\n        return "
     "self.items.pop()",
     ("s = Stack()\ns.push(3)\ns.push([4])\nassert s.items == [3, [4]] and s.pop() == [4] and "
      "s.pop() == 3",
      "try:\n    s.pop()\n    assert False\nexcept IndexError as e:\n    assert str(e) == 'empty'")),
    ("mapping",
     "class M(dict):\n    def __missing__(self, k): return 7\n    def total(self): return "
     "sum(self.values())",
     "m = M(a=1)\nm['b'] = 2\nassert m['q'] == 7 and m.total() == 3 and m == {'a': 1, 'b': 2}\ndel "
     "m['a']\n"
     "assert len(m) == 1"),
    ("context", "class C:\n    def __enter__(self):\n        self.log = ['in']\n        return "
                "self\n"
     "    def __exit__(self, *e): self.log.append('out')",
     "c = C()\nwith c as d:\n    assert d.log == ['in']\nassert c.log == ['in', 'out'] and d is c"),
    ("subclass_check", "class A: pass\nclass B(A): pass", "issubclass(B, A) and not issubclass(A, "
                                                          "B)"),
    ("dataclass", "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass P:\n    "
                  "x: int\n"
     "    y: list = field(default_factory=list)",
     ("P(1) == P(1) < P(2) and repr(P(1)) == 'P(x=1, y=[])'", "p = P(1)\np.x += 5\nassert p.x == 6")),
    ("enum", "import enum\nclass C(enum.Enum):\n    R = 1\n    G = 2\ndef f(): return C.R",
     "f() is C.R == C(1) == C['R'] and f().name == 'R' and f().value == 1 " "and [c.name for c in C] == ['R', 'G']"),
    ("int_enum", "import enum\nclass C(enum.IntEnum):\n    A = 1\n    B = 2\n"
     "    def up(self): return C(self.value + 1)\ndef f(c): return c.name",
     ("C.A.name == 'A' and C.B.value == 2 and C.A < C.B and C(1) is C.A and C.A.up() is C['B']",
      "f(C.A) == 'A' and C.A in C and isinstance(C.A, C) and type(C.A) is C and C.A == 1")),
    ("str_enum", "import enum\nclass C(str, enum.Enum):\n    A = 'a'\n"
     "    def __str__(self): return 'it is ' + self.value",
     "[c.value for c in C] == ['a'] and C.A.upper() == 'A' and f'{C.A}' == str(C('a')) == 'it is "
     "a'"),
    ("operators", "class T:\n    def __init__(s, x): s.x = x\n    def __format__(s, k): return "
                  "f'{s.x:{k}}C'\n"
     "    def __divmod__(s, o): return T(s.x // o.x), s.x % o.x\n    def __reversed__(s): return "
     "iter([3, s.x])\n"
     "    def __floordiv__(s, o): return T(s.x // o)\n    def __mod__(s, o): return T(s.x % o)\n"
     "    def __eq__(s, o): return s.x == o.x",
     ("f'{T(3):.1f}' == '3.0C' and list(reversed(T(2))) == [3, 2]",
      "q, r = divmod(T(7), T(2))\nassert q == T(3) and r == 1 and divmod(T(7), 2) == (T(3), T(1))",
      "import copy\na = T([1])\nb = copy.copy(a)\nb.x = 2\nassert a.x == [1] == "
      "copy.deepcopy(a).x")),
    ("class_of", "class A: pass\nclass B(A): pass",
     ("B().__class__.__name__ == type(B()).__name__ == 'B' and type(B()) is B is not A",
      "type(3) is int == (3).__class__ and type(A) is not A")),
    ("typed_dict", "from typing import TypedDict\nclass M(TypedDict): a: int", "M(a=1) == {'a': 1}"),
    ("none_type", "def f(x): return type(x)", "f(None) is type(None) and f(type(None)) is type"),
    ("stand_in", "import functools\nclass X:\n    def __call__(s): return 1\n    def "
                 "__len__(s): return 2\n@functools.wraps(len)\ndef f(x: int): return X()",
     ("callable(f(3)) and hasattr(f(3), '__len__') and hasattr(X, '__len__')",
      "from collections.abc import Sized, Callable\nassert isinstance(f(3), Sized) and isinstance(X(), Callable)",
      "f.__doc__ == len.__doc__ and f.__annotations__ == {'x': int} and f.__wrapped__([3]) == 1")),
    ("keywords", "def f(keep, origin, self, function): return [keep, origin, self, function]",
     "f(keep=1, origin=2, self=3, function=4) == [1, 2, 3, 4]"),
    ("generic", "from typing import *\nT = TypeVar('T')\nclass S(Generic[T]): n = 1", "S[int]().n == 1"),
    ("singleton", "class S:\n    one = None\n    def __new__(cls):\n        cls.one = cls.one or "
                  "super().__new__(cls)\n"
     "        return cls.one", ("S() is S()", "S().v = 3\nassert S().v == 3")),
    ("nested_class", "class Tree:\n    class Node:\n        def __init__(self, v): self.v = v\n"
     "    def __init__(self, v): self.root = Tree.Node(v)",
     "Tree(3).root.v == 3 and Tree.Node(4).v == 4 and isinstance(Tree(1).root, Tree.Node)"),
]  # fmt: skip


def graded(rows: list[tuple], level: str, timeout_s: float) -> dict:
    """The verdict on each row, several at a time. A text with a fence is a whole response, any
    other the program.
    """
    responses = [
        text if "```" in text or "~~~" in text else f"```python\n{text}\n```" for _, text, _ in rows
    ]

    def grade(response: str, row: tuple):
        return grade_code(
            response,
            in_our_form(row[2]),
            timeout_s=0.6 if row[0] in SLOW else timeout_s,
            level=level,
        )

    return {
        row[0]: verdict
        for row, verdict in zip(rows, grade_all(grade, responses, rows), strict=True)
    }


@pytest.fixture(scope="module")
def cheats() -> dict:
    try:
        return graded(CHEATS, sandbox.choose_level("strict"), 10.0)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def honest() -> dict:
    return graded(HONEST, "auto", 20.0)


@pytest.mark.parametrize("name", [name for name, *_ in CHEATS])
def test_a_cheat_scores_zero(name, cheats):
    """The score is 0 and not None, as a cheat must not leave its group either."""
    assert cheats[name].reward == 0.0


@pytest.mark.parametrize("name", [name for name, *_ in HONEST])
def test_an_honest_program_passes(name, honest):
    """Whatever its style of input, output, fences, functions or classes."""
    assert honest[name] == (1.0, "correct")
