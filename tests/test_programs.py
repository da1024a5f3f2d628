"""tests/cases/programs.jsonl: programs that must not pass, and honest ones that must.

Each line has one trick, or one reason why graders get an honest program wrong. A cheat whose tests
are a script prints the right answer only if its attack has worked. Cheats run at the strict level
and stay bounded even if it fails: those that fill or kill first look where they are. Honest
programs whose reward is null get no verdict: the tests use their objects, and the wall between both
is in the way.

Not in the file, because no grader can tell them from honest programs: an object made for a test of
properties, which is asked one question at a time (`r.index(1) < r.index(2) < r.index(1)`) or
multiplied with another such object; an argument that is emptied, so that what the test computes
from it later is empty, too; text for a test that evaluates its candidate's text.
lab/records/grading.md lists all of these.
"""

import warnings

import pytest
from builders.case_files import cases

from grading import sandbox
from grading.sandbox import SandboxError
from rewards import Verdict, grade_all, grade_code

# Of verdict 0, what only the tests beside the program find: objects that are two across the wall,
# and programs that change when they see what is expected.
BESIDE = set(
    "shallow_copy same_rows same_object_humaneval kept_list global_kept warns leaves_file "
    "forged_failure forged_no_verdict forged_reply slow_beside same_rows_and_exit "
    "same_rows_and_unsupported".split()
)
SHARED = [[1]]  # one object in several places
# What no line of the file can hold: name, reward, program, tests.
OTHERS = [
    ("argument_is_expected", 0.0, "def f(x): return x.clear() or []",
     {"fn_name": "f", "inputs": [SHARED], "outputs": [SHARED[0]]}),
    ("argument_twice", 1.0, "def f(x): return x.append(3) or x",
     {"fn_name": "f", "inputs": [SHARED, SHARED], "outputs": [[1, 3], [1, 3]]}),
    ("big_input", 1.0, "print(len(input()))", {"inputs": ["x" * 5000000], "outputs": ["5000000"]}),
    ("big_output", 1.0, "print('1\\n' * 10**6)", {"inputs": [""], "outputs": ["1\n" * 10**6]}),
]  # fmt: skip
CASES = cases("programs.jsonl")
for name, reward, program, tests in OTHERS:
    response = f"```python\n{program}\n```"
    CASES.append(dict(name=name, reward=reward, response=response, tests=tests))


def with_reward(reward: float | None) -> list[dict]:
    """The cases that should have this reward."""
    return [case for case in CASES if case["reward"] == reward]


def names(cases: list[dict]) -> list[str]:
    """Their names."""
    return [case["name"] for case in cases]


def graded(own: list[dict], level: str) -> dict[str, Verdict]:
    """The verdict on each case, several at a time."""

    def grade(response: str, case: dict) -> Verdict:
        return grade_code(response, case["tests"], case.get("timeout_s", 20.0), level)

    verdicts = grade_all(grade, [case["response"] for case in own], own)
    return dict(zip(names(own), verdicts, strict=True))


def graded_strictly(own: list[dict]) -> dict[str, Verdict]:
    """As above at the level `strict`; skips the test where it does not work."""
    try:
        return graded(own, sandbox.choose_level("strict"))
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cheats() -> dict:
    return graded_strictly(with_reward(0.0))


# Tests that are asserts run beside the program, too; those with inputs run once, at every level.
BEHIND_WALL = [
    case
    for case in with_reward(0.0)
    if "inputs" not in case["tests"] and case["name"] not in BESIDE
]


@pytest.fixture(scope="module")
def cheats_alone() -> dict:
    """The verdicts where no tests run beside the program, as at the level `process`."""
    supervise = sandbox.supervise
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an argument that cannot cross gets no verdict
        patch.setattr(
            sandbox,
            "supervise",
            lambda job, tests=None: supervise(job | {"beside": False}, tests),
        )
        return graded_strictly(BEHIND_WALL)


@pytest.fixture(scope="module")
def honest() -> dict:
    return graded(with_reward(1.0), "auto")


@pytest.fixture(scope="module")
def undecided() -> dict:
    with pytest.warns(RuntimeWarning, match="no verdict"):
        return graded_strictly(with_reward(None))


@pytest.mark.parametrize("name", names(with_reward(0.0)))
def test_a_cheat_scores_zero(name, cheats):
    """The score is 0 and not None, as a cheat must not leave its group either."""
    assert cheats[name].reward == 0.0


@pytest.mark.parametrize("name", names(BEHIND_WALL))
def test_no_cheat_passes_the_wall_alone(name, cheats_alone):
    """Where the sandbox's level leaves out the second run."""
    assert cheats_alone[name].reward != 1.0


@pytest.mark.parametrize("name", names(with_reward(1.0)))
def test_an_honest_program_passes(name, honest):
    """Whatever its style of input, output, fences, functions or classes."""
    assert honest[name] == (1.0, "correct")


@pytest.mark.parametrize("name", names(with_reward(None)))
def test_no_rule_decides(name, undecided):
    """An honest program that only Python itself can tell from a cheat is not called wrong."""
    assert undecided[name] == (None, "infra_error")
