"""rewards.py: which text is the answer, who decides, and many verdicts in parallel.

test_programs.py has the cheats.
"""

import functools
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from builders.case_files import ROOT, cases
from builders.commands import raising

import rewards
from grading import sandbox, workers
from grading.sandbox import SandboxError
from rewards import (
    Verdict,
    code_blocks,
    grade_all,
    grade_code,
    grade_math,
    last_box,
    program_of,
    same_output,
)

patient = functools.partial(grade_math, timeout_s=60.0)  # the machine may be busy


@pytest.mark.parametrize(
    "answer, gold, reason",
    [
        ("007", "7", "correct"), ("0.50", ".5", "correct"), ("$5$.", "5", "correct"), ("-0.0", "0", "correct"),
        (r"\dfrac12", r"\frac{1}{2}", "correct"), (r"3 \sqrt{2}", r"\sqrt{18}", "correct"),
        ("1.05", "1.5", "wrong"), ("-5", "5", "wrong"), ("9" * 10**6, "9" * 10**6 + "1", "wrong"),
        ("0.3333333", r"\frac{1}{3}", "wrong"), (r"4\sqrt{2}", "4", "wrong"),
        (r"\frac{", "4", "no_answer"), ("  ", "0", "no_answer"), ("?", "4", "parse_error"), (".", "0", "parse_error"),
        ("{" * 900 + "1" + "}" * 900, "1", "parse_error"),
        ("{" * 100_000 + "1" + "}" * 100_000, "1", "wrong"),  # too long to be read
    ],
)  # fmt: skip
def test_math_verdicts(answer, gold, reason):
    """The score is 1 exactly for the reason `correct`."""
    verdict = patient(rf"We find \boxed{{{answer}}}.", gold)
    assert verdict == (1.0 if reason == "correct" else 0.0, reason)


@pytest.mark.parametrize(
    "text, box",
    [
        (r"\boxed{1} and then \boxed{2}", "2"), (r"\boxed {\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\\}", r"a\\"), (r"\boxed{1} but \boxed{2", None), (r"\boxed{1} \boxed{}", ""), (r"\boxed{\}", None),
        (r"\fbox{2}", None), ("the answer is 2", None), (r"\boxed{" * 100_000, None),
        ("x" * 10**6 + r"\boxed{2}" + "\\" * 10**6, "2"),
    ],
)  # fmt: skip
def test_the_last_box_is_the_answer_if_it_is_closed(text, box):
    """An earlier box does not replace one that is never closed, as that would reward hedging."""
    assert last_box(text) == box
    if not box:
        assert grade_math(text, "1").reason == "no_answer"


def test_nothing_in_a_box_is_run(tmp_path):
    """Python in a box stays text."""
    target = tmp_path / "made"
    graded = patient(rf"\boxed{{__import__('os').mkdir('{target}')}}", "1")
    assert graded.reward == 0.0 and not target.exists()


def test_workers_serve_several_threads_and_are_replaced_when_they_die(monkeypatch):
    """A worker that was killed costs no verdict."""
    monkeypatch.setattr(rewards, "cores", lambda: 2)
    golds = [rf"\sqrt{{{n}}}" for n in range(2, 8)]
    texts = [rf"\boxed{{{n}^{{1/2}}}}" for n in range(2, 8)]
    worker = None
    for _ in range(2):
        assert grade_all(patient, texts, golds) == [Verdict(1.0, "correct")] * 6
        assert worker not in workers._idle
        worker = workers._idle[-1]  # the next that is asked
        worker.process.kill()
        worker.process.wait()


def test_a_timeout_is_not_kept():
    """A question that ran out of time is judged when it is asked again.

    The worker's CPU time is counted from there on.
    """
    question = (r"\frac{37x}{74}", ".5x")
    assert workers.in_worker(*question, timeout_s=60.0) == "correct"
    os.kill(workers._idle[-1].process.pid, signal.SIGSTOP)  # it cannot be quick
    assert workers.in_worker(*question, timeout_s=0.0) == "timeout"
    assert workers.in_worker(*question, timeout_s=60.9) == "correct"
    assert resource.prlimit(workers._idle[-1].process.pid, resource.RLIMIT_CPU)[0] > 62


def test_a_busy_worker_without_a_master_ends_within_its_cpu_time():
    """A busy worker that nobody kills ends within its CPU time and its memory.

    What counts the towers of powers holds the interpreter's lock, so that no thread could end it.
    """
    assert workers.in_worker("x/2", ".5x", 60.0) == "correct"
    worker = workers._idle.pop()
    assert 0 < resource.prlimit(worker.process.pid, resource.RLIMIT_AS)[0] <= workers.MEMORY
    worker.process.stdin.write(json.dumps([r"9^{9^{9^{9}}}", "5", -2.0]).encode() + b"\n")
    worker.process.stdin.close()
    assert worker.process.wait(300) == -signal.SIGXCPU
    worker.process.stdout.close()


class MortalWorker:
    """A worker that dies of some questions."""

    deadly = ("x",)

    def ask(self, answer: str, gold: str, timeout_s: float) -> str:
        return "" if answer in self.deadly else "correct"


def test_a_question_that_kills_its_workers_is_wrong(monkeypatch):
    """Two workers that die of a question are its fault, unless one dies of any other, too."""
    monkeypatch.setattr(workers, "_idle", [])
    monkeypatch.setattr(workers, "Worker", MortalWorker)
    assert grade_math(r"\boxed{x}", "y") == (0.0, "crashed")
    monkeypatch.setattr(MortalWorker, "deadly", ("x", "x/2"))  # every worker can answer the second
    with pytest.warns(RuntimeWarning, match="workers of math-verify die"):
        assert grade_math(r"\boxed{x}", "y") == (None, "infra_error")


def test_a_hard_limit_of_the_user_holds():
    """A worker sets its limits below the user's hard limits, and starts where they are lower."""
    script = "from resource import *; from grading.workers import *; "
    script += "setrlimit(RLIMIT_AS, (3 * 10**9,) * 2); setrlimit(RLIMIT_CPU, (60, 60)); "
    script += "limit(RLIMIT_CPU, 30); print(getrlimit(RLIMIT_CPU)); "
    script += "limit(RLIMIT_CPU, 100); print(getrlimit(RLIMIT_CPU)); work()"
    command = [sys.executable, "-c", script]
    printed = subprocess.check_output(command, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert printed == "(30, 60)\n(30, 60)\nready\n"


STDIO = {"inputs": ["1\n"], "outputs": ["2\n"]}


@pytest.mark.parametrize("case", cases("blocks.jsonl"))
def test_the_last_complete_python_block_is_the_program(case):
    """Text around it does not matter, and a sample of its output is not a program."""
    program = program_of(case["response"], STDIO)
    assert program == case["program"]
    assert program is not None or grade_code(case["response"], STDIO) == (0.0, "no_answer")


@pytest.mark.parametrize(
    "text, blocks",
    [
        ("`" * 10**6, 0), ("```\n" * 20_000, 10_000), ("```" + " " * 10**6 + "!", 0), ("~~~" + "w" * 10**5 + "`", 0),
        ("~~~py\n" + "=" * 10**6 + "\n~~~", 1),
    ],
)  # fmt: skip
def test_hostile_fences_are_read_in_linear_time(text, blocks):
    """A quadratic search would stop the training process for minutes."""
    assert len(code_blocks(text)) == blocks
    assert program_of(text, STDIO) == ("=" * 10**6 if blocks == 1 else None)


@pytest.mark.parametrize("case", cases("outputs.jsonl"))
def test_outputs_are_compared_line_by_line(case):
    """White space around a line does not count, nor how an integer is written.

    LiveCodeBench's own checker does the same.
    """
    assert same_output(case["text"], case["expected"]) is case["same"]


def test_cores_are_those_of_the_container(tmp_path, monkeypatch):
    """More programs at a time than the quota would run out of time through no fault of theirs.

    macOS lacks `sched_getaffinity`.
    """
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(rewards, "QUOTA", quota)
    monkeypatch.setattr(rewards.os, "sched_getaffinity", lambda process: range(32))
    for text, count in ("max 100000\n", 32), ("250000 100000\n", 2), ("50000 100000\n", 1):
        quota.write_text(text)
        assert rewards.cores() == count
    quota.unlink()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert rewards.cores() == 4
    monkeypatch.delattr(rewards.os, "sched_getaffinity")
    monkeypatch.setattr(rewards.os, "cpu_count", lambda: 16)
    assert rewards.cores() == 2


def test_grade_all_keeps_the_order_and_every_item_its_own_limit():
    """Programs that sleep or crash change nothing for honest ones between them."""
    programs = {
        "print(2)": "correct",
        "import time; time.sleep(600)": "timeout",
        "print(int(input()) + 1)": "correct",
        "1 / 0": "crashed",
        "bytearray(2**31)": "memory",
    }

    def grade(program: str, timeout_s: float) -> Verdict:
        return grade_code(f"```python\n{program}\n```", STDIO, timeout_s)

    limits = [0.7 if "sleep" in program else 60.0 for program in programs]
    verdicts = grade_all(grade, list(programs), limits)
    assert [verdict.reason for verdict in verdicts] == list(programs.values())
    assert grade_all(grade, [], []) == []


@pytest.mark.parametrize(
    "tests", [{}, {"prompt": "", "test": "", "entry_point": ""}, {"inputs": ["1"], "outputs": [5]}]
)
def test_tests_that_decide_nothing_are_no_verdict(tests):
    """Tests that cannot fail cannot be passed."""
    with pytest.warns(RuntimeWarning, match="no verdict"):
        assert grade_code("```python\ndef f(x): return x\n```", tests) == (None, "infra_error")


@pytest.mark.parametrize(
    "text, cause",
    [
        ("assert f(1 == 2", "cannot be run"),
        ("def test():\n    assert f(3) == 5", "check nothing"),
        ("import unittest\nclass T(unittest.TestCase): test = unittest.skip('')(f)\nunittest.main()", "a case"),
        ("import doctest\ndef test(): f(3)\ndoctest.testmod()", "find no tests"),
        ("open('a', 'w')\nassert f('a')", "files"),
        ("import inspect\nassert inspect.signature(f)", "signature"),
    ],
)  # fmt: skip
def test_tests_that_cannot_be_run_are_no_verdict(text, cause):
    """A broken test is no wrong answer, and the warning has the cause."""
    response = "```python\ndef f(x): return open(x)\n```"
    tests = {"asserts": [text], "entry_point": None}
    with pytest.warns(RuntimeWarning, match=cause):
        assert grade_code(response, tests) == (None, "infra_error")


def test_a_machine_that_fails_is_no_verdict(monkeypatch):
    """A process that cannot start, or a sandbox that breaks, is no failure of the answer.

    A level that does not work at all raises an error.
    """
    program = "```\nprint(2)\n```"
    sandbox.choose_level("auto")
    monkeypatch.setattr(workers, "_idle", [])
    monkeypatch.setattr("subprocess.Popen", raising(OSError("temporarily unavailable")))
    with pytest.warns(RuntimeWarning, match="temporarily unavailable"):
        assert grade_math(r"\boxed{x}", "y") == (None, "infra_error")
    with pytest.warns(RuntimeWarning, match="no supervisor can be started"):
        assert grade_code(program, STDIO) == (None, "infra_error")
    monkeypatch.setattr(sandbox, "choose_level", raising(SandboxError("no level")))
    with pytest.raises(SandboxError):
        grade_code(program, STDIO)
