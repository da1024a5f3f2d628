"""tests/cases/programs.jsonl: programs that must not pass, and honest ones that must.

Each line has one trick, or one reason why graders get an honest program wrong. A cheat whose tests
are a script prints the right answer only if its attack has worked. Cheats run at the strict level
and stay bounded even if it fails: those that fill or kill first look where they are. Honest
programs whose reward is null get no verdict: the tests use their objects, and the wall between both
is in the way.

Two programs of each kind run by default, all of them in CI.

Not in the file, because no grader can tell them from honest programs: an object made for a test of
properties, which is asked one question at a time (`r.index(1) < r.index(2) < r.index(1)`) or
multiplied with another such object; an argument that is emptied, so that what the test computes
from it later is empty, too; text for a test that evaluates its candidate's text.
lab/records/grading.md lists all of these.
"""

import pytest
from builders.case_files import cases
from builders.kinds import by_kind
from builders.levels import usable

from grading import sandbox
from rewards import Verdict, grade_code

# Kinds of cheats that only the tests beside the program find.
BESIDE = [
    "objects that are two across the wall",
    "effects beside the tests",
    "forges or stalls beside the tests",
]
SHARED = [[1]]  # one object in several places
# What no line of the file can hold: name, kind, reward, program, tests.
OTHERS = [
    ("argument_is_expected", "shared arguments", 0.0, "def f(x): return x.clear() or []",
     {"fn_name": "f", "inputs": [SHARED], "outputs": [SHARED[0]]}),
    ("argument_twice", "shared arguments", 1.0, "def f(x): return x.append(3) or x",
     {"fn_name": "f", "inputs": [SHARED, SHARED], "outputs": [[1, 3], [1, 3]]}),
    ("big_output", "size", 1.0, "print('1\\n' * 10**6)", {"inputs": [""], "outputs": ["1\n" * 10**6]}),
]  # fmt: skip
CASES = cases("programs.jsonl")
for name, about, reward, program, tests in OTHERS:
    response = f"```python\n{program}\n```"
    CASES.append(dict(name=name, about=about, reward=reward, response=response, tests=tests))


def with_reward(reward: float | None) -> list:
    """Parameters of the cases that should have this reward."""
    return by_kind([case for case in CASES if case["reward"] == reward], "name", by_default=1)


def grade(case: dict, level: str) -> Verdict:
    """The verdict on a case; the limit of time is far off, as the machine may be busy."""
    return grade_code(case["response"], case["tests"], case.get("timeout_s", 120.0), level)


@pytest.fixture(scope="module")
def strict() -> str:
    return usable("strict")


@pytest.fixture
def across(monkeypatch) -> list[str]:
    """What tests find across the wall alone, as at the level `process`.

    They then run beside the program, too, if there is a pass or a doubt: a cause in the reply.
    """
    supervise = sandbox.supervise
    reasons = []

    def supervise_twice(job, tests=None):
        if not job.get("beside"):
            return supervise(job, tests)
        (alone,) = supervise(job | {"beside": False}, tests)
        reasons.append(alone.reason)
        in_doubt = alone.reason == "correct" or alone.text
        return supervise(job, tests) if in_doubt else [alone]

    monkeypatch.setattr(sandbox, "supervise", supervise_twice)
    return reasons


@pytest.mark.parametrize("case", with_reward(0.0))
def test_a_cheat_scores_zero(case, strict, across):
    """A cheat scores 0, and not None, as it must not leave its group either.

    No cheat passes the wall alone, but for those that only the tests beside the program find.
    """
    assert grade(case, strict).reward == 0.0
    assert "correct" not in across or case["about"] in BESIDE


@pytest.mark.parametrize("name", ["equal", "area_forged"])
def test_a_failure_across_the_wall_is_final(name, strict):
    """A cheat that passes beside the tests still scores 0, if it fails across without a doubt."""
    (case,) = [case for case in CASES if case["name"] == name]
    assert grade(case, strict) == (0.0, "wrong")


@pytest.mark.parametrize("case", with_reward(1.0))
def test_an_honest_program_passes(case):
    """An honest program passes, whatever its style of input, output, fences, functions or classes."""
    assert grade(case, "auto") == (1.0, "correct")


@pytest.mark.parametrize("case", with_reward(None))
def test_no_rule_decides(case, strict):
    """An honest program that only Python itself can tell from a cheat is not called wrong."""
    with pytest.warns(RuntimeWarning, match="no verdict"):
        assert grade(case, strict) == (None, "infra_error")
