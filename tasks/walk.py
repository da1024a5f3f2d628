r"""The recoverable kind of the embedded task: of two rows of digits one is to be read, and wrong turns can be undone.

    prompt     a=31415926;b=27182818;b?
    response   b2e                      one line a digit: label, that row's digit, a filler
               a1d                      a slip: from here on the other row is read, consistently
               a4h
               b8c                      a repair
               ...
               b8f
               \boxed{8}                right if it is the last digit of the row asked for; the rows differ there

Demonstrations slip from the row asked for, mostly where its digit is 7 to 9, and off it they repair with the chance
`repair` a line. With `luck` it is the environment that slips, with this chance a line: as long as the response is on
track, it writes the labels (`Environment`), which no loss counts, so that repair is the only skill. `tail` fillers after the lines move the end of the
response away from every decision.

A slip that is repaired is no error; a wrong response's first error is the slip from which it never came back. At a
line's start the future hangs on two things alone, the line and whether the response is on track, so a prefix's value
can be counted: `credit/values.py` does.

`Walk` stands where `tasks/toy.py` takes the name of a kind; vocabulary, tokenizer and model are toy's.
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
LINE = re.compile(r"([ab])(\d)[c-h]\n")
FILLERS = "cdefgh"
LINE_TOKENS = 4
STEPS = {(True, True): "stay", (True, False): "slip", (False, False): "off", (False, True): "repair"}  # on track?
ENDS = ("answer", "final", "format")  # kinds of a last line
HARD, EASY = 0.55, 0.05  # chance of a demonstration's slip where the digit is 7 to 9, and elsewhere


class Line(NamedTuple):
    """A line of a response."""

    start: int  # its first token, which is the decision: a label
    end: int  # index after its last token
    kind: str  # stay, slip, off (it stays off the row), repair; tail, answer, final (not the last line's), format


@dataclass(frozen=True)
class Walk:
    """A recoverable task. Chances a line: of a demonstration's repair, of the environment's slip (0: it has none)."""

    repair: float = 0.1
    luck: float = 0.0
    tail: int = 0  # fillers after the lines, at most 8 a line

    def make_problem(self, rng: random.Random, lines: int) -> dict:
        """{"problem": prompt, "answer": digit}."""
        a, b = (rng.choices("0123456789", k=lines) for _ in "ab")
        while a[-1] == b[-1]:
            b[-1] = rng.choice("0123456789")
        wanted = rng.choice("ab")
        prompt = f"a={''.join(a)};b={''.join(b)};{wanted}?\n"
        return {"problem": prompt, "answer": {"a": a, "b": b}[wanted][-1]}

    def demonstrate(self, problem: dict, rng: random.Random) -> str:
        """A response that slips and repairs."""
        rows, wanted, other = rows_of(problem)
        response, on_track = "", True
        for line, digit in enumerate(rows[wanted]):
            if on_track:
                on_track = rng.random() >= (self.luck or (HARD if digit in "789" else EASY))
            else:
                on_track = rng.random() < self.repair
            label = wanted if on_track else other
            response += f"{label}{rows[label][line]}{rng.choice(FILLERS)}\n"
        if self.tail:
            response += "".join(rng.choices(FILLERS, k=self.tail)) + "\n"
        return response + rf"\boxed{{{rows[label][-1]}}}"

    def lines(self, problem: dict, response: str) -> Iterator[Line]:
        """The lines of a response, up to its answer or to the first that is not in the form."""
        rows, wanted, _ = rows_of(problem)
        label, start = wanted, 0
        for number, text in enumerate(response.splitlines(keepends=True)):
            end = start + len(SYMBOL.findall(text))
            walked, box = LINE.fullmatch(text), BOX.fullmatch(text)
            kind = "format"
            if number < len(rows[wanted]) and walked:
                kind = STEPS[label == wanted, walked[1] == wanted]
                label = walked[1]
            elif number == len(rows[wanted]) and self.tail and not box:
                kind = "tail"
            elif number >= len(rows[wanted]) and box:
                kind = "answer" if box[1] == rows[label][-1] else "final"
            yield Line(start, end, kind)
            if kind in ENDS:
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

    def response_tokens(self, lines: int) -> int:
        """Length of a full response: the lines, the tail with its end, the box, its digit, the brace and the end."""
        return LINE_TOKENS * lines + (self.tail + 1 if self.tail else 0) + 4


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
