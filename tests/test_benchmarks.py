"""tasks/benchmarks.py and rows.py, harness/evaluation.py and tables.py: known answers, order,
resumption.
"""

import base64
import contextlib
import hashlib
import json
import math
import pickle
import zlib
from dataclasses import replace
from itertools import product
from operator import itemgetter

import huggingface_hub
import pytest
import torch
from datasets import Dataset, config
from made import ALONE, Hostile

from grpo import Rollouts
from harness import evaluation, paper_tables, tables
from harness.evaluation import (
    Protocol,
    Sampler,
    describe_set,
    evaluate_benchmark,
    pass_at_k,
    summarise,
)
from harness.files import append_rows
from harness.parallel import Ranks
from tasks import benchmarks, toy
from tasks.benchmarks import (
    BENCHMARKS,
    SUITES,
    Loaded,
    livecodebench_row,
    load_benchmark,
    private_tests,
)
from tasks.rows import BadInput

CHECK = "def check(candidate):\n    assert candidate(2) == 3\n"
STUB = 'def up(n):\n    """One more."""\n'
CASES = [
    {"input": "1\n", "output": "2\n", "testtype": "stdin"},
    {"input": "5\n", "output": "6\n", "testtype": "stdin"},
]
CALLS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]


def pack(cases, inner=None) -> str:
    """Private tests as the hub has them."""
    return base64.b64encode(zlib.compress(pickle.dumps(inner or json.dumps(cases)))).decode()


def contest(date="2025-03-01T00:00:00", private=None, public=None, **columns) -> dict:
    """A row of LiveCodeBench."""
    row = dict(question_title="t", question_content="Add one.", platform="atcoder")
    row |= dict(question_id="abc1", starter_code="", metadata="{}", contest_date=date)
    row["public_test_cases"] = json.dumps(public or CASES[:1])
    row["private_test_cases"] = private or pack(CASES[1:])
    return row | columns


LOOP = "for i in [1]:\n    assert up(i) == i + 1"
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": STUB, "test": CHECK, "entry_point": "up"}
MBPP = {"task_id": 2, "prompt": "P", "test_imports": ["import math"], "test": LOOP}


MBPP |= {"test_list": ["assert up(1) == 2"]}
ROWS = {
    "aime24": {"id": 60, "problem": "P", "answer": "204", "url": "https://x/2024_AIME_I"},
    "aime25": {"question": "P", "answer": "70"},
    "amc23": {"id": 0, "question": "P", "answer": 27.0, "url": "https://x/2023_AMC_12A"},
    "math500": {
        "problem": "P",
        "solution": "s",
        "answer": r"\frac12",
        "level": 2,
        "unique_id": "u",
    },
    "olympiadbench": {"id": 1, "question": "P", "final_answer": ["$1,3$"], "unit": None},
    "humaneval": HUMANEVAL,
    "humaneval+": HUMANEVAL | {"test": "import numpy as np\n" + CHECK},
    "mbpp": MBPP,
    "mbpp+": MBPP,
    "livecodebench": contest(),
}


def cells_of(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


REFERENCES = {
    "aime24": "204", "aime25": "70", "amc23": "27", "math500": r"\frac12", "olympiadbench": "$1,3$",
    "humaneval": {"prompt": STUB, "test": CHECK, "entry_point": "up"},
    "humaneval+": {"prompt": STUB, "test": "import numpy as np\n" + CHECK, "entry_point": "up"},
    "mbpp": {"asserts": ["assert up(1) == 2"], "setup": "import math\n"},
    "mbpp+": {"asserts": [LOOP], "setup": "import math\n"},
    "livecodebench": {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]},
}  # fmt: skip


def write(path, rows) -> str:
    """A JSON-lines file of these rows."""
    path.unlink(missing_ok=True)
    append_rows(path, rows)
    return str(path)


def stand_in(monkeypatch, answers, truncated=()) -> list:
    """Put known responses in place of a model's: the text for the first problem whose prompt holds
    a key.
    """
    calls = []

    def rollout(model, tokenizer, prompts, group_size, *, max_tokens, temperature, generate_batch):
        texts, cut = [], []
        for prompt in prompts:
            texts += [next(text for key, text in answers.items() if key in prompt)] * group_size
            cut += [any(key in prompt for key in truncated)] * group_size
        ids = torch.ones(len(texts), 3, dtype=torch.long)
        draw = torch.rand(1).item()
        calls.append(dict(prompts=prompts, asked=(max_tokens, temperature), draw=draw))
        return Rollouts(ids, ids > 0, ids, ids > 0, torch.tensor(cut), texts)

    monkeypatch.setattr(evaluation, "fast_rollout", rollout)
    return calls


def ask(loaded, tiny, protocol=None, ranks=ALONE, **options) -> list[dict]:
    """`evaluate_benchmark` with a stand-in for the model."""
    protocol = protocol or Protocol(template="plain", samples=1)
    return evaluate_benchmark(Sampler(*tiny, "some/model", 0), loaded, protocol, ranks, **options)


def math_set(count: int) -> Loaded:
    """Problems told apart by their number, each asking for it."""
    problems = [{"id": str(i), "problem": f"Say #{i}.", "answer": str(i)} for i in range(count)]
    return Loaded(BENCHMARKS["math500"], problems, "made", "0")


# ---- numbers -------------------------------------------------------------------------------------


def rows_of(scores: dict[str, list], seed: int = 0) -> list[dict]:
    reasons, rows = {1: "correct", 0: "wrong", None: "infra_error"}, []
    for name, values in scores.items():
        rows += [dict(problem=name, score=s, reason=reasons[s], seed=seed) for s in values]
    return rows


def test_avg_at_k_and_its_clustered_error_are_the_written_out_numbers():
    """Problem means 1, 1/2, 0: mean 1/2, standard deviation 1/2, error 1/2 / sqrt(3). Pooled it
    would be 0.151.

    pass@k is 1 - C(n-c, k) / C(n, k), the mean over all draws of k without putting back.
    """
    result = summarise(rows_of({"a": [1] * 4, "b": [1, 0, 1, 0], "c": [0] * 4}), passes=(1, 2, 4))
    expected = {"mean": 0.5, "error": 0.5 / math.sqrt(3), "problems": 3, "samples": 12, "right": 6}
    expected |= {"pass@1": 0.5, "pass@2": (1 + (1 - 1 / 6) + 0) / 3, "pass@4": 2 / 3}
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    counts = (1, 4, 2), (2, 5, 3), (0, 5, 3), (3, 5, 3)
    assert [pass_at_k(*of_one) for of_one in counts] == [0.5, 0.9, 0, 1]


def test_what_could_not_be_graded_is_in_no_mean_and_counted():
    """A problem of which nothing was graded is no problem; shares are of what was."""
    rows = rows_of({"a": [1, None], "b": [0, 0], "c": [None, None]})
    rows[2]["reason"] = rows[3]["reason"] = "truncated"
    result = summarise(rows)
    expected = dict(mean=0.5, problems=2, samples=3, infra_errors=3, truncated=2 / 3, no_answer=0)
    assert {name: result[name] for name in expected} == pytest.approx(expected)


def test_seeds_give_mean_and_standard_deviation():
    """Means 1/2 and 1: 3/4 ± 0.354 over seeds."""
    rows = rows_of({"a": [1], "b": [0]}, seed=0) + rows_of({"a": [1], "b": [1]}, seed=7)
    result = summarise(rows)
    assert result["seeds"] == {"0": 0.5, "7": 1.0} and result["seed_mean"] == 0.75
    assert result["seed_std"] == pytest.approx(math.sqrt(0.125))


def test_models_are_compared_problem_by_problem():
    """Differences 1, 0, 1 have an error of 1/3; unpaired it would be larger."""
    before, after = {"a": [0], "b": [1], "c": [0]}, {"a": [1], "b": [1], "c": [1]}
    gap = evaluation.paired_difference(rows_of(before), rows_of(after))
    assert (gap["difference"], gap["error"]) == pytest.approx((2 / 3, 1 / 3))


def test_tables_side_by_side_mark_a_sure_gain():
    """Of more than 1.96 standard errors, by *."""
    models = {name: {"amc23": {"mean": 0.5, "error": 0.01}} for name in "ab"}
    for error, cell in ((0.06, "10.0 ± 6.0"), (0.05, "10.0 ± 5.0 *")):
        lines = tables.side_by_side(models, {"b": {"amc23": {"difference": 0.1, "error": error}}})
        assert cells_of(lines[2])[:4] == ["amc23", "50.0 ± 1.0", "50.0 ± 1.0", cell]


def test_the_papers_numbers_average_to_what_it_prints():
    """The two averages that are not those of their rows are its own. All 126 numbers were compared
    with its text.
    """
    wrong, counted = [], 0
    for backbone, methods in paper_tables.PAPER.items():
        for (method, printed), (suite, names) in product(methods.items(), SUITES.items()):
            if suite in printed:
                counted += 1
                mean = sum(printed[name][0] for name in names) / 5
                if abs(mean - printed[suite][0]) > 0.11:
                    wrong.append((backbone, method, suite))
    own = "PRM(Reshape adv.)", "SHEAR"
    assert wrong == [("Qwen2.5-Math-7B", method, "math") for method in own]
    assert counted == 15 + 6
    digest = hashlib.sha256(json.dumps(paper_tables.PAPER).encode()).hexdigest()
    assert digest.startswith("1ad2e0252d33")
    assert paper_tables.suite_of([*SUITES["math"], "math", "x"]) is None


def test_several_benchmarks_end_in_their_average_beside_the_paper_s():
    """Means .1 to .5 ± .01 give 30 ± .01 / sqrt(5). The paper's average of a whole suite is the one
    that it prints.
    """
    results, usual = {}, summarise(rows_of({"a": [1], "b": [0]})) | {"error": 0.01}
    for place, name in enumerate(SUITES["math"], 1):
        results[name] = usual | {"mean": place / 10}
    results["amc23"]["infra_errors"] = 3
    data = {name: {"k": 8} for name in results}
    lines = tables.result_table(results, data, "Qwen2.5-Math-7B")
    cells = cells_of(lines[4])
    assert cells[:5] == ["amc23", "@8", "30.0 ± 1.0", "66.5", "70.3"] and cells[-1] == "3"
    assert cells_of(lines[7])[:5] == ["average", "", "30.0 ± 0.4", "49.6", "51.2"]
    assert any("in no mean" in line for line in lines)
    gaps = {name: {"difference": 0.1, "error": 0.2} for name in results}
    others = {name: result | {"mean": result["mean"] + 0.1} for name, result in results.items()}
    lines = tables.side_by_side({"a": results, "b": others}, {"b": gaps})
    assert cells_of(lines[7])[:4] == ["average", "30.0 ± 0.4", "40.0 ± 0.4", "10.0"]


# ---- loaders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_published_layout_becomes_a_problem(name, tmp_path):
    """Question and reference are where the set has them; another count is said aloud."""
    loaded = load_benchmark(name, [write(tmp_path / "set.jsonl", [ROWS[name]])])
    (problem,) = loaded.problems
    assert problem.get("tests", problem.get("answer")) == REFERENCES[name]
    assert problem["problem"].startswith({"h": "Complete", "l": "Add one."}.get(name[0], "P"))
    counts = " or ".join(map(str, BENCHMARKS[name].counts))
    unit = "rows" if name == "livecodebench" else "problems"
    assert f"1 {unit}, {counts} expected" in loaded.notes[0]
    assert (
        loaded.revision.startswith("sha256:")
        and len(describe_set(loaded, Protocol())["digest"]) == 12
    )


def test_several_files_are_one_set_and_the_right_count_is_no_warning(tmp_path):
    """Thirty of the ninety rows are AIME24, told by their url."""
    urls = [f"https://x/{2022 + place // 30}_AIME" for place in range(90)]
    rows = [ROWS["aime24"] | {"url": url} for url in urls]
    last = tmp_path / "b.json"
    last.write_text(json.dumps(rows[70:]))
    loaded = load_benchmark("aime24", [write(tmp_path / "a.jsonl", rows[:70]), str(last)])
    assert len({problem["id"] for problem in loaded.problems}) == len(loaded.problems) == 30
    assert not loaded.notes


def test_the_hubs_files_are_found_by_pattern_with_their_commit(tmp_path, monkeypatch):
    """The first pattern that fits wins."""
    folder = tmp_path / "abcdef0123456789"
    (folder / "data").mkdir(parents=True)
    write(folder / "train.jsonl", [HUMANEVAL] * 2)
    write(folder / "test.jsonl", [HUMANEVAL] * 3)
    Dataset.from_list([HUMANEVAL]).to_parquet(folder / "data" / "test-00000.parquet")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *wanted, **options: folder)
    loaded = load_benchmark("humaneval")
    assert (len(loaded.problems), loaded.revision) == (1, "abcdef012345")
    assert loaded.source == "openai/openai_humaneval (hub)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "amc23",
            {"question": "P"},
            '--data amc23=.*, row 1: needs "answer".*: question.*math-ai/amc23',
        ),
        ("olympiadbench", {"question": "P", "final_answer": []}, 'row 1: needs "final_answer"'),
        ("humaneval", {"prompt": "P"}, 'row 1: needs "prompt", "test".*found: prompt'),
        ("mbpp+", {"prompt": "P", "test_list": ["assert f()"]}, 'row 1: needs "test"'),
        ("mbpp", MBPP | {"test_list": [None]}, "row 1: "),
        ("livecodebench", {"contest_date": "2025-03-01"}, 'row 1: needs "question_content"'),
        ("aime24", ROWS["aime24"] | {"url": "2023"}, "none of 1 rows"),
        ("math500", "{", "cannot be read"),
    ],
)
def test_bad_files_are_one_sentence(name, content, message, tmp_path):
    """With the file, the row and the remedy."""
    path = tmp_path / "set.jsonl"
    path.write_text(content if content == "{" else json.dumps(content))
    with pytest.raises(BadInput, match=message):
        load_benchmark(name, [str(path)])


def test_names_and_suites_are_loaded_once_and_others_refused(monkeypatch):
    """In the order asked for; the sentence lists those that there are; every file must be there."""

    def load(names, *data):
        return benchmarks.load_sets(names, data, "auto", make_embedded=lambda: "embedded")

    monkeypatch.setattr(benchmarks, "load_benchmark", lambda name, files, flag: (name, *files))
    expected = [(name,) for name in SUITES["math"]]
    expected[SUITES["math"].index("amc23")] += (__file__,)
    assert load(["MATH", "aime24"], f"amc23={__file__}") == expected
    assert load(["embedded"]) == ["embedded"]
    for names, data, message in (
        (["gsm8k"], (), "--bench gsm8k: no such benchmark; give math, code, embedded, aime24"),
        (["amc23", "math500"], ["math500=/no/file"], "--data math500=/no/file: cannot be read"),
        *((["math500"], [text], "give NAME=FILE") for text in ("amc23=x", "math500", "math500=")),
    ):
        with pytest.raises(BadInput, match=message):
            load(names, *data)


# ---- LiveCodeBench -------------------------------------------------------------------------------


def test_livecodebench_calls_and_window(tmp_path):
    """A functional problem becomes a call; contests outside of the window are left out, its days
    are in it.
    """
    call = dict(private=pack(CALLS), public=CALLS, metadata='{"func_name": "add"}')
    days = ("2025-01-31", "2025-02-01T10:00:00", "2025-05-31T23:00:00", "2025-06-01")
    rows = [contest(day, **call, starter_code="class Solution:") for day in days]
    loaded = load_benchmark("livecodebench", [write(tmp_path / "l.jsonl", rows)])
    first, _ = loaded.problems
    tests = {"fn_name": "add", "inputs": [[[1, 2], 3]] * 2, "outputs": [[4, 5]] * 2}
    assert first["tests"] == tests and "class Solution:" in first["problem"]
    assert loaded.window == "2025-02-01 to 2025-05-31"


def test_a_payload_that_does_not_decode_has_no_tests(tmp_path, monkeypatch, tiny):
    """Nothing in it is run, and its generations are infra errors whatever is answered: no pass, no
    zero.
    """
    hostile = pack(None, Hostile(tmp_path / "ran"))
    for payload in (hostile, pack(None, 7), "!!!", pack(CASES)[:-9], pack([]), '"text"'):
        row = livecodebench_row(contest(private=payload))
        assert row["tests"] is None and "cannot be read" in row["fault"]
    assert not (tmp_path / "ran").exists()
    assert private_tests(json.dumps(CASES)) == private_tests(pack(CASES)) == CASES
    rows = [contest(private="!!!"), contest()]
    loaded = load_benchmark("livecodebench", [write(tmp_path / "l.jsonl", rows)])
    assert "1 problems without a verdict" in loaded.notes[1]
    program = "```python\nprint(int(input()) + 1)\n```"
    for cut, reason in (([""], "truncated"), ([], "correct")):
        stand_in(monkeypatch, {"": program}, truncated=cut)
        with contextlib.nullcontext() if cut else pytest.warns(RuntimeWarning, match="no verdict"):
            made = ask(loaded, tiny, Protocol(template="plain", samples=2))
        assert [row["reason"] for row in made] == ["infra_error"] * 2 + [reason] * 2
        assert summarise(made)["infra_errors"] == 2


# ---- evaluate_benchmark --------------------------------------------------------------------------


def test_known_answers_of_each_kind(tmp_path, monkeypatch, tiny):
    """Right, wrong, none and cut off, math and three kinds of programs, through the prompts and the
    graders.
    """
    answers = {"#0": r"\boxed{0}", "#1": r"\boxed{2}", "#2": "2", "#3": r"\boxed{3}"}
    stand_in(monkeypatch, answers, truncated=["#3"])
    rows = ask(math_set(4), tiny)
    assert [row["reason"] for row in rows] == ["correct", "wrong", "no_answer", "truncated"]
    assert [row["score"] for row in rows] == [1, 0, 0, 0]
    right, wrong = (f"```python\ndef up(n):\n    return n + {more}\n```" for more in (1, 2))
    stand_in(monkeypatch, {"# second": wrong, "": right})
    patient = Protocol(template="plain", samples=1, grade_timeout=60)  # on a busy machine, too
    for name in ("humaneval", "humaneval+", "mbpp+"):
        rows = [ROWS[name], ROWS[name] | {"prompt": ROWS[name]["prompt"] + "# second"}]
        loaded = load_benchmark(name, [write(tmp_path / "s.jsonl", rows)])
        assert [row["score"] for row in ask(loaded, tiny, patient)] == [1.0, 0.0], name


def test_what_is_done_is_not_done_again_and_order_does_not_matter(monkeypatch, tiny):
    """Random numbers are the block's own, so a run that goes on draws what an uninterrupted one
    would have drawn.
    """
    loaded, protocol = math_set(6), Protocol(template="plain", samples=2, block=4)
    calls, written = stand_in(monkeypatch, {"": r"\boxed{1}"}), []

    def append(path, rows):
        assert path == "file" and len(rows) == 4
        written.extend(rows)

    monkeypatch.setattr(evaluation.files, "append_rows", append)
    options = dict(seeds=[0, 5], columns={"model": "m"})
    whole = ask(loaded, tiny, protocol, path="file", **options)
    assert written == whole and len(whole) == 24
    assert [len(call["prompts"]) for call in calls] == [2] * 6
    places = [(row["problem"], row["sample"]) for row in whole[:4]]
    assert places == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    draws = [call["draw"] for call in calls]
    assert len(set(draws)) == 6
    calls.clear()
    done = [row for row in whole if (row["seed"], row["block"]) in ((0, 0), (5, 1))]
    again = ask(loaded, tiny, protocol, done=done, **options)
    assert [call["draw"] for call in calls] == [draws[place] for place in (1, 2, 3, 5)]
    key = itemgetter("seed", "problem", "sample")
    assert sorted(again, key=key) == sorted(whole, key=key)


def test_ranks_make_together_what_one_makes(monkeypatch, tiny):
    """Two ranks take blocks in turn; an odd number leaves the second idle."""
    loaded, protocol = math_set(6), Protocol(template="plain", samples=2, block=4)
    calls = stand_in(monkeypatch, {"": r"\boxed{1}"})
    alone = ask(loaded, tiny, protocol)
    draws = [call["draw"] for call in calls]
    calls.clear()
    monkeypatch.setattr(evaluation.parallel, "gather", lambda value, ranks: [value])
    parts = []
    for rank in (0, 1):
        parts += ask(loaded, tiny, protocol, Ranks(rank, 2, ALONE.device))
    assert [call["draw"] for call in calls] == [draws[0], draws[2], draws[1]]
    assert sorted(parts, key=itemgetter("problem", "sample")) == alone


def test_the_limit_leaves_room_for_the_prompt(monkeypatch, tiny):
    """A long problem gets what its prompt leaves of the context, and none is left out. The lowest
    limit holds: the set's own, or the protocol's.
    """
    model, tokenizer = tiny
    context = evaluation.context_of(model)
    problems = [*toy.make_problems(0, 2, 2, 0)[1], {"problem": "1" * context, "answer": "1"}]
    problems = [problem | {"id": str(i)} for i, problem in enumerate(problems)]
    loaded = Loaded(BENCHMARKS["embedded"], problems, "made", "0")
    calls = stand_in(monkeypatch, {"": r"\boxed{1}"})
    rows = ask(loaded, tiny, Protocol(samples=1))
    lengths = {len(tokenizer(p["problem"])["input_ids"]) for p in problems[:2]}
    assert {call["asked"] for call in calls} == {(context - length, 0.1) for length in lengths}
    assert [row["reason"] for row in rows if row["problem"] == "2"] == ["truncated"]
    calls.clear()
    ask(replace(loaded, max_tokens=5), tiny, Protocol(samples=1))
    ask(loaded, tiny, Protocol(samples=1, max_tokens=4, temperature=0.9))
    assert [call["asked"] for call in calls] == [(5, 0.1), (4, 0.9)]


def test_another_models_tokenizer_is_refused_for_the_embedded_set():
    """It would read the problems in other tokens."""
    parts = benchmarks.embedded_set(2, 4, 0), Protocol(), ["one symbol"], "some/model"
    with pytest.raises(BadInput, match="not a model of the embedded task"):
        evaluation.as_task(*parts)
