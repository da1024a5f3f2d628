"""Runs tests against a candidate that lives in another process; see `jail.py`.

    judge(file, tests) -> (reason, cause)

The reason is "correct", "wrong", "crashed", "memory", or "infra_error", which has a cause. The keys
of the tests tell their kind (`rewards.py` lists them): calls of a function with expected values,
assertions, or HumanEval's `check(candidate)`. The tests are trusted code and run here. The
candidate's functions and objects are stand-ins (`proxy.py`).

Standard library only.
"""

import ast
import builtins
import collections
import contextlib
import decimal
import fractions
import functools
import importlib
import itertools
import math
import re
import sys
import types
from collections.abc import Callable
from io import BufferedRWPair

from handles import Handle, class_of
from proxy import Link, Unsupported
from wire import Value

# LeetCode's programs rely on these names. None of them may be a builtin's.
LEETCODE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math
import operator, random, re, statistics, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from copy import deepcopy
from math import ceil, comb, dist, factorial, floor, gcd, hypot, inf, isqrt, lcm
from math import log, log2, log10, perm, pi, prod, sqrt
from typing import *
"""
# Names that tests may use without an import -> their modules. Left out: names that programs give to
# functions of their own, such as `add` of operator and `sub` of re.
LIBRARY = {"approx": "pytest", "deepcopy": "copy"}
for _module, _names in (
    ("datetime", "date datetime time timedelta"),
    ("hashlib", "md5 sha256"),
    ("json", "dumps loads"),
    ("numpy", "allclose array_equal"),
    ("statistics", "mean median mode"),
):
    LIBRARY |= dict.fromkeys(_names.split(), _module)
for _library in (math, itertools, functools, collections, fractions, decimal):
    LIBRARY |= {name: _library.__name__ for name in dir(_library) if not name.startswith("_")}
# Names by which tests may use modules that they do not import -> the modules.
MODULES = {name: name for name in sys.stdlib_module_names} | {
    "np": "numpy",
    "numpy": "numpy",
    "pd": "pandas",
    "pytest": "pytest",
}
# Statements that check nothing.
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
# numpy's functions that `load` changes.
COMPARISONS = {
    "numpy": "allclose array_equiv isclose".split(),
    "numpy.testing": (
        "assert_allclose assert_almost_equal assert_array_almost_equal "
        "assert_array_almost_equal_nulp assert_array_equal assert_equal"
    ).split(),
}


def judge(file: BufferedRWPair, tests: dict) -> tuple[str, str]:
    """Run the tests; returns the reason, and for "infra_error" why they cannot be run."""
    link = Link(file)
    cause = ""
    run = run_calls if "fn_name" in tests else run_asserts if "asserts" in tests else run_check
    try:
        reason = "correct" if run(link, tests) and cases_held() else "wrong"
    # any exception decides: of the candidate, of tests that cannot run, of an assertion
    except BaseException as error:
        if hasattr(error, "candidate"):
            reason = "memory" if isinstance(error, MemoryError) else "crashed"
        elif isinstance(error, Unsupported | ImportError):
            reason = "infra_error"
            cause = str(error)[:500]
        else:
            reason = "wrong"
    return "crashed" if link.dead else reason, cause


@functools.cache
def read(text: str) -> types.CodeType:
    """The code of a test, where `type(x)` and `x.__class__` are `class_of(x)`.

    Raises Unsupported for what is no Python, and for a runner that looks for tests in files or
    docstrings, which are not here.
    """
    if re.search(r"\b(pytest\.main|testmod|run_docstring_examples)\(", text):
        raise Unsupported("pytest and doctest find no tests here")
    try:
        if "type(" not in text and "__class__" not in text:
            return compile(text, "test", "exec")
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "type"
                and len(node.args) == 1
            ):
                node.func.id = "class of"
            elif (
                isinstance(node, ast.Attribute)
                and node.attr == "__class__"
                and isinstance(node.ctx, ast.Load)
            ):
                node.value = ast.Call(ast.Name("holder of", ast.Load()), [node.value], [])
                node.attr = "type"
        return compile(ast.fix_missing_locations(tree), "test", "exec")
    except (SyntaxError, ValueError, TypeError) as error:
        raise Unsupported(f"a test cannot be read: {error}") from error


# What every test gets. `read` puts these names into the syntax tree, which takes a space in a name;
# no source can write one, so no program and no test has them. `type(x)` becomes `class of(x)`, and
# `x.__class__` becomes `holder of(x).type`, which is an attribute, too.
NAMESPACE = {
    "class of": class_of,
    "holder of": lambda value: types.SimpleNamespace(type=class_of(value)),
}


@functools.cache
def load(name: str) -> types.ModuleType:
    """Import a module of Python's or numpy for the tests, changed where they need it.

    numpy's comparisons accept the candidate's objects and tell empty arrays from others. unittest's
    results are kept in RESULTS.
    """
    module = importlib.import_module(name)
    for function in COMPARISONS.get(name, ()):
        setattr(module, function, without_empty(getattr(module, function)))
    if name == "unittest":
        module.TestResult.__new__ = keep_result
    return module


RESULTS: list = []  # of unittest's runs


def keep_result(kind: type, *args: object, **options: object) -> object:
    """`__new__` of unittest's results."""
    RESULTS.append(object.__new__(kind))
    return RESULTS[-1]


def cases_held() -> bool:
    """Whether unittest's cases held, also if the tests do not ask.

    Raises Unsupported if unittest ran, but no case that is not skipped.
    """
    if RESULTS and not any(result.testsRun > len(result.skipped) for result in RESULTS):
        raise Unsupported("the tests run unittest without a case")
    return all(result.wasSuccessful() for result in RESULTS)


def without_empty(compare: Callable) -> Callable:
    """numpy's comparison, but empty never equals non-empty.

    numpy finds `[]` close to any number.
    """

    def read_once(value: Value) -> object:
        if isinstance(value, Handle):
            return sys.modules["numpy"].asarray(value)
        return [read_once(item) for item in value] if type(value) in (list, tuple) else value

    def is_empty(value: object) -> bool:
        with contextlib.suppress(ValueError):  # lists of several lengths are no array
            return sys.modules["numpy"].size(value) == 0
        return False

    def decide(*args: object, **options: object) -> object:
        values = [read_once(arg) for arg in args]
        named = {name: read_once(option) for name, option in options.items()}
        left, right = map(is_empty, [*values, *named.values()][:2])
        if left == right:
            return compare(*values, **named)
        if compare.__name__.startswith("assert"):
            raise AssertionError("only one of them is empty")
        return sys.modules["numpy"].False_

    return decide


def prepare(text: str) -> None:
    """Load what a test imports and `load` changes; numpy also if it uses an array's attributes."""
    if re.search(r"^[ \t]*(from|import)\b.*\bnumpy\b|\.(tolist|shape|dtype|all|any)\b", text, re.M):
        with contextlib.suppress(ImportError):  # the test may expect it
            load("numpy")
    if "numpy" in sys.modules and "testing" in text:
        load("numpy.testing")
    if "unittest" in text:
        load("unittest")


def execute(texts: list[str], names: dict) -> None:
    """Run the tests' texts with these names, in a module that is `__main__`.

    `sys.exit(0)` ends a text without a failure.
    """
    module = types.ModuleType("__main__")
    namespace = vars(module)
    namespace.update(NAMESPACE | names)
    sys.modules["__main__"] = module
    for text in texts:
        prepare(text)
        try:
            exec(read(text), namespace)
        except SystemExit as error:
            if hasattr(error, "candidate") or error.code not in (None, 0):
                cases_held()  # some Pythons end a run of skipped cases with status 5
                raise


def run_check(link: Link, tests: dict) -> bool:
    """Run HumanEval's `check(candidate)`, beside the prompt's own helpers.

    The candidate goes by both names. Raises Unsupported if the test defines no check.
    """
    if "check" not in tests["test"]:
        raise Unsupported("the test defines no check")
    entry_point = tests["entry_point"]
    candidates = link.names([entry_point])
    if not candidates:
        return False
    prompt = tests["prompt"] + "\n    pass\n"
    texts = [prompt, f"{entry_point} = candidate", tests["test"], "check(candidate)"]
    execute(texts, {"candidate": candidates[entry_point]})
    return True


def run_asserts(link: Link, tests: dict) -> bool:
    """Run set-up and assertions in order, with the candidate's names that they mention."""
    texts = [tests.get("setup") or "", *tests["asserts"]]
    for text in texts:
        read(text)
    tree = ast.parse("\n".join(texts))
    if all(isinstance(statement, DEFINITIONS) for statement in tree.body):
        raise Unsupported("the tests define, but check nothing")
    nodes = list(ast.walk(tree))
    mentioned = names_in(tree)
    assigned = set(names_in(tree, ast.Store))
    bound = assigned | {
        getattr(node, field, None) for node in nodes for field in ("name", "asname", "arg")
    }
    # `math.isclose` and `sorted` decide in a test, so they are Python's, whatever the candidate
    # defines by these names. `queue` in `queue.put(1)` is no module.
    modules = {}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in MODULES.keys() - assigned and hasattr(load(MODULES[name]), node.attr):
                modules[name] = load(MODULES[name])
    builtin_names = [name for name in mentioned if hasattr(builtins, name)]
    wanted = set(mentioned) - set(builtin_names) - set(modules)
    candidates = link.names(wanted)
    if not candidates and ("*" in bound or wanted <= bound | LIBRARY.keys()):
        # then the first call of a builtin's name is meant
        candidates = dict(list(link.names(builtin_names).items())[:1])
    subjects = tested(tree, candidates)
    python = {
        name: getattr(load(LIBRARY[name]), name)
        for name in LIBRARY.keys() & set(mentioned) - subjects
    }
    doubtful = python.keys() & candidates.keys()
    python |= {name: for_data(python[name], candidates[name]) for name in doubtful}
    namespace = candidates | python | modules
    execute(texts, namespace)
    # The candidate may have its own by a name of the library's: the checks hold with each, too.
    for name in doubtful - bound:
        with contextlib.suppress(Unsupported):
            execute(texts, namespace | {name: candidates[name]})
    return True


def for_data(function: Callable, own: Callable) -> Callable:
    """Python's function, or the candidate's own where all arguments are objects of its classes.

    Only objects that the tests built count.
    """

    def call(*args: object, **options: object) -> object:
        built = all(isinstance(arg, Handle) and arg._origin == "built" for arg in args)
        return (own if args and built else function)(*args, **options)

    return function if isinstance(function, type) else call


def names_in(tree: ast.AST, context: type = ast.expr_context) -> list[str]:
    """The names in statements, an outer call before its arguments."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, context)]


def tested(tree: ast.Module, candidates: dict) -> set[str]:
    """The candidate's names that are the tests' subject.

    In `isclose(f(3), 5)` that is `f`; in `gcd(4, 6) == 2` it is `gcd`, although Python's library
    has that name, too. A name of the library is a subject if an assertion holds no other name of
    the candidate's, and nothing that was computed with one; or if there is no other subject.
    """
    subjects = candidates.keys() - LIBRARY.keys()
    depending = set(subjects)
    for statement in tree.body:
        if not depending.isdisjoint(names_in(statement)):
            depending.update(names_in(statement, ast.Store))
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert):
                used = (candidates.keys() | depending).intersection(names_in(node))
                if len(used) == 1:
                    subjects |= used & candidates.keys()
    innermost = [name for name in names_in(tree) if name in candidates][-1:]
    return subjects or set(innermost)


def run_calls(link: Link, tests: dict) -> bool:
    """Call a function, or the method of that name of a new `Solution`, on each input."""
    name = tests["fn_name"]
    candidates = link.names([name, "Solution"])
    for args, expected in zip(tests["inputs"], tests["outputs"], strict=True):
        function = (
            candidates[name] if name in candidates else getattr(candidates["Solution"](), name)
        )
        if not same(function(*args), expected):
            return False
    return True


def same(value: object, expected: object) -> bool:
    """Whether a value equals the expected one, as the data sets mean it.

    Floats are compared to 1e-6 where one is expected, tuples as lists, and keys as text.
    """
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(map(same, value, expected))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and sorted(map(str, value)) == sorted(expected)
            and all(same(item, expected[str(key)]) for key, item in value.items())
        )
    if isinstance(expected, float) and isinstance(value, int | float):
        if math.isnan(expected):
            return value != value
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == expected)
