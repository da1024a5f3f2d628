"""The recoverable walk: what its lines are, and that a response is right exactly where it has no first error."""

import random
from functools import partial

import pytest
import torch

from grpo import hf_generate, rollout
from harness import files
from harness.launch import parse_args
from tasks import benchmarks, toy
from tasks.rows import BadInput
from tasks.walk import Environment, Walk
from train import main

PROBLEM = {"problem": "a=123;b=456;b?\n", "answer": "6"}
REPAIRED = "a1c\na2d\nb6e\n\\boxed{6}"
STRAYED = "b4c\na2d\na3e\n\\boxed{3}"


def kinds(response: str, tail: int = 0) -> list[str]:
    return [line.kind for line in Walk(tail=tail).lines(PROBLEM, response)]


def test_lines_say_who_is_on_track():
    assert kinds(REPAIRED) == ["slip", "off", "repair", "answer"]
    assert kinds(STRAYED) == ["stay", "slip", "off", "answer"]
    assert [line[:2] for line in Walk().lines(PROBLEM, STRAYED)] == [(0, 4), (4, 8), (8, 12), (12, 15)]
    assert kinds("b4c\nb5c\nb6c\ncdef\n\\boxed{6}", tail=4) == ["stay"] * 3 + ["tail", "answer"]


def test_a_repaired_slip_is_no_error_and_the_others_start_where_they_were_made():
    first_error = Walk().first_error
    assert first_error(PROBLEM, REPAIRED) is None
    assert first_error(PROBLEM, STRAYED) == (4, "slip", 8)
    assert first_error(PROBLEM, "a1c\nb5c\na3c\n\\boxed{3}") == (8, "slip", 12)
    assert first_error(PROBLEM, "b4c\nb5c\nb6c\n\\boxed{3}") == (12, "final", 15)
    assert first_error(PROBLEM, "b4c\n\\boxed{6}") == (4, "format", 7)
    assert first_error(PROBLEM, "b4c\nb5c\nb6c\n") == (12, "format", 13)


@pytest.mark.parametrize("walk", (Walk(), Walk(repair=0.5), Walk(luck=0.2, tail=5), Walk(repair=0.0)))
def test_demonstrations_are_right_exactly_where_they_have_no_error(walk):
    rng = random.Random(0)
    right = 0
    for _ in range(300):
        problem = walk.make_problem(rng, 4)
        response = walk.demonstrate(problem, rng)
        is_right = response.endswith(toy.HINT.format(problem["answer"]).strip())
        assert is_right == (walk.first_error(problem, response) is None)
        assert len(toy.SYMBOL.findall(response)) + 1 == walk.response_tokens(4)  # and the stop token
        right += is_right
    assert 0 < right < 300


def test_demonstrations_repair_with_the_chance_that_was_asked_for():
    walk, rng = Walk(repair=0.3, luck=0.2), random.Random(1)
    counts = dict.fromkeys(("stay", "slip", "off", "repair", "answer"), 0)
    for _ in range(500):
        problem = walk.make_problem(rng, 8)
        for line in walk.lines(problem, walk.demonstrate(problem, rng)):
            counts[line.kind] += 1
    assert counts["repair"] / (counts["repair"] + counts["off"]) == pytest.approx(0.3, abs=0.04)
    assert counts["slip"] / (counts["slip"] + counts["stay"]) == pytest.approx(0.2, abs=0.03)
    assert counts["answer"] == 500


def test_the_environment_writes_the_other_label_where_an_on_track_line_begins():
    tokenizer, environment = toy.make_tokenizer(), Environment(1.0, lines=3)
    scores = torch.zeros(1, len(toy.SYMBOLS))
    for said, forced in (("", True), ("b4c\n", True), ("b4", False), ("a1c\n", False), (REPAIRED[:12], False)):
        ids = tokenizer([PROBLEM["problem"] + said], return_tensors="pt")["input_ids"]
        after = environment(ids, scores)
        assert after[0].isfinite().sum() == (1 if forced else len(toy.SYMBOLS)), said
        if forced:
            assert after[0, toy.IDS["a"]] == 0.0
        padded = torch.nn.functional.pad(ids, (3, 0), value=toy.IDS["<pad>"])
        assert torch.equal(environment(padded, scores), after)


def test_slips_come_as_often_as_they_should_in_rollouts():
    torch.manual_seed(0)
    model = toy.make_model(3, seed=0, width=16).eval()
    generate = partial(hf_generate, processors=[Environment(0.4, lines=3)])
    options = dict(max_tokens=1, temperature=1.0, generate=generate)
    texts = rollout(model, toy.make_tokenizer(), [PROBLEM["problem"]], 2000, **options).texts
    assert set(texts) == {"a", "b"} and texts.count("a") / 2000 == pytest.approx(0.4, abs=0.035)


def test_what_the_environment_wrote_gets_no_credit(tmp_path, no_curve):
    words = "--toy-kind recoverable --toy-lines 3 --toy-luck 0.3 --toy-width 32 --warmup-steps 100 --steps 2"
    words += " --window 4 --stride 2 --heldout 8 --eval-groups 8 --name run"
    assert main([*words.split(), "--out", str(tmp_path)]) == 0
    foreign = 0
    for row in files.rows(tmp_path / "run" / "samples.jsonl"):
        for token in Walk(luck=0.3).foreign({"problem": row["problem"]}, row["response"]):
            foreign += 1
            assert row["weights"]["shear"][token] == 0.0
    assert foreign > 0


@pytest.mark.parametrize(
    "words, named",
    [
        ("--toy-luck 0.2", "--toy-luck"),
        ("--toy-lines 9", "--toy-lines"),
        ("--toy-kind recoverable --toy-lines 2 --toy-tail 17", "--toy-tail"),
        ("--toy-kind recoverable --method prm", "--method prm"),
        ("--method oracle-value", "--method oracle-value"),
    ],
)
def test_settings_that_mean_nothing_are_refused(words, named):
    with pytest.raises(BadInput, match=named):
        parse_args(words.split())


def test_eval_knows_no_environment_and_asks_no_walks():
    with pytest.raises(BadInput, match="--bench embedded: has no recoverable problems"):
        benchmarks.embedded_set(4, "recoverable", 8, 0)
