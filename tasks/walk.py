r"""The recoverable kind of the embedded task: of two rows of digits one is to be read, and wrong turns can be undone.

    prompt     a=31415926;b=27182818;b?
    response   b2e            a line a digit: label, that row's digit, a filler
               a1d            a slip: from here on the other row is read
               a4h
               b8c            a repair
               ...
               \boxed{8}      the last line's digit; right if it is that of the row asked for (the rows differ there)

Demonstrations slip from the row asked for, mostly where its digit is 7 to 9, and repair with the chance `repair` a
line. With `luck` the environment slips in their place, with this chance a line: it writes the label of every line that
begins on track, which gets no credit, so that repair is the only skill. `tail` fillers after the lines move the end
of a response away from its decisions.

A slip that is repaired is no error: a wrong response's first error is the slip from which it never came back. What
follows a line hangs on its number and on being on track alone, so a prefix's value can be counted (`credit/values.py`).

A `Walk` stands where `tasks/toy.py` takes the name of a kind; vocabulary, tokenizer and model are those of toy.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from tasks.toy import BOX, IDS, SYMBOL, FirstError

ROWS = re.compile(r"a=(\d+);b=(\d+);([ab])\?\n")
LINE = re.compile(r"([ab])\d[c-h]\n")
LINE_TOKENS, FILLERS = 4, "cdefgh"
STEPS = {(True, True): "stay", (True, False): "slip", (False, False): "off", (False, True): "repair"}  # on track?
HARD, EASY = 0.55, 0.05  # chance of a demonstration's slip where the digit is 7 to 9, and elsewhere


class Line(NamedTuple):
    """A line of a response."""

    start: int  # its first token, the label that decides
    end: int  # index after its last token
    kind: str  # stay, slip, off (it stays off the row), repair; tail; answer, final (not the last line's), format


@dataclass(frozen=True)
class Walk:
    """A recoverable task; chances are a line's."""

    repair: float = 0.1  # of a demonstration
    luck: float = 0.0  # the environment's slip; 0: there is no environment
    tail: int = 0  # fillers after the lines

    def make_problem(self, rng: random.Random, lines: int) -> dict:
        """{"problem": prompt, "answer": digit}."""
        a, b = ("".join(rng.choices("0123456789", k=lines)) for _ in "ab")
        if a[-1] == b[-1]:
            return self.make_problem(rng, lines)
        wanted = rng.choice("ab")
        return {"problem": f"a={a};b={b};{wanted}?\n", "answer": {"a": a, "b": b}[wanted][-1]}

    def demonstrate(self, problem: dict, rng: random.Random) -> str:
        """A response that slips and repairs."""
        rows, wanted, other = rows_of(problem)
        response, on_track = "", True
        for number, digit in enumerate(rows[wanted]):
            if on_track:
                on_track = rng.random() >= (self.luck or (HARD if digit in "789" else EASY))
            else:
                on_track = rng.random() < self.repair
            label = wanted if on_track else other
            response += f"{label}{rows[label][number]}{rng.choice(FILLERS)}\n"
        if self.tail:
            response += "".join(rng.choices(FILLERS, k=self.tail)) + "\n"
        return response + rf"\boxed{{{rows[label][-1]}}}"

    def response_tokens(self, lines: int) -> int:
        """Length of a full response: the lines, the tail with its end, the box, its digit, the brace and the end."""
        return LINE_TOKENS * lines + (self.tail + 1 if self.tail else 0) + 4

    def lines(self, problem: dict, response: str) -> Iterator[Line]:
        """The lines of a response, up to its answer or to the first without form."""
        rows, wanted, _ = rows_of(problem)
        label, start = wanted, 0
        for number, text in enumerate(response.splitlines(keepends=True)):
            end = start + len(SYMBOL.findall(text))
            box, kind = BOX.fullmatch(text), "format"
            if number < len(rows[wanted]) and LINE.fullmatch(text):
                kind = STEPS[label == wanted, text[0] == wanted]
                label = text[0]
            elif number >= len(rows[wanted]) and box:
                kind = "answer" if box[1] == rows[label][-1] else "final"
            elif number == len(rows[wanted]) and self.tail:
                kind = "tail"
            yield Line(start, end, kind)
            if kind in ("answer", "final", "format"):
                return
            start = end
        yield Line(start, start + 1, "format")  # no box

    def first_error(self, problem: dict, response: str) -> FirstError | None:
        """The slip that was never repaired, else a line without form, or an answer that is not the last line's."""
        standing = None
        for line in self.lines(problem, response):
            if line.kind == "repair":
                standing = None
            elif line.kind in ("slip", "format", "final") and standing is None:
                standing = FirstError(line.start, line.kind, line.end)
        return standing

    def foreign(self, problem: dict, response: str) -> list[int]:
        """The tokens that the environment wrote, if it does: the labels of lines that began on track."""
        begun_on_track = ("stay", "slip") if self.luck else ()
        return [line.start for line in self.lines(problem, response) if line.kind in begun_on_track]


def kind_of(args) -> str | Walk:
    """What `toy` takes for a kind of problems, by the flags."""
    if args.toy_kind == "recoverable":
        return Walk(args.toy_repair, args.toy_luck, args.toy_tail)
    return args.toy_kind


def rows_of(problem: dict) -> tuple[dict[str, str], str, str]:
    """Both rows by label, the label asked for, and the other one."""
    a, b, wanted = ROWS.fullmatch(problem["problem"]).groups()
    return {"a": a, "b": b}, wanted, {"a": "b", "b": "a"}[wanted]


class Environment(LogitsProcessor):
    """Where a line begins on track, it writes the label: the wrong one with the chance `luck`."""

    def __init__(self, luck: float, lines: int):
        self.luck, self.lines = luck, lines

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Ids (B, L) so far, scores (B, V) of the next token -> scores."""
        ends = ids == IDS["\n"]  # (B, L); a prompt has one, a response one a line
        done = ends.sum(1) - 1  # (B,) lines
        prompt_end = ends.int().argmax(1)  # (B,)
        wanted = ids.gather(1, prompt_end[:, None] - 2)[:, 0]  # (B,), "b" of "b?\n"
        on_track = (done == 0) | (ids[:, -LINE_TOKENS] == wanted)  # (B,)
        its_turn = ends[:, -1] & (done < self.lines) & on_track  # (B,)
        slips = torch.rand(len(ids), device=ids.device) < self.luck  # (B,)
        label = torch.where(slips, IDS["a"] + IDS["b"] - wanted, wanted)  # (B,)
        forced = torch.full_like(scores, -torch.inf).scatter(1, label[:, None], 0.0)  # (B, V)
        return torch.where(its_turn[:, None], forced, scores)
