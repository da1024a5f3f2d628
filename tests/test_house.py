"""The layout of the core: imports run down, in no circle, and none is of the lab.

All of it is read from the files' own text. lab/tests/test_house.py reads the docs.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"base"},
    {"sinkhorn", "grpo", "grading"},
    {"shear", "rewards"},
    {"tasks"},
    {"credit"},
    {"harness"},
    {"train", "eval"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imports_of(path: Path) -> set[str]:
    """The dotted names of all imports of a file, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_run_down():
    """A file imports files of lower floors or of its own room, in no circle, and nothing of lab/."""
    graph = {}
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).with_suffix("")
        if path.parent == ROOT or place.parts[0] in FLOOR_OF:
            graph[".".join(place.parts)] = imports_of(path)
    for name, imports in graph.items():
        room = name.split(".")[0]
        for other in imports:
            below = other.split(".")[0]
            assert below not in ("lab", "tests"), name
            is_own = below == room and other != name
            assert is_own or FLOOR_OF.get(below, -1) < FLOOR_OF[room], f"{name}: {other}"
    TopologicalSorter(graph).prepare()  # raises for a circle
    assert "shear.shear_weights" in graph["credit.rules"]
    assert graph["shear"] & FLOOR_OF.keys() == {"sinkhorn"}  # who copies one needs the other alone
