"""tasks/reward.py and steps without verdicts: whose reward a run trains on, and what ends it."""

import math
import os
import signal
import sys
from asyncio import CancelledError
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from builders.commands import interrupt, raising, run_well, words_of
from builders.rollouts import batch_of, rollouts_like
from builders.runs import ALONE

import eval as evaluation
import train
from base.config import Problems, parse_train
from base.errors import BadInput, RunFailed
from base.files import locked_folder, read_lines, write_rows
from grpo import group_advantages
from harness import fsdp
from harness.run import check_verdicts, resolve
from rewards import Verdict, grade_all
from tasks import toy
from tasks.reward import LARGEST, grade_by, load_reward

# In a file with a name of ours, beside another that it imports.
OWN = """
from __future__ import annotations
from dataclasses import dataclass
from beside_it import RIGHT

@dataclass
class Length:
    characters: int

def grade(response: str, answer: str) -> float:
    assert answer == "1"
    return RIGHT if Length(len(response)).characters % 2 else -0.25
"""


def test_a_run_and_its_resumption_train_on_the_reward_that_was_asked_for(
    qwen_folder, tmp_path, monkeypatch
):
    """config.json keeps the flag for `--resume`. The built-in grader would find no answer.

    An evaluation without --bench asks what the run held out, with its limit. Edited, the reward is
    another one: an evaluation grades anew what it has kept, and --resume refuses the run.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the file's folder is added
    write_rows(tmp_path / "data.jsonl", [{"problem": "1", "answer": "1"}] * 20)
    (tmp_path / "beside_it.py").write_text("RIGHT = 1.5")
    (tmp_path / "rewards.py").write_text(OWN)
    run = tmp_path / "run"
    flags = "--steps 1 --prompts-per-step 2 --rollouts-per-prompt 4 --prompts-per-update 2"
    flags += f" --max-tokens 12 --heldout 2 --eval-groups 2 --model {qwen_folder} --name run"
    places = f"--data {tmp_path}/data.jsonl --reward {tmp_path}/rewards.py:grade --out {tmp_path}"
    run_well(train, flags, places)
    run_well(train, "--resume", run, "--steps 2")
    samples = read_lines(run / "samples.jsonl")
    for step in (1, 2):
        scores = {(row["reason"], row["score"]) for row in samples if row["step"] == step}
        assert scores & {("correct", 1.5), ("wrong", -0.25)}
        assert scores <= {("truncated", 0), ("correct", 1.5), ("wrong", -0.25)}
    assert read_lines(run / "metrics.jsonl")[-1]["after"]["no_answer"] == 0
    ask = words_of("--model", run, "--samples 1 --out", tmp_path / "evaluation")
    for edit, answers in (("", 2), ("", 2), ("# edited", 4)):  # of two held-out problems
        with (tmp_path / "rewards.py").open("a") as file:
            file.write(edit)
        run_well(evaluation, ask)
        rows = read_lines(tmp_path / "evaluation" / "generations.jsonl")
        assert len(rows) == answers and {(row["set"], row["limit"]) for row in rows} == {
            ("heldout", 12)
        }
    with pytest.raises(BadInput, match="its file has changed since the run began; restore it"):
        resolve(parse_train(["--resume", str(run)]))


def test_a_reward_that_forks_leaves_no_trainer_behind():
    """The copy ends where the function does."""
    trainer = os.getpid()

    def forks(response: str, answer: object) -> float:
        if os.fork() == 0:
            sys.exit()
        return 1.0

    verdict = grade_by(forks, "", "")
    if os.getpid() != trainer:
        os._exit(0)
    assert verdict.reward == 1
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 1


def test_a_forked_process_holds_no_lock_of_its_trainer(tmp_path):
    """The run's folder can be locked again, although the copy goes on."""
    reads, writes = os.pipe()
    with locked_folder(tmp_path):
        copy = os.fork()
        if not copy:
            os.write(writes, b"forked")
            signal.pause()
        os.read(reads, 6)
    try:
        with locked_folder(tmp_path):
            pass
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
        os.close(reads)
        os.close(writes)


NO_VERDICT = Verdict(None, "infra_error")


@pytest.mark.parametrize(
    "result, expected",
    [
        (True, (1, "correct")), (np.float32(0.5), (0.5, "wrong")), (Fraction(3, 2), (1.5, "correct")),
        (Verdict(0.25, "half"), (0.25, "half")), (NO_VERDICT, NO_VERDICT), (-1e17, (-1e17, "wrong")),
        (None, "it returned None, not a Verdict"), (math.nan, "it returned nan, not a Verdict"),
        (Verdict(math.inf, "x"), "not a Verdict, a finite number"),
        (np.float32(-1e19), r"not a Verdict, a finite number .up to 1e\+17"),
    ],
)  # fmt: skip
def test_a_reward_is_a_verdict_a_number_or_a_bool(result, expected):
    """Anything else is no verdict, and the warning has the cause."""
    if isinstance(expected, str):
        with pytest.warns(RuntimeWarning, match=f"no verdict: --reward: TypeError: .*{expected}"):
            assert grade_by(lambda response, answer: result, "", "") == NO_VERDICT
    else:
        verdict = grade_by(lambda response, answer: result, "", "")
        assert verdict == expected and type(verdict.reward) is not bool


def test_the_largest_rewards_have_advantages():
    """The sum of the squares of Eq. (1) is still a float32 in the largest group."""
    rewards = torch.tensor([LARGEST, -LARGEST] * 2048)
    assert group_advantages(rewards, 4096).abs().min() > 0.99


@pytest.mark.parametrize("end", [KeyError("no"), SystemExit(0), CancelledError()])
def test_an_error_is_no_verdict(end):
    """That holds for what would end the program; only Ctrl-C ends a run."""
    with pytest.warns(RuntimeWarning, match=f"--reward: {type(end).__name__}"):
        assert grade_by(raising(end), "", "") == NO_VERDICT
    with pytest.raises(KeyboardInterrupt):
        grade_by(interrupt, "", "")


@pytest.mark.parametrize(
    "parameters",
    ["response, answer", "answer, response", "answer, response=None, *more", "text, gold"],
)
def test_parameters_are_taken_by_name(parameters, tmp_path):
    """A parameter that is called neither `response` nor `answer` is taken by its place."""
    path = tmp_path / "named.py"
    path.write_text(f"def grade({parameters}):\n    return dict(locals())")
    due = {"response": "R", "answer": "A", "text": "R", "gold": "A", "more": ()}
    assert load_reward(f"{path}:grade").args[0]("R", "A").items() <= due.items()


def test_the_embedded_task_takes_a_reward_of_one_s_own(tmp_path):
    """Without one, it grades as mathematics."""
    (tmp_path / "own.py").write_text("def grade(response, answer):\n    return 0.25")
    for reward, expected in ((f"{tmp_path}/own.py:grade", 0.25), (None, 1.0)):
        settings = Problems(task="embedded", toy_lines=1, reward=reward)
        task, _ = toy.task(settings, toy.make_tokenizer(1), "M")
        assert task.grade(r"\boxed{7}", "7").reward == expected


MOVES = """
import os
import tempfile

os.chdir("/")

def grade(response, answer):
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return len(response) % 2
"""


def test_a_reward_that_changes_the_working_directory_moves_no_path(tmp_path, monkeypatch):
    """Relative folders stay where they were, even if the new one is gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moves.py").write_text(MOVES)
    grade = load_reward("moves.py:grade")
    assert os.getcwd() == str(tmp_path)
    verdicts = grade_all(grade, ["1", "22"], ["", ""])
    assert [verdict.reward for verdict in verdicts] == [1, 0] and os.getcwd() == str(tmp_path)


def test_the_first_cause_may_be_another_rank_s(monkeypatch):
    """The sentence has the first cause of all ranks, and one verdict is enough to go on.

    Responses that were cut off do not count, unless all were.
    """
    nan = math.nan
    for rewards, cut, others, cause in (
        ([nan, nan, 0], [0, 0, 1], ["b", "c"], "b"),
        ([nan, nan, nan], [0, 0, 0], [], "the reward gave no verdict"),
        ([nan, 0, 0], [0, 0, 1], ["b"], None),
        ([0, 0, 0], [1, 1, 1], [], None),
    ):
        rollouts = replace(rollouts_like(torch.ones(3, 2)), truncated=torch.tensor(cut).bool())
        batch = batch_of(torch.tensor(rewards), rollouts, 3)
        monkeypatch.setattr(fsdp, "gather_items", lambda items, ranks, o=others: items + o)
        said = f"step 5: no response could be graded: {cause}"
        with pytest.raises(RunFailed, match=said) if cause else nullcontext():
            check_verdicts(batch, [NO_VERDICT], 4, ALONE)
