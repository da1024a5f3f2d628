"""tasks/problems.py and rows.py: problems of files, folders and the hub, prompts, the order of
problems, verdicts.
"""

import csv
import gzip
import json

import datasets
import huggingface_hub
import pytest
import torch
from cases import configured
from datasets import Dataset, DatasetDict
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from grpo import Rollouts
from harness.files import append_rows
from harness.prepare import make_task
from integrations.trl_rewards import without_bos
from rewards import grade_math
from tasks import toy
from tasks.benchmarks import load_benchmark
from tasks.problems import (
    HUB,
    INSTRUCTIONS,
    Task,
    choose_template,
    digest_of,
    load_problems,
    render,
    text_task,
)
from tasks.rows import BadInput

MATH = INSTRUCTIONS["math"]


@pytest.fixture(autouse=True)
def no_traces(tmp_path_factory, monkeypatch):
    """What `datasets` caches goes with the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def qwen(qwen_folder):
    """A byte-level tokenizer with the marks of turns and a chat template."""
    return AutoTokenizer.from_pretrained(qwen_folder)


def numbered(count: int) -> list[dict]:
    """Problems told apart by their answers."""
    return [{"problem": f"What is {i}?", "answer": str(i)} for i in range(count)]


def test_an_epoch_holds_every_problem_once_in_a_seeded_order():
    """Steps that straddle an epoch's end lose and repeat nothing; a step depends on (step, seed)
    alone. Other problems, or other answers to them, have another digest.
    """
    task = Task("t", numbered(10), [], None, grade_math)
    steps = [task.draw(step, 4, seed=0) for step in range(5)]
    flat = [problem["answer"] for step in steps for problem in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == sorted(str(i) for i in range(10))
    assert flat[:10] != flat[10:]
    assert task.draw(3, 4, seed=0) == steps[3] and task.draw(3, 4, seed=1) != steps[3]
    for column in ("problem", "answer"):
        others = [*numbered(9), numbered(10)[9] | {column: "?"}]
        assert digest_of(others) != digest_of(numbered(10)) == digest_of(task.train)


def test_verdicts_go_to_the_right_problem_and_cut_responses_score_zero():
    """G rollouts per problem, adjacent; a response without an end is wrong even with the right box
    in it.
    """
    task = Task("t", [], [], None, grade_math)
    texts = [r"\boxed{0}", *[r"\boxed{1}"] * 3]
    cut = torch.tensor([False, False, False, True])
    verdicts = task.verdicts(numbered(2), Rollouts(None, None, None, None, cut, texts))
    assert [tuple(v) for v in verdicts] == [
        (1, "correct"),
        (0, "wrong"),
        (1, "correct"),
        (0, "truncated"),
    ]


@pytest.mark.parametrize(
    "method, context, dropped", [("grpo", 259, 1), ("rlsd", 259, 2), ("hsd", 268, 2)]
)
def test_prompts_that_leave_no_room_are_dropped_and_counted(
    method, context, dropped, qwen, tmp_path
):
    """Of over 250 tokens, a byte each: one of 300 letters, or of 100 where its answer of 60 is
    told; hsd tells more.
    """
    rows = [
        *numbered(5),
        {"problem": "x" * 300, "answer": "1"},
        {"problem": "x" * 100, "answer": "1" * 60},
    ]
    append_rows(tmp_path / "x.jsonl", rows)
    words = "--model M --max-tokens 9 --heldout 2 --eval-groups 2 --template chat --method".split()
    config = configured([*words, method, "--data", str(tmp_path / "x.jsonl")])
    config, task, notes = make_task(config, qwen, context)
    assert f"{dropped} problems dropped: prompts of over 250 tokens" in notes
    assert (len(task.train), len(task.heldout)) == (5 - dropped, 2)


def test_sizes_that_were_not_given_shrink_to_the_data_and_the_context(qwen, tmp_path):
    """And the plan says so; given ones stay, or are refused; sets that are large enough change
    nothing.
    """
    append_rows(tmp_path / "x.jsonl", numbered(38))
    for words, sizes in (
        ("", (7, 31, 31, 256)),
        ("--heldout 6 --max-tokens 9", (6, 32, 32, 9)),
        ("--prompts-per-step 8", (7, 8, 8, 256)),
        ("--prompts-per-update 4", (7, 28, 4, 256)),
        ("--prompts-per-step 24 --heldout 18", (18, 24, 24, 256)),
        ("--prompts-per-step 64 --prompts-per-update 64", (7, 64, 64, 256)),
    ):
        config = configured(["--model", "M", "--data", str(tmp_path / "x.jsonl"), *words.split()])
        config, task, notes = make_task(config, qwen, 512)
        assert (
            config.problems.heldout,
            config.sampling.prompts_per_step,
            config.optimisation.prompts_per_update,
            config.sampling.max_tokens,
        ) == sizes
        assert (len(task.train), len(task.heldout)) == (38 - sizes[0], sizes[0])
        assert ("--heldout 7, not 64: there are 38 problems" in notes) == ("--heldout" not in words)
    config = configured(["--model", "M", "--data", str(tmp_path / "x.jsonl"), "--heldout", "38"])
    with pytest.raises(BadInput, match="not more than --heldout 38"):
        make_task(config, qwen, 512)
    append_rows(tmp_path / "many.jsonl", numbered(800))
    config = configured(["--model", "M", "--data", str(tmp_path / "many.jsonl")])
    config, _, notes = make_task(config, qwen, 4096)  # the context of Qwen2.5-Math-7B
    assert not any(", not " in note for note in notes)
    assert (
        config.problems.heldout,
        config.sampling.prompts_per_step,
        config.sampling.max_tokens,
    ) == (64, 512, 3000)


# ---- templates -----------------------------------------------------------------------------------


def test_prompts_of_every_template(qwen):
    """Character by character, and the turns' marks become their own ids."""
    math = f"<|im_start|>system\n{MATH}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    chat = f"<|im_start|>user\n1+1?\n{MATH}<|im_end|>\n<|im_start|>assistant\n"
    assert render("qwen-math", "1+1?", MATH, qwen) == math
    assert render("chat", "1+1?", MATH, qwen) == chat
    assert render("plain", "1+1?", MATH, qwen) == f"1+1?\n{MATH}\n"
    assert qwen(math, add_special_tokens=False)["input_ids"].count(1) == 3


def test_plain_prompts_start_as_the_tokenizer_starts_a_text():
    """With the token that begins texts where the tokenizer puts one, as Llama's does; encoding adds
    none.
    """
    tokenizer = toy.make_tokenizer()
    assert render("plain", "1", "2", tokenizer) == "1\n2\n"
    symbol, index = tokenizer.convert_ids_to_tokens(1), 1
    tokenizer.bos_token = symbol
    assert without_bos(tokenizer, [f"{symbol}1\n"]) == [f"{symbol}1\n"]
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{symbol} $A", special_tokens=[(symbol, index)]
    )
    assert render("plain", "1", "2", tokenizer) == f"{symbol}1\n2\n"
    assert without_bos(tokenizer, [f"{symbol}1\n", "2\n"]) == ["1\n", "2\n"]


@pytest.mark.parametrize(
    "name, has_turns, has_chat, template",
    [
        ("Qwen/Qwen2.5-Math-7B", True, True, "qwen-math"),
        ("cache/models--Qwen--Qwen2.5-Math-7B/snapshots/0a1b", True, True, "qwen-math"),
        ("Qwen/Qwen2.5-Math-7B", False, True, "chat"),
        ("/home/mathilda/qwen", True, True, "chat"),
        ("Qwen/Qwen2.5-7B", True, False, "plain"),
    ],
)
def test_auto_goes_by_the_name_then_by_the_tokenizer(name, has_turns, has_chat, template, qwen):
    """Both words in one part of the name; tokens it needs must be there."""
    tokenizer = qwen if has_turns else toy.make_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}" if has_chat else None
    assert choose_template("auto", name, tokenizer) == template


@pytest.mark.parametrize(
    "template, lacks", [("qwen-math", r"<\|im_end\|>"), ("chat", "chat template"), ("plain", "")]
)
def test_a_template_that_is_asked_for_is_used_whatever_the_name(template, lacks, qwen):
    """With the instruction of the kind of problems; refused where its marks would be read as
    letters.
    """
    assert choose_template(template, "qwen-math", qwen) == template
    for kind in INSTRUCTIONS:
        task = text_task(kind, template, qwen, grade_math)
        assert task.prompt({"problem": "Print 0."}) == render(
            template, "Print 0.", INSTRUCTIONS[kind], qwen
        )
    if lacks:
        with pytest.raises(
            BadInput, match=f"--template {template}: .* of some/model has no {lacks}; use "
        ):
            choose_template(template, "some/model", toy.make_tokenizer())


# ---- JSON lines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"problem": "a", "answer": "1"}\n{"problem": \n', "line 2: not JSON"),
        (
            '{"problem": "a", "solution": "1"}\n',
            'line 1: needs "answer", .*found: problem, solution',
        ),
        ('{"problem": "a", "answer": " "}\n', "line 1: needs"),
        ('{"problem": "\\ud800", "answer": "1"}\n', "line 1: needs"),
        ('{"a":' * 100_000 + "\n", "line 1: not JSON"),
        ('\n{"problem": "a", "answer": 1}\n', "line 2: needs"),
        ("1\n", 'line 1: needs "problem", .*found: no keys'),
        ("\n\n", "holds no problem"),
        (None, "cannot be read .no such file or folder"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(content, message, tmp_path):
    """One sentence with file and line."""
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadInput, match=message) as error:
        load_problems("math", str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_json_lines_in_our_own_form_are_taken_as_they_are(tmp_path):
    """With every column, whatever its level; compressed or not."""
    rows = [
        {"problem": "a", "answer": "1", "level": 1},
        {"problem": "b", "answer": "2", "source": "here"},
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "x.jsonl").write_text(text)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for path in tmp_path.iterdir():
        assert load_problems("math", str(path)) == (rows, [f"data {path}: 2 problems"])


@pytest.mark.parametrize(
    "tests, message",
    [
        ("[]", "must be an object"),
        ("{}", "needs inputs and outputs, lists of text; or asserts"),
        ('{"inputs": ["1"], "outputs": []}', "needs inputs"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "has 1 inputs and 2 outputs"),
    ],
)
def test_tests_that_decide_nothing_are_refused(tests, message, tmp_path):
    """A program must not pass because there was nothing to fail."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"problem": "a", "tests": {tests}}}\n')
    with pytest.raises(BadInput, match=f'line 1: "tests": {message}'):
        load_problems("code", str(path))


# ---- tables, folders -----------------------------------------------------------------------------


OTHERS = Dataset.from_list(numbered(9))


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_folder(path, rows):
    path.mkdir()
    Dataset.from_list(rows).to_parquet(path / "train.parquet")
    OTHERS.to_parquet(path / "test.parquet")


def write_csv_folder(path, rows):
    path.mkdir()
    write_csv(path / "x.csv", rows)


WRITERS = {
    "x[1].parquet": lambda path, rows: Dataset.from_list(rows).to_parquet(path),
    "x.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "x.csv": write_csv,
    "saved": lambda path, rows: Dataset.from_list(rows).save_to_disk(path),
    "splits": lambda path, rows: DatasetDict(
        eval=OTHERS, train=Dataset.from_list(rows)
    ).save_to_disk(path),
    "folder": write_folder,
    "folder of csv": write_csv_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_and_folder_gives_the_same_problems(name, tmp_path, monkeypatch):
    """Of several splits the training one; answers stay the text they are. None needs a home to be
    copied into.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/proc/no-home")
    rows = [{"problem": "a", "answer": "007"}, {"problem": "b", "answer": "1.50"}]
    WRITERS[name](tmp_path / name, rows)
    problems, notes = load_problems("math", str(tmp_path / name))
    assert problems == rows and notes == [
        f"data {tmp_path / name}: 2 of 2 rows of levels 3 to 5, or of none"
    ]


@pytest.mark.parametrize(
    "row, answer",
    [
        ({"question": "q", "answer": "1", "gt_answer": "2"}, "2"),
        ({"question": "q", "ground_truth_answer": "3", "input": "<|im_start|>..."}, "3"),
        (
            {
                "problem": "q",
                "solution": r"first \boxed{3}, so \boxed{\frac{1}{2}}.",
                "level": "Level 4",
            },
            r"\frac{1}{2}",
        ),
        ({"problem": "q", "answer": 12}, "12"),
        (
            {
                "question": "q",
                "prompt": [{"role": "user", "content": "<|im_start|>"}],
                "gt_answer": "4",
            },
            "4",
        ),
        ({"extra_info": {"question": "q", "answer": "5"}}, "5"),
        (
            {
                "prompt": [{"role": "user", "content": text} for text in ("first", "q")],
                "ability": "math",
                "reward_model": {"ground_truth": "6"},
            },
            "6",
        ),
    ],
)
def test_rows_of_the_known_layouts_become_problems(row, answer, tmp_path):
    """Column names of MATH, SimpleRL-Zoo and Eurus."""
    (tmp_path / "x.json").write_text(json.dumps([row]))
    assert load_problems("math", str(tmp_path / "x.json"))[0] == [
        {"problem": "q", "answer": answer}
    ]


def test_levels_and_abilities_of_others_are_left_out(tmp_path):
    """Before anything else is asked of a row; programs have no such levels."""
    levels = [1, 2, 3, "Level 4", "5", 4.0, 6, 34, "Level ?", None, ""]
    rows = [{"problem": f"L{level}", "answer": "1", "level": level} for level in levels]
    (tmp_path / "x.json").write_text(json.dumps([*rows, {"ability": "code"}]))
    problems, notes = load_problems("math", str(tmp_path / "x.json"))
    assert [p["problem"] for p in problems] == ["L3", "LLevel 4", "L5", "L4.0", "LNone", "L"]
    assert "6 of 12 rows of levels 3 to 5" in notes[0]
    tests = {"inputs": [""], "outputs": ["1"]}
    row = {"problem": "a", "tests": tests, "level": 1, "reward_model": None}
    (tmp_path / "x.json").write_text(json.dumps([row, {"ability": "math"}]))
    problems, notes = load_problems("code", str(tmp_path / "x.json"))
    assert problems == [{"problem": "a", "tests": tests}] and "1 of 2 rows of ability" in notes[0]


def test_own_tests_survive_a_table(tmp_path):
    """In parquet each row has every other row's keys, empty; in csv they are JSON text. One style
    is not another.
    """
    script = {"inputs": ["1"], "outputs": ["2"]}
    all_tests = [script, {"asserts": ["assert f(1) == 2"], "setup": ""}, {"fn_name": "f", **script}]
    expected = [{"problem": "a", "tests": tests} for tests in all_tests]
    WRITERS["x[1].parquet"](tmp_path / "x.parquet", expected[:2])
    assert load_problems("code", str(tmp_path / "x.parquet"))[0] == expected[:2]
    write_csv(
        tmp_path / "x.csv",
        [{"problem": "a", "tests": json.dumps(tests)} for tests in all_tests[:2]],
    )
    assert load_problems("code", str(tmp_path / "x.csv"))[0] == expected[:2]
    WRITERS["x[1].parquet"](tmp_path / "y.parquet", expected)
    with pytest.raises(
        BadInput, match=r'y\.parquet, row 3: "tests": needs fn_name, a list of argument lists'
    ):
        load_problems("code", str(tmp_path / "y.parquet"))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.json", '[{"problem": "a", "answer": "1"}, 3]', 'row 2: needs "problem" or "question"'),
        ("x.json", '[{"problem": "<|im_start|>user", "answer": "1"}]', "row 1: holds a template"),
        (
            "x.json",
            '[{"problem": "a", "answer": true}]',
            'row 1: needs "answer".*found: problem, answer',
        ),
        ("x.json", '[{"problem": "a", "solution": "none"}]', r"row 1: .*solution\" with a \\boxed"),
        (
            "x.json",
            '[{"problem": "a", "answer": "1", "level": 2}]',
            "none of 1 rows can be used .0 of levels 3 to 5",
        ),
        (
            "x.json",
            '[{"question": "a", "gt_answer": ""}]',
            "none of 1 rows can be used .the first dropped: row 1",
        ),
        ("x.json", "[]", "none of 0 rows"),
        ("x.json", "[" * 100_000, "cannot be read .* give a file"),
        ("x.jsonl", "[1]", 'row 1: needs "problem" or "question"'),
        ("x.csv", b"\xff", "cannot be read .*utf-8"),
        ("x.csv", "problem,answer,answer\n1,1,2\n", "read .line 1: two columns are named answer.;"),
        ("x.csv", 'problem,answer\n"1\n1",2\n20, 0+1?,21\n', "line 4: more cells than the header"),
        ("x.csv", 'problem,answer\n1,1\n"2,2\n3,3\n', "line 3: unexpected end of data; put quotes"),
        ("x.csv", 'problem,answer\n"2,2\n"3",3\n', "line 2: ',' expected after"),
        ("x.parquet", "junk", "cannot be read .*Parquet file size is 4 bytes"),
        (
            "cut",
            {"train.jsonl": '{"problem": "a"}\n{"problem": '},
            "cannot be read .train.jsonl, line 2: not JSON",
        ),
        (
            "kinds",
            {"x.jsonl": "", "x.csv": "problem,answer\n1,1\n"},
            "cannot be read .needs files of one kind, found .csv, .json.;",
        ),
        ("text", {"x.txt": ""}, "cannot be read .needs files of one kind, found none"),
        ("empty", {}, "cannot be read .*any data files"),
        (
            "test-only",
            {"test.csv": "problem,answer\n1,1\n"},
            "read .its splits are test, not train",
        ),
        (
            "saved-test",
            {"dataset_dict.json": '{"splits": []}'},
            "cannot be read .its splits are .*, not train",
        ),
    ],
)
def test_bad_tables_are_one_sentence(name, content, message, tmp_path, capfd):
    """It names the path; no library prints anything beside it."""
    path = tmp_path / name
    if isinstance(content, dict):
        path.mkdir()
        for file, text in content.items():
            (path / file).write_text(text)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=message) as error:
        load_problems("math", str(path))
    assert str(error.value).startswith(f"--data {path}") and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


# ---- the hub -------------------------------------------------------------------------------------


def eurus(truth, ability="code") -> dict:
    """A row of Eurus-2-RL-Data, tests as JSON text."""
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Do it."}]
    reward_model = {"ground_truth": json.dumps(truth), "style": "rule"}
    return {"prompt": messages, "ability": ability, "reward_model": reward_model}


CALLS = {"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [[1], 2]}
EURUS = [
    ({"inputs": ["1 2\n"], "outputs": ["3\n"]}, {"inputs": ["1 2\n"], "outputs": ["3\n"]}),
    ({"inputs": [["1", "2"]], "outputs": [["3"]]}, {"inputs": ["1\n2"], "outputs": ["3"]}),
    ({"fn_name": "f", "inputs": ['1\n"a"', '2\n"b"\n'], "outputs": ["[1]", "2"]}, CALLS),
    ({"fn_name": "f", "inputs": CALLS["inputs"], "outputs": [[[1]], [2]]}, CALLS),
    (CALLS, CALLS),
]


@pytest.mark.parametrize("truth, tests", EURUS)
def test_published_tests_become_ours(truth, tests, tmp_path):
    """Scripts by text or by lines; calls by JSON lines, or by lists whose values stand in lists of
    one, or do not.
    """
    Dataset.from_list([eurus("1", "math"), eurus(truth)]).to_parquet(tmp_path / "x.parquet")
    assert load_problems("code", str(tmp_path / "x.parquet"))[0] == [
        {"problem": "Do it.", "tests": tests}
    ]


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """What the hub is asked for; `rows` is the table that it answers with."""

    def download(repo_id, repo_type, allow_patterns, local_files_only=False):
        download.calls.append((repo_id, allow_patterns, repo_type))
        (tmp_path / allow_patterns[0]).parent.mkdir(exist_ok=True)
        Dataset.from_list(download.rows).to_parquet(tmp_path / allow_patterns[0])
        return str(tmp_path)

    download.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


ZOO = [{"question": str(i), "gt_answer": str(i), "answer": "", "level": 3} for i in range(8_522)]


def test_math_comes_from_the_hub(fake_hub):
    """One file of the set; a row without an answer is dropped, and the count is the paper's."""
    fake_hub.rows = [*ZOO, {"question": "?", "gt_answer": "", "answer": "", "level": 5}]
    problems, notes = load_problems("math", None)
    assert fake_hub.calls == [
        ("hkust-nlp/SimpleRL-Zoo-Data", ["simplelr_qwen_level3to5/train.parquet"], "dataset")
    ]
    assert len(problems) == 8_522 and problems[7] == {"problem": "7", "answer": "7"}
    assert (
        notes[0]
        == "data hkust-nlp/SimpleRL-Zoo-Data (hub): 8,523 of 8,523 rows of levels 3 to 5, or of "
        "none"
    )
    assert notes[1].startswith("1 problems dropped: without a usable answer (first: row 8523 needs")
    assert len(notes) == 2
    fake_hub.rows = [{"question": "a", "level": 1}]
    with pytest.raises(
        BadInput, match="--task math without --data: hkust-nlp/SimpleRL-Zoo-Data: none of 1 rows"
    ):
        load_problems("math", None)


def test_code_comes_from_the_hub(fake_hub):
    """Other abilities are left out, unusable tests dropped: text that is no JSON, or too deep, or
    decides nothing.
    """
    bad = [
        {"inputs": [], "outputs": []},
        {"fn_name": "f", "inputs": ["f(1)"], "outputs": ["1"]},
        None,
        [1],
    ]
    deep = {**eurus(0), "reward_model": {"ground_truth": "[" * 100_000}}
    fake_hub.rows = [
        eurus("7", "math"),
        *map(eurus, bad),
        deep,
        {**eurus(0), "reward_model": None},
        eurus(CALLS),
    ]
    problems, notes = load_problems("code", None)
    assert fake_hub.calls == [("PRIME-RL/Eurus-2-RL-Data", ["train.parquet"], "dataset")]
    assert problems == [{"problem": "Do it.", "tests": CALLS}]
    assert '7 of 8 rows of ability "code"' in notes[0]
    assert notes[1].startswith("WARNING: 7 problems") and "25,276 expected" in notes[1]
    assert notes[2].startswith(
        '6 problems dropped: without a usable tests (first: row 2 "tests": needs inputs'
    )


@pytest.mark.parametrize(
    "kind, error", [("math", ConnectionError("Couldn't reach it.\nMore.")), ("code", OSError())]
)
def test_a_hub_that_fails_is_one_sentence(kind, error, monkeypatch):
    """What was tried, the first line of why, and what to do."""

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(BadInput) as raised:
        load_problems(kind, None)
    reason = str(error).split("\n")[0].rstrip(".") or "OSError"
    tried = (
        f"{'/'.join(HUB[kind][:2])} cannot be loaded from the hub ({reason}); give a local file "
        "or folder"
    )
    assert str(raised.value) == f"--task {kind} without --data: {tried} with --data"
    with pytest.raises(
        BadInput, match=r"--bench amc23: math-ai/amc23 cannot .*; give .* --bench-data amc23=FILE"
    ):
        load_benchmark("amc23", flag="--bench-data")


def test_a_hub_out_of_reach_costs_one_request(monkeypatch):
    """Only for what is not on the disk; a download would be tried again for half a minute."""
    requests = []

    def download(local_files_only=False, **wanted):
        assert local_files_only
        raise LocalEntryNotFoundError("not there")

    def unreachable(self, name, timeout):
        requests.append(name)
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(BadInput, match="Name or service not known"):
        load_problems("math", None)
    assert requests == ["hkust-nlp/SimpleRL-Zoo-Data"]
