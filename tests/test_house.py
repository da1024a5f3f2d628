"""The layout of the core: six files at the root, imports that run down, and none of the lab.

All of it is read from the files' own text. lab/tests/test_house.py reads the whole house.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAPER = {"sinkhorn", "shear", "grpo", "rewards", "train", "eval"}
FLOORS = [
    {"base"},
    {"sinkhorn", "grpo", "grading"},
    {"shear", "rewards"},
    {"tasks"},
    {"credit"},
    {"harness"},
    {"train", "eval"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = [ROOT / f"{name}.py" for name in sorted(PAPER)]
ROOMS = set(FLOOR) - PAPER
SOURCES += [path for room in sorted(ROOMS) for path in (ROOT / room).rglob("*.py")]
TESTS = list((ROOT / "tests").rglob("*.py"))


def room_of(path: Path) -> str:
    """The name of a root file, or of the folder that a file is in."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def floor_of(path: Path) -> int:
    """The floor of a file's room."""
    return FLOOR[room_of(path)]


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    """A module's name."""
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


@cache
def imported(path: Path) -> set[str]:
    """The dotted names of all imports of a file, anywhere in it."""
    return names_in(ast.walk(tree_of(path)))


def packages(names: Iterable[str]) -> set[str]:
    """The first words of dotted names."""
    return {name.split(".")[0] for name in names}


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The dotted names of all imports among these nodes."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_root_is_the_paper():
    """The root's Python is the six files."""
    assert {path.stem for path in ROOT.glob("*.py")} == PAPER


def test_imports_run_down():
    """Imports go from a higher floor to a lower one, or within a room; none is of lab/ or tests/."""
    arrows = set()
    modules = {dotted(path): path for path in SOURCES}
    for path in SOURCES:
        assert not packages(imported(path)) & {"lab", "tests"}, path
        for name in imported(path) & set(modules):
            other = modules[name]
            is_within = room_of(path) == room_of(other) and floor_of(path) == floor_of(other)
            assert is_within or floor_of(path) > floor_of(other), f"{path}: {other}"
            arrows.add((room_of(path), room_of(other)))
    assert arrows >= {("train", "grpo"), ("credit", "shear"), ("harness", "credit")}


def test_no_file_imports_itself_in_a_circle():
    """No imports form a circle, not even within a room: each file can be read after its imports."""
    TopologicalSorter({dotted(path): imported(path) for path in SOURCES}).prepare()  # raises


def test_no_test_imports_a_test_or_the_lab():
    """Functions that several test files need stand in tests/builders/."""
    for path in TESTS:
        names = imported(path)
        assert not [name for name in names if name[:5] == "test_"], path
        assert "lab" not in packages(names), path


@pytest.mark.parametrize("name", ["test_sinkhorn", "test_shear"])
def test_what_tests_the_paper_s_credit_needs_torch_alone(name):
    """Neither the file nor any that it imports needs transformers: who copies shear.py has none."""
    files = {dotted(path): path for path in SOURCES}
    for path in TESTS:
        files[path.relative_to(ROOT / "tests").with_suffix("").as_posix().replace("/", ".")] = path
    names = {name, "conftest"}
    read = set()
    while names - read:
        module = (names - read).pop()
        read.add(module)
        if module in files:
            names |= names_in(tree_of(files[module]).body)
    assert {"torch", name.removeprefix("test_")} <= names
    assert not packages(names) & {"transformers", "pandas", "datasets"}


def test_every_table_of_cases_is_in_their_index():
    """tests/cases/README.md has a row for each, and the test that reads it is there."""
    tests = ROOT / "tests"
    rows = {}
    for line in (tests / "cases" / "README.md").read_text().splitlines():
        if line.startswith("| `"):
            _, name, _, readers, _ = line.split("|")
            rows[name.strip(" `")] = readers.strip().split(", ")
    assert {path.name for path in (tests / "cases").iterdir()} == {*rows, "README.md"}
    for name, readers in rows.items():
        for reader in readers:
            assert name in (tests / reader).read_text(), (name, reader)


def test_the_paper_s_files_import_what_the_paper_needs():
    """Among our files, shear.py imports sinkhorn.py alone, and rewards.py imports grading/ alone."""
    assert packages(imported(ROOT / "shear.py")) & set(FLOOR) == {"sinkhorn"}
    assert packages(imported(ROOT / "rewards.py")) & set(FLOOR) == {"grading"}


def test_what_runs_in_the_sandbox_stands_alone():
    """`grading/inside/` needs Python and its own files, by plain names that no other file uses."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for path in SOURCES:
        names["inside" in path.parts] |= packages(imported(path))
    own = {path.stem for path in SOURCES if "inside" in path.parts}
    assert "isolation" in names[True] <= own | sys.stdlib_module_names
    assert not own & names[False]


def test_a_public_name_stands_for_one_thing():
    """No two public functions or classes share a name, but for `main` and the tasks' own functions.

    `grading/inside/` runs in a sandbox, so its names count by themselves.
    """
    of_commands = {"main"}
    of_tasks = {"task"}  # each file of tasks has a function that makes its task
    places = {}
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                places.setdefault(("inside" in path.parts, node.name), []).append(path)
    twice = {name: paths for (_, name), paths in places.items() if len(paths) > 1}
    assert not {name: paths for name, paths in twice.items() if name not in of_commands | of_tasks}
