r"""Tasks: problems, their prompts, and how a response is graded.

    template = choose_template("auto", model_name, tokenizer)
    task = text_task("math", template, tokenizer, grade_math)
    task, notes = split(task, tokenizer, ...)              # some problems are held out
    task.draw(step, count, seed)                           # the problems of one training step
    task.verdicts(problems, rollouts)                      # a Verdict for each rollout

The task that makes its own problems is `tasks/toy.py`. `base.config.TASKS` names the function
that makes a task.

**Templates** put an instruction on the form of the answer beside the problem (`choose_template`).
chat is the tokenizer's own template, with the instruction below the problem. qwen-math is the same
template with the instruction as the system's message, as in Qwen2.5-Math's own evaluation. plain is
the problem and the instruction as text. A chat template that loses either is refused; where it
writes today's date it gets DAY, so that a prompt is the same on any day.

Left out: several answers to a problem, splits by date.
"""

import hashlib
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from base.config import Problems, Template
from base.errors import BadInput, bad_input_on_error
from grading import sandbox
from grpo import Rollouts, decode
from rewards import Verdict, grade_all, grade_code, grade_math
from tasks.problems import REFERENCES, load_problems
from tasks.readings import without_copies
from tasks.reward import load_reward

# What each kind of problem asks for.
INSTRUCTIONS = {
    "math": r"Please reason step by step, and put your final answer within \boxed{}.",
    "code": "Please reason step by step, and give your final program in a ```python block.",
}
CHECKED = 20  # prompts, at most, that are decoded again to find a tokenizer that loses characters
LOST = 0.1  # share of a prompt's characters that a tokenizer must not lose
DAY = date(2024, 7, 26)  # which Llama's templates write where they know no other
WRITTEN = "".join(f"|replace('%{code}', '{DAY:%{code}}')" for code in "aAbBdeFjmuUVwWxyYHIMSp")
# goes before a chat template, where it hides transformers' function of this name
FIXED_DAY = "{% macro strftime_now(format) %}{{ format|replace('%-', '%')" + WRITTEN
FIXED_DAY += " }}{% endmacro +%}"
HTML = re.compile(r"</?s>|<(?:pad|unk|mask)>")  # tokens that are text in a problem


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
    # (model, forbidden=prompts, steps=number) -> the last loss: supervised steps before training
    warm_up: Callable[..., float] | None = None
    refuse_copies: bool = False  # a right answer that only repeats the problem is wrong

    def draw(self, step: int, count: int, seed: int) -> list[dict]:
        """The `count` problems of a step (from 0), in shuffled epochs that follow each other."""
        epoch, start = divmod(step * count, len(self.train))
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


math_task = partial(task, "math")
code_task = partial(task, "code")


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


def without_special_tokens(problem: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A problem as text alone: HTML's <s> becomes < s> where it is a special token.

    Raises BadInput for another special token that chat templates write.
    """
    written = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token}"
    for token in tokenizer.all_special_tokens:
        if token not in problem:
            continue
        if HTML.fullmatch(token):
            problem = problem.replace(token, f"< {token[1:]}")
        elif token in written:
            raise BadInput(
                f"the problem {problem[:40]!r} holds {token}, which the chat template writes; give "
                "the bare problem"
            )
    return problem


def render(
    template: str, problem: str, instruction: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The text that the model continues, with special tokens written out.

    Raises BadInput.
    """
    problem = without_special_tokens(problem, tokenizer)
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
