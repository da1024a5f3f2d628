"""harness/recipe.py and the protocol: every default of the paper's run, written out, so that none changes unnoticed.

Run: pytest tests/test_recipe.py
"""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.protocol import Protocol

from credit.ablations import CHOICES, Settings
from credit.table import METHODS
from fast.race import race_matrix
from grpo import group_advantages, policy_loss
from harness import protocol, recipe, tables
from harness.command import parse_args
from shear import shear_weights
from sinkhorn import sinkhorn
from tasks import benchmarks, problems, toy
from tasks.benchmarks import BENCHMARKS

PAPER = dict(  # `python train.py --model M`, without what depends on the machine: device and dtype
    **dict(task="math", model="M", data=None, template="auto", seed=0, out="runs", name=None, smoke=False),
    **dict(method="shear", negative_scale=1.0, rescale="none", lora_rank=0, prm=None),
    **dict(
        window=100, stride=25, eps=4.52, eps_unit="raw", reading="value", distance="w1", normalize="group", pool="max"
    ),
    **dict(max_iters=100, tol=1e-3, fused=False),
    **dict(first_threshold=0.03, kgae_lambda=0.95, kgae_width=0.05),
    **dict(entropy_alpha=0.4, entropy_kappa=2.0, hapo_alpha=0.2, hapo_phi=2.0),
    **dict(rsi_low=-6.0, rsi_high=0.8, delta_low=0.8, delta_high=1.2, sdpo_mix=0.0, dynamic_sampling=0),
    **dict(oar_quantile=0.25, oar_beta=1.0, oar_probe="kl", oar_noise=1e-3, arca_floor=1e-6),
    **dict(pure_temperature=0.1, pure_outcome=1.0, rlsd_mix=0.5, rlsd_steps=50, rlsd_bound=0.2, attention_slope=1.0),
    **dict(
        prompts_per_step=512,
        rollouts_per_prompt=8,
        max_tokens=3000,
        temperature=1.0,
        generate_batch=0,
        decode="generate",
    ),
    **dict(grade_timeout=None, sandbox="auto"),
    **dict(
        steps=300, lr=1e-6, prompts_per_update=32, micro_tokens=16_384, clip_low=0.2, clip_high=0.28, max_grad_norm=1.0
    ),
    **dict(heldout=64, eval_groups=64, eval_every=0, bench=[], bench_data=[], save_every=None, keep=2, resume=None),
    **dict(ranks=0, shard_over=0, recompute=True, threads=0, toy_kind="chain", toy_lines=5, warmup_steps=600),
    **dict(toy_width=128, toy_repair=0.1, toy_luck=0.0, toy_tail=0, track=None, force=False),
)
# What changes no number of a run on one machine, or has no value before a user gives one.
PLAIN = "task model data out name smoke prm micro_tokens bench bench_data resume ranks shard_over recompute threads"
PLAIN += (
    " generate_batch decode fused toy_kind toy_lines warmup_steps track force toy_width toy_repair toy_luck toy_tail"
)
EMBEDDED = dict(
    **dict(
        task="embedded",
        model=None,
        window=12,
        stride=6,
        eps=0.05,
        eps_unit="nbar",
        prompts_per_step=16,
        prompts_per_update=4,
        max_tokens=64,
        steps=40,
        lr=1e-4,
    ),
    **dict(heldout=512, save_every=10, threads=1, recompute=False),
)
SAMPLES = dict(  # a problem, avg@k of Sec. 5.2; the embedded set is ours
    **dict(aime24=32, aime25=32, amc23=8, math500=1, olympiadbench=1),
    **{"humaneval": 4, "humaneval+": 4, "mbpp": 4, "mbpp+": 4, "livecodebench": 4, "embedded": 4},
)


def settings(*argv: str) -> dict:
    """What `train.py` resolves, but for the machine's own."""
    return {name: value for name, value in vars(parse_args([*argv])).items() if name not in ("device", "dtype")}


def test_every_default_of_the_paper_s_run():
    """And of the embedded run, which replaces some."""
    assert settings("--model", "M") == PAPER
    assert settings("--model", "M", "--task", "code") == PAPER | dict(task="code")
    assert settings() == PAPER | EMBEDDED


def test_the_table_of_the_recipe_is_true():
    """docs/recipe.md has every default of the paper's run, and what the embedded task replaces."""
    text = (Path(__file__).parents[1] / "docs" / "recipe.md").read_text()
    paper, embedded = text.split("## The embedded task")
    for part, expected, plain in ((paper, settings("--model", "M"), PLAIN.split()), (embedded, settings(), None)):
        cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `--")]
        written = dict(re.findall(r"`--(\S+) (\S+?)`", " ".join(cells)))
        written = {name.replace("-", "_"): value for name, value in written.items()}
        assert written == {name: str(expected[name]) for name in written} and len(written) > 12
        if plain:
            assert set(written) == set(expected) - set(plain)
        else:
            assert set(written) >= {name for name in EMBEDDED if expected[name] != PAPER[name]} - set(PLAIN.split())


def test_every_default_of_the_evaluation():
    """Temperature .1 and 3,000 tokens, each set at the paper's k, with the window of its LiveCodeBench."""
    args = protocol.parse(["--model", "M"])
    expected = dict(temperature=0.1, max_tokens=3000, samples=0, template="auto", block=128)
    expected |= dict(grade_timeout=None, sandbox="auto")
    assert dataclasses.asdict(Protocol()) == expected
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.seeds == [0] and list(args.lcb_window) == ["2025-02-01", "2025-05-31"]
    assert {name: each.k for name, each in BENCHMARKS.items()} == SAMPLES


def test_functions_for_other_trainers_have_the_same_defaults():
    """What a user of `shear_weights` or `policy_loss` gets is what `train.py` runs, but eps, which is in nbar there."""
    own = PAPER | dict(eps=0.05, eps_unit="nbar")
    settings = dataclasses.asdict(Settings())
    assert settings == {name: own[name] for name in settings}
    for function, names in (
        (shear_weights, "window stride eps".split()),
        (race_matrix, "max_iters tol".split()),
        (sinkhorn, "max_iters tol".split()),
        (policy_loss, "clip_low clip_high".split()),
    ):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].default for name in names} == {name: own[name] for name in names}
    assert inspect.signature(group_advantages).parameters["delta"].default == 1e-6


def test_what_the_flags_state_once_more_is_what_other_files_have():
    """Choices of methods, ablations, templates, embedded problems and models: in the same order."""
    train = {action.dest: action.choices for action in recipe.make_parser()._actions}
    assert train["method"] == list(METHODS) and {name: train[name] for name in CHOICES} == CHOICES
    assert train["toy_kind"] == (*toy.KINDS, "recoverable")
    assert parse_args(["--toy-lines", str(len(toy.LABELS))]).toy_lines == 8
    assert (benchmarks.WINDOW, tuple(tables.PAPER)) == (protocol.WINDOW, protocol.PAPER)


STUDIES = ("compare", "diagnose", "bench")
RUN = """
import runpy, sys
sys.argv = {argv}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("status", end.code, {{"torch", "transformers", "numpy"}} & set(sys.modules))
"""


def said(command: str, words: str) -> str:
    """What a command prints that ends with status 0, or with 2 for a mistake, before it imports what is heavy."""
    code = RUN.format(argv=[command, *words.split()])
    options = dict(cwd=Path(__file__).parents[1], env={"COLUMNS": "80", "PYTHONPATH": "."}, text=True)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, **options)
    assert f"status {2 if 'modell' in words else 0} set()" in ended.stdout, ended
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("command", ["train.py", "eval.py", *(f"studies/{name}.py" for name in STUDIES)])
def test_help_and_mistakes_are_answered_without_torch(command):
    """Help within 80 columns; a mistake is one sentence with the nearest flag."""
    assert max(len(line) for line in said(command, "--help").splitlines()) <= 80
    assert "unrecognized arguments: --modell M; did you mean --model?" in said(command, "--modell M")


@pytest.mark.parametrize("command", ["train.py", "eval.py"])
def test_help_shows_the_usual_flags_with_the_defaults_of_this_very_command(command):
    """And --help-all all of them."""
    short, full = said(command, "--help"), said(command, "--help-all")
    flags = [set(re.findall(r"^  (?:-\S, )?(--\S+)", text, re.MULTILINE)) for text in (short, full)]
    assert 10 < len(flags[0]) < 20 and flags[0] < flags[1]
    if command == "train.py":
        assert "(default: 0.0001)" in short and "(default: 1e-06)" in said(command, "--model M --help")


def test_every_number_has_bounds():
    """All flags refuse what is no number and what is too large; some of them, what is too small."""
    for action in recipe.make_parser()._actions:
        for value in ("nan", "1e3x", "9" * 40, "-" + "9" * 40) if action.type else ():
            with pytest.raises(problems.BadInput, match=action.option_strings[0]):
                recipe.parse([f"{action.option_strings[0]}={value}"])
    for flag in (
        *("--window 0", "--eps 0", "--rollouts-per-prompt 1", "--toy-lines -1", "--warmup-steps 0", "--ranks -1"),
        *("--save-every 0", "--keep 0", "--seed -1", "--threads -1", "--clip-low -1", "--grade-timeout 0"),
        *("--negative-scale -1", "--oar-quantile 2", "--temperature 1e-300"),
    ):
        with pytest.raises(problems.BadInput, match=f"{flag}: must be"):
            recipe.parse(flag.split())


def test_a_choice_that_is_nearly_right_is_named():
    """With all choices."""
    with pytest.raises(problems.BadInput, match=r"--method: invalid choice: 'sheer' .*grpo.*; did you mean shear\?"):
        recipe.parse(["--method", "sheer"])
