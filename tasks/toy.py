r"""The embedded task: little programs mod 10 whose first wrong step is known exactly.

    prompt     a=3-6;b=3+a;c=b*7;c?
    response   a=3-6=3-6=7
               b=3+a=3+7=0
               c=b*7=0*7=0
               \boxed{0}

A response has a line per definition: label = definition = the same with values = result. A line is
12 tokens long, so spans of `--window 12` compare about a line of work. Each definition uses the one
before, and every operation is invertible mod 10 (`*` only by 3, 7 or 9). So a single mistake
always changes the answer, and a wrong answer always has a first wrong line, which `first_error`
finds with its kind. No real data set offers this: credit can be scored against the truth. Two
mistakes can cancel, so a right answer may hold wrong lines: before training 15% of them do
(lab/records/decides.md).

The policy is a tiny Qwen2 model, made here and taught by `warm_up` on *careless* demonstrations:
they do `*` as `+` more often than not (so greedy decoding is wrong too, and reinforcement learning
has something to fix) and slip elsewhere now and then, always going on consistently from the wrong
value. With more than eight lines each of these mistakes is rarer, as a response would otherwise
never be right; greedy decoding can then do `*`.

The default run's warm-up takes two minutes. The model after it ships with the project (START):

    python -m tasks.toy    # makes it again, after a change of the model or of its warm-up

Left out: problems with several answers, self-correction.
"""

import hashlib
import inspect
import random
import re
import string
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AddedToken,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from base.config import Problems, defaults_of
from base.errors import BadInput
from grpo import HIDE_BAR
from tasks.reward import load_reward
from tasks.task import FirstError, Task, grader

LABELS = string.ascii_lowercase
FEW = 8  # lines whose labels the default's vocabulary holds
SYMBOLS = ["<pad>", "<eos>", *"\n;0123456789+-*=?", r"\boxed{", "}", *LABELS]
IDS = {symbol: i for i, symbol in enumerate(SYMBOLS)}
DIGIT_VALUES = {str(digit): digit for digit in range(10)}  # of operands that are not labels
SYMBOL = re.compile(r"<pad>|<eos>|\\boxed\{|[\s\S]")
LINE = re.compile(
    r"([a-z])=(?P<definition>(\w)([-+*])(\w))"
    r"=(?P<left>\d)(?P<op>[-+*])(?P<right>\d)"
    r"=(?P<result>\d)\n"
)
SHORT_LINE = re.compile(r"([a-z])=(?P<result>\d)\n")
BOX = re.compile(r"\\boxed\{(\d)\}")

Definition = tuple[str, str, str]  # left operand, operator, right operand

# Problems for training; the same for any --steps, so that a resumed run draws the same ones.
MADE_PROBLEMS = 640
SILENCE = 30  # seconds between two lines of a log while nothing else is printed
MISCONCEPTION = 0.55  # chance that a demonstration does * as +, with up to FEW lines
SLIP = 0.05  # chance of another mistake in any other line
BATCH = 32  # demonstrations in a batch of supervised learning
HINT_TOKENS = 4  # of a prompt that tells the answer
START = Path(__file__).with_name("start.safetensors")  # the model after the default run's warm-up


def task(
    settings: Problems,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
) -> tuple[Task, list[str]]:
    """The task with its problems, and no notes.

    Raises BadInput where there are too few problems, or for a model of another task.
    """
    lines = settings.toy_lines
    if len(tokenizer) != len(symbols_of(lines)):
        raise BadInput(
            f"--task embedded: {model_name} is not a model of the embedded task with --toy-lines "
            f"{lines}; give that of its training, or --task math and --data"
        )
    train, heldout = make_problems(MADE_PROBLEMS, settings.heldout, lines, settings.seed)
    if len(train) < MADE_PROBLEMS:
        raise BadInput(
            f"--toy-lines {lines}: too few different problems for --heldout {settings.heldout}; "
            "raise it"
        )
    grade = grader("math", settings.grade_timeout, settings.sandbox)
    if settings.reward:
        grade = load_reward(settings.reward)
    return Task(
        "embedded",
        train,
        heldout,
        itemgetter("problem"),
        grade,
        first_error=first_error,
        warm_up=partial(
            warm_up, lines=lines, seed=settings.seed, may_read=not settings.warmup_given
        ),
    ), []


def apply(op: str, left: int, right: int) -> int:
    """left op right, mod 10."""
    return {"+": left + right, "-": left - right, "*": left * right}[op] % 10


def make_problem(rng: random.Random, lines: int) -> dict:
    """One problem {"problem": prompt, "answer": digit} with `lines` definitions (1 to 26)."""
    prompt = ""
    values = dict(DIGIT_VALUES)
    for i in range(lines):
        op = rng.choice("+-*")
        operands = [LABELS[i - 1] if i else str(rng.randrange(10)), str(rng.randrange(10))]
        if op == "*":
            operands[1] = rng.choice("379")
        elif i:
            rng.shuffle(operands)
        left, right = operands
        prompt += f"{LABELS[i]}={left}{op}{right};"
        values[LABELS[i]] = apply(op, values[left], values[right])
    last = LABELS[lines - 1]
    return {"problem": f"{prompt}{last}?\n", "answer": str(values[last])}


def make_problems(count: int, heldout: int, lines: int, seed: int) -> tuple[list[dict], list[dict]]:
    """`count` problems to train on and `heldout` others, with no prompt in both.

    No prompt is held out twice. Fewer problems come where so many do not exist: one line allows
    230, two 9,890.
    """
    rng = random.Random(f"problems {seed}")
    train: list[dict] = []
    tests: dict[str, dict] = {}
    for _ in range(100 * (count + heldout)):
        if len(tests) == heldout and len(train) == count:
            break
        problem = make_problem(rng, lines)
        if len(tests) < heldout:
            tests[problem["problem"]] = problem
        elif problem["problem"] not in tests:
            train.append(problem)
    return train, list(tests.values())


def demonstrate(problem: dict, rng: random.Random, careless: bool = True) -> str:
    """A worked response to a problem.

    A careless one makes mistakes and continues from the wrong values.
    """
    values = dict(DIGIT_VALUES)
    response = ""
    definitions = definitions_of(problem["problem"])
    carelessness = careless * min(1, FEW / len(definitions))
    for label, (left, op, right) in definitions.items():
        work, values[label] = _work(op, values[left], values[right], rng, carelessness)
        response += f"{label}={left}{op}{right}={work}={values[label]}\n"
    return response + rf"\boxed{{{values[label]}}}"


def _work(
    op: str, left: int, right: int, rng: random.Random, carelessness: float
) -> tuple[str, int]:
    """One line's substitution and result, e.g. ("3+7", 0); the chance of a mistake is scaled."""
    shown = done = op  # the operator as written and as carried out
    if carelessness and op == "*" and rng.random() < carelessness * MISCONCEPTION:
        done = "+"
    elif carelessness and op != "*" and rng.random() < carelessness * SLIP:
        slip = rng.random()
        if slip < 0.4:
            return f"{left}{op}{right}", (apply(op, left, right) + rng.choice((-1, 1))) % 10
        if slip < 0.7:
            left = (left + rng.randrange(1, 10)) % 10
        else:
            shown = done = rng.choice([o for o in "+-*" if o != op])
    return f"{left}{shown}{right}", apply(done, left, right)


def first_error(problem: dict, tokens: Sequence[str]) -> FirstError | None:
    """The first wrong step of a response, given as the texts of its tokens; None if there is none.

    Its kind is format, repeat, copy, order, lookup, operator, arith, shortcut or final.

    A step is judged by the response's *own* earlier results: what follows consistently from a wrong
    value is not wrong again. So a response without an error has the right answer, and a wrong
    answer has an error.
    """
    definitions = definitions_of(problem["problem"])
    query = list(definitions)[-1]  # the label asked for
    values = dict(DIGIT_VALUES)
    start = 0
    for line in "".join(tokens).splitlines(keepends=True):
        end = start + len(SYMBOL.findall(line))
        if not line.startswith(r"\boxed{"):
            fault = _line_fault(line, definitions, values)
        elif line == rf"\boxed{{{values.get(query, '')}}}":
            return None
        else:
            fault = "final" if BOX.fullmatch(line) else "format"
        if fault:
            return FirstError(start, fault, end)
        start = end
    return FirstError(start, "format", start + 1)  # no box: wrong where it should have stood


def _line_fault(
    line: str, definitions: dict[str, Definition], values: dict[str, int]
) -> str | None:
    """What is wrong with a line of work, None if nothing is.

    The line's own result enters `values`.
    """
    full = LINE.fullmatch(line)
    match = full or SHORT_LINE.fullmatch(line)
    if not match:
        return "format"
    label = line[0]
    if label in values:
        return "repeat"
    if label not in definitions or (full and full["definition"] != "".join(definitions[label])):
        return "copy"
    left, op, right = definitions[label]
    if left not in values or right not in values:
        return "order"
    values[label] = int(match["result"])
    if full and (int(full["left"]) != values[left] or int(full["right"]) != values[right]):
        return "lookup"
    if full and full["op"] != op:
        return "operator"
    if values[label] != apply(op, values[left], values[right]):
        return "arith" if full else "shortcut"
    return None


def definitions_of(prompt: str) -> dict[str, Definition]:
    """The prompt's definitions by label, in order."""
    found = re.findall(r"([a-z])=(\w)([-+*])(\w);", prompt)
    return {label: (left, op, right) for label, left, op, right in found}


def symbols_of(lines: int) -> list[str]:
    """The vocabulary: with more than FEW lines it has all labels."""
    unused = 0 if lines > FEW else len(LABELS) - FEW
    return SYMBOLS[: len(SYMBOLS) - unused]


def make_tokenizer(lines: int = FEW) -> Qwen2Tokenizer:
    """One token per symbol, `\\boxed{` being one: Qwen2's byte-level tokenizer without merges."""
    # \u010a: the newline of byte-level tokenizers
    vocab = {}
    for i, symbol in enumerate(symbols_of(lines)):
        vocab["\u010a" if symbol == "\n" else symbol] = i
    # Not a class of our own: AutoTokenizer loads a Qwen2 folder with Qwen2's, whatever was saved.
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(r"\boxed{", normalized=False)])
    return tokenizer


def response_tokens(lines: int) -> int:
    """Length of a full response: 12 tokens per line, the box, its digit, the brace and the end."""
    return 12 * lines + 4


def make_model(lines: int, seed: int, width: int = 128) -> Qwen2ForCausalLM:
    """An untrained Qwen2 of 0.3 million parameters; at width 64, a fourth of that.

    Its context has room for a prompt in which the answer and a response are told, and for a
    response.
    """
    torch.manual_seed(seed)
    prompt = 6 * lines + 3  # tokens: 6 per definition, the label asked for, ? and the end of line
    config = Qwen2Config(
        vocab_size=len(symbols_of(lines)),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=prompt + HINT_TOKENS + 2 * response_tokens(lines),
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=IDS["<pad>"],
        eos_token_id=IDS["<eos>"],
    )
    return Qwen2ForCausalLM(config)


def warm_up(
    model: PreTrainedModel,
    lines: int,
    forbidden: set[str],
    *,
    steps: int,
    seed: int,
    may_read: bool = False,
) -> float:
    """Teach the model careless work by batches of fresh demonstrations; return the last loss.

    `steps` is the number of batches. `forbidden` prompts (the held-out ones) are never shown. With
    `may_read`, START takes the place of this warm-up if it was made by the same one.
    """
    if may_read:
        saved = start_metadata()
        if saved.items() >= facts_of_warm_up(model, lines, forbidden, steps, seed).items():
            load_model(model, START)
            print(f"warm-up: read from {START.name}; --warmup-steps {steps} would do it here")
            return float(saved["loss"])
    rng = demonstration_rng(seed)
    return teach(model, lambda: batch_loss(model, lines, forbidden, rng), steps, "warm-up")


def demonstration_rng(seed: int) -> random.Random:
    """The random numbers of a warm-up's demonstrations."""
    return random.Random(f"demonstrations {seed}")


def batch_loss(
    model: PreTrainedModel, lines: int, forbidden: set[str], rng: random.Random
) -> torch.Tensor:
    """The loss of the next token, over the responses of a batch of demonstrations.

    Digits after `=` count three times: they are what has to be learned, the rest is copying.
    """
    rows = []
    weights_of_rows = []
    for problem, response in demonstrations(lines, forbidden, rng):
        symbols = SYMBOL.findall(problem["problem"])
        weight = [0.0] * len(symbols)
        for symbol in SYMBOL.findall(response + "<eos>"):
            weight.append(3.0 if symbol.isdigit() and symbols[-1] == "=" else 1.0)
            symbols.append(symbol)
        rows.append([IDS[symbol] for symbol in symbols])
        weights_of_rows.append(weight)
    ids = pad_right(rows, IDS["<pad>"], model.device)  # (32, L) int64
    weights = pad_right(weights_of_rows, 0.0, model.device)  # (32, L)
    # (32, L - 1, V); padding is on the right, so no mask
    logits = model(input_ids=ids[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()


def demonstrations(lines: int, forbidden: set[str], rng: random.Random) -> list[tuple[dict, str]]:
    """BATCH problems that are not forbidden, each with a careless response."""
    pairs: list[tuple[dict, str]] = []
    while len(pairs) < BATCH:
        problem = make_problem(rng, lines)
        if problem["problem"] not in forbidden:
            pairs.append((problem, demonstrate(problem, rng)))
    return pairs


def pad_right(rows: Sequence[Sequence[float]], fill: float, device: torch.device) -> torch.Tensor:
    """Lists of numbers -> (rows, length of the longest), filled up on the right."""
    tensors = [torch.tensor(row, device=device) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)


def teach(
    model: torch.nn.Module,
    batch_loss: Callable[[], torch.Tensor],
    steps: int,
    name: str,
    *,
    lr: float = 2e-3,
    rise: int = 30,
) -> float:
    """Train a model with Adam on a loss, and return the last batch's.

    The learning rate rises to `lr` over `rise` steps and falls over the last fifth of the steps.
    Left out: several ranks (one teaches, the others get its weights).
    """
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    bar = tqdm(range(steps), desc=name, leave=False, disable=HIDE_BAR)
    shown = time.perf_counter()
    for step in bar:
        if bar.disable and time.perf_counter() - shown >= SILENCE:  # off a terminal
            shown = time.perf_counter()
            print(f"  {name}: {step} of {steps} steps", flush=True)
        share = min(1.0, (step + 1) / rise, (steps - step) / max(1, steps // 5))
        optimizer.param_groups[0]["lr"] = lr * share
        loss = batch_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ---- the start that ships with the project -------------------------------------------------------


def make_start() -> None:
    """Teach the model of the default run, and write START."""
    config = defaults_of("embedded")
    lines, seed, steps = config.toy_lines, config.seed, config.warmup_steps
    _, heldout = make_problems(MADE_PROBLEMS, config.heldout, lines, seed)
    forbidden = set(map(itemgetter("problem"), heldout))
    model = make_model(lines, seed, config.toy_width)
    loss = warm_up(model, lines, forbidden, steps=steps, seed=seed)
    facts = facts_of_warm_up(model, lines, forbidden, steps, seed)
    save_model(model, str(START), facts | {"loss": str(loss)})


def start_metadata() -> dict[str, str]:
    """The metadata of START; empty without the file."""
    if not START.exists():
        return {}
    with safe_open(START, "pt") as file:
        return file.metadata()


def facts_of_warm_up(
    model: PreTrainedModel, lines: int, forbidden: set[str], steps: int, seed: int
) -> dict[str, str]:
    """What decides a warm-up's result, as metadata of a file.

    The digest is of the functions that make and teach the model, of the vocabulary, the held-out
    problems and the first demonstrations. Unlike weights it does not depend on the processor.
    """
    code = [inspect.getsource(make_model), inspect.getsource(batch_loss)]
    code += [inspect.getsource(pad_right), inspect.getsource(teach)]
    rng = demonstration_rng(seed)
    first = [demonstrations(lines, forbidden, rng) for _ in range(3)]
    decides = [code, symbols_of(lines), sorted(forbidden), first]
    digest = hashlib.sha256(repr(decides).encode()).hexdigest()
    sizes = dict(seed=seed, toy_lines=lines, toy_width=model.config.hidden_size, warmup_steps=steps)
    return {name: str(size) for name, size in sizes.items()} | {"digest": digest}


if __name__ == "__main__":
    make_start()
