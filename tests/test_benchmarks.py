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

import huggingface_hub
import pytest
import torch
from cases import ALONE, Hostile
from datasets import Dataset, config

from grpo import Rollouts
from harness import evaluation, paper_tables, tables
from harness.evaluation import Protocol, Sampler, about, evaluate_benchmark, pass_at_k, summarise
from harness.files import append_rows
from harness.parallel import Ranks
from tasks import benchmarks, toy
from tasks.benchmarks import BENCHMARKS, Loaded, livecodebench_row, load_benchmark, private_tests
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
    cases = json.dumps(public or CASES[:1])
    row = dict(
        question_title="t",
        question_content="Add one.",
        platform="atcoder",
        question_id="abc1",
        starter_code="",
    )
    row.update(
        contest_date=date,
        public_test_cases=cases,
        private_test_cases=private or pack(CASES[1:]),
        metadata="{}",
    )
    return {**row, **columns}


LOOP = "for i in [1]:\n    assert up(i) == i + 1"
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": STUB, "test": CHECK, "entry_point": "up"}
MBPP = {
    "task_id": 2,
    "prompt": "P",
    "test_imports": ["import math"],
    "test_list": ["assert up(1) == 2"],
    "test": LOOP,
}
ROWS = {
    "aime24": {
        "id": 60,
        "problem": "P",
        "solution": "so 2",
        "answer": "204",
        "url": "https://x/2024_AIME_I_Problems",
    },
    "aime25": {"question": "P", "answer": "70"},
    "amc23": {"id": 0, "question": "P", "answer": 27.0, "url": "https://x/2023_AMC_12A"},
    "math500": {
        "problem": "P",
        "solution": "s",
        "answer": r"\frac12",
        "subject": "a",
        "level": 2,
        "unique_id": "u",
    },
    "olympiadbench": {
        "id": 1,
        "question": "P",
        "final_answer": ["$1,3$"],
        "is_multiple_answer": True,
        "unit": None,
    },
    "humaneval": HUMANEVAL,
    "humaneval+": {**HUMANEVAL, "test": "import numpy as np\n" + CHECK},
    "mbpp": MBPP,
    "mbpp+": MBPP,
    "livecodebench": contest(),
}
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
    reasons = {1: "correct", 0: "wrong", None: "infra_error"}
    return [
        dict(problem=p, score=s, reason=reasons[s], seed=seed)
        for p, values in scores.items()
        for s in values
    ]


def test_avg_at_k_and_its_clustered_error_are_the_written_out_numbers():
    """Problem means 1, 1/2, 0: mean 1/2, standard deviation 1/2, error 1/2 / sqrt(3). Pooled it
    would be 0.151.

    pass@k is 1 - C(n-c, k) / C(n, k), the mean over all draws of k without putting back.
    """
    result = summarise(rows_of({"a": [1] * 4, "b": [1, 0, 1, 0], "c": [0] * 4}), passes=(1, 2, 4))
    assert result["mean"] == 0.5 and result["error"] == pytest.approx(0.5 / math.sqrt(3))
    assert (result["problems"], result["samples"], result["right"]) == (3, 12, 6)
    assert result["pass@1"] == pytest.approx(0.5)
    assert result["pass@2"] == pytest.approx((1 + (1 - 1 / 6) + 0) / 3)
    assert result["pass@4"] == pytest.approx(2 / 3)
    assert [pass_at_k(*counts) for counts in ((1, 4, 2), (2, 5, 3), (0, 5, 3), (3, 5, 3))] == [
        0.5,
        0.9,
        0,
        1,
    ]


def test_what_could_not_be_graded_is_in_no_mean_and_counted():
    """A problem of which nothing was graded is no problem; shares are of what was."""
    rows = rows_of({"a": [1, None], "b": [0, 0], "c": [None, None]})
    rows[2]["reason"] = rows[3]["reason"] = "truncated"
    result = summarise(rows)
    assert (result["mean"], result["problems"], result["samples"], result["infra_errors"]) == (
        0.5,
        2,
        3,
        3,
    )
    assert (result["truncated"], result["no_answer"]) == (pytest.approx(2 / 3), 0)


def test_seeds_give_mean_and_standard_deviation():
    """Means 1/2 and 1: 3/4 ± 0.354 over seeds."""
    result = summarise(
        rows_of({"a": [1], "b": [0]}, seed=0) + rows_of({"a": [1], "b": [1]}, seed=7)
    )
    assert result["seeds"] == {"0": 0.5, "7": 1.0} and result["seed_mean"] == 0.75
    assert result["seed_std"] == pytest.approx(math.sqrt(0.125))


def test_models_are_compared_problem_by_problem():
    """Differences 1, 0, 1 have an error of 1/3; unpaired it would be larger."""
    gap = evaluation.paired_difference(
        rows_of({"a": [0], "b": [1], "c": [0]}), rows_of({"a": [1], "b": [1], "c": [1]})
    )
    assert gap["difference"] == pytest.approx(2 / 3) and gap["error"] == pytest.approx(1 / 3)


def test_tables_side_by_side_mark_a_sure_gain():
    """Of more than 1.96 standard errors, by *."""
    models = {name: {"amc23": {"mean": 0.5, "error": 0.01}} for name in ("a", "b")}
    for error, cell in ((0.06, "10.0 ± 6.0"), (0.05, "10.0 ± 5.0 *")):
        lines = tables.side_by_side(models, {"b": {"amc23": {"difference": 0.1, "error": error}}})
        assert [cell.strip() for cell in lines[2].split("|")[1:5]] == [
            "amc23",
            "50.0 ± 1.0",
            "50.0 ± 1.0",
            cell,
        ]


def test_the_papers_numbers_average_to_what_it_prints():
    """The two averages that are not those of their rows are its own. All 126 numbers were compared
    with its text.
    """
    wrong, counted = [], 0
    for backbone, methods in paper_tables.PAPER.items():
        for method, printed in methods.items():
            for suite, names in benchmarks.SUITES.items():
                if suite in printed:
                    counted += 1
                    if abs(sum(printed[name][0] for name in names) / 5 - printed[suite][0]) > 0.11:
                        wrong.append((backbone, method, suite))
    assert wrong == [
        ("Qwen2.5-Math-7B", method, "math") for method in ("PRM(Reshape adv.)", "SHEAR")
    ]
    assert counted == 15 + 6
    assert (
        hashlib.sha256(json.dumps(paper_tables.PAPER).encode()).hexdigest()[:12] == "1ad2e0252d33"
    )


def test_several_benchmarks_end_in_their_average_beside_the_paper_s():
    """Means .1 to .5 ± .01 give 30 ± .01 / sqrt(5). The paper's average of a whole suite is the one
    that it prints.
    """
    results = {}
    for place, name in enumerate(benchmarks.SUITES["math"], 1):
        results[name] = summarise(rows_of({"a": [1], "b": [0]})) | {
            "mean": place / 10,
            "error": 0.01,
        }
    results["amc23"]["infra_errors"] = 3
    data = {name: {"k": 8} for name in results}
    lines = tables.result_table(results, data, "Qwen2.5-Math-7B")
    assert [cell.strip() for cell in lines[4].split("|")[1:6]] == [
        "amc23",
        "@8",
        "30.0 ± 1.0",
        "66.5",
        "70.3",
    ]
    assert [cell.strip() for cell in lines[7].split("|")[1:6]] == [
        "average",
        "",
        "30.0 ± 0.4",
        "49.6",
        "51.2",
    ]
    assert lines[4].endswith("| 3     |") and any("in no mean" in line for line in lines)
    gaps = {name: {"difference": 0.1, "error": 0.2} for name in results}
    others = {name: result | {"mean": result["mean"] + 0.1} for name, result in results.items()}
    average = tables.side_by_side({"a": results, "b": others}, {"b": gaps})[7]
    assert [cell.strip() for cell in average.split("|")[1:5]] == [
        "average",
        "30.0 ± 0.4",
        "40.0 ± 0.4",
        "10.0",
    ]


# ---- loaders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_published_layout_becomes_a_problem(name, tmp_path):
    """Question and reference are where the set has them; another count is said aloud."""
    loaded = load_benchmark(name, [write(tmp_path / "set.jsonl", [ROWS[name]])])
    (problem,) = loaded.problems
    assert problem.get("tests", problem.get("answer")) == REFERENCES[name]
    assert problem["problem"].startswith({"h": "Complete", "l": "Add one."}.get(name[0], "P"))
    counts = " or ".join(map(str, BENCHMARKS[name].counts))
    assert (
        f"1 {'rows' if name == 'livecodebench' else 'problems'}, {counts} expected"
        in loaded.notes[0]
    )
    assert loaded.revision.startswith("sha256:") and len(about(loaded, Protocol())["digest"]) == 12


def test_several_files_are_one_set_and_the_right_count_is_no_warning(tmp_path):
    """Thirty of the ninety rows are AIME24, told by their url."""
    urls = [f"https://x/{year}_AIME" for year in (2022, 2023, 2024) for _ in range(30)]
    rows = [{**ROWS["aime24"], "url": url} for url in urls]
    (tmp_path / "b.json").write_text(json.dumps(rows[70:]))
    loaded = load_benchmark(
        "aime24", [write(tmp_path / "a.jsonl", rows[:70]), str(tmp_path / "b.json")]
    )
    assert len(loaded.problems) == 30 and not loaded.notes
    assert len({problem["id"] for problem in loaded.problems}) == 30


def test_the_hubs_files_are_found_by_pattern_with_their_commit(tmp_path, monkeypatch):
    """The first pattern that fits wins; where files are not on the disk, the hub is asked for them,
    and not again.
    """
    folder = tmp_path / "abcdef0123456789"
    (folder / "data").mkdir(parents=True)
    write(folder / "train.jsonl", [HUMANEVAL] * 2)
    requests = []

    def download(local_files_only=False, **wanted):
        if not local_files_only:
            write(folder / "test.jsonl", [HUMANEVAL] * 3)
            Dataset.from_list([HUMANEVAL]).to_parquet(folder / "data" / "test-00000.parquet")
        return str(folder)

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout: requests.append(name)
    )
    for _ in range(2):
        loaded = load_benchmark("humaneval")
        assert (len(loaded.problems), loaded.revision) == (1, "abcdef012345")
        assert loaded.source == "openai/openai_humaneval (hub)" and requests == [
            "openai/openai_humaneval"
        ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "amc23",
            '{"question": "P"}',
            r"--data amc23=.*, row 1: needs \"answer\".*found: question.*math-ai/amc23",
        ),
        ("olympiadbench", '{"question": "P", "final_answer": []}', 'row 1: needs "final_answer"'),
        ("humaneval", '{"prompt": "P"}', 'row 1: needs "prompt", "test".*found: prompt'),
        ("mbpp+", '{"prompt": "P", "test_list": ["assert f()"]}', 'row 1: needs "test"'),
        ("mbpp", json.dumps({**ROWS["mbpp"], "test_list": [None]}), "row 1: "),
        ("livecodebench", '{"contest_date": "2025-03-01"}', 'row 1: needs "question_content"'),
        ("aime24", json.dumps({**ROWS["aime24"], "url": "2023"}), "none of 1 rows"),
        ("math500", "{", "cannot be read"),
    ],
)
def test_bad_files_are_one_sentence(name, content, message, tmp_path):
    """With the file, the row and the remedy."""
    (tmp_path / "set.jsonl").write_text(content)
    with pytest.raises(BadInput, match=message):
        load_benchmark(name, [str(tmp_path / "set.jsonl")])


def test_names_and_suites_are_loaded_once_and_others_refused(monkeypatch):
    """In the order asked for; the sentence lists those that there are; every file must be there."""

    def load(names, data=()):
        return benchmarks.load_sets(names, data, "auto", make_embedded=lambda: "embedded")

    monkeypatch.setattr(benchmarks, "load_benchmark", lambda name, files, flag: (name, *files))
    files = {"amc23": [__file__]}
    loaded = load(["MATH", "aime24"], [f"amc23={__file__}"])
    assert loaded == [(name, *files.get(name, [])) for name in benchmarks.SUITES["math"]]
    assert load(["embedded"]) == ["embedded"]
    for names, data, message in (
        (["gsm8k"], [], "--bench gsm8k: no such benchmark; give math, code, embedded, aime24"),
        (
            ["amc23", "math500"],
            ["math500=/no/file"],
            r"--data math500=/no/file: cannot be read .no such file",
        ),
        *((["math500"], [text], "give NAME=FILE") for text in ("amc23=x", "math500", "math500=")),
    ):
        with pytest.raises(BadInput, match=message):
            load(names, data)


# ---- LiveCodeBench -------------------------------------------------------------------------------


def test_livecodebench_calls_and_window(tmp_path):
    """A functional problem becomes a call; contests outside of the window are left out, its days
    are in it.
    """
    call = dict(
        private=pack(CALLS),
        public=CALLS,
        metadata='{"func_name": "add"}',
        starter_code="class Solution:",
    )
    days = ("2025-01-31", "2025-02-01T10:00:00", "2025-05-31T23:00:00", "2025-06-01")
    path = write(tmp_path / "l.jsonl", [contest(day, **call) for day in days])
    loaded = load_benchmark("livecodebench", [path])
    assert loaded.problems[0]["tests"] == {
        "fn_name": "add",
        "inputs": [[[1, 2], 3]] * 2,
        "outputs": [[4, 5]] * 2,
    }
    assert len(loaded.problems) == 2 and loaded.window == "2025-02-01 to 2025-05-31"
    assert "class Solution:" in loaded.problems[0]["problem"]


def test_a_payload_that_does_not_decode_has_no_tests(tmp_path, monkeypatch, tiny):
    """Nothing in it is run, and its generations are infra errors whatever is answered: no pass, no
    zero.
    """
    payloads = [
        pack(None, Hostile(tmp_path / "ran")),
        pack(None, 7),
        "!!!",
        pack(CASES)[:-9],
        pack([]),
        '"text"',
    ]
    rows = [livecodebench_row(contest(private=payload)) for payload in payloads]
    assert all(row["tests"] is None and "cannot be read" in row["fault"] for row in rows)
    assert not (tmp_path / "ran").exists()
    assert private_tests(json.dumps(CASES)) == private_tests(pack(CASES)) == CASES
    loaded = load_benchmark(
        "livecodebench", [write(tmp_path / "l.jsonl", [contest(private="!!!"), contest()])]
    )
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
    for name in ("humaneval", "humaneval+", "mbpp+"):
        second = {**ROWS[name], "prompt": ROWS[name]["prompt"] + "# second"}
        loaded = load_benchmark(name, [write(tmp_path / "s.jsonl", [ROWS[name], second])])
        stand_in(monkeypatch, {"# second": wrong, "": right})
        patient = Protocol(
            template="plain", samples=1, grade_timeout=60
        )  # seconds: a busy machine is no verdict
        assert [row["score"] for row in ask(loaded, tiny, patient)] == [1.0, 0.0], name


def test_what_is_done_is_not_done_again_and_order_does_not_matter(monkeypatch, tiny):
    """Random numbers are the block's own, so a run that goes on draws what an uninterrupted one
    would have drawn.
    """
    loaded, protocol = math_set(6), Protocol(template="plain", samples=2, block=4)
    calls = stand_in(monkeypatch, {"": r"\boxed{1}"})
    written = []
    monkeypatch.setattr(
        evaluation.files, "append_rows", lambda path, rows: written.append((path, rows))
    )
    whole = ask(loaded, tiny, protocol, seeds=[0, 5], path="file", columns={"model": "m"})
    assert [row for _, rows in written for row in rows] == whole and {
        path for path, _ in written
    } == {"file"}
    assert (
        len(whole) == 24
        and len(written) == 6
        and [len(call["prompts"]) for call in calls] == [2] * 6
    )
    assert [(row["problem"], row["sample"]) for row in whole[:4]] == [
        ("0", 0),
        ("0", 1),
        ("1", 0),
        ("1", 1),
    ]
    draws = [call["draw"] for call in calls]
    assert len(set(draws)) == 6
    calls.clear()
    done = [row for row in whole if (row["seed"], row["block"]) in ((0, 0), (5, 1))]
    again = ask(loaded, tiny, protocol, seeds=[0, 5], done=done, columns={"model": "m"})
    assert [call["draw"] for call in calls] == [draws[place] for place in (1, 2, 3, 5)]
    key = lambda row: (row["seed"], row["problem"], row["sample"])  # noqa: E731
    assert sorted(again, key=key) == sorted(whole, key=key)


def test_ranks_make_together_what_one_makes(monkeypatch, tiny):
    """Two ranks take blocks in turn; an odd number leaves the second idle."""
    loaded, protocol = math_set(6), Protocol(template="plain", samples=2, block=4)
    calls = stand_in(monkeypatch, {"": r"\boxed{1}"})
    alone = ask(loaded, tiny, protocol)
    draws = [call["draw"] for call in calls]
    calls.clear()
    monkeypatch.setattr(evaluation.parallel, "gather", lambda value, ranks: [value])
    parts = [ask(loaded, tiny, protocol, Ranks(rank, 2, ALONE.device)) for rank in (0, 1)]
    assert [call["draw"] for call in calls] == [draws[0], draws[2], draws[1]]
    assert sorted(parts[0] + parts[1], key=lambda row: (row["problem"], row["sample"])) == alone


def test_the_limit_leaves_room_for_the_prompt(monkeypatch, tiny):
    """A long problem gets what its prompt leaves of the context, and none is left out. The lowest
    limit holds: the set's own, or the protocol's.
    """
    model, tokenizer = tiny
    context = evaluation.context_of(model)
    long = Loaded(BENCHMARKS["embedded"], toy.make_problems(0, 2, 2, 0)[1], "made", "0")
    problems = [{"id": str(i), **p} for i, p in enumerate(long.problems)]
    problems.append({"id": "2", "problem": "1" * context, "answer": "1"})
    calls = stand_in(monkeypatch, {"": r"\boxed{1}"})
    loaded = Loaded(BENCHMARKS["embedded"], problems, "made", "0")
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
    with pytest.raises(BadInput, match="not a model of the embedded task"):
        evaluation.as_task(
            benchmarks.embedded_set(2, 4, 0), Protocol(), ["one symbol"], "some/model"
        )
