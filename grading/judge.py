"""Runs tests against a candidate that is somewhere else: in a process of their own, see `jail.py`.

    judge(connection, tests) -> ("correct", "wrong", "crashed", "memory" or "infra_error", and what caused the last)

Three kinds of tests, told by their keys (`rewards.py` names them): calls of a function with expected values,
assertions, and HumanEval's `check(candidate)`. They are code that is trusted and run here; the candidate's
functions and objects are stand-ins (`proxy.py`).

Standard library only.
"""

import ast
import builtins
import importlib
import math
import sys
import types

from proxy import Link, Unsupported

# LeetCode's programs count on these names.
LEETCODE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, log, log2, sqrt
from typing import *
"""
# Modules that tests may use without importing them.
MODULES = {**{name: name for name in sys.stdlib_module_names}, "np": "numpy", "numpy": "numpy"}


def judge(connection, tests: dict) -> tuple[str, str]:
    """Run the tests; why they ended, correct, wrong, crashed, memory, or infra_error, and why they could not be run."""
    link, cause = Link(connection), ""
    try:
        run = run_calls if "fn_name" in tests else run_asserts if "asserts" in tests else run_check
        reason = "correct" if run(link, tests) else "wrong"
    except BaseException as error:  # whatever a test raises is its verdict; an assertion's is the usual one
        if isinstance(error, Unsupported | ImportError) and not hasattr(error, "candidate"):
            reason, cause = "infra_error", str(error)[:500]
        elif hasattr(error, "candidate"):
            reason = "memory" if isinstance(error, MemoryError) else "crashed"
        else:
            reason = "wrong"
    return "crashed" if link.dead else reason, cause


def read(text: str) -> types.CodeType:
    """The code of a test; raises Unsupported where it is none."""
    try:
        return compile(text, "test", "exec")
    except (SyntaxError, ValueError, TypeError) as error:
        raise Unsupported(f"a test cannot be read: {error}") from error


def run_check(link: Link, tests: dict) -> bool:
    """HumanEval's style: `check(candidate)` beside the prompt's own helpers; the candidate under both its names."""
    names = {"__name__": "tests"}
    exec(read(tests["prompt"] + "\n    pass\n"), names)
    code = read(tests["test"])
    found = link.names(tests["entry_point"])
    if not found:
        return False
    names["candidate"] = names[tests["entry_point"]] = found[tests["entry_point"]]
    exec(code, names)
    if "check" not in names:
        raise Unsupported("the test defines no check")
    names["check"](names["candidate"])
    return True


def run_asserts(link: Link, tests: dict) -> bool:
    """Set-up and assertions, one after the other, with the candidate's names that they mention."""
    codes = [read(text) for text in (tests.get("setup") or "", *tests["asserts"])]
    nodes = [node for text in (tests.get("setup") or "", *tests["asserts"]) for node in ast.walk(ast.parse(text))]
    mentioned = [node.id for node in nodes if isinstance(node, ast.Name)]  # an outer call before its arguments
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    # `math.isclose` and `sorted` decide in a test, so they are Python's, whatever the candidate calls by these names.
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = {name: MODULES[name] for name in owners - assigned if name in MODULES}
    builtin = [name for name in mentioned if hasattr(builtins, name)]
    found = link.names(*(set(mentioned) - set(builtin) - set(modules)))
    if not found:  # nothing to test but what bears a builtin's name: the first such call is meant
        found = dict(list(link.names(*dict.fromkeys(builtin)).items())[:1])
    names = {"__name__": "tests", **found}
    for name, module in modules.items():
        names[name] = importlib.import_module(module)
    for code in codes:
        exec(code, names)
    return True


def run_calls(link: Link, tests: dict) -> bool:
    """A function, or the method of that name of a new `Solution`, on each input."""
    name = tests["fn_name"]
    found = link.names(name, "Solution")
    for args, expected in zip(tests["inputs"], tests["outputs"], strict=True):
        function = found[name] if name in found else getattr(found["Solution"](), name)
        if not same(function(*args), expected):
            return False
    return True


def same(value, expected) -> bool:
    """Equality as the data sets mean it: floats to 1e-6 where the answer is one, tuples as lists, keys as text."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(same(mine, theirs) for mine, theirs in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        mine = {str(key): item for key, item in value.items()}
        return mine.keys() == expected.keys() and all(same(mine[key], expected[key]) for key in mine)
    if isinstance(expected, float) and isinstance(value, int | float):
        if math.isnan(expected):
            return value != value
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == expected)
