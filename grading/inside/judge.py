"""Tests run twice against a program; see `jail.py`.

    across(file, tests)    in a process of their own, the candidate behind a wall (`proxy.py`)
    beside(module, tests)  in the program's own process, as any harness runs them

Both return a reason: "correct", "wrong", "crashed", "memory", "output", "infra_error" if the tests
cannot be read, or "unsupported" if they need what cannot cross the wall or is not installed. A pass
beside proves nothing, as the program sees there what is expected, but a failure does. A failure
across proves nothing if it has a cause, which `across` returns, too: where the wall differs from
Python.

The keys of the tests tell their kind (`rewards.py` lists them). Calls with expected values run
across alone. The tests are trusted code.

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
from collections.abc import Callable, Iterable
from io import BufferedRWPair

from proxy import OF_CONSTANTS, Handle, Link, Unsupported

# What programs of LeetCode and LiveCodeBench need not import: modules, and all that is in them.
HEADER = "".join(
    f"from {module} import *\nimport {module}\n"
    for module in (
        "string re datetime collections heapq bisect copy math random statistics itertools "
        "functools operator io sys json typing"
    ).split()
)
# LeetCode's `bisect` is the function, too.
HEADER += "bisect.__class__ = type('', (type(re),), {'__call__': staticmethod(bisect.bisect)})"
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
MODULES = {name: name for name in (*sys.stdlib_module_names, "numpy", "pytest")}
MODULES |= {"np": "numpy", "pd": "pandas"}
# Functions that get what the tests expect: a program's own never decides.
COMPARISONS = {"isclose", "allclose", "array_equal", "approx"}
# numpy's functions that `load` changes.
OF_NUMPY = {
    "numpy": "allclose array_equiv isclose".split(),
    "numpy.testing": (
        "assert_allclose assert_almost_equal assert_array_almost_equal "
        "assert_array_almost_equal_nulp assert_array_equal assert_equal"
    ).split(),
}
# Statements that check nothing.
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
DOUBT = "the tests use classes, globals, files or identity, which differ across the wall"


def across(file: BufferedRWPair, tests: dict) -> tuple[str, str]:
    """Run the tests in this process, with the candidate at the other end of the file."""
    link = Link(file)
    candidates: dict = {}
    try:
        trees = [] if "fn_name" in tests else read(tests)
    except (SyntaxError, ValueError, TypeError) as error:
        return "infra_error", f"the tests cannot be run: {error}"
    nodes = nodes_of(trees)

    def run() -> bool:
        if "fn_name" in tests:
            return run_calls(link, tests)
        python = library(nodes)
        candidates.update(candidates_of(link, nodes, python))
        own = {name: candidates[name] for name in subjects(trees, candidates)}
        shared = candidates.keys() & python.keys() - own.keys() - bound_in(nodes)
        for name in shared:
            if isinstance(candidates[name], Handle) and name not in COMPARISONS:
                python[name] = for_data(python[name], candidates[name])
        execute(trees, candidates | python | own)
        # the checks hold with each of the program's other names, too
        for name in shared:
            with contextlib.suppress(Unsupported):
                execute(trees, candidates | python | own | {name: candidates[name]})
        return True

    reason, cause = outcome(run)
    return link.dead or reason, cause or DOUBT * (
        bool(link.functions) or in_doubt(nodes, candidates)
    )


def beside(module: types.ModuleType, tests: dict) -> str:
    """Run the tests in the program's own module and process; returns the reason alone."""
    trees = read(tests)
    if "entry_point" in tests:
        del trees[1:3]  # the prompt, with which the program begins
    names = library(nodes_of(trees)) | vars(module) | {"__name__": "__main__"}
    return outcome(lambda: execute(trees, names, module))[0]


def outcome(run: Callable[[], bool]) -> tuple[str, str]:
    """The reason that a run of the tests gives, and why they cannot be run."""
    try:
        return "correct" if run() and cases_held() else "wrong", ""
    # any exception decides: of the candidate, of tests that cannot run, of an assertion
    except BaseException as error:
        if is_candidates(error):
            return "memory" if isinstance(error, MemoryError) else "crashed", ""
        if isinstance(error, Unsupported | ImportError):
            return "unsupported", str(error)[:500]
        return "wrong", ""


def is_candidates(error: BaseException) -> bool:
    """Whether the candidate raised an exception, or let it pass through a frame of its own."""
    step = error.__traceback__
    while step and step.tb_frame.f_code.co_filename != "program.py":
        step = step.tb_next
    return step is not None or hasattr(error, "candidate")


# ---- what the tests are --------------------------------------------------------------------------


def read(tests: dict) -> list[ast.Module]:
    """The syntax tree of each text of the tests.

    Loads what they import and `load` changes. Raises SyntaxError, ValueError or TypeError for tests
    that cannot be run, such as those of a runner that looks for tests in files or docstrings.
    """
    texts = [tests.get("setup") or "", *tests.get("asserts", ())]
    if "entry_point" in tests:  # beside the prompt's own helpers; the candidate has both names
        name = tests["entry_point"]
        texts = [f"candidate = {name}", tests["prompt"] + "\n    pass\n", f"{name} = candidate"]
        texts += [tests["test"], "check(candidate)"]
        if "check" not in tests["test"]:
            raise ValueError("they define no check")
    source = "\n".join(texts)
    if re.search(r"\b(pytest\.main|testmod|run_docstring_examples)\(", source):
        raise ValueError("pytest and doctest find no tests here")
    trees = [ast.parse(text, "test") for text in texts]
    statements = itertools.chain.from_iterable(tree.body for tree in trees)
    if all(isinstance(statement, DEFINITIONS) for statement in statements):
        raise ValueError("they define, but check nothing")
    for module in (*OF_NUMPY, "unittest"):
        if module.rpartition(".")[2] in source:
            with contextlib.suppress(ImportError):  # the test may expect it
                load(module)
    return trees


def nodes_of(trees: list[ast.Module]) -> list[ast.AST]:
    """All nodes of some trees."""
    return list(itertools.chain.from_iterable(map(ast.walk, trees)))


def names_in(nodes: Iterable[ast.AST], context: type = ast.expr_context) -> list[str]:
    """The names among some nodes."""
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, context)]


def defined_in(nodes: list[ast.AST]) -> set:
    """The names that the tests import or define."""
    return {getattr(node, field, None) for node in nodes for field in ("name", "asname", "arg")}


def bound_in(nodes: list[ast.AST]) -> set:
    """The names that the tests import, define or assign."""
    return defined_in(nodes).union(names_in(nodes, ast.Store))


def library(nodes: list[ast.AST]) -> dict:
    """Python's own values of names that the tests use without an import, and modules."""
    assigned = set(names_in(nodes, ast.Store))
    values: dict = {}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in LIBRARY:
            values.setdefault(node.id, getattr(load(LIBRARY[node.id]), node.id))
        # `queue` in `queue.put(1)` is no module
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in MODULES.keys() - assigned and hasattr(load(MODULES[name]), node.attr):
                values[name] = load(MODULES[name])
    return values


def candidates_of(link: Link, nodes: list[ast.AST], known: dict) -> dict:
    """The candidate's names that the tests mention, with their values.

    `sorted` decides in a test, so it is Python's, whatever the candidate defines by this name; but
    a builtin's name is the candidate's if the tests need no other.
    """
    modules = {name for name, value in known.items() if isinstance(value, types.ModuleType)}
    mentioned = set(names_in(nodes)) - modules
    others = mentioned - vars(builtins).keys()
    candidates = link.names(others)
    needed = others - bound_in(nodes) - LIBRARY.keys()
    return candidates if candidates or needed else link.names(mentioned)


def subjects(trees: list[ast.Module], candidates: dict) -> set[str]:
    """The candidate's names that the tests are about.

    Of the library's names, as in `gcd(4, 6) == 2`, one that a statement has without another name of
    the candidate's, and without a variable of an earlier statement.
    """
    found = candidates.keys() - LIBRARY.keys()
    others = set(found)
    for statement in itertools.chain.from_iterable(tree.body for tree in trees):
        names = set(names_in(ast.walk(statement)))
        own = names & candidates.keys() - COMPARISONS
        if names.isdisjoint(others) and len(own) == 1:
            found |= own
        others.update(names_in(ast.walk(statement), ast.Store))
    return found


def for_data(function: Callable, own: Callable) -> Callable:
    """Python's function, or the candidate's own if the tests built an argument."""

    def call(*args: object, **options: object) -> object:
        built = any(isinstance(arg, Handle) and arg._built for arg in args)
        return (own if built else function)(*args, **options)

    return call


def in_doubt(nodes: list[ast.AST], candidates: dict) -> bool:
    """Whether what the tests need of the candidate may differ across the wall.

    They open files, read a global that is no function, or compare identity. Or they use a class: a
    name with a capital letter, and somewhere an attribute that no constant has, but not of a module
    or a parameter, or a comparison of two objects of one class.
    """
    called = set(names_in(node.func for node in nodes if isinstance(node, ast.Call)))
    free = candidates.keys() - bound_in(nodes)
    if "open" in called or any(not callable(candidates[name]) for name in free - called):
        return True
    classes = {name for name in free - LIBRARY.keys() if name[0].isupper()}
    no_objects = defined_in(nodes) | MODULES.keys()
    no_tests = [node.value for node in nodes if isinstance(node, ast.Expr)]
    for node in nodes:
        used = False
        if isinstance(node, ast.Attribute) and node not in no_tests:
            root = getattr(node.value, "func", node.value)
            used = node.attr not in OF_CONSTANTS and no_objects.isdisjoint(names_in([root]))
        elif isinstance(node, ast.Compare):
            right = set(names_in(ast.walk(node.comparators[0])))
            if isinstance(node.ops[0], ast.Is | ast.IsNot) and right - vars(builtins).keys():
                return True
            used = not classes.isdisjoint(right.intersection(names_in(ast.walk(node.left))))
        if classes and used:
            return True
    return False


# ---- how they run --------------------------------------------------------------------------------


@functools.cache
def load(name: str) -> types.ModuleType:
    """Import a module of Python's or numpy for the tests, changed where they need it.

    numpy's comparisons tell empty arrays from others. unittest's results are kept in RESULTS.
    """
    module = importlib.import_module(name)
    for function in OF_NUMPY.get(name, ()):
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

    def decide(*args: object, **options: object) -> object:
        with contextlib.suppress(ValueError):  # lists of several lengths are no array
            sizes = list(map(sys.modules["numpy"].size, [*args, *options.values()][:2]))
            if 0 in sizes and any(sizes):
                assert not compare.__name__.startswith("assert"), "only one of them is empty"
                return sys.modules["numpy"].False_
        return compare(*args, **options)

    return decide


def execute(trees: list[ast.Module], names: dict, module: types.ModuleType | None = None) -> bool:
    """Run the tests with these names in a module, by default a new one, that becomes `__main__`.

    `sys.exit(0)` ends a text without a failure.
    """
    module = module or types.ModuleType("__main__")
    vars(module).update(names)
    sys.modules["__main__"] = module
    for tree in trees:
        try:
            exec(compile(tree, "test", "exec"), vars(module))
        except SystemExit as error:
            if is_candidates(error) or error.code not in (None, 0):
                cases_held()  # some Pythons end a run of skipped cases with status 5
                raise
    return True


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
    if isinstance(expected, dict) and isinstance(value, dict):
        value = sorted((str(key), item) for key, item in value.items())
        expected = sorted(expected.items())
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, float) and isinstance(value, int | float):
        both_nan = value != value and expected != expected
        return both_nan or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == expected)
