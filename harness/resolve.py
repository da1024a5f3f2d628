"""From flags to the configuration of a run: what depends on the machine, on a run's folder, and on other files' tables.

parse_args(argv) -> what `train.py` saves and follows; `harness/recipe.py` parses the flags
renamed(config)      -> an older run's config.json by today's names
"""

import argparse
from pathlib import Path

from credit.methods import UNWEIGHTED, USES_ANSWER, USES_PRM
from fast import kernel
from harness import checkpoint
from harness.command import resolve_machine
from harness.flags import flag, refuse_other_settings
from harness.folders import settings_in
from harness.recipe import MAY_CHANGE, RENAMED, check, make_parser, parse
from tasks import toy
from tasks.benchmarks import check_sandbox
from tasks.problems import BadInput
from tasks.walk import kind_of


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The resolved configuration; raises BadInput."""
    args = parse(argv)
    if args.resume:
        args = resumed(args, argv)
    if args.task == "embedded" and not args.max_tokens:
        args.max_tokens = toy.response_tokens(args.toy_lines, kind_of(args))
    resolve_machine(args, half=args.task != "embedded")
    check_method(args)
    if args.task == "code":
        check_sandbox(args.sandbox)
    return args


def resumed(first: argparse.Namespace, argv: list[str] | None) -> argparse.Namespace:
    """The configuration of the run to go on with; `resume` is then the checkpoint's own folder. Raises BadInput."""
    parser = make_parser()
    try:
        path, step = checkpoint.find(Path(first.resume))
        run = path.resolve().parent.parent
        saved = renamed(settings_in(run / "config.json", dict(task=str, method=str, seed=int)))
        made = checkpoint.report_of(path)["settings"]
    except ValueError as error:
        raise BadInput(f"--resume {first.resume}: {error}; give a run's folder, or another checkpoint") from error
    for name, value in made.items():
        if name not in saved or (name not in MAY_CHANGE and saved[name] != value):
            had = f"{flag(name)} {saved.get(name)} in config.json, {value} in its checkpoint"
            raise BadInput(f"--resume {first.resume}: {had}; restore the file")
    defaults = {name: parser.get_default(name) for name in vars(first)}
    saved = {name: value for name, value in saved.items() if name in vars(first)}
    as_flags = vars(parser.parse_args([word for name, value in saved.items() for word in spelled(name, value)]))
    for name, value in saved.items():
        if as_flags[name] != value:
            raise BadInput(f"--resume {first.resume}: {flag(name)} {value} in its config.json; restore the file")
    parser.set_defaults(**saved)
    args = parser.parse_args(argv)
    fixed = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    had = defaults | saved  # a run may be older than a flag
    refuse_other_settings(fixed, had, f"the run in --resume {first.resume} has", "leave the flag out")
    if Path.cwd() in run.parents:
        run = run.relative_to(Path.cwd())  # as a person would type it
    args.out, args.name, args.resume = str(run.parent), run.name, str(path)
    if args.steps < step:  # as many: the run was cut in its last evaluation
        raise BadInput(f"--steps {args.steps}: the checkpoint is of step {step} already; give more")
    check(args)
    return args


def spelled(name: str, value) -> list[str]:
    """A flag and its value as one would type them; nothing where the flag would not be given."""
    if isinstance(value, bool):
        return [flag(name)] if value else [f"--no-{name}"] * (name == "recompute")
    if value is None or value == []:
        return []
    return [flag(name), *map(str, value if isinstance(value, list) else [value])]


def renamed(config: dict) -> dict:
    """The config.json of a run, also of one that is older than RENAMED and --eps-unit, by today's names."""
    if not isinstance(config.get("group"), int) or config["group"] < 1:
        return config
    new = {"rollouts_per_prompt": config["group"], "eps_unit": "nbar"}
    for old in ("batch", "minibatch"):
        if old in config:
            name = RENAMED[f"--{old}"].removeprefix("--").replace("-", "_")
            new[name] = config[old] // config["group"]
    return {**config, **new}


def check_method(args: argparse.Namespace) -> None:
    """What the credit method needs and does not have; raises BadInput."""
    method, embedded = args.method, args.task == "embedded"
    if args.fused and not (args.device == "cuda" and kernel.available()):
        raise BadInput("--fused: needs a GPU and Triton; leave it out")
    if args.fused and (args.window > kernel.LONGEST or (args.distance, args.reading) != ("w1", "value")):
        raise BadInput(f"--fused: is for w1's value, and a --window up to {kernel.LONGEST}; leave it out")
    if method == "arca" and not args.lora_rank:
        raise BadInput(f"--method {method} compares the model with and without an adapter; give --lora-rank")
    if method in USES_PRM and not (args.prm or embedded or args.task == "code"):
        raise BadInput(f"--method {method} needs a process reward model; give --prm, e.g. Qwen/Qwen2.5-Math-PRM-7B")
    if method in USES_PRM and embedded and args.toy_kind == "recoverable":
        raise BadInput(f"--method {method}: no process reward model of the recoverable kind; choose another method")
    if args.prm and method not in USES_PRM:
        raise BadInput(f"--prm {args.prm}: --method {method} uses none; leave it out")
    if method in USES_ANSWER | USES_PRM and args.task == "code":
        raise BadInput(
            f"--method {method}: made for steps and answers in a box, not for programs; choose another method"
        )
    if method == "oracle" and not embedded:
        raise BadInput(f"--method {method}: the first error is known in --task embedded only; choose another method")
    if method == "oracle-value" and not (embedded and args.toy_kind == "recoverable"):
        raise BadInput(
            f"--method {method}: values can be counted in --toy-kind recoverable only; choose another method"
        )
    if method in UNWEIGHTED and args.rescale != "none":
        raise BadInput(f"--rescale {args.rescale}: {method} has advantages of its own, and no weights; leave it out")
    if args.entropy_kappa <= 1 or args.hapo_alpha >= args.hapo_phi:
        raise BadInput(
            f"--entropy-kappa {args.entropy_kappa}, --hapo-alpha {args.hapo_alpha}, --hapo-phi {args.hapo_phi}: "
            "advantages would change their sign; kappa must exceed 1, and phi alpha"
        )
