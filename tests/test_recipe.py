"""base/config.py: no default of the paper's run changes unnoticed, as the docs have them all."""

import dataclasses
import inspect
import math
import re
import sys

import pytest
from builders.case_files import DOCS, ROOT, cases
from builders.processes import run_script

import eval as evaluation
from base import config
from base.config import Shear
from base.errors import BadInput
from grpo import group_advantages, policy_loss
from harness.run import resolve
from rewards import grade_code, grade_math
from shear import shear_weights
from tasks import benchmarks

# What changes no number of a run on one machine, or has no value before a user gives one.
PLAIN = (
    "task model data out name use micro_tokens resume ranks recompute threads reward "
    "generate_batch toy_lines warmup_steps warmup_given method_option toy_width keep_samples keep_models"
)


def settings(*argv: str) -> dict:
    """What `train.py` resolves, but for the machine's own."""
    own = ("device", "dtype", "digest", "reward_digest", "token_digest")
    values = dataclasses.asdict(resolve(config.parse_train(argv)))
    return {name: value for name, value in values.items() if name not in own}


def test_the_table_of_the_recipe_is_true():
    """docs/recipe.md has every default of the paper's run.

    It also has what the toy task replaces.
    """
    text = (DOCS / "recipe.md").read_text()
    run = settings("--model", "M")
    toy_task = settings()
    replaced = dict(toy_task.items() - run.items()).keys()
    parts = re.split("## The toy task|## The word problems", text)
    for part, expected, needed in (parts[0], run, run), (parts[1], toy_task, replaced):
        cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `--")]
        written = dict(re.findall(r"`--(\S+) (\S+?)`", " ".join(cells)))
        written = {name.replace("-", "_"): value for name, value in written.items()}
        assert written == {name: str(expected[name]) for name in written}
        assert set(written) - set(PLAIN.split()) >= set(needed) - set(PLAIN.split())
    assert settings("--model", "M", "--task", "code") == run | dict(task="code")


def test_every_default_of_the_evaluation():
    """They are temperature .1, 3,000 tokens, the paper's k, and LiveCodeBench's window.

    Training asks so, too, but with the flags of its own run.
    """
    asked = evaluation.parse_eval(["--model", "M"])
    sizes = asked.temperature, asked.max_tokens, asked.samples, asked.block, asked.seeds
    assert sizes == (0.1, 3000, 0, 128, (0,))
    assert (asked.template, asked.sandbox, asked.grade_timeout) == ("auto", "auto", None)
    assert benchmarks.LCB_WINDOW == ("2025-02-01", "2025-05-31")
    # samples a problem, avg@k of Sec. 5.2, and seconds to grade one
    for row in cases("sets.csv"):
        each = benchmarks.BENCHMARKS[row["benchmark"]]
        assert (each.k, each.timeout_s) == (int(row["samples"]), int(row["seconds"]))


def test_functions_for_other_trainers_have_the_same_defaults():
    """What a user of `shear_weights` or `policy_loss` gets is what `train.py` runs."""
    own = settings("--model", "M") | {"delta": 1e-6}
    for function, names in {
        Shear: "window stride eps eps_unit",
        shear_weights: "window stride eps",
        policy_loss: "clip_low clip_high",
        group_advantages: "delta",
    }.items():
        parameters = inspect.signature(function).parameters
        for name in names.split():
            assert parameters[name].default == own[name]
    for grade, seconds in ((grade_math, 5), (grade_code, 10)):
        assert inspect.signature(grade).parameters["timeout_s"].default == seconds


def test_own_problems_have_sizes_for_a_cpu():
    """Responses, spans and steps are short; a flag still decides."""
    own = settings(*"--task own --model M --data F --lr 1e-4".split())
    expected = dict(max_tokens=256, window=12, lr=1e-4, template="auto", warmup_steps=0)
    assert {name: own[name] for name in expected} == expected


@pytest.mark.parametrize(
    "command, words, sentence",
    [
        ("train.py", "--help", "(default: 40)"),
        ("train.py", "--model M --help", "(default: 300)"),
        ("eval.py", "--help", "--bench"),
        ("train.py", "--max-tokens modell", "Error parsing --max-tokens"),
        ("train.py", "--model a/b --data tests/cases/sets.csv", "sets.csv, row 1: needs "),
        ("train.py", "--lr=1e-4 --max_tokens 9 --max-tokens 8", "error: --max-tokens: is given twice"),
        ("train.py", "--recompute --no-recompute", "error: --recompute: is given twice"),
        ("eval.py", "--model M --model R", "error: --model: is given twice; give it once"),
    ],
)  # fmt: skip
def test_help_and_mistakes_are_answered_without_torch(
    command, words, sentence, tmp_path, monkeypatch
):
    """The help has the embedded task's defaults, or with --model the paper's.

    Flags, a file and its rows are checked before torch is imported.
    """
    monkeypatch.setenv("COLUMNS", "80")
    heavy = "torch", "transformers", "sympy"
    status, printed = run_script(ROOT, command, words.split(), tmp_path / "printed", heavy)
    assert sentence in printed and status == (0 if "--help" in words else 2)


def test_flags_that_are_appended_may_come_twice(monkeypatch):
    """Of others that a study appends to its own the last counts; those typed twice are refused."""
    assert config.parse_train(["--steps", "3", "--steps", "4"]).steps == 4
    typed = "train.py --method-option a=1 --use json --method-option b=2 --use math"
    monkeypatch.setattr(sys, "argv", typed.split())
    assert config.parse_train().method_option == ("a=1", "b=2")
    asked = evaluation.parse_eval("--model a b --use c --seeds 3 4 --use d".split())
    assert asked.use == ("c", "d") and asked.seeds == (3, 4)


def test_every_number_has_bounds():
    """Numbers are finite and positive; those that switch something off may be 0."""
    plain = dataclasses.replace(config.Config(), grade_timeout=1.0)
    for name, value in dataclasses.asdict(plain).items():
        if type(value) not in (int, float):
            continue
        for other in (math.nan, math.inf, -1, 0):
            changed = dataclasses.replace(plain, **{name: other})
            if other == 0 and name in config.MAY_BE_ZERO:
                config.check_bounds(changed, config.MAY_BE_ZERO)
            else:
                with pytest.raises(BadInput, match=f"{config.flag(name)} .*out of bounds"):
                    config.check_bounds(changed, config.MAY_BE_ZERO)
