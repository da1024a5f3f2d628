"""tasks/problems.py, task.py and rows.py: problems of files, folders and the hub, prompts, verdicts."""

import csv
import gzip
import json
import os
from contextlib import nullcontext
from decimal import Decimal
from unittest.mock import Mock

import huggingface_hub
import pyarrow
import pytest
import torch
from builders.case_files import cases
from builders.commands import raising, words_of
from builders.runs import config_from, recipe_with
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from base.errors import BadInput
from base.files import write_rows
from grading.sandbox import SandboxError
from grpo import Rollouts
from harness.run import lower, make_task
from rewards import grade_math
from tasks import toy
from tasks.problems import HUB, load_problems
from tasks.rows import read_rows
from tasks.task import (
    INSTRUCTIONS,
    Task,
    check_readable,
    choose_template,
    grader,
    render,
    text_task,
)

MATH = INSTRUCTIONS["math"]


@pytest.fixture
def qwen(qwen_folder):
    """A byte-level tokenizer with the marks of turns and a chat template."""
    return AutoTokenizer.from_pretrained(qwen_folder)


def numbered(count: int) -> list[dict]:
    """Problems told apart by their answers."""
    return [{"problem": f"What is {i}?", "answer": str(i)} for i in range(count)]


def test_an_epoch_holds_every_problem_once_in_a_seeded_order():
    """Steps that straddle an epoch's end lose no problem; a step depends on (step, seed) alone."""
    task = Task("t", numbered(10), [], None, grade_math)
    steps = [task.draw(step, 4, seed=0) for step in range(5)]
    drawn = [problem["answer"] for step in steps for problem in step]
    assert drawn[:10] != drawn[10:]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == [*"0123456789"]
    assert task.draw(3, 4, seed=0) == steps[3] != task.draw(3, 4, seed=1)


def test_a_digest_tells_answers_and_the_order_of_problems(qwen, tmp_path):
    """A run that is resumed draws problems by their place."""
    problems = numbered(9)
    digests = set()
    for rows in problems, problems[::-1], [*problems[:8], problems[8] | {"answer": "9"}]:
        config, *_ = made_task(qwen, tmp_path, rows, 512, "")
        digests.add(config.digest)
    assert len(digests) == 3


def test_verdicts_go_to_the_right_problem_and_cut_responses_score_zero():
    """Rollouts of a problem are adjacent; one that is cut off is wrong even with the right box."""
    task = Task("t", [], [], None, grade_math)
    texts = [r"\boxed{0}", *[r"\boxed{1}"] * 3]
    rollouts = Rollouts(None, None, None, None, torch.arange(4) == 3, texts)
    verdicts = task.verdicts(numbered(2), rollouts)
    assert verdicts == [(1, "correct"), (0, "wrong"), (1, "correct"), (0, "truncated")]


def made_task(tokenizer, tmp_path, rows: list[dict], context: int, words: str):
    """The task of these rows, with the configuration and the notes."""
    write_rows(tmp_path / "x.jsonl", rows)
    config = config_from(words_of("--model M --data", tmp_path / "x.jsonl", words))
    return make_task(config, tokenizer, context)


@pytest.mark.parametrize("words, reason", [("", "copied"), ("--reward operator:ne", "correct")])
def test_a_training_task_refuses_copies(words, reason, qwen, tmp_path, monkeypatch):
    """A copied question is wrong, though it equals the answer; a reward of one's own decides."""
    monkeypatch.setattr("rewards.in_worker", lambda *question: "correct")
    rows = [{"problem": "What is 4 + 5?", "answer": "9"}] * 9
    _, task, _ = made_task(qwen, tmp_path, rows, 512, words)
    texts = [r"\boxed{4 + 5}", r"\boxed{9}"]
    rollouts = Rollouts(None, None, None, None, torch.zeros(2) > 0, texts)
    assert [v.reason for v in task.verdicts(rows[:1], rollouts)] == [reason, "correct"]


def test_programs_are_graded_at_the_level_that_was_asked_for(monkeypatch):
    """One that does not work here is refused, before a model is loaded."""
    monkeypatch.setattr("tasks.task.grade_code", lambda *inputs, **options: (inputs, options))
    monkeypatch.setattr("grading.sandbox.choose_level", lambda level: level)
    grade = grader("code", 3, "strict")
    assert grade("R", "T") == (("R", "T"), {"level": "strict", "timeout_s": 3})
    error = SandboxError("strict: name spaces: Operation not permitted")
    monkeypatch.setattr("grading.sandbox.choose_level", raising(error))
    with pytest.raises(BadInput, match=r"--sandbox strict: .*not permitted; choose another"):
        grader("code", None, "strict")


def test_prompts_that_leave_no_room_are_dropped_and_counted(qwen, tmp_path):
    """Prompts of more than 250 tokens are dropped, where a token is a byte: one has 300 letters."""
    long = [{"problem": "x" * 300, "answer": "1"}, {"problem": "x" * 100, "answer": "1" * 60}]
    rows = numbered(5) + long
    words = "--max-tokens 9 --heldout 2 --eval-groups 2 --grade-timeout 3"
    _, task, notes = made_task(qwen, tmp_path, rows, 259, words)
    data = f"data {tmp_path / 'x.jsonl'}: 7 of 7 rows"
    assert {data, "template chat", "1 problems dropped: prompts of over 250 tokens"} <= set(notes)
    assert task.grade.keywords == {"timeout_s": 3}
    assert sorted(map(rows.index, task.train + task.heldout)) == [0, 1, 2, 3, 4, 6]
    assert len(task.heldout) == 2
    with pytest.raises(BadInput, match="6 of 7 prompts fit 250 tokens, not more than --heldout 6"):
        made_task(qwen, tmp_path, rows, 259, words + " --heldout 6")


@pytest.mark.parametrize(
    "count, words, sizes",
    [
        (38, "", (7, 31, 31, 256)),
        (38, "--heldout 6 --max-tokens 9", (6, 32, 32, 9)),
        (38, "--prompts-per-update 4", (7, 28, 4, 256)),
        (38, "--prompts-per-step 64 --prompts-per-update 64", (7, 64, 64, 256)),
        (600, "--max-tokens 400", (64, 512, 32, 400)),
    ],
)
def test_sizes_that_were_not_given_shrink_to_the_data_and_the_context(
    count, words, sizes, qwen, tmp_path
):
    """The plan says which sizes shrink, and given ones stay."""
    config, task, notes = made_task(qwen, tmp_path, numbered(count), 512, words)
    steps = config.prompts_per_step, config.prompts_per_update
    assert (config.heldout, *steps, config.max_tokens) == sizes
    assert (len(task.train), len(task.heldout)) == (count - sizes[0], sizes[0])
    assert ("--heldout 7, not 64: there are 38 problems" in notes) == (sizes[0] == 7)


def test_sizes_of_a_resumed_run_stay():
    """It would not be the same run."""
    assert lower(recipe_with(resume="run"), [], "", heldout=1) == recipe_with(resume="run")


@pytest.mark.parametrize(
    "prompt, decoded, is_lost",
    [("x" * 9 + "é", "x" * 9, True), ("x" * 10 + "é", "x" * 10, False), ("ﬁn al", " final", False)],
)
def test_a_prompt_that_loses_a_tenth_of_its_characters_is_refused(prompt, decoded, is_lost):
    """One character of ten is too many; spaces and other forms of a letter are not lost."""
    with pytest.raises(BadInput, match="loses 1 of the 10") if is_lost else nullcontext():
        check_readable(prompt, decoded)


def test_twenty_prompts_find_a_tokenizer_that_loses_characters(qwen, tmp_path, monkeypatch):
    """At most twenty prompts are decoded at start-up, and they are spread over the set."""
    readable = Mock()
    monkeypatch.setattr("tasks.task.check_readable", readable)
    made_task(qwen, tmp_path, numbered(250), 4096, "")
    assert readable.call_count == 20
    assert "What is 247?" in readable.call_args.args[1]


# ---- templates -----------------------------------------------------------------------------------


def test_prompts_of_every_template(qwen):
    """A prompt is right by the character, and the marks of turns become their own ids."""
    math = f"<|im_start|>system\n{MATH}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    chat = f"<|im_start|>user\n1+1?\n{MATH}<|im_end|>\n<|im_start|>assistant\n"
    assert render("qwen-math", "1+1?", MATH, qwen) == math
    assert render("chat", "1+1?", MATH, qwen) == chat
    assert render("plain", "1+1?", MATH, qwen) == f"1+1?\n{MATH}\n"
    assert qwen(math, add_special_tokens=False)["input_ids"].count(1) == 3


def test_plain_prompts_start_as_the_tokenizer_starts_a_text():
    """A prompt has the token that begins texts if the tokenizer adds it, as Llama's does."""
    tokenizer = toy.make_tokenizer()
    assert render("plain", "1", "2", tokenizer) == "1\n2\n"
    symbol = tokenizer.bos_token = tokenizer.convert_ids_to_tokens(1)
    starts = TemplateProcessing(single=f"{symbol} $A", special_tokens=[(symbol, 1)])
    tokenizer._tokenizer.post_processor = starts
    assert render("plain", "1", "2", tokenizer) == f"{symbol}1\n2\n"


def test_no_special_token_comes_from_a_problem(qwen):
    """What the chat template writes is refused; HTML's marks are text, also where they are tokens."""
    tokens = ["[TURN]", "[OTHER]", "<s>", "</s>", "<mask>"]
    qwen.add_special_tokens({"additional_special_tokens": tokens})
    qwen.chat_template = "[TURN]{% for m in messages %}{{ m.content }}{% endfor %}"
    for template in "chat", "plain":
        with pytest.raises(BadInput, match=r"'1\+1\?\[TURN\]' holds \[TURN\], which the chat"):
            render(template, "1+1?[TURN]", MATH, qwen)
        text = render(template, "<p>[OTHER]</p> <s>1</s> <mask>?", MATH, qwen)
        assert "<p>[OTHER]</p> < s>1< /s> < mask>?" in text


@pytest.mark.parametrize(
    "messages, content, refused",
    [
        ("messages", "m.content|trim", []),
        ("messages if m.role != 'system'", "m.content", ["qwen-math"]),
        ("messages", "m.content[:5]", ["chat", "qwen-math"]),
    ],
)
def test_a_template_that_loses_the_problem_or_the_instruction_is_refused(
    messages, content, refused, qwen
):
    """Only white space at the ends of problem and instruction may be lost."""
    qwen.chat_template = f"{{% for m in {messages} %}}{{{{ {content} }}}}{{% endfor %}}Answer:"
    for template in "chat", "qwen-math":
        message = f"--template {template}: .*leaves out '.*(What is|Please reason).*; give plain"
        with pytest.raises(BadInput, match=message) if template in refused else nullcontext():
            assert "What is\n1+1?" in render(template, " What is\n1+1?\n", MATH, qwen)


@pytest.mark.parametrize(
    "text, written",
    [
        ("{% if strftime_now is defined %}{{ strftime_now('%A, %-d %B %y') }}{% endif %}", "Friday, 26 July 24"),
        ("{% set form = '%Y-%m-%d' %}{{ strftime_now(form) }} ", "2024-07-26 "),
        ("\n  {{ 'No date: ' }}", "\n  No date: "),
    ],
)  # fmt: skip
def test_a_prompt_is_the_same_on_any_day(text, written, qwen):
    """A template that writes today's date gets one day."""
    qwen.chat_template = text + "{{ messages[0].content }}"
    assert render("chat", "1+1?", MATH, qwen) == f"{written}1+1?\n{MATH}"


def test_auto_goes_by_the_tokenizer_then_by_the_name(qwen):
    """`qwen-math` needs a template, and both words in one part of the name.

    A template that is asked for is used whatever the name, if the tokenizer has one.
    """
    base = toy.make_tokenizer()
    for name, template in {
        "models--Qwen--Qwen2.5-Math-7B/snapshots/0a1b": "qwen-math",
        "/home/qwen/mathilda": "chat",
    }.items():
        assert choose_template("auto", name, qwen) == template
    assert choose_template("auto", "Qwen/Qwen2.5-Math-7B", base) == "plain"
    for template in "qwen-math", "chat", "plain":
        assert choose_template(template, "qwen-math", qwen) == template
    assert choose_template("plain", "some/model", base) == "plain"
    with pytest.raises(BadInput, match="of some/model has no chat template; use plain"):
        choose_template("chat", "some/model", base)


def test_a_prompt_has_the_instruction_of_its_kind(qwen):
    """A program is asked for otherwise than a number."""
    for kind, instruction in INSTRUCTIONS.items():
        prompt = text_task(kind, "chat", qwen, grade_math).prompt({"problem": "Print 0."})
        assert prompt == render("chat", "Print 0.", instruction, qwen)


# ---- files --------------------------------------------------------------------------------------


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def write_lines(path, rows):
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8-sig")


def write_compressed(path, rows):
    path.write_bytes(gzip.compress(("\ufeff" + json.dumps(rows, indent=1)).encode()))


WRITERS = {
    "x[1].parquet": write_parquet,
    "x.CSV": write_csv,
    "x.jsonl": write_lines,
    "x.txt.GZ": write_compressed,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_problems(name, tmp_path):
    """Answers stay text, and a byte order mark is skipped."""
    rows = [{"problem": "a", "answer": "007"}, {"problem": "b", "answer": "1.50"}]
    path = tmp_path / name
    WRITERS[name](path, rows)
    assert load_problems("math", str(path)) == (rows, [f"data {path}: 2 of 2 rows"])


@pytest.fixture
def load(tmp_path):
    """A function that loads math problems and notes from a file of these rows."""

    def from_rows(*rows: dict, kind: str = "math") -> tuple[list[dict], list[str]]:
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(rows))
        return load_problems(kind, str(path))

    return from_rows


@pytest.mark.parametrize("case", cases("layouts.jsonl"))
def test_rows_of_the_known_layouts_become_problems(case, load):
    """Column names are those of MATH, SimpleRL-Zoo, GSM8K, Eurus and verl.

    A number is its decimal digits, and a box may lack its braces.
    """
    due = {"problem": "q", "answer": case["answer"]}
    if "solution" in case["row"]:
        due["solution"] = case["row"]["solution"]
    assert load(case["row"])[0] == [due]


def test_numbers_of_a_table_keep_their_digits(tmp_path):
    """A short float keeps its decimal digits, also within an object; a decimal becomes text.

    The type of any other answer is named.
    """
    steps = pyarrow.struct({"all": pyarrow.list_(pyarrow.float16())})
    columns = {"question": pyarrow.string(), "answer": pyarrow.float32(), "steps": steps}
    rows = [{"question": "a", "answer": x, "steps": {"all": [x, 0.3]}} for x in (0.1, 27.0)]
    rows.append({"question": "a", "answer": 0.5, "steps": None})
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(columns)), path)
    assert list(read_rows(path)) == rows
    problems, _ = load_problems("math", str(path))
    assert [problem["answer"] for problem in problems] == ["0.1", "27", "0.5"]
    write_parquet(path, [{"problem": "q", "answer": Decimal("1.50")}])
    assert load_problems("math", str(path))[0] == [{"problem": "q", "answer": "1.50"}]
    write_parquet(path, [{"problem": "q", "answer": ["7"]}])
    with pytest.raises(BadInput, match="found: problem, answer: list"):
        load_problems("math", str(path))


def test_a_table_that_was_written_again_is_read_again(tmp_path):
    """Even with the time of the file before, by which `datasets` would know it."""
    path = tmp_path / "x.parquet"
    for answer in "1", "2":
        write_parquet(path, [{"problem": "p", "answer": answer}])
        os.utime(path, (1e9, 1e9))
        assert [row["answer"] for row in read_rows(path)] == [answer]


def test_capitals_of_a_header_do_not_matter(load):
    """`Question` is `question`, unless both are there; published sets are known by either.

    A box of MATH's before an empty one is no answer.
    """
    problems, (_, dropped) = load(
        {"Question": "a", "ANSWER": "7", "Level": "", "Type": ""},
        {"Question": "b", "ANSWER": "8", "Level": "Level 2", "Type": "", "Solution": ""},
        {"Problem": "a", "problem": "b", "Answer": "1", "answer": "2"},
        {"Problem": "a", "Solution": "Not \\boxed{1}, but \\boxed{}."},
    )
    assert problems == [{"problem": "a", "answer": "7"}, {"problem": "b", "answer": "2"}]
    assert dropped.startswith("WARNING: 1 rows cannot be used (the first: row 4: needs")


def test_columns_that_nothing_reads_are_named(load):
    """An "explanation" is no "solution", and a level is one of MATH's rows alone."""
    _, (_, unread) = load({"problem": "a", "answer": "7", "Explanation": "so 7", "level": "easy"})
    assert unread == "columns that nothing reads: explanation, level"


def test_problems_that_occur_twice_are_named(load):
    """Other white space makes no other problem, and rows that are left out count as rows."""
    rows = [{"problem": text, "answer": "1"} for text in ["a b", "c", "a  b ", "c", "A b"]]
    problems, notes = load({"problem": "c", "ability": "code"}, *rows)
    assert len(problems) == 5
    assert notes[1:] == [
        "WARNING: rows 2 and 4, rows 3 and 5 are the same problem; keep one of them"
    ]


def test_levels_and_abilities_of_others_are_left_out(load):
    """MATH's rows are, before anything else is asked of them.

    Programs have no such levels, and in a file of one's own a level is just a column.
    """
    kept = [3, "Level 4", "5", 4.0, None, "", 6, "hard"]
    levels = [*kept, 1, 2.0, "Level 1", "Level ?"]
    rows = [{"problem": f"L{level}", "gt_answer": "1", "level": level} for level in levels]
    problems, notes = load(*rows, {"ability": "code"})
    assert [problem["problem"] for problem in problems] == [f"L{level}" for level in kept]
    assert "8 of 13 rows of levels 3 to 5" in notes[0]
    own = {"problem": "a", "answer": "1"}
    program = {"problem": "a", "tests": {"inputs": [""], "outputs": ["1"]}}
    for row, kind, other in (own, "math", "code"), (program, "code", "math"):
        problems, notes = load(row | {"level": 1}, {"ability": other}, kind=kind)
        assert problems == [row] and "1 of 2 rows of " in notes[0]


def test_own_tests_survive_a_table(tmp_path):
    """Tests are the same from parquet, with empty keys of other rows, and from csv, as JSON text."""
    tests = {"inputs": ["1"], "outputs": ["2"]}, {"asserts": ["assert f(1) == 2"], "setup": ""}
    rows = [{"problem": "a", "tests": of_row} for of_row in tests]
    write_parquet(tmp_path / "x.parquet", rows)
    write_csv(tmp_path / "x.csv", [row | {"tests": json.dumps(row["tests"])} for row in rows])
    for path in tmp_path.iterdir():
        assert load_problems("code", str(path))[0] == rows


@pytest.mark.parametrize(
    "tests, message",
    [
        ([], "must be an object"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "have 1 inputs and 2"),
        ({"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}, "need inputs and outputs"),
    ],
)
def test_tests_that_decide_nothing_are_refused(tests, message, load):
    """A program must not pass because there was nothing to fail."""
    with pytest.raises(BadInput, match=f"row 1: tests {message}"):
        load({"problem": "a", "tests": tests}, kind="code")


DEEP = dict(name="x.jsonl", content='{"a":' * 100_000, message="line 1: not JSON")


@pytest.mark.parametrize("case", [*cases("bad_tables.jsonl"), DEEP])
def test_bad_tables_are_one_sentence(case, tmp_path, capfd):
    """The sentence names the path, and no library prints anything beside it."""
    path = tmp_path / case["name"]
    if case["content"] is not None:
        path.write_bytes(case["content"].encode("latin-1"))
    with pytest.raises(BadInput, match=case["message"]) as error:
        load_problems("math", str(path))
    assert str(error.value).startswith(f"--data {path}") and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


# ---- the hub -------------------------------------------------------------------------------------


def eurus(truth, ability="code") -> dict:
    """A row of Eurus-2-RL-Data, tests as JSON text."""
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "Do it."}]
    reward_model = {"ground_truth": json.dumps(truth), "style": "rule"}
    return {"prompt": messages, "ability": ability, "reward_model": reward_model}


@pytest.mark.parametrize("case", cases("published_tests.jsonl"))
def test_published_tests_become_ours(case, load):
    """Scripts come as text or lines, calls as JSON lines or as lists, bare or each in a list."""
    problems, _ = load(eurus("1", "math"), eurus(case["published"]), kind="code")
    assert problems == [{"problem": "Do it.", "tests": case["tests"]}]


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """What the hub is asked for; `rows` is the table that it answers with."""

    def download(repo_id, repo_type, allow_patterns):
        download.calls.append((repo_id, allow_patterns, repo_type))
        (tmp_path / allow_patterns).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path / allow_patterns, download.rows)
        return str(tmp_path)

    download.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


def test_math_comes_from_the_hub(fake_hub, monkeypatch):
    """One file of the set is read; a row without an answer is dropped; the paper's count is none."""
    name, file, _ = HUB["math"]
    monkeypatch.setitem(HUB, "math", (name, file, 3))
    fake_hub.rows = [{"question": "q", "gt_answer": text, "level": 3} for text in ("7", "8", "")]
    problems, (counts, dropped) = load_problems("math", None)
    assert fake_hub.calls == [(name, file, "dataset")]
    assert problems == [{"problem": "q", "answer": text} for text in ("7", "8")]
    assert counts == f"data {name} (hub): 3 of 3 rows"
    assert dropped.startswith("WARNING: 1 rows cannot be used (the first: row 3: needs")


def test_code_comes_from_the_hub(fake_hub):
    """Other abilities are left out, and tests that are too deep or decide nothing are dropped."""
    no_call = {"fn_name": "f", "inputs": ["f(1)"], "outputs": ["1"]}
    bad = [eurus(no_call), eurus(None)]
    bad.append(eurus(0) | {"reward_model": {"ground_truth": "[" * 100_000}})
    calls = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]}
    fake_hub.rows = [eurus("7", "math"), *bad, eurus(calls)]
    problems, (counts, few, dropped) = load_problems("code", None)
    assert fake_hub.calls == [("PRIME-RL/Eurus-2-RL-Data", "train.parquet", "dataset")]
    assert problems == [{"problem": "Do it.", "tests": calls}]
    assert '4 of 5 rows of ability "code"' in counts
    assert few.startswith("WARNING: 25,276 problems were expected")
    assert dropped.startswith("WARNING: 3 rows cannot be used (the first: row 2: ")


def test_a_hub_that_fails_is_one_sentence(monkeypatch):
    """The sentence says what was tried, the first line of why, and what to do."""
    error = ConnectionError("Couldn't reach it.\nMore.")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    message = "--task math .* on the hub: .*[(]Couldn't reach it[)]; give a local file with --data"
    with pytest.raises(BadInput, match=message):
        load_problems("math", None)
