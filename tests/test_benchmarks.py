"""Benchmarks, their evaluation and its tables: known answers, order, resumption."""

import base64
import json
import os
import pickle
import zlib
from dataclasses import replace
from operator import itemgetter
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from builders.case_files import cases
from builders.commands import MakesAFolder
from builders.runs import ALONE
from builders.small_models import save_model
from builders.stand_ins import replace_sampler

import eval as evaluation
from base.errors import BadInput
from base.files import read_lines, write_rows
from grpo import Rollouts, hf_generate
from harness.generations import finished
from harness.models import context_of, stop_ids
from tasks import benchmarks
from tasks.benchmarks import BENCHMARKS, SUITES, EvalSet, livecodebench_row, load_benchmark
from tasks.task import Task

PUBLISHED = {case["set"]: case for case in cases("published.jsonl")}
LCB = PUBLISHED["livecodebench"]["row"]
ONE = evaluation.EvalConfig("cpu", "float32", template="plain", samples=1, grade_timeout=60)
TWO = replace(ONE, samples=2, block=4)


def pack(value) -> str:
    """Private tests as the hub has them."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.fixture
def stand_in(monkeypatch):
    """A function that puts known responses in place of a model's; it returns the list of calls.

    A prompt gets the text of the first key of `answers` that it contains.
    """

    def put(answers, truncated=()) -> list:
        calls = []

        def rollout(model, tokenizer, prompts, group_size, *, max_tokens, temperature, **_):
            texts = []
            cut = []
            for prompt in prompts:
                text = next(text for key, text in answers.items() if key in prompt)
                texts += [text] * group_size
                cut += [any(key in prompt for key in truncated)] * group_size
            ids = torch.ones(len(texts), 3, dtype=torch.long)
            draw = torch.rand(1).item()
            calls.append(dict(prompts=prompts, asked=(max_tokens, temperature), draw=draw))
            return Rollouts(ids, ids > 0, ids, ids > 0, torch.tensor(cut), texts)

        replace_sampler(monkeypatch, rollout)
        return calls

    return put


@pytest.fixture
def ask(tiny, tmp_path):
    """A function by which the untrained model is asked a set, into tmp_path; it returns new rows."""
    path = save_model(tmp_path / "model", *tiny)

    def evaluate(loaded, config=ONE, seeds=(0,)) -> list[dict]:
        config = replace(config, seeds=tuple(seeds))
        blocks = evaluation.blocks_of(path, *tiny, [loaded], config)
        done = finished(tmp_path)
        todo = [block for block in blocks if block.key not in done]
        before = len(read_lines(tmp_path / "generations.jsonl")) if done else 0
        evaluation.sample_blocks(path, todo, config, hf_generate, ALONE, tmp_path)
        return read_lines(tmp_path / "generations.jsonl")[before:]

    return evaluate


@pytest.fixture
def load(tmp_path):
    """A benchmark from a JSON-lines file of these rows."""

    def from_rows(name, rows) -> EvalSet:
        write_rows(tmp_path / "set.jsonl", rows)
        return load_benchmark(name, str(tmp_path / "set.jsonl"))

    return from_rows


def math_set(count: int) -> EvalSet:
    """Problems told apart by their number, each asking for it."""
    problems = [{"id": str(i), "problem": f"Say #{i}.", "answer": str(i)} for i in range(count)]
    return EvalSet("math500", "math", 1, problems)


# ---- numbers -------------------------------------------------------------------------------------


def rows_of(model: str = "m", name: str = "set", **scores: list) -> list[dict]:
    """Rows of each problem with these scores."""
    reasons = {1: "correct", 0: "wrong", None: "infra_error"}
    settings = {"problems": len(scores), "k": max(map(len, scores.values())), "max_tokens": 9}
    rows = []
    for problem, values in scores.items():
        for score in values:
            row = dict(model=model, set=name, weights="", seed=0, limit=9, settings=settings)
            rows.append(row | dict(problem=problem, score=score, reason=reasons[score]))
    return rows


def cells_of(capsys) -> list[list[str]]:
    """The cells of the rows below the title of the table that was printed."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_avg_at_k_has_an_error_clustered_by_problem(capsys):
    """Three problem means, 1, 1/2 and 0, have mean 1/2 and error 1/2 / sqrt(3).

    Pooled samples would give an error of 0.151.
    """
    evaluation.print_table(rows_of(a=[1] * 4, b=[1, 0, 1, 0], c=[0] * 4))
    assert cells_of(capsys) == [["m", "50.0 ± 28.9"]]


def test_what_could_not_be_graded_is_in_no_mean_and_counted(capsys):
    """A problem without a graded sample does not count."""
    rows = rows_of(a=[1, None], b=[0, 0], c=[None, None])
    evaluation.print_table(rows)
    printed = capsys.readouterr().out
    assert "3 infra_error" in printed and "3 could not be graded, and are in no number" in printed
    for graded, number in (rows, "50.0 ± 50.0"), (rows[-1:], "-"):
        evaluation.print_table(graded)
        assert cells_of(capsys) == [["m", number]]


def test_models_are_compared_by_problem(capsys):
    """A gain is paired, whatever the order: differences 1, 0, 1 have error 1/3.

    Unpaired, it would be larger. Models that were asked otherwise are told.
    """
    first = rows_of(d=[1], a=[0], b=[1], c=[0], e=[None])
    second = rows_of("n", a=[1], b=[1], c=[1], d=[None], e=[1])
    evaluation.print_table(first + second)
    assert cells_of(capsys) == [
        ["m", "50.0 ± 28.9"],
        ["n", "100.0 ± 0.0"],
        ["gain", "66.7 ± 33.3"],
    ]
    for row in second:
        row["settings"] = {**row["settings"], "template": "plain"}
    evaluation.print_table(first + second)
    assert "WARNING: it was asked otherwise than the model before" in capsys.readouterr().out


def test_several_sets_end_in_their_average(capsys):
    """Sets weigh alike, and their errors add in squares; without a set there is no average."""
    rows = rows_of(a=[1], b=[0], c=[0]) + rows_of("m", "other", a=[1], b=[0])
    evaluation.print_table(rows + rows_of("n", a=[1], b=[1], c=[1]))
    assert cells_of(capsys) == [
        ["m", "33.3 ± 33.3", "50.0 ± 50.0", "41.7 ± 30.0"],
        ["n", "100.0 ± 0.0", "-", "-"],
        ["gain", "66.7 ± 33.3", "-", "-"],
    ]


# ---- loaders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_of_the_published_layout_becomes_a_problem(name, load):
    """Question and reference are read from the set's columns; a wrong number of rows is noted."""
    case = PUBLISHED[name]
    loaded = load(name, [case["row"]])
    (problem,) = loaded.problems
    assert problem.get("tests", problem.get("answer")) == case["reference"]
    assert problem["problem"].startswith(case["problem"]) and problem["id"] == case["id"]
    counts = " or ".join(map(str, BENCHMARKS[name].counts))
    assert f"1 rows, {counts} expected" in loaded.notes[0]


def test_the_right_count_is_no_warning(load):
    """Thirty of the ninety rows are AIME24, told by their url."""
    row = PUBLISHED["aime24"]["row"]
    loaded = load("aime24", [row | {"url": f"https://x/{2022 + i // 30}_AIME"} for i in range(90)])
    assert len(loaded.problems) == 30 and not loaded.notes


def test_the_hubs_files_are_found_by_pattern(tmp_path, monkeypatch):
    """They are read by name, and no other file of the folder; a set without one is refused."""
    for name in "cadbe":
        row = {"question": name, "answer": "1"}
        write_rows(tmp_path / f"{name}.jsonl", [row])
    (tmp_path / "0.json").write_text("[]")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *wanted, **options: tmp_path)
    loaded = load_benchmark("aime25")
    assert [problem["problem"] for problem in loaded.problems] == list("abcde")
    with pytest.raises(
        BadInput,
        match=r"--bench math500: .* on the hub: .*no file is named test.jsonl.; give .* math500=FILE",
    ):
        load_benchmark("math500")


@pytest.mark.parametrize("case", cases("published_wrong.jsonl"))
def test_bad_rows_are_one_sentence(case, load):
    """The sentence names the file, the row and the remedy."""
    with pytest.raises(BadInput, match=case["message"]):
        load(case["set"], [case["row"]])


def test_names_and_suites_are_loaded_once_from_their_files(tmp_path):
    """Sets come in the order asked for, and what a run held out from the run."""
    names = SUITES["math"]
    data = [f"{name}={tmp_path / name}" for name in names]
    for name in names:
        write_rows(tmp_path / name, [PUBLISHED[name]["row"]])
    first, *others = benchmarks.load_sets(["heldout", "MATH", "aime24"], data, lambda: "of a run")
    assert first == "of a run" and [loaded.name for loaded in others] == names
    assert others[0].problems[0]["id"] == PUBLISHED[names[0]]["id"]
    with pytest.raises(BadInput, match=f"--data {data[0]}: give NAME=FILE, once for a NAME"):
        benchmarks.load_sets(["math"], [*data, data[0]], None)


# ---- LiveCodeBench -------------------------------------------------------------------------------


def test_livecodebench_calls_and_window(load):
    """A functional problem becomes a call; contests outside of the window are left out.

    The window's first and last day are in it.
    """
    calls = json.dumps([{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}])
    call = LCB | dict(metadata='{"func_name": "add"}', starter_code="class Solution:")
    call |= dict(public_test_cases=calls, private_test_cases=pack(calls))
    days = ("2025-01-31", "2025-02-01T10:00:00", "2025-05-31T23:00:00", "2025-06-01")
    loaded = load("livecodebench", [call | {"contest_date": day} for day in days])
    assert [problem["id"] for problem in loaded.problems] == ["2 abc1", "3 abc1"]
    tests = {"fn_name": "add", "inputs": [[[1, 2], 3]] * 2, "outputs": [[4, 5]] * 2}
    assert loaded.problems[0]["tests"] == tests
    assert "class Solution:" in loaded.problems[0]["problem"]


def test_a_payload_that_does_not_decode_has_no_tests(tmp_path, stand_in, load, ask):
    """Nothing in such a payload is run, and its generations are infra errors for any response.

    They count neither as a pass nor as a zero.
    """
    text = LCB["private_test_cases"]
    assert livecodebench_row(LCB | {"private_test_cases": pack(text)}) == livecodebench_row(LCB)
    hostile = pack(MakesAFolder(tmp_path / "ran"))
    for payload in (hostile, pack(7), "!!!", pack(text)[:-9], pack("[]"), '"text"'):
        row = livecodebench_row(LCB | {"private_test_cases": payload})
        assert row["tests"] is None and "cannot be read" in row["fault"]
    assert not (tmp_path / "ran").exists()
    loaded = load("livecodebench", [LCB | {"private_test_cases": "!!!"}, LCB])
    assert "1 problems without a verdict" in loaded.notes[1]
    stand_in({"": ""}, truncated=[""])
    assert [(row["score"], row["reason"]) for row in ask(loaded)] == [
        (None, "infra_error"),
        (0, "truncated"),
    ]


# ---- sampling and grading ------------------------------------------------------------------------


def test_known_answers_of_each_kind(stand_in, load, ask):
    """Known responses get their verdicts, through the prompts and the graders.

    They are right, wrong, without an answer and cut off, in math and three kinds of programs.
    """
    answers = {"#0": r"\boxed{0}", "#1": r"\boxed{2}", "#2": "2", "#3": r"\boxed{3}"}
    stand_in(answers, truncated=["#3"])
    rows = ask(math_set(4))
    assert [row["reason"] for row in rows] == ["correct", "wrong", "no_answer", "truncated"]
    assert [row["score"] for row in rows] == [1, 0, 0, 0]
    right, wrong = (f"```python\ndef up(n):\n    return n + {more}\n```" for more in (1, 2))
    stand_in({"# second": wrong, "": right})
    for name in ("humaneval", "mbpp+"):
        row = PUBLISHED[name]["row"]
        loaded = load(name, [row, row | {"prompt": row["prompt"] + "# second"}])
        assert [row["score"] for row in ask(loaded)] == [1.0, 0.0], name


def test_what_is_done_is_not_done_again_and_order_does_not_matter(stand_in, tmp_path, ask):
    """An evaluation that continues draws the random numbers of an uninterrupted one.

    They depend on the block alone. Blocks that are not whole, or twice in the file, are removed,
    those of other sets are kept.
    """
    path = tmp_path / "generations.jsonl"
    calls = stand_in({"": r"\boxed{1}"})
    whole = ask(math_set(6), TWO, seeds=[0, 5])
    assert [len(call["prompts"]) for call in calls] == [2] * 6 and len(whole) == 24
    assert [(row["problem"], row["sample"]) for row in whole[1:3]] == [("0", 1), ("1", 0)]
    draws = [call["draw"] for call in calls]
    assert len(set(draws)) == 6
    ask(replace(math_set(6), name="other"), TWO)
    assert not {call["draw"] for call in calls[6:]} & set(draws)
    calls.clear()
    other = whole[0] | {"set": "amc23", "of": 1}
    write_rows(path, [*whole[:7], *whole[8:12], *whole[8:12], *whole[16:20], other])
    ask(math_set(6), TWO, seeds=[0, 5])
    assert [call["draw"] for call in calls] == [draws[place] for place in (1, 2, 3, 5)]
    rows = read_lines(path)
    assert rows[:9] == [*whole[:4], *whole[16:20], other]
    key = itemgetter("seed", "problem", "sample")
    assert sorted(rows[:8] + rows[9:], key=key) == sorted(whole, key=key)


def test_what_eval_samples_with_is_what_was_asked(tiny, ask, monkeypatch):
    """The stop tokens are the model's, its weights in --dtype; held-out copies stay wrong."""
    model, tokenizer = tiny
    sampler = Mock(wraps=evaluation.rollout)
    monkeypatch.setattr(evaluation, "rollout", sampler)
    ask(math_set(1), replace(ONE, dtype="bfloat16", max_tokens=2, generate_batch=3))
    (own, _, (prompt,), _), asked = sampler.call_args
    assert own.dtype == torch.bfloat16 and asked["stops"] == stop_ids(model, tokenizer)
    assert asked["batch_tokens"] == 3 * (len(tokenizer(prompt)["input_ids"]) + 2)
    heldout = replace(math_set(1), task=Task("own", [], [], None, None, refuse_copies=True))
    assert evaluation.task_of(heldout, "plain", tokenizer, ONE).refuse_copies


def test_what_decides_a_response_is_in_its_key(tiny, tmp_path):
    """A file of the model, a row of the data, a setting and the seed are; nothing else is.

    What is asked by another key is sampled anew.
    """
    tiny[1].chat_template = "{{ messages[0].content }}"
    path = save_model(tmp_path / "model", *tiny)

    def keys(loaded=None, **settings) -> set[str]:
        sets = [loaded or math_set(3)]
        blocks = evaluation.blocks_of(path, *tiny, sets, replace(TWO, **settings))
        return {block.key for block in blocks}

    asked = keys()
    assert keys(threads=1, generate_batch=3, ranks=1) == asked < keys(seeds=(1, 0))
    changes = dict(temperature=0.5, max_tokens=3, samples=1, template="chat", block=6, seeds=(1,))
    changes |= dict(dtype="bfloat16", grade_timeout=9.0, sandbox="process", use=("mine",))
    for name, value in changes.items():
        assert not asked & keys(**{name: value}), name
    edited = math_set(3)
    edited.problems[2]["answer"] = "3"
    assert not asked & keys(edited)
    for name in "model.safetensors", "tokenizer_config.json":
        before = keys()
        os.utime(tmp_path / "model" / name, (0, 0))  # as whoever rewrites it leaves
        assert not before & keys()


def test_the_limit_leaves_room_for_the_prompt(stand_in, tiny, ask, capsys):
    """A long problem gets the rest of the context as its limit, and no problem is left out.

    The lowest limit holds: the set's own, or the flag's. A warning tells of lower ones.
    """
    context = context_of(tiny[0])
    calls = stand_in({"": r"\boxed{1}"})

    def evaluate(*texts: str, config=ONE, **limits) -> list[dict]:
        problems = [{"id": text[:3], "problem": text, "answer": "1"} for text in texts]
        return ask(EvalSet("math500", "math", 1, problems, **limits), config)

    rows = evaluate("1", "12", "1" * context)
    lengths = [len(tiny[1](call["prompts"][0])["input_ids"]) for call in calls]
    assert [call["asked"] for call in calls] == [(context - length, 0.1) for length in lengths]
    assert [row["problem"] for row in rows] == ["1", "12", "111"] and len(calls) == 2
    assert rows[2]["reason"] == "truncated"
    evaluation.print_table(rows)
    assert "WARNING: 3 problems had a lower limit, to fit the context" in capsys.readouterr().out
    evaluate("1", max_tokens=5)
    evaluate("1", config=replace(ONE, max_tokens=4, temperature=0.9))
    assert [call["asked"] for call in calls[2:]] == [(5, 0.1), (4, 0.9)]
