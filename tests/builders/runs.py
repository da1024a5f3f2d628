"""Configurations of runs, and runs that must be equal."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from builders.small_models import save_model
from safetensors.torch import load_file

from base import files
from base.config import Config, parse_train
from credit.batch import Batch
from credit.rules import assign_credit, with_options
from grpo import AT_ONCE, Policy
from harness.fsdp import Ranks
from harness.log import write_config
from harness.models import stop_ids
from harness.run import Hooks, Loaded, Run, make_context, make_task, resolve, start_run
from tasks import toy

ALONE = Ranks(0, 1, torch.device("cpu"))


def config_from(argv: list[str]) -> Config:
    """The configuration of a run with these flags."""
    return resolve(parse_train(argv))


@cache
def recipe() -> Config:
    """The configuration of a run without flags; reading flags takes longer than many a method."""
    return config_from([])


def recipe_with(**changes) -> Config:
    """The recipe, with other values of some settings."""
    return replace(recipe(), **changes)


def save_run(folder: Path, **changes) -> str:
    """The folder of a run of the embedded task that holds out 20 problems of a line.

    Its model is an untrained one, unless there is one.
    """
    sizes = dict(toy_lines=1, heldout=20, max_tokens=toy.response_tokens(1))
    config, *_ = make_task(recipe_with(**sizes | changes), toy.make_tokenizer(1), math.inf)
    if not (folder / "model").exists():
        save_model(folder / "model", toy.make_model(1, seed=0))
    write_config(config, folder)
    return str(folder)


def run_of(config: Config, task, model, tokenizer, ranks: Ranks = ALONE) -> Loaded:
    """A run that is loaded: its model is whole."""
    context = make_context(config, Policy(model), tokenizer, task, {})
    stops = stop_ids(model, tokenizer) if tokenizer else []
    return Loaded(config, ranks, context, Hooks(), stops, AT_ONCE, [])


def sharded(loaded: Loaded, folder: Path = Path("nowhere")) -> Run:
    """A run that is ready for its first step."""
    return start_run(loaded, folder)


def credit_by(config: Config, batch: Batch) -> torch.Tensor:
    """Token advantages by the configuration's method, which needs no policy of its own."""
    context = make_context(config, None, None, None, {})
    return assign_credit(with_options(config), batch, context)


def assert_same_run(one, other) -> None:
    """Weights, metrics but seconds, and samples, to the bit."""
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (files.read_lines(run / "metrics.jsonl") for run in (one, other))
    assert [row | {"seconds": 0} for row in ours] == [row | {"seconds": 0} for row in theirs]
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
