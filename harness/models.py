"""Which models are evaluated, and what they were trained from: a run of `train.py` stands for its models."""

import argparse
from pathlib import Path

from harness import checkpoint
from harness.config import EMBEDDED
from harness.folders import settings_in
from tasks import benchmarks
from tasks.benchmarks import Loaded
from tasks.problems import BadInput


def config_of(folder: Path) -> dict | None:
    """The configuration of a run of train.py; None for any other folder."""
    try:
        return settings_in(folder / "config.json", {"toy_lines": int})
    except BadInput:  # no folder, or one whose loading will say what is wrong with it
        return None


def find_models(args: argparse.Namespace) -> dict[str, str]:
    """A short name for each model, and where it is; a run stands for its last model, or for its checkpoints."""
    paths = []
    for name in args.model:
        path = Path(name)
        if args.select and not config_of(path):
            raise BadInput(f"--select {args.select}: {name} is no run of train.py; give its folder in runs/")
        if args.select:
            found = [str(each / "model") for each in checkpoint.complete(path)]
            if not found:
                raise BadInput(f"--model {name}: has no complete checkpoint; train with --save-every and --keep")
            paths += found
        else:
            paths.append(str(path / "model") if config_of(path) else name)
    models = {label_of(path): path for path in paths}
    if len(models) < len(set(paths)):
        models = {path: path for path in paths}
    return models


def label_of(path: str) -> str:
    """The last parts of a folder's name: run and step, or run and model; a hub id as it is."""
    parts = Path(path).resolve().parts if Path(path).exists() else Path(path).parts
    if len(parts) > 3 and parts[-3] == "checkpoints":
        return f"{parts[-4]}/{parts[-2]}"
    return "/".join(parts[-2:])


def run_of(path: str) -> dict | None:
    """The configuration of the run that a model's folder lies in."""
    folder = Path(path).resolve()
    return config_of(folder.parent) or config_of(folder.parent.parent.parent)


def origin_of(path: str) -> str:
    """The model that a run's model was trained from, whose name tells its template; any other model itself."""
    for _ in range(10):  # runs that go on from each other's models
        trained_from = (run_of(path) or {}).get("model")
        if not trained_from:
            break
        path = trained_from
    return path


def embedded(args: argparse.Namespace, models: dict[str, str]) -> Loaded:
    """The held-out set of the models' runs, or of the flags; raises BadInput where runs have different ones."""
    chosen = set()
    for path in models.values():
        run = run_of(path) or {}
        usual = dict(toy_lines=5, toy_kind="chain", heldout=EMBEDDED["heldout"], seed=0)
        given = dict(toy_lines=args.toy_lines, toy_kind=args.toy_kind, heldout=args.heldout, seed=args.toy_seed)
        values = {name: run.get(name, usual[name]) if given[name] is None else given[name] for name in usual}
        chosen.add((values["toy_lines"], values["toy_kind"], values["heldout"], values["seed"]))
    if len(chosen) > 1:
        raise BadInput("--bench embedded: the models' runs hold out different problems; give --toy-seed and the like")
    return benchmarks.embedded(*chosen.pop())
