"""The paper's evaluation protocol as command-line flags: those of `eval.py`, which are parsed without torch.

Choices and defaults that belong to other files are stated here once more; tests/test_recipe.py compares them.
"""

import argparse
import datetime
from dataclasses import dataclass

from grading import sandbox
from harness.flags import Parser, add_machine_flags, natural, number, positive_int, random_seed, seconds
from harness.recipe import KINDS, TEMPLATES
from tasks.rows import BadInput

WINDOW = ("2025-02-01", "2025-05-31")  # of LiveCodeBench's contests, both days included
PAPER = (
    "Qwen2.5-Math-7B",
    "Qwen2.5-Coder-7B",
    "Llama3.1-8B-Instruct",
    "Qwen2.5-14B-Base",
)  # models with numbers in the paper
COMMON = "model bench data out saved runs greedy samples max_tokens seeds select device"  # what `--help` shows


@dataclass(frozen=True)
class Protocol:
    """How responses are sampled and graded; the defaults are the paper's."""

    temperature: float = 0.1  # 0: greedy
    max_tokens: int = 3000
    samples: int = 0  # a problem; 0: the benchmark's k
    template: str = "auto"
    block: int = 128  # responses that are sampled, graded and kept together
    grade_timeout: float | None = None  # None: the benchmark's
    sandbox: str = "auto"


def make_parser() -> Parser:
    """Every flag with its default."""
    parser = Parser(COMMON, prog="python eval.py", description="Evaluate models on the paper's benchmarks.")
    add = parser.add_argument_group("what").add_argument
    add("--model", nargs="+", default=[], help="Hugging Face folders, hub ids, or runs of train.py (their last model)")
    add("--bench", nargs="+", help="math, code, embedded, or names of benchmarks; embedded for its models, else math")
    add("--data", nargs="+", default=[], metavar="NAME=FILE", help="local file of a benchmark; twice for two files")
    add("--lcb-window", nargs=2, default=list(WINDOW), metavar="DATE", help="LiveCodeBench: first, last day")
    add("--out", help="folder for generations and tables; if not given: in evals/, named by models and benchmarks")
    add("--from", dest="saved", metavar="DIR", help="no model: the table of the generations in DIR")
    add("--replay", metavar="FILE", help="no model: grade the responses in FILE")
    add("--runs", nargs="+", default=[], help="no model: what train.py --eval-every wrote in these runs")
    add = parser.add_argument_group("protocol").add_argument
    add("--temperature", type=number(float, 0, 1000), default=Protocol.temperature, help="of sampling")
    add("--greedy", action="store_true", help="temperature 0, one response a problem")
    add("--samples", type=natural, default=0, help="responses a problem; 0: the paper's k")
    add("--max-tokens", type=positive_int, default=Protocol.max_tokens, help="response limit")
    add("--seeds", type=random_seed, nargs="+", default=[0], help="several: mean and standard deviation over them, too")
    add("--template", choices=TEMPLATES, default=Protocol.template, help="of prompts, as in train.py")
    add("--block", type=positive_int, default=Protocol.block, help="responses made, graded and saved together")
    add("--grade-timeout", type=seconds, help="for one response; if not given: the benchmark's")
    add("--sandbox", choices=("auto", *sandbox.LEVELS), default="auto", help="for programs")
    add = parser.add_argument_group("table").add_argument
    add(
        "--pass-at",
        type=positive_int,
        nargs="+",
        default=[],
        metavar="K",
        help="pass@K besides, unbiased; K samples at least",
    )
    add("--paper", choices=PAPER, help="whose numbers to print beside; if not given: by the model's name")
    add("--select", choices=("best",), help="every checkpoint of the runs, and the best, chosen on the test sets")
    add = parser.add_argument_group("embedded task, if not given: as the model's run has them").add_argument
    add("--toy-kind", choices=KINDS, help="shape of the little programs")
    add("--toy-lines", type=number(int, 1, 8), help="definitions a problem")
    add("--heldout", type=number(int, 1, 10**5), help="problems")
    add("--toy-seed", type=random_seed, help="the run's seed, which made the problems")
    add_machine_flags(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; raises BadInput."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.help_if_asked(args)
    if sum(map(bool, (args.model, args.saved, args.replay, args.runs))) != 1:
        raise BadInput("give one of --model, --from, --replay and --runs")
    if args.greedy and args.samples > 1:
        raise BadInput(f"--samples {args.samples}: --greedy gives the same one each time; leave one of them out")
    if args.greedy:
        args.temperature, args.samples = 0.0, 1
    if len(set(args.seeds)) < len(args.seeds):
        raise BadInput(f"--seeds {' '.join(map(str, args.seeds))}: must be different; change them")
    try:
        first, last = map(datetime.date.fromisoformat, args.lcb_window)
    except ValueError as error:
        raise BadInput(f"--lcb-window {' '.join(args.lcb_window)}: {error}; give two days as 2025-02-01") from error
    if first > last:
        raise BadInput(f"--lcb-window {first} {last}: ends before it begins; swap them")
    return args
