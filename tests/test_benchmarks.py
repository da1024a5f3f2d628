"""Benchmarks, their evaluation and its tables: known answers, order, resumption."""

import base64
import contextlib
import json
import math
import pickle
import zlib
from dataclasses import replace
from operator import itemgetter

import huggingface_hub
import numpy as np
import pytest
import torch
from builders.case_files import cases
from builders.commands import MakesAFolder
from builders.runs import ALONE
from builders.small_models import save_model
from builders.stand_ins import hear_no_other_ranks, replace_sampler
from pyarrow import Table, parquet

import eval as evaluation
from base import files
from base.errors import BadInput
from base.files import append_rows, read_lines, write_rows
from grpo import Rollouts, hf_generate
from harness.fsdp import Ranks
from harness.generations import finished
from harness.log import mean_and_error
from harness.models import context_of, stop_ids
from tasks import benchmarks
from tasks.benchmarks import BENCHMARKS, SUITES, EvalSet, livecodebench_row, load_benchmark
from tasks.task import Task

PUBLISHED = {case["set"]: case for case in cases("published.jsonl")}
LCB = PUBLISHED["livecodebench"]["row"]
CALLS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
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

    def evaluate(loaded, config=ONE, ranks=ALONE, seeds=(0,)) -> list[dict]:
        config = replace(config, seeds=tuple(seeds))
        blocks = evaluation.blocks_of(path, *tiny, [loaded], config)
        done = finished(tmp_path)
        todo = [block for block in blocks if block.key not in done]
        before = len(read_lines(tmp_path / "generations.jsonl")) if done else 0
        evaluation.sample_blocks(path, todo, config, hf_generate, ranks, tmp_path)
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


def test_avg_at_k_and_its_clustered_error_are_the_written_out_numbers():
    """Three problem means, 1, 1/2 and 0, have mean 1/2 and error 1/2 / sqrt(3).

    Pooled samples would give an error of 0.151.
    """
    scores = evaluation.scores_of(rows_of(a=[1] * 4, b=[1, 0, 1, 0], c=[0] * 4))
    assert scores == {"a": 1, "b": 0.5, "c": 0}
    found = mean_and_error(np.array(list(scores.values())))
    assert found == pytest.approx((0.5, 0.5 / math.sqrt(3), 3))


def test_what_could_not_be_graded_is_in_no_mean_and_counted(capsys):
    """A problem without a graded sample does not count."""
    rows = rows_of(a=[1, None], b=[0, 0], c=[None, None])
    assert evaluation.scores_of(rows) == {"a": 1, "b": 0}
    evaluation.print_table(rows)
    printed = capsys.readouterr().out
    assert "3 infra_error" in printed and "3 could not be graded, and are in no number" in printed
    assert "| m             | 50.0 ± 50.0 |" in printed
    evaluation.print_table(rows_of(a=[None]))
    assert "| m             | -   |" in capsys.readouterr().out


def test_models_are_compared_by_problem(capsys):
    """A gain is paired: differences 1, 0, 1 have error 1/3, and unpaired it would be larger."""
    before = rows_of(a=[0], b=[1], c=[0], d=[1])
    evaluation.print_table(before + rows_of("n", a=[1], b=[1], c=[1], d=[None]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in lines[-3:]] == [
        "50.0 ± 28.9",
        "100.0 ± 0.0",
        "66.7 ± 33.3",
    ]


def test_several_sets_end_in_their_average(capsys):
    """The errors of sets add in squares, and a model that lacks a set has no average."""
    results = [(place / 10, 0.01) for place in range(1, 6)]
    assert evaluation.average(results) == pytest.approx((0.3, 0.01 / math.sqrt(5)))
    rows = rows_of(a=[1], b=[0]) + rows_of("m", "other", a=[1], b=[1]) + rows_of("n", a=[1], b=[1])
    evaluation.print_table(rows)
    *_, title, _, first, second, gain = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (title, first, second)]
    assert cells == [
        ["avg@k ± SE, %", "set", "other", "average"],
        ["m", "50.0 ± 50.0", "100.0 ± 0.0", "75.0 ± 25.0"],
        ["n", "100.0 ± 0.0", "-", "-"],
    ]
    assert "| gain          | 50.0 ± 50.0 | -           | -           |" in gain


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
    rows = []
    for place in range(90):
        rows.append(PUBLISHED["aime24"]["row"] | {"url": f"https://x/{2022 + place // 30}_AIME"})
    loaded = load("aime24", rows)
    assert len({problem["id"] for problem in loaded.problems}) == len(loaded.problems) == 30
    assert not loaded.notes


def test_the_hubs_files_are_found_by_pattern(tmp_path, monkeypatch):
    """No other file of the folder is read, and a set without its file is refused."""
    row = PUBLISHED["humaneval"]["row"]
    folder = tmp_path / "abcdef0123456789"
    (folder / "data").mkdir(parents=True)
    append_rows(folder / "train.jsonl", [row] * 2)
    append_rows(folder / "test.jsonl", [row] * 3)
    parquet.write_table(Table.from_pylist([row]), folder / "data" / "test-00000.parquet")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *wanted, **options: folder)
    loaded = load_benchmark("humaneval")
    assert len(loaded.problems) == 1
    with pytest.raises(BadInput, match=r"500 on the hub: .*no file is named test.jsonl.; give"):
        (folder / "test.jsonl").unlink()
        load_benchmark("math500")


def test_bad_rows_are_one_sentence(load):
    """The sentence names the file, the row and the remedy."""
    for case in cases("published_wrong.jsonl"):
        with pytest.raises(BadInput, match=case["message"]):
            load(case["set"], [case["row"]])


def test_names_and_suites_are_loaded_once_and_others_refused(tmp_path):
    """Sets come in the order asked for, from their files; a refusal lists the names that exist."""

    def load_all(names, *data):
        return benchmarks.load_sets(names, data, lambda: "of a run")

    data = []
    for name in SUITES["math"]:
        path = tmp_path / f"{name}.jsonl"
        write_rows(path, [PUBLISHED[name]["row"]])
        data.append(f"{name}={path}")
    loaded = load_all(["MATH", "aime24"], *data)
    assert [each.name for each in loaded] == SUITES["math"] and len(loaded) == 5
    assert [each.problems[0]["id"] for each in loaded] == [
        PUBLISHED[name]["id"] for name in SUITES["math"]
    ]
    assert load_all(["heldout"]) == ["of a run"]
    message = "--bench gsm8k: no such benchmark; give heldout, math, code, aime24"
    with pytest.raises(BadInput, match=message):
        load_all(["gsm8k"])
    for text in ("amc23=x", "math500", "math500=", "heldout=x", f"aime24={path}"):
        with pytest.raises(BadInput, match=f"--data {text}: give NAME=FILE"):
            load_all(["math500", "aime24", "heldout"], data[0], text)


# ---- LiveCodeBench -------------------------------------------------------------------------------


def test_livecodebench_calls_and_window(load):
    """A functional problem becomes a call; contests outside of the window are left out.

    The window's first and last day are in it.
    """
    call = LCB | dict(metadata='{"func_name": "add"}', starter_code="class Solution:")
    call |= dict(public_test_cases=json.dumps(CALLS), private_test_cases=pack(json.dumps(CALLS)))
    days = ("2025-01-31", "2025-02-01T10:00:00", "2025-05-31T23:00:00", "2025-06-01")
    loaded = load("livecodebench", [call | {"contest_date": day} for day in days])
    first, last = loaded.problems
    tests = {"fn_name": "add", "inputs": [[[1, 2], 3]] * 2, "outputs": [[4, 5]] * 2}
    assert first["tests"] == tests and "class Solution:" in first["problem"]
    assert (first["id"], last["id"]) == ("2 abc1", "3 abc1")


def test_a_payload_that_does_not_decode_has_no_tests(tmp_path, stand_in, load, ask):
    """Nothing in such a payload is run, and its generations are infra errors for any response.

    They count neither as a pass nor as a zero.
    """
    text = LCB["private_test_cases"]
    packed = livecodebench_row(LCB | {"private_test_cases": pack(text)})
    assert packed == livecodebench_row(LCB) and "fault" not in packed
    hostile = pack(MakesAFolder(tmp_path / "ran"))
    for payload in (hostile, pack(7), "!!!", pack(text)[:-9], pack("[]"), '"text"'):
        row = livecodebench_row(LCB | {"private_test_cases": payload})
        assert row["tests"] is None and "cannot be read" in row["fault"]
    assert not (tmp_path / "ran").exists()
    loaded = load("livecodebench", [LCB | {"private_test_cases": "!!!"}, LCB])
    assert "1 problems without a verdict" in loaded.notes[1]
    program = "```python\nprint(int(input()) + 1)\n```"
    for cut, reason in (([""], "truncated"), ([], "correct")):
        stand_in({"": program}, truncated=cut)
        with contextlib.nullcontext() if cut else pytest.warns(RuntimeWarning, match="no verdict"):
            made = ask(loaded, TWO)
        assert [row["reason"] for row in made] == ["infra_error"] * 2 + [reason] * 2
        assert [row["score"] for row in made[:2]] == [None, None]
        (tmp_path / "generations.jsonl").unlink()


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
    for name in ("humaneval", "humaneval+", "mbpp+"):
        row = PUBLISHED[name]["row"]
        loaded = load(name, [row, row | {"prompt": row["prompt"] + "# second"}])
        assert [row["score"] for row in ask(loaded)] == [1.0, 0.0], name


def test_what_is_done_is_not_done_again_and_order_does_not_matter(stand_in, tmp_path, ask):
    """An evaluation that continues draws the random numbers of an uninterrupted one.

    They depend on the block alone. Blocks that are not whole, or twice in the file, are removed,
    those of other sets are kept.
    """
    loaded = math_set(6)
    path = tmp_path / "generations.jsonl"
    calls = stand_in({"": r"\boxed{1}"})
    whole = ask(loaded, TWO, seeds=[0, 5])
    assert read_lines(path) == whole and len(whole) == 24
    assert [len(call["prompts"]) for call in calls] == [2] * 6
    places = [(row["problem"], row["sample"]) for row in whole[:4]]
    assert places == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    draws = [call["draw"] for call in calls]
    assert len(set(draws)) == 6
    calls.clear()
    other = [whole[0] | {"set": "amc23", "of": 1}]
    write_rows(path, whole[:7] + 2 * whole[8:12] + whole[16:20] + other)
    finished(tmp_path)
    assert read_lines(path) == whole[:4] + whole[16:20] + other
    ask(loaded, TWO, seeds=[0, 5])
    assert [call["draw"] for call in calls] == [draws[place] for place in (1, 2, 3, 5)]
    key = itemgetter("set", "seed", "problem", "sample")
    assert sorted(read_lines(path), key=key) == other + sorted(whole, key=key)


def test_ranks_make_together_what_one_makes(stand_in, monkeypatch, tmp_path, ask):
    """Two ranks take blocks in turn; an odd number leaves the second idle."""
    loaded = math_set(6)
    calls = stand_in({"": r"\boxed{1}"})
    alone = ask(loaded, TWO)
    draws = [call["draw"] for call in calls]
    calls.clear()
    hear_no_other_ranks(monkeypatch)
    written = []  # by both ranks, which would not wait for each other
    monkeypatch.setattr(files, "append_rows", lambda path, rows: written.extend(rows))
    monkeypatch.setattr(Ranks, "main", True)
    for rank in (0, 1):
        (tmp_path / "generations.jsonl").write_text("")
        ask(loaded, TWO, Ranks(rank, 2, ALONE.device))
    assert [call["draw"] for call in calls] == [draws[0], draws[2], draws[1]]
    assert sorted(written, key=itemgetter("problem", "sample")) == alone


def test_what_eval_samples_with_is_what_was_asked(tiny, ask, monkeypatch):
    """The stop tokens are the model's, its weights in --dtype; held-out copies stay wrong."""
    model, tokenizer = tiny
    plain = evaluation.rollout
    asked = {}

    def noted(model, *inputs, **options):
        asked.update(options, dtype=model.dtype)
        return plain(model, *inputs, **options)

    monkeypatch.setattr(evaluation, "rollout", noted)
    ask(math_set(1), replace(ONE, dtype="bfloat16", max_tokens=2))
    assert asked["stops"] == stop_ids(model, tokenizer) and asked["dtype"] == torch.bfloat16
    kept = Task("own", [], [{"problem": "1+1", "answer": "2"}], None, None, refuse_copies=True)
    heldout = replace(math_set(1), task=kept)
    assert evaluation.task_of(heldout, "plain", tokenizer, ONE).refuse_copies


def test_the_limit_leaves_room_for_the_prompt(stand_in, tiny, ask, capsys):
    """A long problem gets the rest of the context as its limit, and no problem is left out.

    The lowest limit holds: the set's own, or the flag's. A warning tells of lower ones.
    """
    model, tokenizer = tiny
    context = context_of(model)
    texts = "1", "12", "1" * context
    problems = [{"id": text[:3], "problem": text, "answer": "1"} for text in texts]
    loaded = EvalSet("math500", "math", 1, problems)
    calls = stand_in({"": r"\boxed{1}"})
    rows = ask(loaded)
    first, *_ = evaluation.blocks_of(rows[0]["model"], model, tokenizer, [loaded], ONE)
    expected = {(context - asked.length, 0.1) for asked in first.asked[:2]}
    assert {call["asked"] for call in calls} == expected and len(expected) == 2
    assert [row["problem"] for row in rows] == ["1", "12", "111"]
    assert [row["reason"] for row in rows if row["problem"] == "111"] == ["truncated"]
    evaluation.print_table(rows)
    assert "WARNING: 3 problems had a lower limit, to fit the context" in capsys.readouterr().out
    calls.clear()
    short = EvalSet("math500", "math", 1, problems[:2])
    ask(replace(short, max_tokens=5))
    ask(short, replace(ONE, max_tokens=4, temperature=0.9))
    assert [call["asked"] for call in calls] == [(5, 0.1), (4, 0.9)]
