"""tasks/problems.py, task.py and rows.py: problems of files, folders and the hub, prompts, verdicts."""

import csv
import gzip
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import chain
from unittest.mock import Mock, patch

import huggingface_hub
import pyarrow
import pytest
import torch
from builders.case_files import ROOT, cases, rows_of_text
from builders.commands import raising, words_of
from builders.runs import config_from
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from base.config import Config
from base.errors import BadInput
from base.files import append_rows
from grpo import Rollouts
from harness.run import make_task
from rewards import grade_math
from tasks import toy
from tasks.benchmarks import load_benchmark
from tasks.problems import load_problems
from tasks.rows import read_rows
from tasks.task import (
    INSTRUCTIONS,
    Task,
    check_readable,
    choose_template,
    digest_of,
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
    """Steps that straddle an epoch's end lose no problem and repeat none.

    A step depends on (step, seed) alone. Other problems, or other answers to them, have another
    digest.
    """
    problems = numbered(10)
    task = Task("t", problems, [], None, grade_math)
    steps = [task.draw(step, 4, seed=0) for step in range(5)]
    drawn = list(chain.from_iterable(steps))
    assert drawn[:10] != drawn[10:]
    for epoch in (drawn[:10], drawn[10:]):
        assert sorted(epoch, key=problems.index) == problems
    assert task.draw(3, 4, seed=0) == steps[3] != task.draw(3, 4, seed=1)
    for column in ("problem", "answer"):
        others = [*problems[:9], problems[9] | {column: "?"}]
        assert digest_of(others) != digest_of(numbered(10)) == digest_of(task.train)


def test_verdicts_go_to_the_right_problem_and_cut_responses_score_zero():
    """Rollouts of a problem are adjacent; one that is cut off is wrong even with the right box."""
    task = Task("t", [], [], None, grade_math)
    texts = [r"\boxed{0}", *[r"\boxed{1}"] * 3]
    rollouts = Rollouts(None, None, None, None, torch.arange(4) == 3, texts)
    verdicts = task.verdicts(numbered(2), rollouts)
    assert [verdict.reason for verdict in verdicts] == "correct wrong correct truncated".split()
    assert [verdict.reward for verdict in verdicts] == [1, 0, 1, 0]


def made_task(tokenizer, tmp_path, rows: list[dict], context: int, words: str):
    """The task of these rows, with the configuration and the notes."""
    append_rows(tmp_path / "x.jsonl", rows)
    config = config_from(words_of("--model M --data", tmp_path / "x.jsonl", words))
    return make_task(config, tokenizer, context)


def test_a_training_task_refuses_copies(qwen, tmp_path, monkeypatch):
    """A copied question is wrong, though it equals the answer."""
    monkeypatch.setattr("rewards.in_worker", lambda *question: "correct")
    rows = [{"problem": "What is 4 + 5?", "answer": "9"}] * 9
    _, task, _ = made_task(qwen, tmp_path, rows, 512, "--template chat --heldout 1")
    rollouts = Rollouts(
        None, None, None, None, torch.zeros(2) > 0, [r"\boxed{4 + 5}", r"\boxed{9}"]
    )
    assert [v.reason for v in task.verdicts(rows[:1], rollouts)] == ["copied", "correct"]


def test_prompts_that_leave_no_room_are_dropped_and_counted(qwen, tmp_path):
    """Prompts of more than 250 tokens are dropped, where a token is a byte: one has 300 letters."""
    long = [{"problem": "x" * 300, "answer": "1"}, {"problem": "x" * 100, "answer": "1" * 60}]
    words = "--max-tokens 9 --heldout 2 --eval-groups 2 --template chat --grade-timeout 3"
    _, task, notes = made_task(qwen, tmp_path, numbered(5) + long, 259, words)
    data = f"data {tmp_path / 'x.jsonl'}: 7 of 7 rows"
    dropped = "1 problems dropped: prompts of over 250 tokens"
    assert {data, "template chat", dropped} <= set(notes)
    assert task.grade.keywords == {"timeout_s": 3}
    assert (len(task.train), len(task.heldout)) == (4, 2)


@pytest.mark.parametrize(
    "words, sizes",
    [
        ("", (7, 31, 31, 256)),
        ("--heldout 6 --max-tokens 9", (6, 32, 32, 9)),
        ("--prompts-per-step 8", (7, 8, 8, 256)),
        ("--prompts-per-update 4", (7, 28, 4, 256)),
        ("--prompts-per-step 24 --heldout 18", (18, 24, 24, 256)),
        ("--prompts-per-step 64 --prompts-per-update 64", (7, 64, 64, 256)),
    ],
)
def test_sizes_that_were_not_given_shrink_to_the_data_and_the_context(words, sizes, qwen, tmp_path):
    """The plan says which sizes shrink, and given ones stay."""
    config, task, notes = made_task(qwen, tmp_path, numbered(38), 512, words)
    assert sizes_of(config) == sizes
    assert (len(task.train), len(task.heldout)) == (38 - sizes[0], sizes[0])
    assert ("--heldout 7, not 64: there are 38 problems" in notes) == ("--heldout" not in words)


def sizes_of(config) -> tuple:
    """The sizes that may shrink."""
    return config.heldout, config.prompts_per_step, config.prompts_per_update, config.max_tokens


def test_sets_that_are_large_enough_change_no_size(qwen, tmp_path):
    """All sizes stay at the context of Qwen2.5-Math-7B; a given size beyond the set is refused."""
    config, _, notes = made_task(qwen, tmp_path, numbered(800), 4096, "")
    assert not any(", not " in note for note in notes)
    assert sizes_of(config) == (64, 512, sizes_of(Config())[2], 3000)
    with pytest.raises(BadInput, match="not more than --heldout 800"):
        made_task(qwen, tmp_path, [], 512, "--heldout 800")


@pytest.mark.parametrize(
    "prompt, decoded, is_lost",
    [("x" * 9 + "é", "x" * 9, True), ("x" * 10 + "é", "x" * 10, False), ("ﬁn al", " final", False)],
)
def test_a_prompt_that_loses_a_tenth_of_its_characters_is_refused(prompt, decoded, is_lost):
    """One character of ten is too many; spaces and other forms of a letter are not lost."""
    with pytest.raises(BadInput, match="loses 1 of the 10") if is_lost else nullcontext():
        check_readable(prompt, decoded)


@pytest.mark.parametrize("rows, decoded", [(10, 10), (30, 15), (250, 20)])
def test_twenty_prompts_find_a_tokenizer_that_loses_characters(
    rows, decoded, qwen, tmp_path, monkeypatch
):
    """At most twenty prompts are decoded at start-up, and they are spread over the set."""
    readable = Mock()
    monkeypatch.setattr("tasks.task.check_readable", readable)
    made_task(qwen, tmp_path, numbered(rows), 4096, "")
    texts = [call.args[1] for call in readable.call_args_list]
    assert len(texts) == decoded and len(set(texts)) == decoded
    assert any(f"What is {number}?" in texts[-1] for number in range(rows * 9 // 10, rows))


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
    """A prompt has the token that begins texts if the tokenizer adds it, as Llama's does.

    Encoding adds no second one.
    """
    tokenizer = toy.make_tokenizer()
    assert render("plain", "1", "2", tokenizer) == "1\n2\n"
    symbol = tokenizer.bos_token = tokenizer.convert_ids_to_tokens(1)
    starts = TemplateProcessing(single=f"{symbol} $A", special_tokens=[(symbol, 1)])
    tokenizer._tokenizer.post_processor = starts
    assert render("plain", "1", "2", tokenizer) == f"{symbol}1\n2\n"


def test_no_special_token_comes_from_a_problem(qwen):
    """What the chat template writes is refused; HTML's marks are text, also where they are tokens."""
    qwen.add_special_tokens(
        {"additional_special_tokens": ["[TURN]", "[OTHER]", "<s>", "</s>", "<mask>"]}
    )
    qwen.chat_template = "[TURN]" + EACH
    for template in "chat", "plain":
        with pytest.raises(BadInput, match=r"'1\+1\?\[TURN\]' holds \[TURN\], which the chat"):
            render(template, "1+1?[TURN]", MATH, qwen)
        assert "<p>[OTHER]</p>" in render(template, "<p>[OTHER]</p>", MATH, qwen)
        text = render(template, "Is <s>1</s> a <mask>?", MATH, qwen)
        assert "Is < s>1< /s> a < mask>?" in text
        ids = qwen(text, add_special_tokens=False)["input_ids"]
        special = set(qwen.convert_tokens_to_ids(["<s>", "</s>", "<mask>"]))
        assert special and not special & set(ids)


EACH = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "text, chat, qwen_math",
    [
        (EACH.replace("m.content", "m.content|trim"), True, True),
        (EACH.replace("messages", "messages if m.role != 'system'"), True, False),
        (EACH.replace("messages", "messages if m.role == 'human'"), False, False),
        (EACH.replace("m.content", "m.content[:5]"), False, False),
        (EACH.replace("m.content", "m.content[0].text"), False, False),
    ],
)
def test_a_template_that_loses_the_problem_or_the_instruction_is_refused(
    text, chat, qwen_math, qwen
):
    """Only white space at the ends of problem and instruction may be lost."""
    qwen.chat_template = text + "\nAnswer:"
    for template, is_kept in (("chat", chat), ("qwen-math", qwen_math)):
        message = f"--template {template}: .*leaves out '.*(What is|Please reason).*; give plain"
        with nullcontext() if is_kept else pytest.raises(BadInput, match=message):
            assert "What is\n1+1?" in render(template, " What is\n1+1?\n", MATH, qwen)


@pytest.mark.parametrize(
    "text, written",
    [
        ("Today: {{ strftime_now('%d %b %Y') }}\n", "Today: 26 Jul 2024\n"),
        ("{% if strftime_now is defined %}{{ strftime_now('%A, %-d %B %y') }}{% endif %}", "Friday, 26 July 24"),
        ("{% set form = '%Y-%m-%d' %}{{ strftime_now(form) }} ", "2024-07-26 "),
        ("\n  {{ 'No date: ' }}", "\n  No date: "),
    ],
)  # fmt: skip
def test_a_prompt_is_the_same_on_any_day(text, written, qwen):
    """A template that writes today's date gets one day."""
    qwen.chat_template = text + "{{ messages[0].content }}"
    assert render("chat", "1+1?", MATH, qwen) == f"{written}1+1?\n{MATH}"


@pytest.mark.parametrize(
    "name, has_chat, template",
    [
        ("Qwen/Qwen2.5-Math-7B", True, "qwen-math"),
        ("cache/models--Qwen--Qwen2.5-Math-7B/snapshots/0a1b", True, "qwen-math"),
        ("Qwen/Qwen2.5-Math-7B", False, "plain"),
        ("/home/mathilda/qwen", True, "chat"),
    ],
)
def test_auto_goes_by_the_tokenizer_then_by_the_name(name, has_chat, template, qwen):
    """`qwen-math` needs a template, and both words in one part of the name."""
    qwen.chat_template = qwen.chat_template if has_chat else None
    assert choose_template("auto", name, qwen) == template


@pytest.mark.parametrize("template", ["qwen-math", "chat", "plain"])
def test_a_template_that_is_asked_for_is_used_whatever_the_name(template, qwen):
    """A prompt has the instruction of its kind of problems.

    A template is refused where the tokenizer has none.
    """
    assert choose_template(template, "qwen-math", qwen) == template
    for kind, instruction in INSTRUCTIONS.items():
        prompt = text_task(kind, template, qwen, grade_math).prompt({"problem": "Print 0."})
        assert prompt == render(template, "Print 0.", instruction, qwen)
    message = f"--template {template}: .* of some/model has no chat template; use plain"
    with pytest.raises(BadInput, match=message) if template != "plain" else nullcontext():
        choose_template(template, "some/model", toy.make_tokenizer())


# ---- files --------------------------------------------------------------------------------------


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {
    "x[1].parquet": write_parquet,
    "x.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "x.jsonl": lambda path, rows: path.write_text("\n\n".join(map(json.dumps, rows))),
    "mark.jsonl": lambda path, rows: path.write_text(
        "\n".join(map(json.dumps, rows)), encoding="utf-8-sig"
    ),
    "mark.txt.gz": lambda path, rows: path.write_bytes(
        gzip.compress(("\ufeff" + json.dumps(rows)).encode())
    ),
    "x.CSV": write_csv,
    "x.JSONL.GZ": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_problems(name, tmp_path):
    """Answers stay text, and a byte order mark is skipped."""
    rows = [{"problem": "a", "answer": "007"}, {"problem": "b", "answer": "1.50"}]
    path = tmp_path / name
    WRITERS[name](path, rows)
    note = f"data {path}: 2 of 2 rows"
    assert load_problems("math", str(path)) == (rows, [note])


@pytest.mark.parametrize("case", cases("layouts.jsonl"))
def test_rows_of_the_known_layouts_become_problems(case, tmp_path):
    """Column names are those of MATH, SimpleRL-Zoo, GSM8K, Eurus and verl.

    A number is its decimal digits, and a box may lack its braces.
    """
    path = tmp_path / "x.json"
    path.write_text(json.dumps([case["row"]]))
    due = {"problem": "q", "answer": case["answer"]}
    if "solution" in case["row"]:
        due["solution"] = case["row"]["solution"]
    assert load_problems("math", str(path))[0] == [due]


@pytest.mark.parametrize(
    "kind, value, answer",
    [
        ("date32", datetime(2024, 1, 2), "found: problem, answer: date"),
        (None, Decimal("1.50"), "1.50"),
        ("duration[s]", timedelta(1), "found: problem, answer: timedelta"),
        ("binary", b"7", "found: problem, answer: bytes"),
        (None, ["7"], "found: problem, answer: list"),
    ],
)
def test_a_column_of_another_type_is_text_or_is_named(kind, value, answer, tmp_path):
    """A decimal becomes text, and the type of any other value is named."""
    column = pyarrow.array([value], kind)  # without a kind, its guess
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"problem": ["q"], "answer": column}), path)
    is_refused = answer.startswith("found")
    with pytest.raises(BadInput, match=answer) if is_refused else nullcontext():
        assert load_problems("math", str(path))[0] == [{"problem": "q", "answer": answer}]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_numbers_of_a_table_keep_their_digits(kind, tmp_path):
    """A number keeps its decimal digits, also within an object."""
    number = getattr(pyarrow, kind)()
    steps = pyarrow.struct({"all": pyarrow.list_(number)})
    schema = pyarrow.schema({"question": pyarrow.string(), "answer": number, "steps": steps})
    rows = [{"question": "a", "answer": x, "steps": {"all": [x, 0.3]}} for x in (0.1, 2.7, 27.0)]
    rows.append({"question": "a", "answer": 0.5, "steps": None})
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    assert list(read_rows(path))[:3] == rows[:3]
    problems, _ = load_problems("math", str(path))
    assert [problem["answer"] for problem in problems] == ["0.1", "2.7", "27", "0.5"]


def test_the_order_of_problems_is_in_their_digest():
    """A run that is resumed draws by place."""
    config = config_from(["--toy-lines", "1", "--heldout", "8"])
    tokenizer = toy.make_tokenizer(1)
    task, _ = toy.task(config, tokenizer, "")
    digests = set()
    for order in (1, -1):
        made = replace(task, train=task.train[::order])
        with patch.object(toy, "task", lambda *inputs, made=made: (made, [])):
            digests.add(make_task(config, tokenizer, 512)[0].digest)
    assert len(digests) == 2


def test_a_table_that_was_written_again_is_read_again(tmp_path):
    """Even with the time of the file before, by which `datasets` would know it."""
    path = tmp_path / "x.parquet"
    for answer in "1", "2":
        write_parquet(path, [{"problem": "p", "answer": answer}])
        os.utime(path, (1e9, 1e9))
        assert [row["answer"] for row in read_rows(path)] == [answer]


def test_a_table_is_read_without_a_home(tmp_path):
    """A user of a container may have no folder that a cache could be written to."""
    write_parquet(tmp_path / "x.parquet", [{"problem": "p", "answer": "7"}])
    program = "from tasks.rows import read_rows; print(next(iter(read_rows(Path('x.parquet')))))"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; {program}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"HOME": "/dev/null", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[-2] == "{'problem': 'p', 'answer': '7'}", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.parquet"]


def test_empty_boxes_of_math_are_dropped(tmp_path):
    """MATH's official files have two empty boxes, and a box before an empty one is no answer."""
    solutions = ["So $\\boxed{2}$.", "Not \\boxed{1}, but \\boxed{}."]
    rows = [{"problem": "p", "level": "Level 4", "solution": text} for text in solutions]
    append_rows(tmp_path / "x.jsonl", rows)
    problems, (_, dropped) = load_problems("math", str(tmp_path / "x.jsonl"))
    assert [problem["answer"] for problem in problems] == ["2"]
    assert dropped.startswith("WARNING: 1 rows cannot be used (the first: row 2: needs")


def test_capitals_of_a_header_do_not_matter(tmp_path):
    """`Question` is `question`, unless both are there; published sets are known by either."""
    path = tmp_path / "x.csv"
    path.write_text("Question,ANSWER,Solution,Level,Type\na,7,so 7,,\nb,8,so 8,Level 2,\n")
    due = {"problem": "a", "answer": "7", "solution": "so 7"}
    assert load_problems("math", str(path))[0] == [due]
    path.write_text("Problem,problem,Answer,answer\na,b,1,2\n")
    assert load_problems("math", str(path))[0] == [{"problem": "b", "answer": "2"}]
    path.write_text("Problem,Solution\na,none\nb,\\boxed{2}\n")
    assert "1 rows cannot be used" in load_problems("math", str(path))[1][1]


def test_problems_that_occur_twice_are_named(tmp_path):
    """Other white space makes no other problem, and rows that are left out count as rows."""
    rows = [{"problem": text, "answer": "1"} for text in ["a b", "c", "a  b ", "c", "A b"]]
    append_rows(tmp_path / "x.jsonl", [{"problem": "c", "ability": "code"}, *rows])
    problems, notes = load_problems("math", str(tmp_path / "x.jsonl"))
    assert len(problems) == 5
    assert notes[1:] == [
        "WARNING: rows 2 and 4, rows 3 and 5 are the same problem; keep one of them"
    ]


def test_levels_and_abilities_of_others_are_left_out(tmp_path):
    """MATH's rows are, before anything else is asked of them.

    Programs have no such levels, and in a file of one's own a level is just a column.
    """
    path = tmp_path / "x.json"
    levels = [1, 2, 3, "Level 4", "5", 4.0, 6, 34, "Level ?", None, ""]
    rows = [{"problem": f"L{level}", "gt_answer": "1", "level": level} for level in levels]
    path.write_text(json.dumps([*rows, {"ability": "code"}]))
    problems, notes = load_problems("math", str(path))
    assert [p["problem"] for p in problems] == ["L3", "LLevel 4", "L5", "L4.0", "LNone", "L"]
    assert "6 of 12 rows of levels 3 to 5" in notes[0]
    for level in "easy", 1, "Level 1", "Grade 6":
        path.write_text(json.dumps([{"problem": "a", "answer": "1", "level": level}]))
        assert load_problems("math", str(path))[0] == [{"problem": "a", "answer": "1"}]
    program = {"problem": "a", "tests": {"inputs": [""], "outputs": ["1"]}}
    path.write_text(json.dumps([program | {"level": 1, "reward_model": None}, {"ability": "math"}]))
    problems, notes = load_problems("code", str(path))
    assert problems == [program] and "1 of 2 rows of ability" in notes[0]


def test_own_tests_survive_a_table(tmp_path):
    """Tests are the same from parquet, with empty keys of other rows, and from csv, as JSON text."""
    script = {"inputs": ["1"], "outputs": ["2"]}
    styles = [script, {"asserts": ["assert f(1) == 2"], "setup": ""}, {"fn_name": "f", **script}]
    rows = [{"problem": "a", "tests": tests} for tests in styles]
    as_text = [row | {"tests": json.dumps(row["tests"])} for row in rows[:2]]
    write_parquet(tmp_path / "x.parquet", rows[:2])
    write_csv(tmp_path / "x.csv", as_text)
    for path in tmp_path.iterdir():
        assert load_problems("code", str(path))[0] == rows[:2]
    write_parquet(tmp_path / "y.parquet", rows)
    with pytest.raises(BadInput, match="row 3: tests need inputs"):
        load_problems("code", str(tmp_path / "y.parquet"))


@pytest.mark.parametrize(
    "tests, message",
    rows_of_text(r"""
    []                                        must be an object
    {}                                        need inputs and outputs
    {"inputs": ["1"], "outputs": []}          need inputs
    {"inputs": ["1"], "outputs": ["1", "2"]}  have 1 inputs and 2 outputs
    """),
)
def test_tests_that_decide_nothing_are_refused(tests, message, tmp_path):
    """A program must not pass because there was nothing to fail."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"problem": "a", "tests": {tests}}}\n')
    with pytest.raises(BadInput, match=f"row 1: tests {message}"):
        load_problems("code", str(path))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.json", '[3]', 'row 1: is no object.; give JSON lines'),
        ("x.json", '[{"problem": "<|im_start|>user", "answer": "1"}]', "row 1: holds a template"),
        ("x.json", '[{"problem": "1?<|endoftext|>", "answer": "1"}]', r"holds a template already \(<.endoftext.>\)"),
        ("x.json", '[{"problem": "<start_of_turn>user", "answer": "1"}]', "row 1: holds a template"),
        ("x.json", '[{"problem": "<\\uff5cUser\\uff5c>1?", "answer": "1"}]', "row 1: holds a template"),
        ("x.json", '[{"problem": "<s>[INST] 1? [/INST]", "answer": "1"}]', "row 1: holds a template"),
        ("x.json", '[{"problem": "a", "answer": "1"}, {"problem": "a", "answer": true}]', 'row 2: needs "answer".*: problem, answer'),
        ("x.json", '[{"problem": "a", "solution": "none"}]', r"row 1: .*solution\" with a \\boxed"),
        ("x.json", '[{"problem": "a", "solution": ["\\\\boxed{1}"]}]', "row 1: needs"),
        ("x.json", '[{"problem": "a", "gt_answer": "1", "level": 2}]', "no problem is left .*0 of 1 rows of levels"),
        ("x.json", "[]", "no problem .*0 of 0 rows"),
        ("x.json", "[" * 100_000, "cannot be read .* give JSON lines"),
        ("x.jsonl", "{}", 'row 1: needs "problem" .*found: no keys'),
        ("x.jsonl", '{"problem": "a", "answer": "1"}\n{"problem": \n', "line 2: not JSON"),
        ("x.jsonl", '{"a":' * 100_000, "line 1: not JSON"),
        ("x.jsonl", '{"problem": "\\ud800", "answer": "1"}', "row 1: holds half of a surrogate pair"),
        ("x.jsonl", '{"problem": "a", "answer": "1", "solution": "\\ud83d"}', "1 rows cannot .* half of a surrogate"),
        ("x.jsonl", '{"problem": "a", "answer": " "}', 'row 1: needs "answer"'),
        ("x.csv", "\xff", "cannot be read .*utf-8"),
        ("x.csv", "problem,answer,answer\n1,1,2\n", "row 1: two columns have one name"),
        ("x.csv", "problem;answer\n1,5;2\n", "semicolons separate its columns; save it with commas"),
        ("x.csv", "problem\tanswer\n15\t2\n", "tabs separate its columns; save it with commas"),
        ("x.csv", "problem,answer\n1,1\n2\n", 'row 2: needs "answer"'),
        ("x.csv", '"problem,answer\n1,1\n', "row 1: unexpected end of data"),
        ("x.csv", 'problem,answer\n"1\n1",2\n20, 0+1?,21\n', "row 2: more cells than the header"),
        ("x.csv", 'problem,answer\n1,1\n"2,2\n3,3\n', "row 2: .* end of data; put quotes"),
        ("x.parquet", "junk", "cannot be read .*Parquet file size is 4 bytes"),
        ("x.txt", "", "no problem .*0 of 0 rows"),
        ("none", None, "cannot be read .*No such file"),
        ("folder/", None, "cannot be read .*Is a directory.*; give JSON lines .*parquet"),
        ("folder.parquet/", None, "cannot be read .*Is a directory"),
    ],
)  # fmt: skip
def test_bad_tables_are_one_sentence(name, content, message, tmp_path, capfd):
    """The sentence names the path, and no library prints anything beside it."""
    path = tmp_path / name.removesuffix("/")
    if name.endswith("/"):
        path.mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
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


@pytest.mark.parametrize("case", cases("published_tests.jsonl"))
def test_published_tests_become_ours(case, tmp_path):
    """Scripts come as text or lines, calls as JSON lines or as lists.

    The values in these lists stand in lists of one, or do not.
    """
    rows = [eurus("1", "math"), eurus(case["published"])]
    write_parquet(tmp_path / "x.parquet", rows)
    problems, _ = load_problems("code", str(tmp_path / "x.parquet"))
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


ZOO = [{"question": str(i), "gt_answer": str(i), "answer": "", "level": 3} for i in range(8_522)]


def test_math_comes_from_the_hub(fake_hub):
    """One file of the set is read; a row without an answer is dropped; the paper's count stays."""
    fake_hub.rows = [*ZOO, {"question": "?", "gt_answer": "", "answer": "", "level": 5}]
    problems, notes = load_problems("math", None)
    name = "hkust-nlp/SimpleRL-Zoo-Data"
    assert fake_hub.calls == [(name, "simplelr_qwen_level3to5/train.parquet", "dataset")]
    assert problems == [{"problem": row["question"], "answer": row["gt_answer"]} for row in ZOO]
    counts, dropped = notes
    assert counts.startswith(f"data {name} (hub): 8,523 of 8,523 rows")
    assert dropped.startswith("WARNING: 1 rows cannot be used (the first: row 8523: needs")
    fake_hub.rows = [{"question": "a", "gt_answer": "1", "level": 1}]
    with pytest.raises(BadInput, match=f"--task math without --data: {name}: no problem is left"):
        load_problems("math", None)


def test_code_comes_from_the_hub(fake_hub):
    """Other abilities are left out, and unusable tests are dropped.

    Those are text that is not JSON, or is too deep, or decides nothing.
    """
    no_call = {"fn_name": "f", "inputs": ["f(1)"], "outputs": ["1"]}
    bad = [eurus(truth) for truth in ({"inputs": [], "outputs": []}, no_call, None, [1])]
    deep = eurus(0) | {"reward_model": {"ground_truth": "[" * 100_000}}
    bad += [deep, eurus(0) | {"reward_model": None}]
    calls = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 2]}
    fake_hub.rows = [eurus("7", "math"), *bad, eurus(calls)]
    problems, (counts, few, dropped) = load_problems("code", None)
    assert fake_hub.calls == [("PRIME-RL/Eurus-2-RL-Data", "train.parquet", "dataset")]
    assert problems == [{"problem": "Do it.", "tests": calls}]
    assert '7 of 8 rows of ability "code"' in counts
    assert few.startswith("WARNING: 25,276 problems were expected")
    assert dropped.startswith("WARNING: 6 rows cannot be used (the first: row 2: ")


@pytest.mark.parametrize(
    "kind, error", [("math", ConnectionError("Couldn't reach it.\nMore.")), ("code", OSError())]
)
def test_a_hub_that_fails_is_one_sentence(kind, error, monkeypatch):
    """The sentence says what was tried, the first line of why, and what to do."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    reason = "Couldn't reach it" if str(error) else "OSError"
    message = f"--task {kind} .* on the hub: .*[(]{reason}[)]; give a local file with --data"
    with pytest.raises(BadInput, match=message):
        load_problems(kind, None)
    with pytest.raises(BadInput, match=r"--bench amc23: .* give .* --data amc23=FILE"):
        load_benchmark("amc23")
