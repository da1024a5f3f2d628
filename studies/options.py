"""The flags of the studies, which are parsed without torch; those of train.py can be added to most."""

import sys
from pathlib import Path

from harness.flags import Parser, natural, number, positive_int, random_seed
from harness.recipe import METHODS, make_parser
from studies.trials import CELLS, HEADROOM, RULES

OF_GROUPS = "grpo shear first position entropy hapo kgae".split()  # what `studies.advantages` compares if not told
NEED_MODELS = {"arca", "prm", "pure"}  # another one, or a trained adapter


def check_flags(parser: Parser) -> None:
    """Help, and what is wrong with a command's own flags or with those of train.py; raises BadInput."""
    _, others = parser.parse_known_args()
    make_parser().parse_args(others)


def compare_parser() -> Parser:
    """Of `studies.compare`."""
    about = "Train with every credit method, each at its own learning rate; one table."
    epilog = "Flags of train.py that are not set here can be added. Without any, all rows take some hours."
    parser = Parser(prog="python -m studies.compare", description=about, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    names = f"rows of the table, of {', '.join(RULES)}; if not given: all that the task allows"
    add("--methods", nargs="+", default=[], choices=list(RULES), metavar="ROW", help=names)
    add("--seeds", nargs="+", type=random_seed, default=[0, 1, 2, 3, 4], help="of the table; others choose the rates")
    add("--jobs", type=positive_int, default=2, help="seeds at a time, a process each")
    add("--rows", type=Path, metavar="FILE", default=Path("runs/compare.jsonl"), help="of finished trials")
    return parser


def diagnose_parser() -> Parser:
    """Of `studies.diagnose`."""
    about = (
        "What the distance sees: the paper's figures on your rollouts. The embedded task takes four to five minutes "
        "on two CPU cores, --samples alone seconds."
    )
    epilog = "Flags of train.py can be added."
    parser = Parser(prog="python -m studies.diagnose", description=about, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    groups = "problems that are sampled, or groups of --rollouts that are read"
    add("--groups", type=positive_int, default=16, help=groups)
    add("--continuations", type=natural, help="of each prefix; if not given: 16, and 0 with --rollouts; 0: none")
    lines = 'JSON lines with "problem", "solution", "label"; "answer" for --continuations'
    add("--rollouts", type=Path, metavar="FILE", help=lines)
    add("--prm", help="process reward model, to compare prm and pure, too; embedded: if not given, a tiny one is made")
    out = Path("runs/diagnose")
    add("--out", type=Path, metavar="DIR", default=out, help="folder of the groups, the numbers and the figures")
    add("--html", type=Path, metavar="FILE", help="a page to write, its tokens shaded by weight")
    samples = "samples.jsonl of a training run: the --html page of that, and nothing else"
    add("--samples", type=Path, metavar="FILE", help=samples)
    return parser


def advantages_parser() -> Parser:
    """Of `studies.advantages`."""
    about = "Credit against true token advantages, which continuations of every line's two ends estimate."
    parser = Parser(prog="python -m studies.advantages", description=about, allow_abbrev=False)
    parser.usage = "%(prog)s RUN [flags]"
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run of the embedded task")
    add("--start", action="store_true", help="the run's warmed-up model, not its trained one")
    add("--groups", type=positive_int, default=12, help="held-out problems that are sampled")
    add("--continuations", type=number(int, 2, 10**6), default=16, help="from every line boundary")
    names = [name for name in METHODS if name not in NEED_MODELS]
    about = "credit methods: " + ", ".join(names)
    add("--methods", nargs="+", default=OF_GROUPS, choices=names, metavar="NAME", help=about)
    out = Path("runs/advantages")
    add("--out", type=Path, metavar="DIR", default=out, help="folder of advantages.json")
    return parser


def bench_parser() -> Parser:
    """Of `studies.bench`, as it was called."""
    return step_parser() if "--step" in sys.argv else peers_parser()


def step_parser() -> Parser:
    """Of `studies.bench --step`."""
    about = (
        "Measure a step of training, SHEAR beside GRPO. --size tiny --tokens 32 --problems 4 --group 4 takes seconds "
        "on two CPU cores; the other sizes are for a GPU, where a step may take minutes."
    )
    epilog = "Flags of train.py that are not fixed here can be added."
    parser = Parser(prog="python -m studies.bench --step", description=about, epilog=epilog, allow_abbrev=False)
    add = parser.add_argument
    add("--step", action="store_true", help="the table of a full training step, SHEAR beside GRPO")
    add("--size", choices=("7b", "1.5b", "tiny"), default="7b", help="architecture, with random weights")
    add("--problems", type=number(int, 1, 4096), default=64, help="of the step; the recipe has 512")
    add("--group", type=number(int, 2, 256), default=8, help="rollouts a problem")
    add("--tokens", type=number(int, 1, 3896), default=1000, help="of every response")
    add("--no-optimizer", action="store_true", help="leave AdamW and its moments out")
    return parser


def peers_parser() -> Parser:
    """Of `studies.bench`."""
    about = (
        "SHEAR's distances beside POT, GeomLoss and exact transport: about a minute on two CPU cores, and two to three "
        "more to make the embedded model without --model."
    )
    epilog = "--step measures a step of training instead: see python -m studies.bench --step --help"
    parser = Parser(prog="python -m studies.bench", description=about, epilog=epilog)
    add = parser.add_argument
    add("--states", type=Path, help="safetensors file of groups of states, groupN.rolloutK.right or .wrong (T, d)")
    add("--model", help="a folder of the embedded task's model; if not given, one is made and warmed up")
    tokens, states = "of synthetic responses; if not given: 300", "of synthetic states; if not given: 896"
    add("--tokens", type=number(int, 1, 16_384), nargs="*", help=f"{tokens}, on a GPU 1000 and 3000, too")
    add("--width", type=number(int, 1, 16_384), nargs="*", help=f"{states}, on a GPU 3584, too")
    add("--group", type=number(int, 2, 256), nargs="*", help="rollouts of a group; if not given: 8, on a GPU 16, too")
    pairs = "of 100 x 100 that a peer solves at most, more if small; if not given: 256, on a GPU 4096"
    add("--pairs", type=number(int, 8, 16_384), help=pairs)
    add("--rounds", type=number(int, 1, 1000), default=3, help="times that each is measured")
    add("--device", choices=("cpu", "cuda"), help="if not given: cuda where there is one")
    return parser


def study_parser() -> Parser:
    """Of `studies.study`."""
    about = "Run the trials of docs/study-plan.md that have no row yet, half a minute to a minute each."
    parser = Parser(prog="python -m studies.study", description=about)
    add = parser.add_argument
    add("stage", choices=("headroom", "advantages", "tune", "confirm"), help="which trials")
    names = list(CELLS | HEADROOM)
    add("--cells", nargs="+", choices=names, metavar="CELL", help=f"some of the stage's: {', '.join(names)}")
    add("--jobs", type=positive_int, default=2, help="starts at a time, a process each")
    add("--rows", type=Path, metavar="FILE", default=Path("docs/study.jsonl"), help="of finished trials")
    return parser
