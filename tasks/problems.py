r"""Tasks: problems, their prompts, and how a response is graded.

    task, notes = file_task("math", None, tokenizer, ...)           # the paper's problems, from the hub
    task, notes = file_task("math", "some.jsonl", tokenizer, ...)   # {"problem": ..., "answer": ...} a line
    task, notes = file_task("code", "some.jsonl", tokenizer, ...)   # {"problem": ..., "tests": ...}: `rewards.py`
    task.draw(step, count, seed)                                    # the problems of one training step
    task.verdicts(problems, rollouts)                               # a Verdict for each rollout

The embedded task is built from the same `Task` in `harness/prepare.py`; its problems come from `tasks/toy.py`.

**From the hub**, where no path is given: one parquet file each, so no code of theirs runs and no split is guessed.
  - math: the 8,523 problems of MATH levels 3 to 5 are a file of `hkust-nlp/SimpleRL-Zoo-Data`. From
    `EleutherAI/hendrycks_math`, 14 parts, one would have to take out MATH-500, and be left with another count.
  - code: the 25,276 problems of `PRIME-RL/Eurus-2-RL-Data` (`ability` "code"): 1.7 GB to load, some GB of memory.
Another count is a loud note, not an error; rows without an answer or with tests that decide nothing are dropped.

**From a path**: a JSON-lines file in our own form, taken as it is; or a .parquet, .csv or .json file (a list), a
folder of such files, or a folder that `datasets` saved, with a "train" split if it has splits. A row there may be
  - ours: "problem" or "question", with "answer" (math) or "tests" (code; an object or its JSON text);
  - MATH's: "answer" may be "gt_answer", "ground_truth_answer", or the last box of "solution";
  - Eurus's: "prompt" (messages) and "reward_model" {"ground_truth"}.
Rows of a "level" outside 3 to 5 (math), or of another task's "ability", are left out. A row that cannot be used is an
error with its number, but for the published forms ("gt_answer", "reward_model"), which load as they do from the hub.

**Templates** around the problem and an instruction on the form of the answer (`choose_template`): qwen-math, of
Qwen2.5-Math's own evaluation, has the instruction as the system's message; chat is the tokenizer's own, with the
instruction below the problem; plain is the two as text.

Left out: evaluation sets, several answers to a problem, splits by date.
"""

import csv
import glob
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from grpo import Rollouts
from rewards import Verdict, grade_all, last_box, style_of

# What a kind of problems asks for, and under which key its problems hold what a response is graded against.
INSTRUCTIONS = {
    "math": r"Please reason step by step, and put your final answer within \boxed{}.",
    "code": "Please reason step by step, and give your final program in a ```python block.",
}
REFERENCES = {"math": "answer", "code": "tests"}
# Name on the hub, file, and how many problems the paper trains on.
HUB = {
    "math": ("hkust-nlp/SimpleRL-Zoo-Data", "simplelr_qwen_level3to5/train.parquet", 8_523),
    "code": ("PRIME-RL/Eurus-2-RL-Data", "train.parquet", 25_276),
}
FILTERS = {"math": "of levels 3 to 5, or of none", "code": 'of ability "code", or of none'}
HINT = "The final answer is \\boxed{{{}}}.\n\n"
TEMPLATES = ("auto", "qwen-math", "chat", "plain")


class BadInput(ValueError):
    """A user's mistake, in one sentence that names the flag or file, the value and the remedy."""


@dataclass(frozen=True)
class Task:
    """Problems are dictionaries with at least "problem", a text, and `reference`, what a response is graded against."""

    name: str
    train: list[dict]
    heldout: list[dict]
    prompt: Callable[[dict], str]
    grade: Callable[[str, object], Verdict]
    reference: str = "answer"
    # The first wrong step of a response, a `toy.FirstError` or None, where a task knows it.
    first_error: Callable[[dict, str], tuple[int, str, int] | None] | None = None
    step_end: str = "\n\n"  # what ends a step of a response
    hint: str = HINT  # the answer, told before the problem

    def informed(self, problem: dict) -> dict:
        """The same problem with its answer told."""
        return {**problem, "problem": self.hint.format(problem[self.reference]) + problem["problem"]}

    def draw(self, step: int, count: int, seed: int) -> list[dict]:
        """The `count` problems of a step (from 0): consecutive ones of an endless row of shuffled epochs."""
        places = range(step * count, (step + 1) * count)
        orders = {}
        for epoch in {place // len(self.train) for place in places}:
            orders[epoch] = list(range(len(self.train)))
            random.Random(f"epoch {seed} {epoch}").shuffle(orders[epoch])
        return [self.train[orders[place // len(self.train)][place % len(self.train)]] for place in places]

    def verdicts(self, problems: list[dict], rollouts: Rollouts) -> list[Verdict]:
        """One verdict a rollout; G rollouts a problem, adjacent. A response without an end scores 0."""
        group_size = len(rollouts.texts) // len(problems)
        whole = [row for row, cut in enumerate(rollouts.truncated.tolist()) if not cut]
        references = [problems[row // group_size][self.reference] for row in whole]
        verdicts = [Verdict(0.0, "truncated")] * len(rollouts.texts)
        grades = grade_all(self.grade, [rollouts.texts[row] for row in whole], references)
        for row, grade in zip(whole, grades, strict=True):
            verdicts[row] = grade
        return verdicts


def file_task(
    kind: str,
    path: str | None,
    tokenizer,
    grade: Callable,
    *,
    template: str,
    model_name: str,
    heldout: int,
    seed: int,
    max_prompt_tokens: float,
    told: bool = False,
) -> tuple[Task, list[str]]:
    """Problems of `path`, or of the hub, "math" or "code"; `heldout` of them (drawn by the seed) kept for evaluation.

    Problems whose prompt exceeds `max_prompt_tokens` are dropped, if `told` also those that do so with the answer told.
    The notes, for the user, say where the problems come from, how many were left out or dropped and why, and which
    template is used. Raises BadInput.
    """
    chosen = choose_template(template, model_name, tokenizer)
    problems, notes = load_problems(kind, path)

    def prompt(problem: dict) -> str:
        return render(chosen, problem["problem"], INSTRUCTIONS[kind], tokenizer)

    task = Task(kind, [], [], prompt, grade, REFERENCES[kind])
    longest = [prompt(task.informed(problem) if told else problem) for problem in problems]
    ids = tokenizer(longest, add_special_tokens=False)["input_ids"]
    fitting = [problem for problem, tokens in zip(problems, ids, strict=True) if len(tokens) <= max_prompt_tokens]
    if len(fitting) <= heldout:
        raise BadInput(
            f"{_blame(kind, path)}: {len(fitting)} of its {len(problems)} problems have prompts of at most "
            f"{max_prompt_tokens} tokens, not more than --heldout {heldout}; lower --heldout or --max-tokens"
        )
    if len(fitting) < len(problems):
        notes.append(f"{len(problems) - len(fitting):,} problems dropped: prompts of over {max_prompt_tokens} tokens")
    notes.append(f"template {chosen}" + (" (chosen by model and tokenizer)" if template == "auto" else " (asked for)"))
    random.Random(f"heldout {seed}").shuffle(fitting)
    return replace(task, train=fitting[heldout:], heldout=fitting[:heldout]), notes


# ---- templates ------------------------------------------------------------------------------------------------


def choose_template(template: str, model_name: str, tokenizer) -> str:
    """The template, "auto" resolved by the tokenizer and by `model_name`, a hub id or a folder. Raises BadInput."""
    missing = sorted({"<|im_start|>", "<|im_end|>"} - set(tokenizer.added_tokens_encoder))
    if template == "auto":
        parts = Path(model_name.lower()).parts  # both words in one of them: /home/mathilda/qwen is no Qwen-Math
        qwen_math = not missing and any("qwen" in part and "math" in part for part in parts)
        return "qwen-math" if qwen_math else "chat" if tokenizer.chat_template else "plain"
    if template == "qwen-math" and missing:
        raise BadInput(f"--template qwen-math: the tokenizer of {model_name} has no {missing[0]}; use another template")
    if template == "chat" and not tokenizer.chat_template:
        raise BadInput(f"--template chat: the tokenizer of {model_name} has no chat template; use --template plain")
    return template


def render(template: str, problem: str, instruction: str, tokenizer) -> str:
    """The text that the model continues; special tokens are written out in it."""
    if template == "qwen-math":
        system, user = (f"<|im_start|>{name}\n" for name in ("system", "user"))
        return f"{system}{instruction}<|im_end|>\n{user}{problem}<|im_end|>\n<|im_start|>assistant\n"
    content = f"{problem}\n{instruction}"
    if template == "chat":
        messages = [{"role": "user", "content": content}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    starts = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("")["input_ids"]
    return f"{tokenizer.bos_token if starts else ''}{content}\n"


# ---- where problems come from ---------------------------------------------------------------------------------


def load_problems(kind: str, path: str | None) -> tuple[list[dict], list[str]]:
    """The problems of `path`, or of the hub where it is None, and notes on them; raises BadInput."""
    if path is None:
        return select(kind, hub_rows(kind), path)
    if (rows := local_rows(Path(path))) is not None:
        return select(kind, rows, path)
    problems = read_problems(Path(path), kind)
    return problems, [f"data {path}: {len(problems):,} problems"]


def _blame(kind: str, path: str | None) -> str:
    """What an error is about: the flag and the file, or the set."""
    return f"--task {kind} without --data: {HUB[kind][0]}" if path is None else f"--data {path}"


def hub_rows(kind: str) -> Iterable[dict]:
    """The rows of a set of `HUB`, kept on disk once loaded; raises BadInput, at once where the hub is out of reach."""
    name, file, _ = HUB[kind]
    wanted = dict(repo_id=name, filename=file, repo_type="dataset")
    try:
        import huggingface_hub as hub  # here and in `_datasets`: they take a second, which the embedded task saves

        try:
            return _table(hub.hf_hub_download(**wanted, local_files_only=True))
        except hub.errors.LocalEntryNotFoundError:
            hub.HfApi().dataset_info(name, timeout=10)  # a download would retry for long, and fill the screen
            return _table(hub.hf_hub_download(**wanted))
    except Exception as error:  # libraries raise of every kind; the cause stays attached
        raise BadInput(
            f"--task {kind} without --data: {name}/{file} cannot be loaded from the hub ({cause(error)}); "
            "give a local file or folder with --data"
        ) from error


def local_rows(path: Path) -> Iterable[dict] | None:
    """The rows of a table or of a folder, None for a file of JSON lines; raises BadInput."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.suffix == ".parquet":
            return _table(path)
        if path.suffix == ".csv":  # not by `datasets`, which guesses types: an answer of 007 would be 7
            csv.field_size_limit(2**31 - 1)
            with path.open(encoding="utf-8-sig", newline="") as file:
                return list(csv.DictReader(file))
        if path.suffix == ".json" and (text := path.read_text(encoding="utf-8")).lstrip().startswith("["):
            return json.loads(text)
    except Exception as error:  # libraries raise of every kind; the cause stays attached
        raise BadInput(
            f"--data {path}: cannot be read ({cause(error)}); give a file of JSON lines, .json, .csv or .parquet, or "
            "a folder of such files or saved by datasets, with a train split"
        ) from error


def _table(path: Path | str) -> Iterable[dict]:
    """The rows of a parquet file, whose name would be a pattern to `datasets`."""
    return _datasets().load_dataset("parquet", data_files=glob.escape(str(path)), split="train")


def _folder(path: Path) -> Iterable[dict]:
    """What `save_to_disk` wrote, or files whose names tell training from test."""
    if not any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return _datasets().load_dataset(str(path), split="train")
    saved = _datasets().load_from_disk(str(path))
    if isinstance(saved, dict) and "train" not in saved:
        raise ValueError(f"its splits are {', '.join(saved)}, not train")
    return saved["train"] if isinstance(saved, dict) else saved


def _datasets():
    """The library, without what it would print beside our one sentence."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def cause(error: BaseException) -> str:
    """The first line of what caused an error, to stand in brackets."""
    while error.__cause__:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(". ")


def read_problems(path: Path, kind: str) -> list[dict]:
    """The problems of a JSON-lines file; blank lines are skipped. Raises BadInput, naming the line."""
    problems = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--data {path}: cannot be read ({error}); give a UTF-8 JSON-lines file") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"--data {path}, line {number}: not JSON ({error}); give one object a line") from error
        if not isinstance(row, dict) or not _is_text(row.get("problem")):
            raise BadInput(f'--data {path}, line {number}: needs "problem", non-empty text')
        if kind == "math" and not _is_text(row.get("answer")):
            raise BadInput(f'--data {path}, line {number}: needs "answer", non-empty text')
        if kind == "code":
            try:
                style_of(row.get("tests"))
            except ValueError as error:
                raise BadInput(f'--data {path}, line {number}, "tests": {error}') from error
        problems.append(row)
    if not problems:
        raise BadInput(f"--data {path}: holds no problem; give one JSON object a line")
    return problems


# ---- rows of tables -------------------------------------------------------------------------------------------


def select(kind: str, rows: Iterable[dict], path: str | None) -> tuple[list[dict], list[str]]:
    """The problems of these rows, and notes: how many were left out or dropped, or are not as many as the paper's."""
    source, expected = (f"{HUB[kind][0]} (hub)", HUB[kind][2]) if path is None else (path, None)
    problems, dropped, number, wanted = [], [], 0, 0
    for number, row in enumerate(rows, 1):
        row = row if isinstance(row, dict) else {}  # a list of JSON may hold anything
        if not _is_wanted(row, kind):
            continue
        wanted += 1
        try:
            problems.append(as_problem(row, kind))
        except (ValueError, RecursionError) as error:
            if path is not None and not {"gt_answer", "reward_model"} & row.keys():
                raise BadInput(f"--data {path}, row {number}: {error}") from error
            dropped.append(f"row {number} {error}")
    if not problems:
        why = f"the first dropped: {dropped[0]}" if dropped else f"{wanted:,} {FILTERS[kind]}"
        raise BadInput(f"{_blame(kind, path)}: none of {number:,} rows can be used ({why}); give others with --data")
    notes = [f"data {source}: {wanted:,} of {number:,} rows {FILTERS[kind]}"]
    if expected and wanted != expected:
        notes.append(f"WARNING: {wanted:,} problems in {source}, {expected:,} expected: not the paper's training set")
    if dropped:
        notes.append(f"{len(dropped):,} problems dropped: without a usable {REFERENCES[kind]} (first: {dropped[0]})")
    return problems, notes


def _is_wanted(row: dict, kind: str) -> bool:
    """Not of another level, and not another task's."""
    level = _fields(row).get("level") if kind == "math" else None
    if level is not None and not re.fullmatch(r"\D*[345](\.0)?", str(level)):  # 4, "4", "Level 4"; not "Level ?"
        return False
    ability = str(row.get("ability"))
    return ability == kind or ability not in REFERENCES


def as_problem(row: dict, kind: str) -> dict:
    """{"problem", "answer"} or {"problem", "tests"} of a row; raises ValueError, which says what is missing."""
    fields = _fields(row)
    # The prompt last: SimpleRL-Zoo's holds a template, its question does not.
    problem = _first_text(fields.get("problem"), fields.get("question"), _user_message(row.get("prompt")))
    if problem is None:
        raise ValueError('needs "problem" or "question", non-empty text, or "prompt" with a user\'s message')
    if "<|im_start|>" in problem:
        raise ValueError("holds a template already; give the bare problem")
    graded = fields["reward_model"].get("ground_truth") if isinstance(fields.get("reward_model"), dict) else None
    if kind == "code":
        tests = _published_tests(graded) if "reward_model" in fields else _own_tests(fields.get("tests"))
        try:
            style_of(tests)
        except ValueError as error:
            raise ValueError(f'"tests": {error}') from error
        return {"problem": problem, "tests": tests}
    box = last_box(fields["solution"]) if isinstance(fields.get("solution"), str) else None
    answer = _first_text(*map(fields.get, ("gt_answer", "ground_truth_answer", "answer")), graded, box)
    if answer is None:
        raise ValueError('needs "answer", non-empty text, or "solution" with a \\boxed{}')
    return {"problem": problem, "answer": answer}


def _fields(row: dict) -> dict:
    """A row's columns, and what some sets keep in "extra_info"."""
    extra = row.get("extra_info")
    return {**(extra if isinstance(extra, dict) else {}), **row}


def _user_message(prompt) -> str | None:
    """The last message of the user."""
    messages = [item for item in prompt if isinstance(item, dict)] if isinstance(prompt, list) else []
    return ([None] + [item.get("content") for item in messages if item.get("role") == "user"])[-1]


def _first_text(*values) -> str | None:
    """The first that is text, or a number as text: a column of numbers comes as numbers from some files."""
    for value in values:
        if type(value) is int or (type(value) is float and math.isfinite(value)):
            return str(value)
        if _is_text(value):
            return value
    return None


def _own_tests(tests) -> dict:
    """Tests in our form, or their JSON text; parquet fills in None for the keys that other rows have."""
    tests = json.loads(tests) if isinstance(tests, str) else tests
    return {key: value for key, value in tests.items() if value is not None} if isinstance(tests, dict) else tests


def _published_tests(tests) -> dict:
    """Eurus's tests in our form. Its scripts read and write text or lists of lines. Its calls are lists of arguments,
    each value in a list of one, or texts with an argument a line, in JSON, as are the values.
    """
    tests = _own_tests(tests)
    inputs, outputs = (tests.get(key) if isinstance(tests, dict) else None for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        return tests  # `style_of` says what is wrong
    if "fn_name" not in tests:
        return {"inputs": list(map(_lines, inputs)), "outputs": list(map(_lines, outputs))}
    if all(isinstance(item, str) for item in inputs):
        inputs = [[json.loads(line) for line in item.split("\n") if line.strip()] for item in inputs]
        outputs = [json.loads(item) if isinstance(item, str) else item for item in outputs]
    elif all(isinstance(item, list) and len(item) == 1 for item in outputs):
        outputs = [item[0] for item in outputs]
    return {"fn_name": tests["fn_name"], "inputs": inputs, "outputs": outputs}


def _lines(item):
    """A list of lines as one text; everything else as it is."""
    return "\n".join(item) if isinstance(item, list) and all(isinstance(line, str) for line in item) else item


def _is_text(value) -> bool:
    """Non-empty text; JSON can spell half a surrogate pair, which no tokenizer reads."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= c <= "\udfff" for c in value)
