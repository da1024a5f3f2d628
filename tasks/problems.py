r"""Tasks: problems, their prompts, and how a response is graded.

    problems, notes = load_problems("math", "some.jsonl")  # None: from the hub
    template = choose_template("auto", model_name, tokenizer)
    task = text_task("math", template, tokenizer, grade_math)
    task, notes = split(task, tokenizer, ...)              # some problems are held out
    task.draw(step, count, seed)                           # the problems of one training step
    task.verdicts(problems, rollouts)                      # a Verdict for each rollout

The task that makes its own problems is `tasks/toy.py`. `tasks.settings.TASKS` names the function
that makes a task.

**From the hub** comes one parquet file per set, so no code of the set runs and no split is guessed.
  - math: the 8,523 problems of MATH levels 3 to 5 are a file of `hkust-nlp/SimpleRL-Zoo-Data`. From
    the 14 parts of `EleutherAI/hendrycks_math` one would have to take out MATH-500, and be left
    with another count.
  - code: the 25,276 problems of `PRIME-RL/Eurus-2-RL-Data` (`ability` "code"): a download of 1.7
    GB, and some GB of memory.
Another count is a warning, not an error. Rows without an answer, or with tests that decide nothing,
are dropped.

**A path** is a file of JSON lines, a JSON list or a table (`tasks/rows.py`), where a row may be
  - ours: "problem" or "question", with "answer" or "tests" (an object or its JSON text; see
    `rewards.py`);
  - MATH's: "answer" may be "gt_answer", "ground_truth_answer", or the last box of "solution";
  - GSM8K's: what follows "####" is the answer;
  - Eurus's and verl's: "prompt" (messages) and "reward_model" {"ground_truth"}, which decides
    whatever other columns say.
Capital letters in the names of columns do not matter.
Rows of a "level" outside 3 to 5 (math), or of another task's "ability", are left out. A row that
cannot be used is an error that names it; in published sets, which have "gt_answer", "solution" or
"reward_model", it is dropped, and a warning counts these rows and names the first.

**Templates** put an instruction on the form of the answer beside the problem (`choose_template`).
chat is the tokenizer's own template, with the instruction below the problem. qwen-math is the same
template with the instruction as the system's message, as in Qwen2.5-Math's own evaluation. plain is
the problem and the instruction as text. A chat template that loses either is refused; where it
writes today's date it gets DAY, so that a prompt is the same on any day.

Left out: evaluation sets (`tasks/benchmarks.py`), several answers to a problem, splits by date.
"""

import hashlib
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import NamedTuple, TypeGuard

from transformers import PreTrainedTokenizerBase

from grading import sandbox
from grading.readings import UNMATCHED, read_answer
from grpo import Rollouts, decode
from rewards import (
    Verdict,
    grade_all,
    grade_code,
    grade_math,
    last_box,
    style_of,
    without_copies,
)
from tasks.errors import BadInput, bad_input_on_error
from tasks.reward import load_reward
from tasks.rows import SURROGATE, from_file, from_hub, lacks
from tasks.settings import Problems, Template

# What each kind of problem asks for.
INSTRUCTIONS = {
    "math": r"Please reason step by step, and put your final answer within \boxed{}.",
    "code": "Please reason step by step, and give your final program in a ```python block.",
}
# The key under which a problem of a kind holds what a response is graded against.
REFERENCES = {"math": "answer", "code": "tests"}
# Name on the hub, file, and how many problems the paper trains on.
HUB = {
    "math": ("hkust-nlp/SimpleRL-Zoo-Data", "simplelr_qwen_level3to5/train.parquet", 8_523),
    "code": ("PRIME-RL/Eurus-2-RL-Data", "train.parquet", 25_276),
}
PROBLEM = "problem", "question"  # columns, of which the first that has text counts
ANSWER = "gt_answer", "ground_truth_answer", "answer"
PUBLISHED = {"gt_answer", "reward_model", "solution"}  # columns of sets from the hub
FILTERS = {"math": " of levels 3 to 5, or of none", "code": ' of ability "code", or of none'}
CHECKED = 20  # prompts, at most, that are decoded again to find a tokenizer that loses characters
LOST = 0.1  # share of a prompt's characters that a tokenizer must not lose
NAMED = 5  # rows, at most, that a warning names
ROUND = 2**20  # steps, which no run takes
DAY = date(2024, 7, 26)  # which Llama's templates write where they know no other
WRITTEN = "".join(f"|replace('%{code}', '{DAY:%{code}}')" for code in "aAbBdeFjmuUVwWxyYHIMSp")
# goes before a chat template, where it hides transformers' function of this name
FIXED_DAY = "{% macro strftime_now(format) %}{{ format|replace('%-', '%')" + WRITTEN
FIXED_DAY += " }}{% endmacro +%}"
# TeX's \boxed 2: up to the next space or the end of the formula, without a full stop
UNBRACED = re.compile(r"\\boxed(?![a-zA-Z])\s*+([^\s{$][^\s$]*?)[.,;]*(?=\s|\$|\\[)\]]|\Z)")
LEVELS = re.compile(r"(None)?|\D*[345](\.0)?")  # none, 4, "4", "Level 4"; not "Level ?"


class FirstError(NamedTuple):
    """The first wrong step of a response."""

    token: int  # index in the response's tokens of the step's first token
    kind: str  # what is wrong, in one of the task's words
    end: int  # index after the step's last token


@dataclass(frozen=True)
class Task:
    """Problems to train on, problems held out, and what turns them into prompts and verdicts.

    A problem is a dictionary with "problem", a text, and, under the key `reference`, what a
    response is graded against.
    """

    name: str
    train: list[dict]
    heldout: list[dict]
    prompt: Callable[[dict], str]
    grade: Callable[[str, object], Verdict]
    reference: str = "answer"
    # (problem, the texts of a response's tokens) -> its first wrong step, if the task can know it.
    first_error: Callable[[dict, Sequence[str]], FirstError | None] | None = None
    # (model, forbidden=prompts, steps=number) -> the last loss, after the model was taught the task
    lessons: Callable[..., float] | None = None
    refuse_copies: bool = False  # a right answer that only repeats the problem is wrong

    def draw(self, step: int, count: int, seed: int, attempt: int = 0) -> list[dict]:
        """The `count` problems of a step (from 0), in shuffled epochs that follow each other.

        The problems of an `attempt` above 0, which replace some of the step's, come from epochs
        that no step reaches.
        """
        epoch, start = divmod((step + attempt * ROUND) * count, len(self.train))
        problems: list[dict] = []
        while len(problems) < start + count:
            shuffled = list(self.train)
            random.Random(f"epoch {seed} {epoch}").shuffle(shuffled)
            problems += shuffled
            epoch += 1
        return problems[start : start + count]

    def verdicts(self, problems: list[dict], rollouts: Rollouts) -> list[Verdict]:
        """One verdict per rollout; the G rollouts of a problem are adjacent.

        A truncated response scores 0.
        """
        group_size = len(rollouts.texts) // len(problems)
        complete = (~rollouts.truncated).nonzero().flatten().tolist()
        responses = [rollouts.texts[row] for row in complete]
        references = [problems[row // group_size][self.reference] for row in complete]
        graded = grade_all(self.grade, responses, references)
        if self.refuse_copies:
            texts = [problems[row // group_size]["problem"] for row in complete]
            graded = list(map(without_copies, graded, responses, references, texts))
        verdicts = [Verdict(0.0, "truncated")] * len(rollouts.texts)
        for row, verdict in zip(complete, graded, strict=True):
            verdicts[row] = verdict
        return verdicts


def digest_of(problems: list[dict]) -> str:
    """A digest that tells these problems and their references from others."""
    text = json.dumps(
        [[p.get("id"), p["problem"], p.get("answer", p.get("tests"))] for p in problems]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def grader(kind: str, timeout_s: float | None, level: str) -> Callable[[str, object], Verdict]:
    """The function `grade(response, reference)` for a kind of problems.

    It takes the default time if `timeout_s` is None. Programs run at the sandbox `level`; raises
    BadInput where that level does not work.
    """
    grade: Callable[..., Verdict] = grade_math
    if kind == "code":
        try:
            sandbox.choose_level(level)
        except sandbox.SandboxError as error:
            raise BadInput(
                f"--sandbox {level}: {error}; choose another level or another machine"
            ) from error
        grade = partial(grade_code, level=level)
    return grade if timeout_s is None else partial(grade, timeout_s=timeout_s)


def task(
    kind: str,
    settings: Problems,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
    problems: list[dict] | None = None,
) -> tuple[Task, list[str]]:
    """A "math" or "code" task as the flags say, and notes for the user; no problem is held out yet.

    The problems are those of --data or the hub if they are not given. Raises BadInput.
    """
    template = choose_template(settings.template, model_name, tokenizer)
    if settings.reward:
        grade = load_reward(settings.reward)
    else:
        grade = grader(kind, settings.grade_timeout, settings.sandbox)
    notes: list[str] = []
    if problems is None:
        problems, notes = load_problems(kind, settings.data)
    empty = text_task(kind, template, tokenizer, grade)
    refuse_copies = kind == "math" and not settings.reward
    made = replace(empty, train=problems, refuse_copies=refuse_copies)
    return made, [*notes, f"template {template}"]


math = partial(task, "math")
code = partial(task, "code")


def text_task(
    kind: str, template: str, tokenizer: PreTrainedTokenizerBase, grade: Callable
) -> Task:
    """A "math" or "code" task without problems; `template` is a result of `choose_template`."""

    def prompt(problem: dict) -> str:
        return render(template, problem["problem"], INSTRUCTIONS[kind], tokenizer)

    return Task(kind, [], [], prompt, grade, REFERENCES[kind])


def check_readable(prompt: str, decoded: str) -> None:
    """Raise BadInput for a prompt of which encoding and decoding lost a tenth of the characters.

    White space does not count, nor another form of a letter.
    """
    normal = partial(unicodedata.normalize, "NFKC")
    written = Counter("".join(normal(prompt).split()))
    lost = (written - Counter(normal(decoded))).total()
    if lost >= LOST * written.total():
        raise BadInput(
            f"--model: the model's tokenizer loses {lost} of the {written.total()} characters of "
            f"{prompt[:40]!r}; give another"
        )


def split(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    heldout: int,
    seed: int,
    max_prompt_tokens: float,
) -> tuple[Task, list[str]]:
    """The task with `heldout` problems for evaluation and the others to train on, and notes.

    The seed draws which problems are held out. A problem is dropped if its prompt exceeds
    `max_prompt_tokens`; the notes say how many were.
    Raises BadInput if no problem is left to train on.
    """
    problems = task.train
    prompts = [task.prompt(problem) for problem in problems]
    encoded = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    fitting = []
    for place, problem in enumerate(problems):
        if place % (1 + len(problems) // CHECKED) == 0:
            check_readable(prompts[place], decode(tokenizer, encoded[place]))
        if len(encoded[place]) <= max_prompt_tokens:
            fitting.append(problem)
    if len(fitting) <= heldout:
        raise BadInput(
            f"--task {task.name}: {len(fitting)} of {len(problems)} prompts fit "
            f"{max_prompt_tokens} tokens, not more than --heldout {heldout}; lower --heldout or "
            "--max-tokens"
        )
    notes = []
    if len(fitting) < len(problems):
        notes.append(
            f"{len(problems) - len(fitting):,} problems dropped: prompts of over "
            f"{max_prompt_tokens} tokens"
        )
    random.Random(f"heldout {seed}").shuffle(fitting)
    train = fitting[heldout:]
    held = {problem["problem"] for problem in fitting[:heldout]}
    both = held.intersection(problem["problem"] for problem in train)
    if both:
        notes.append(
            f"WARNING: {len(both)} problem(s) held out are trained on, too; remove doubles"
        )
    return replace(task, train=train, heldout=fitting[:heldout]), notes


# ---- templates -----------------------------------------------------------------------------------


def choose_template(
    template: Template, model_name: str, tokenizer: PreTrainedTokenizerBase
) -> Template:
    """The template, where "auto" is resolved by the tokenizer and by `model_name`.

    `model_name` is a hub id or a folder. Raises BadInput if the tokenizer has no chat template for
    it.
    """
    if template == "auto":
        if not tokenizer.chat_template:
            return "plain"
        # both words in one folder's name: /home/qwen/mathilda is no Qwen-Math
        return "qwen-math" if re.search("qwen[^/]*math", model_name, re.I) else "chat"
    if template != "plain" and not tokenizer.chat_template:
        raise BadInput(
            f"--template {template}: the tokenizer of {model_name} has no chat template; use plain"
        )
    return template


def render(
    template: str, problem: str, instruction: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The text that the model continues, with special tokens written out.

    Raises BadInput.
    """
    content = f"{problem}\n{instruction}"
    if template == "plain":
        bos = tokenizer.bos_token_id
        starts = bos is not None and bos in tokenizer("")["input_ids"]
        return f"{tokenizer.bos_token if starts else ''}{content}\n"
    messages = [{"role": "user", "content": content}]
    if template == "qwen-math":
        system = {"role": "system", "content": instruction}
        messages = [system, {"role": "user", "content": problem}]
    with bad_input_on_error(f"--template {template}", "give plain"):
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=FIXED_DAY + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
        )
        for part in (problem, instruction):
            if "".join(part.split()) not in "".join(str(text).split()):
                raise ValueError(f"the tokenizer's chat template leaves out {part[:40]!r}")
    return str(text)


# ---- problems from rows --------------------------------------------------------------------------


def load_problems(kind: str, data: str | None) -> tuple[list[dict], list[str]]:
    """The problems of a file, or of the hub if `data` is None, and notes for the user.

    The notes say where the problems come from, how many rows were left out or dropped, and why. Of
    a file, they name rows that would train wrongly. Raises BadInput.
    """
    repo, file, expected = HUB[kind]
    if data is None:
        blame = f"--task {kind} without --data: {repo}"
        rows = from_hub(repo, file, f"{blame}/{file}", "give a local file with --data")
    else:
        blame = f"--data {data}"
        rows = from_file(data, blame)
    problems, dropped, count = numbered(rows, kind, blame)
    wanted = len(problems) + len(dropped)
    notes = [f"data {data or f'{repo} (hub)'}: {wanted:,} of {count:,} rows"]
    if wanted < count:
        notes[0] += FILTERS[kind]
    if data is None and wanted != expected:
        notes.append(f"WARNING: {expected:,} problems were expected: not the paper's training set")
    if dropped:
        notes.append(f"WARNING: {len(dropped):,} rows cannot be used (the first: {dropped[0]})")
    if not problems:
        raise BadInput(f"{blame}: no problem is left ({notes[-1]}); give others with --data")
    if data is not None:
        notes += doubts_of(problems)
    return list(problems.values()), notes


def numbered(rows: Iterable[dict], kind: str, blame: str) -> tuple[dict[int, dict], list[str], int]:
    """The problems by the numbers of their rows, what was dropped and why, and how many rows are.

    Raises BadInput, which begins with `blame`, for a row of no published set that cannot be used.
    """
    problems = {}
    dropped = []
    count = 0
    for count, row in enumerate(rows, 1):
        if _is_wanted(row, kind):
            try:
                problems[count] = as_problem(row, kind)
            except (ValueError, TypeError, RecursionError) as error:
                if not PUBLISHED & set(map(str.lower, row)):
                    raise BadInput(f"{blame}, row {count}: {error}") from error
                dropped.append(f"row {count}: {error}")
    return problems, dropped, count


def doubts_of(problems: dict[int, dict]) -> list[str]:
    """Warnings of answers that no number equals, and of problems that occur twice.

    The keys are the numbers of the problems' rows.
    """
    notes = []
    for pattern, remedy in UNMATCHED.items():
        rows = [f"row {row}" for row, p in problems.items() if pattern.match(p.get("answer", ""))]
        if rows:
            notes.append(f"WARNING: {_first(rows)}: {remedy}")
    seen: dict[str, int] = {}  # the words of a problem -> its first row
    doubles = []
    for row, problem in problems.items():
        before = seen.setdefault(" ".join(problem["problem"].split()), row)
        if before != row:
            doubles.append(f"rows {before} and {row}")
    if doubles:
        notes.append(f"WARNING: {_first(doubles)} are the same problem; keep one of them")
    return notes


def _first(rows: list[str]) -> str:
    """The first names of rows, with dots for the others."""
    return ", ".join(rows[:NAMED] + ["..."] * (len(rows) > NAMED))


def _is_wanted(row: dict, kind: str) -> bool:
    """Whether a row has no other level and no other task's ability."""
    level = _columns(row).get("level") if kind == "math" else None
    if not LEVELS.fullmatch(str(level)):  # a CSV has "" for none
        return False
    ability = str(row.get("ability"))
    return ability == kind or ability not in REFERENCES


def as_problem(row: dict, kind: str) -> dict:
    """The problem in a row: {"problem", "answer"} or {"problem", "tests"}.

    One with an answer keeps a "solution". Raises ValueError, which says what the row lacks.
    """
    columns = _columns(row)
    # The prompt last: SimpleRL-Zoo's holds a template, its question does not.
    problem = _first_text([*map(columns.get, PROBLEM), _user_message(row.get("prompt"))])
    if problem is None:
        raise lacks(
            row, '"problem" or "question", non-empty text, or "prompt" with a user\'s message'
        )
    if "<|im_start|>" in problem:
        raise ValueError("holds a template already; give the bare problem")
    reward_model = columns.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if kind == "code":
        if reward_model is None:
            tests = _own_tests(columns.get("tests"))
        else:
            tests = _published_tests(truth)
        style_of(tests)
        return {"problem": problem, "tests": tests}
    solution = columns.get("solution")
    answers = [truth, *map(columns.get, ANSWER), boxed_answer(solution)]
    answer = _first_text(list(map(read_answer, answers)))
    if answer is None:
        raise lacks(row, '"answer", non-empty text, or "solution" with a \\boxed{}')
    found = {"problem": problem, "answer": answer}
    return found | {"solution": solution} if is_text(solution) else found


def _columns(row: dict) -> dict:
    """A row's columns, also without capitals, and what some sets keep in "extra_info"."""
    columns = {name.lower(): value for name, value in row.items()} | row
    extra = columns.get("extra_info")
    return extra | columns if isinstance(extra, dict) else columns


def _user_message(prompt: object) -> str | None:
    """The last message of the user; None if there is none, or the prompt is no list."""
    for message in reversed(prompt) if isinstance(prompt, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            return message.get("content")
    return None


def _first_text(values: list) -> str | None:
    """The first value that is non-empty text; None if there is none."""
    return next(filter(is_text, values), None)


def boxed_answer(solution: object) -> str | None:
    r"""The last box of a solution as MATH's authors write it, also as \boxed 2 or \fbox{2}."""
    if not isinstance(solution, str):
        return None
    return last_box(UNBRACED.sub(r"\\boxed{\1}", solution.replace(r"\fbox", r"\boxed")))


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is non-empty text.

    Raises ValueError for text that no tokenizer reads.
    """
    if not isinstance(value, str):
        return False
    if SURROGATE.search(value):
        raise ValueError("holds half of a surrogate pair (\\ud800 to \\udfff); write both halves")
    return bool(value.strip())


# ---- tests ---------------------------------------------------------------------------------------


def _own_tests(tests: object) -> object:
    """Tests in our form, from an object or its JSON text.

    Keys with None are left out: parquet gives each row the keys that other rows have.
    """
    if isinstance(tests, str):
        tests = json.loads(tests)
    if isinstance(tests, dict):
        return {key: value for key, value in tests.items() if value is not None}
    return tests


def _published_tests(published: object) -> object:
    """Tests of Eurus or LiveCodeBench in our form.

    Scripts read and write text or lists of lines. Calls are lists of arguments, and the value of
    each may stand in a list of one; or both are JSON texts, with one argument per line.
    """
    tests = _own_tests(published)
    if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
        return tests  # `style_of` says what is wrong
    inputs = tests["inputs"]
    outputs = tests["outputs"]
    if "fn_name" not in tests:
        return {
            "inputs": list(map(_joined, inputs)),
            "outputs": list(map(_joined, outputs)),
        }
    if all(isinstance(text, str) for text in inputs):
        inputs = list(map(_json_values, inputs))
        outputs = [json.loads(value) if isinstance(value, str) else value for value in outputs]
    elif all(isinstance(value, list) and len(value) == 1 for value in outputs):
        outputs = [value[0] for value in outputs]
    return {"fn_name": tests["fn_name"], "inputs": inputs, "outputs": outputs}


def _json_values(text: str) -> list:
    """The values of a text with one JSON value per line: the arguments of a call."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _joined(lines: object) -> object:
    """A list of lines as one text; everything else as it is."""
    return "\n".join(lines) if isinstance(lines, list) else lines
