"""The layout of the repository: six files at the root, imports that run down, limits of size.

All of it is read from the files' own text.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from credit.table import METHODS

ROOT = Path(__file__).parents[1]
PAPER = {"sinkhorn", "shear", "grpo", "rewards", "train", "eval"}
FLOORS = [
    {"sinkhorn", "grpo", "grading"},
    {"shear", "rewards"},
    {"fast"},
    {"tasks"},
    {"credit"},
    {"harness", "integrations"},
    {"train", "eval"},
    {"studies"},
    {"learn"},
]
# The size of each room, at most (`size_of`): a twentieth above what it was when this was written, so
# that good lines fit. Whoever fills a room raises its limit, and says why.
ROOMS = dict(
    root=8150,
    fast=2700,
    grading=9950,
    tasks=8300,
    credit=11700,
    harness=16800,
    integrations=2950,
    studies=11300,
    learn=2000,
    tests=80500,
)
# Constructs that make a line hard to read, outside of tests, at most.
DENSITY = {
    "assignments of several values": 31,
    "star arguments": 87,  # one of them calls what a learner has written
    "nested comprehensions": 8,
    "assignments within expressions": 0,
    "parameters without a type": 0,
}
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = [ROOT / f"{name}.py" for name in sorted(PAPER)]
SOURCES += [path for room in sorted(set(FLOOR) - PAPER) for path in (ROOT / room).rglob("*.py")]
TESTS = list((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
PAGES += ROOT.glob("docs/*.ipynb")
PROSE = re.compile(r'(?s)""".*?"""|#[^\n]*')  # of code
OURS = re.compile(rf"`(?:--(?:no-)?|(?:{'|'.join(FLOOR)}|docs|tests)[./])([\w./-]+)")
# Flags of other programs, and the ending of `train.py`.
OTHERS = {"py", "num_processes", "index_url", "custom_advantage_function_path"}
OTHERS.add("custom_megatron_before_log_prob_hook_path")


def room_of(path: Path) -> str:
    """The name of a root file, or of the folder that a file is in."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    """A module's name."""
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


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
    """The root's tracked Python is exactly the six files.

    Every other file stands in one of the rooms, whose `__init__` is empty.
    """
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = [Path(name) for name in listed.stdout.split()]
    assert {path.stem for path in tracked if len(path.parts) == 1} == PAPER
    rooms = {path.parts[0] for path in tracked if len(path.parts) > 1} - {"tests", "docs"}
    assert rooms <= set(FLOOR) - PAPER
    assert all((ROOT / room / "__init__.py").read_text() == "" for room in rooms)


def test_imports_run_down():
    """Imports go from a higher floor to a lower one, or within a room.

    Nothing but `studies` imports a command.
    """
    arrows = set()
    for path in SOURCES:
        room = room_of(path)
        for other in packages(imported(path)) & set(FLOOR) - {room}:
            assert FLOOR[room] > FLOOR[other], f"{path}: {other}"
            arrows.add((room, other))
    assert arrows >= {("train", "grpo"), ("credit", "shear"), ("studies", "train")}


def test_no_file_imports_itself_in_a_circle():
    """No imports form a circle, not even within a room: each file can be read after its imports."""
    TopologicalSorter({dotted(path): imported(path) for path in SOURCES}).prepare()  # raises


def test_no_test_imports_a_test():
    """Functions that several test files need stand in tests/builders/."""
    for path in TESTS:
        assert not [name for name in imported(path) if name[:5] == "test_"], path


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
    assert not packages(names) & {"transformers", "peft", "pandas", "datasets", "trl"}


@pytest.mark.parametrize("tests", [ROOT / "tests", ROOT / "lab" / "tests"])
def test_every_table_of_cases_is_in_their_index(tests):
    """cases/README.md has a row for each, and the test that reads it is there."""
    rows = {}
    for line in (tests / "cases" / "README.md").read_text().splitlines():
        if line.startswith("| `"):
            _, name, _, readers, _ = line.split("|")
            rows[name.strip(" `")] = readers.strip().split(", ")
    assert {path.name for path in (tests / "cases").iterdir()} == {*rows, "README.md"}
    for name, readers in rows.items():
        for reader in readers:
            assert name in (tests / reader).read_text(), (name, reader)


def test_what_few_need_is_imported_where_it_is_needed():
    """`datasets` takes a second; POT and GeomLoss are for the table of `lab.studies.bench`."""
    need = {"datasets": set(), "ot": set(), "geomloss": set()}
    for path in SOURCES:
        for package in packages(names_in(tree_of(path).body)) & set(need):
            need[package].add(dotted(path))
    assert need["datasets"] == {"lab.bridges.train_trl", "lab.studies.loops"}
    assert need["ot"] == need["geomloss"] == {"lab.studies.bench"}


def test_the_paper_s_files_import_what_the_paper_needs():
    """Among our files, shear.py imports sinkhorn.py alone, and rewards.py imports grading/ alone.

    The exercises in lab/learn/ need only the paper's files.
    """
    assert packages(imported(ROOT / "shear.py")) & set(FLOOR) == {"sinkhorn"}
    assert packages(imported(ROOT / "rewards.py")) & set(FLOOR) == {"grading"}
    for path in (ROOT / "learn").glob("*.py"):
        assert packages(imported(path)) & set(FLOOR) <= PAPER | {"learn"}


def test_what_runs_in_the_sandbox_stands_alone():
    """`grading/inside/` needs Python and its own files, by plain names that no other file uses."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for path in SOURCES:
        names["inside" in path.parts] |= packages(imported(path))
    own = {path.stem for path in SOURCES if "inside" in path.parts}
    assert "isolation" in names[True] <= own | sys.stdlib_module_names
    assert not own & names[False]


def test_a_method_is_known_to_the_table_and_to_its_function():
    """Below the studies only the table and the dictionary of functions name a method.

    All other files ask `credit.table` what a method needs.
    """
    other_words = {"prm", "shear", "entropy"}  # a flag, the default and the project, a metric
    for path in SOURCES:
        if room_of(path) != "studies" and path.name not in ("table.py", "methods.py"):
            nodes = ast.walk(tree_of(path))
            constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
            assert not constants & (METHODS.keys() - other_words), path


def test_a_public_name_stands_for_one_thing():
    """No two public functions or classes share a name, but for those listed here.

    `grading/inside/` runs in a sandbox, so its names count by themselves; an exercise has the name
    of its solution.
    """
    hooks = {"token_distances", "pack", "shear_weights"}  # fast versions with the paper's signature
    of_commands = {"main", "make_parser"}  # and ARGS, a constant
    # Functions of tasks that make their own problems.
    of_tasks = {*"task make_problem make_problems demonstrate first_error rephrase warm_up".split()}
    places = {}
    for path in SOURCES:
        if path.name == "exercises.py":
            continue
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                places.setdefault(("inside" in path.parts, node.name), []).append(path)
    twice = {name: paths for (_, name), paths in places.items() if len(paths) > 1}
    assert not {
        name: paths for name, paths in twice.items() if name not in hooks | of_commands | of_tasks
    }
    assert twice.keys() >= hooks  # remove an exception that is no longer needed


def documentation_and_types(tree: ast.Module) -> set[ast.AST]:
    """The nodes of docstrings and annotations."""
    roots = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            roots.append(node.body[0])
        roots += [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return {node for root in roots if root is not None for node in ast.walk(root)}


def size_of(path: Path) -> int:
    """The number of nodes in a file's syntax tree, with strings counted by their words.

    So neither a line break nor a docstring nor a type counts. Operators and contexts belong to the
    nodes that have them.
    """
    tree = tree_of(path)
    free = documentation_and_types(tree)
    parts = ast.expr_context | ast.operator | ast.unaryop | ast.boolop | ast.cmpop
    size = 0
    for node in ast.walk(tree):
        if node in free or isinstance(node, parts):
            continue
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        size += max(1, len(node.value.split())) if is_text else 1
    return size


def test_rooms_have_limits():
    """No room is larger than its limit."""
    sizes = dict.fromkeys(ROOMS, 0)
    for path in [*SOURCES, *TESTS]:
        sizes["root" if path.parent == ROOT else room_of(path)] += size_of(path)
    assert not {room: size for room, size in sizes.items() if size > ROOMS[room]}


def density_of(path: Path) -> Counter:
    """How often a file has each of DENSITY."""
    found = Counter()
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Assign):
            is_pack = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            found["assignments of several values"] += is_pack
        elif isinstance(node, ast.Call):
            found["star arguments"] += sum(isinstance(value, ast.Starred) for value in node.args)
            found["star arguments"] += sum(keyword.arg is None for keyword in node.keywords)
        elif isinstance(node, ast.Dict):
            found["star arguments"] += node.keys.count(None)
        elif isinstance(node, ast.NamedExpr):
            found["assignments within expressions"] += 1
        elif isinstance(node, comprehensions):
            inner = sum(isinstance(child, comprehensions) for child in ast.walk(node)) - 1
            found["nested comprehensions"] += inner > 0 or len(node.generators) > 1
        elif isinstance(node, ast.FunctionDef):
            for parameter in [*node.args.args, *node.args.kwonlyargs]:
                untyped = parameter.annotation is None and parameter.arg not in ("self", "cls")
                found["parameters without a type"] += untyped
    return found


def test_lines_stay_easy_to_read():
    """These limits only ever fall, so that a line has one fact."""
    found = sum((density_of(path) for path in SOURCES), Counter())
    assert not {name: found[name] for name, limit in DENSITY.items() if found[name] > limit}


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in headings}


def test_links_hold():
    """Links within the repository, in README, CONTRIBUTING and docs/, have a target."""
    for page in PAGES:
        for target in re.findall(r'(?:\]\(|src="|srcset=")(?!http)([^)"\s]+)', page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{page}: {target}"


def test_names_in_backticks_exist():
    """Flags, files and dotted names of ours exist, in guides, docstrings and comments.

    Records may name code that was removed.
    """
    words = OTHERS | {path.stem.replace("-", "_") for path in [*PAGES, *SOURCES, *TESTS]}
    texts = {page: page.read_text() for page in PAGES if "records" not in page.parts}
    for path in SOURCES:
        words |= set(re.findall(r"\w+", PROSE.sub("", path.read_text())))
        texts[path] = "".join(PROSE.findall(path.read_text()))
    for path, text in texts.items():
        names = [re.sub(r"\.(py|md|ipynb)$", "", name) for name in OURS.findall(text)]
        last = {re.split(r"[./]", name.strip("."))[-1].replace("-", "_") for name in names}
        assert last <= words, f"{path}: {last - words}"
