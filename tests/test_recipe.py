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
from grpo import AT_ONCE, group_advantages, policy_loss
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
    expected = dict(temperature=0.1, max_tokens=3000, samples=0, template="auto", block=128)
    expected |= dict(grade_timeout=None, sandbox="auto", seeds=(0,))
    assert {name: getattr(asked, name) for name in expected} == expected
    assert benchmarks.LCB_WINDOW == ("2025-02-01", "2025-05-31")
    # samples a problem, avg@k of Sec. 5.2, and seconds to grade one
    for row in cases("sets.csv"):
        each = benchmarks.BENCHMARKS[row["benchmark"]]
        assert (each.k, each.timeout_s) == (int(row["samples"]), int(row["seconds"]))


def test_functions_for_other_trainers_have_the_same_defaults():
    """What a user of `shear_weights` or `policy_loss` gets is what `train.py` runs."""
    own = settings("--model", "M")
    defaults = dataclasses.asdict(Shear())
    assert defaults == {name: own[name] for name in defaults}
    words = "--window 7 --stride 3 --eps .2 --eps-unit raw"
    asked = config.parse_train(words.split())
    assert [getattr(asked, name) for name in defaults] == [7, 3, 0.2, "raw"]
    named = {shear_weights: "window stride eps", policy_loss: "clip_low clip_high"}
    for function, names in named.items():
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in names.split()} == {
            name: own[name] for name in names.split()
        }
    assert inspect.signature(group_advantages).parameters["delta"].default == 1e-6
    limits = [
        inspect.signature(grade).parameters["timeout_s"] for grade in (grade_math, grade_code)
    ]
    assert [limit.default for limit in limits] == [5, 10]


@pytest.fixture
def said(tmp_path, monkeypatch):
    """A function that returns what a command prints, where what is heavy cannot be imported."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(script: str, words: str, expected: int = 2) -> str:
        heavy = "torch", "transformers", "sympy"
        status, printed = run_script(ROOT, script, words.split(), tmp_path / "printed", heavy)
        assert status == expected, printed
        return printed

    return run


@pytest.mark.parametrize("command", ["train.py", "eval.py"])
def test_mistakes_are_answered_without_torch(command, said):
    """The answer names the nearest flag."""
    assert "Error parsing --max-tokens" in said(command, "--max-tokens modell")
    assert "Unrecognized options: --modell" in said(command, "--modell M")


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--model a/b --data none.csv", "--data none.csv: cannot be read ([Errno 2]"),
        ("--model a/b --data requirements.txt", "--data requirements.txt: cannot be read (line 1"),
        (
            "--model a/b --data tests/cases/sets.csv",
            '--data tests/cases/sets.csv, row 1: needs "pr',
        ),
    ],
)
def test_what_is_the_user_s_own_is_answered_without_torch(words, sentence, said):
    """A file and its rows are checked before torch is imported."""
    assert sentence in said("train.py", words)


@pytest.mark.parametrize(
    "command, words, flag",
    [
        ("train.py", "--steps 3 --lr 1e-4 --steps 4", "--steps"),
        ("train.py", "--lr=1e-4 --lr 2e-4", "--lr"),
        ("train.py", "--max_tokens 9 --max-tokens 8", "--max-tokens"),
        ("train.py", "--recompute --no-recompute", "--recompute"),
        ("eval.py", "--model M --model R", "--model"),
    ],
)
def test_a_flag_that_is_typed_twice_is_refused(command, words, flag, said, monkeypatch):
    """Of two the last would count in silence; what a study appends to its flags may count so."""
    assert f"error: {flag}: is given twice; give it once" in said(command, words)
    assert config.parse_train(["--steps", "3", "--steps", "4"]).steps == 4
    typed = "train.py --method-option a=1 --use json --method-option b=2 --use math"
    monkeypatch.setattr(sys, "argv", typed.split())
    assert config.parse_train().method_option == ("a=1", "b=2")


@pytest.mark.parametrize("command", ["train.py", "eval.py"])
def test_help_shows_all_flags_with_their_defaults(command, said):
    """In 80 columns, without torch, it has the embedded task's, or with --model the paper's."""
    text = said(command, "--help", 0)
    assert max(len(line) for line in text.splitlines()) <= 80
    default = config.Config() if command == "train.py" else evaluation.EvalConfig()
    suppressed = {"digest", "reward_digest", "token_digest", "saved", "warmup_given"}
    for name in set(dataclasses.asdict(default)) - suppressed:
        assert f"--{name.replace('_', '-')}" in text
    words = text.replace("│", "").split()
    assert f", {AT_ONCE} on a CPU." in " ".join(words)
    if command == "eval.py":
        names = {row["benchmark"] for row in cases("sets.csv")}
        assert {value.strip("(),.") for value in words} >= names and len(names) == 10
    else:
        for words, steps in (("", 40), ("--model M ", 300)):
            text = " ".join(said(command, f"{words}--help", 0).split())
            assert f"Training steps: sample, then update. (default: {steps})" in text


@pytest.mark.parametrize(
    "parse, words, name, values",
    [
        (evaluation.parse_eval, "--model a b --use c --seeds 3 4 --use d", "use", ("c", "d")),
        (config.parse_train, "--use a:c=1 --use d --model n", "use", ("a:c=1", "d")),
        (config.parse_train, "--method-option mix=1 --method-option steps=9",
         "method_option", ("mix=1", "steps=9")),
    ],
)  # fmt: skip
def test_a_list_flag_given_twice_appends(parse, words, name, values):
    """Every command appends the values of a list flag; of other flags the last value counts."""
    assert dataclasses.asdict(parse(words.split()))[name] == values


@pytest.mark.parametrize("name", dataclasses.asdict(config.Config()))
def test_every_number_has_bounds(name):
    """Numbers are finite and positive; those that switch something off may be 0."""
    value = dataclasses.asdict(config.Config())[name]
    if name == "grade_timeout":
        value = 1.0
    if type(value) not in (int, float):
        return
    for other in (math.nan, math.inf, -math.inf, -1, 0):
        changed = dataclasses.replace(config.Config(), **{name: other})
        if other == 0 and name in config.MAY_BE_ZERO:
            config.check_bounds(changed, config.MAY_BE_ZERO)
        else:
            with pytest.raises(BadInput, match=f"{config.flag(name)} .*out of bounds"):
                config.check_bounds(changed, config.MAY_BE_ZERO)


@pytest.mark.parametrize("name", "template eps_unit device dtype sandbox".split())
def test_a_choice_is_one_of_those_there_are(name, capsys):
    """tyro refuses others, and names the flag."""
    with pytest.raises(SystemExit, match="2"):
        config.parse_train([f"{config.flag(name)}=neither"])
    assert config.flag(name) in capsys.readouterr().err
