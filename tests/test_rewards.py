"""rewards.py: which text is the answer, who decides, and many verdicts in parallel.

For cheats see test_programs.py.
"""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from builders.case_files import cases

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
    verdict,
    without_copies,
)


@pytest.mark.parametrize(
    "answer, gold, reason",
    [
        ("7", "7", "correct"), ("007", "7", "correct"), ("0.50", ".5", "correct"), ("$5$.", "5", "correct"),
        ("-0.0", "0", "correct"), ("-.50", "-0.5", "correct"),
        (r"\dfrac12", r"\frac{1}{2}", "correct"), (r"3 \sqrt{2}", r"\sqrt{18}", "correct"),
        ("8", "7", "wrong"), ("1.05", "1.5", "wrong"), ("-5", "5", "wrong"), ("1000000", "1000001", "wrong"),
        ("9" * 10**6, "9" * 10**6 + "1", "wrong"), ("0.3333333", r"\frac{1}{3}", "wrong"), (r"4\sqrt{2}", "4", "wrong"),
        (r"\frac{", "4", "no_answer"), (r"\unknown{", "4", "no_answer"), ("", "0", "no_answer"),
        ("  ", "0", "no_answer"), ("?", "4", "parse_error"), (".", "0", "parse_error"),
        (r"9^{9^{9^{9}}}", "1", "timeout"), ("{" * 900 + "1" + "}" * 900, "1", "parse_error"),
        ("{" * 100_000 + "1" + "}" * 100_000, "1", "wrong"),  # too long to be read
    ],
)  # fmt: skip
def test_math_verdicts(answer, gold, reason):
    """The score is 1 exactly for `correct`, and an endless comparison ends at the limit."""
    verdict = grade_math(
        rf"We find \boxed{{{answer}}}.", gold, timeout_s=0.5 if reason == "timeout" else 30.0
    )
    assert verdict == (1.0 if reason == "correct" else 0.0, reason)


@pytest.mark.parametrize(
    "problem, gold, answer, is_copied",
    [
        ("What is 4 + 5?", "9", "4 + 5", True), ("What is 7 * 8?", "56", r"7 \times 8", True),
        (r"Simplify $\frac{12}{18}$.", r"\frac23", r"\dfrac{12}{18}", True), (r"Find $\sqrt{16}$.", "4", r"\sqrt{16}", True),
        ("Expand (x-1)(x+1).", "x^2-1", "(x-1)(x+1)", True), ("Write 10^4 in full.", "10000", "10^{4}", True),
        (r"Which is more, $\frac23$ or $\frac35$?", r"\frac{2}{3}", r"\frac23", False),
        ("Which is more, 2/3 or 3/5?", r"\frac23", "2/3", False), ("What is 15+4?", "9", "5+4", False),
        ("Is it 4, -5 or 6?", "-5", "-5", False), ("Who was first, Jean-Luc or Bo?", "Jean-Luc", r"\text{Jean-Luc}", False),
        ("He drives at 60 km/h.", "60", r"60\text{ km/h}", False), (r"Angles of $90^\circ$ and less", "90", r"90^\circ", False),
        ("Solve 4 + 5 = x.", "9", "9", False), ("Is (A) or (B) right?", "B", "(B)", False),
    ],
)  # fmt: skip
def test_a_calculation_that_is_copied_from_the_problem_is_wrong(problem, gold, answer, is_copied):
    """It is right only as the gold answer is written; numerals, names and options may be repeated."""
    response = rf"So it is \boxed{{{answer}}}."
    graded = grade_math(response, gold, timeout_s=30.0)
    assert graded.reason == "correct"
    final = without_copies(graded, response, gold, problem)
    assert final == (Verdict(0.0, "copied") if is_copied else graded)
    wrong = Verdict(0.0, "wrong")
    assert without_copies(wrong, response, "1", problem) == wrong


@pytest.mark.parametrize(
    "text, box",
    [
        (r"\boxed{1} and then \boxed{2}", "2"), (r"\boxed {2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{a\\}", r"a\\"), (r"\boxed{1} but \boxed{2", None),
        (r"\boxed{1} \boxed{}", ""), (r"\boxed{\}", None), (r"\fbox{2}", None), ("the answer is 2", None), ("", None),
        (r"\boxed{" * 100_000, None), ("x" * 10**6 + r"\boxed{2}" + "\\" * 10**6, "2"),
    ],
)  # fmt: skip
def test_the_last_box_is_the_answer_if_it_is_closed(text, box):
    """An earlier box does not stand in for one that is never closed: that would reward hedging."""
    assert last_box(text) == box
    if not box:
        assert grade_math(text, "1").reason == "no_answer"


def test_nothing_in_a_box_is_run(tmp_path):
    """Python in a box stays text."""
    target = tmp_path / "made"
    verdict = grade_math(rf"\boxed{{__import__('os').mkdir('{target}')}}", "1")
    assert verdict.reward == 0.0 and not target.exists()


def test_workers_serve_many_threads_and_are_replaced_when_they_die():
    """Killed while idle or at work, a worker costs no verdict."""
    golds = [rf"\sqrt{{{n}}}" for n in range(2, 8)]
    texts = [rf"\boxed{{{n}^{{1/2}}}}" for n in range(2, 8)]
    patient = functools.partial(grade_math, timeout_s=60.0)  # also where the machine is busy
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(grade_all, [patient] * 2, [texts] * 2, [golds] * 2)
    assert list(results) == [[Verdict(1.0, "correct")] * 6] * 2
    for worker in workers._idle:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    assert grade_all(patient, texts, golds) == [Verdict(1.0, "correct")] * 6


def test_a_timeout_is_not_kept():
    """A worker keeps its judgements, but not that a question ran out of time.

    Such a question is judged when it is asked again. Its CPU time is counted from there on.
    """
    question = (r"\frac{37x}{74}", ".5x")
    assert workers.in_worker(*question, timeout_s=0.0) == "timeout"
    assert workers.in_worker(*question, timeout_s=60.9) == "correct"
    assert resource.prlimit(workers._idle[-1].process.pid, resource.RLIMIT_CPU)[0] > 62


def test_a_busy_worker_without_a_master_ends_within_its_cpu_time():
    """Nobody kills it then; it also ends within its memory.

    What counts the towers of powers holds the interpreter's lock, so that no thread could.
    """
    worker = workers.Worker()
    assert 0 < resource.prlimit(worker.process.pid, resource.RLIMIT_AS)[0] <= workers.MEMORY
    worker.process.stdin.write(json.dumps([r"9^{9^{9^{9}}}", "5", -1.0]).encode() + b"\n")
    worker.process.stdin.close()
    assert worker.process.wait(60) == -signal.SIGXCPU
    worker.process.stdout.close()


def test_a_question_that_kills_its_workers_is_wrong(monkeypatch):
    """Two workers that die of a question are its fault, unless one dies of any other, too."""
    ask = workers.Worker.ask
    deadly = ["x"]

    def die(worker, answer, gold, timeout_s):
        return "" if answer in deadly else ask(worker, answer, gold, timeout_s)

    monkeypatch.setattr(workers.Worker, "ask", die)
    assert grade_math(r"\boxed{x}", "y") == (0.0, "crashed")
    deadly.append("x/2")  # the question that every worker can answer
    with pytest.warns(RuntimeWarning, match="workers of math-verify die"):
        assert grade_math(r"\boxed{x}", "y") == (None, "infra_error")


def test_a_limit_of_the_user_is_no_wrong_answer():
    """A hard limit of CPU time holds, and a worker that has used it up is replaced."""
    script = r"""
import resource
from grading.workers import _idle, in_worker

resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
used = set()
for number in range(5000):
    print(in_worker(rf"\frac{{{number}x}}{{7}}", f"{number}x/7", 60.0))
    used.add(_idle[0].process.pid)
    if len(used) == 2:
        print(len(used))
        break
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    reasons = said.stdout.split()
    assert reasons.pop() == "2", said.stderr
    assert set(reasons) == {"correct"}


def test_a_process_that_cannot_start_is_no_verdict(monkeypatch):
    """A failure of the machine is not one of the answer: None, with a warning."""

    def fail(*args, **options):
        raise OSError("Resource temporarily unavailable")

    sandbox.choose_level("auto")
    monkeypatch.setattr(workers, "_idle", [])
    monkeypatch.setattr(workers.subprocess, "Popen", fail)
    with pytest.warns(RuntimeWarning, match="temporarily unavailable"):
        assert grade_math(r"\boxed{x}", "y") == (None, "infra_error")
    with pytest.warns(RuntimeWarning, match="no supervisor can be started"):
        assert grade_code("```\nprint(1)\n```", STDIO) == (None, "infra_error")


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
        ("`" * 10**6, 0), ("```\n" * 10**5, 50_000), ("``` " * 10**5, 0), ("```" + " " * 10**6 + "!", 0),
        ("~" * 10**5 + "`", 0), ("~~~" + " " * 10**5 + "`", 0), ("~~~" + "w" * 10**5 + "`", 0),
        ("~~~py\n" + "=" * 10**6 + "\n~~~", 1),
    ],
)  # fmt: skip
def test_hostile_fences_are_read_in_linear_time(text, blocks):
    """In the training process, where a quadratic search would take an hour."""
    assert len(code_blocks(text)) == blocks
    assert program_of(text, STDIO) == ("=" * 10**6 if blocks == 1 else None)


@pytest.mark.parametrize("case", cases("outputs.jsonl"))
def test_outputs_are_compared_line_by_line(case):
    """White space around a line does not count, nor how an integer is written.

    LiveCodeBench's own checker does the same.
    """
    assert same_output(case["text"], case["expected"]) is case["same"]


def test_cores_are_those_of_the_container(tmp_path, monkeypatch):
    """More programs at a time than its quota would run out of time through no fault of theirs."""
    monkeypatch.setattr(rewards, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(rewards.os, "sched_getaffinity", lambda process: range(32))
    for quota, expected in (
        ("max 100000", 32),
        ("6400000 100000", 32),
        ("250000 100000", 2),
        ("50000 100000", 1),
    ):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert rewards.cores() == expected
    (tmp_path / "cpu.max").unlink()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert rewards.cores() == 4


def test_grade_all_keeps_the_order_and_every_item_its_own_limit():
    """Programs that sleep or crash change nothing for honest ones between them."""
    programs = [
        "print(2)",
        "import time; time.sleep(60)",
        "print(int(input()) + 1)",
        "1 / 0",
        "bytearray(2**31)",
    ] * 2
    texts = [f"```python\n{program}\n```" for program in programs]
    verdicts = grade_all(functools.partial(grade_code, timeout_s=2.0), texts, [STDIO] * len(texts))
    right, *wrong = (1.0, "correct"), (0.0, "timeout"), (0.0, "crashed"), (0.0, "memory")
    assert verdicts == [right, wrong[0], right, *wrong[1:]] * 2
    assert grade_all(grade_code, [], []) == []


def test_tests_that_cannot_be_run_are_no_verdict():
    """Tests that cannot fail cannot be passed, and a broken test is no wrong answer."""
    response = "```python\ndef f(x): return open(x)\n```"
    empty = {}, {"asserts": []}, dict(prompt="", test="", entry_point="")
    for tests in (*empty, *({"inputs": ["1"], "outputs": outputs} for outputs in ([], [5]))):
        with pytest.warns(RuntimeWarning, match="no verdict"):
            assert grade_code(response, tests) == (None, "infra_error")
    uncalled = (
        "import unittest\nclass T(unittest.TestCase): pass\ndef test():\n    assert f(3) == 5"
    )
    for text, cause in (
        (uncalled, "check nothing"),
        ("assert f(1 == 2", "cannot be run"),
        (uncalled.replace("pass", "test = unittest.skip('')(f)") + "\nunittest.main()", "a case"),
        (
            uncalled.replace("pass", "test = unittest.skip('')(f)")
            + "\nunittest.main(exit=False)\nraise SystemExit(5)",
            "a case",
        ),
        (uncalled + "\nimport doctest\ndoctest.testmod()", "find no tests"),
        (
            uncalled.replace("pass", "test = lambda s: f('a')")
            + "\nopen('a', 'w')\nT('test').run()",
            "files",
        ),
        ("import inspect\nassert inspect.signature(f)", "signature"),
    ):
        with pytest.warns(RuntimeWarning, match=cause):
            assert grade_code(response, {"asserts": [text], "entry_point": None}) == (
                None,
                "infra_error",
            )


def test_a_sandbox_that_breaks_is_no_verdict_and_one_that_cannot_be_had_is_an_error(monkeypatch):
    """A level that does not work raises before the run; a later failure gives None."""

    def fail(*args, **options):
        raise SandboxError("the supervisor died")

    monkeypatch.setattr(sandbox, "choose_level", lambda level: "strict")
    monkeypatch.setattr(sandbox, "supervise", fail)
    with pytest.warns(RuntimeWarning, match="supervisor died"):
        assert grade_code("```\nprint(2)\n```", STDIO) == (None, "infra_error")
    monkeypatch.setattr(sandbox, "choose_level", fail)
    with pytest.raises(SandboxError):
        grade_code("```\nprint(2)\n```", STDIO)


def test_a_failed_grading_has_no_reward():
    """It is neither right nor wrong, whoever reports it; an unknown reason is a crash."""
    assert verdict("infra_error") == (None, "infra_error")
    assert verdict("no such reason") == (0.0, "crashed")
