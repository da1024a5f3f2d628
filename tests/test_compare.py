"""studies/compare.py: stages in a row, a table of what they left, and what is refused."""

import multiprocessing
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import DOCS, saved
from scipy import stats

import train
from harness import files, tables
from studies import compare
from studies.compare import Cell, Trial
from tasks.rows import BadInput

SMALL = (
    "--smoke --toy-lines 2 --toy-width 16 --window 4 --stride 2 --eval-groups 2 --steps 1 "
    "--warmup-steps 1"
)
SMALL += " --threads 0"


@pytest.fixture
def in_this_process(monkeypatch):
    """Trials run here, one after the other; of each grid only the middle."""

    class Pool:
        def __init__(self, jobs):
            pass

        def __enter__(self):
            return SimpleNamespace(imap_unordered=map)

        def __exit__(self, *raised):
            pass

    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SimpleNamespace(Pool=Pool))
    monkeypatch.setattr(compare, "grid", lambda middle, curves: [middle])
    monkeypatch.setattr(compare, "HELDOUT", 8)
    monkeypatch.setattr(compare, "GROUPS", 2)
    monkeypatch.setattr(compare, "CONTINUATIONS", 2)
    monkeypatch.setattr(compare, "TIMED", 1)


def test_a_grid_grows_until_its_best_rate_is_inside():
    """And to 8 times its middle or an eighth, no further."""
    assert compare.grid(2.0, {}) == [1.0, 2.0, 4.0]
    assert compare.grid(2.0, {1.0: 0.1, 2.0: 0.3, 4.0: 0.2}) == [1.0, 2.0, 4.0]
    assert compare.grid(2.0, {1.0: 0.4, 2.0: 0.3, 4.0: 0.2}) == [0.5, 1.0, 2.0, 4.0]
    assert compare.grid(2.0, {1.0: 0.1, 2.0: 0.2, 4.0: 0.3, 8.0: 0.4}) == [1.0, 2.0, 4.0, 8.0, 16.0]
    for sign, rates in ((1, [1.0, 2.0, 4.0, 8.0, 16.0]), (-1, [0.25, 0.5, 1.0, 2.0, 4.0])):
        assert compare.grid(2.0, {rate: sign * rate for rate in rates}) == rates


def test_every_rate_is_tuned_on_both_seeds_before_the_best_is_confirmed():
    """What lacks is a trial, by its seed; the rate of the highest mean curve is then confirmed,
    others' rows aside.
    """
    rows, cell = [], Cell("--steps 2", 1e-4, ["grpo", "kgae", "grpo-lora"])
    for rule, middle in (("grpo", 1e-4), ("grpo-lora", 1e-3), ("kgae", 1e-4)):
        for lr in (middle / 2, middle, middle * 2):
            for seed in (100, 101):
                row = {"stage": "tune", "cell": cell.flags, "seed": seed, "rule": rule, "lr": lr}
                rows.append(row | {"rewards": [0.5 if lr == middle else 0.3, 0.5]})
    rows.append(rows[-1] | {"cell": "--steps 3", "lr": 5e-5, "rewards": [0.9, 0.9]})
    rows.append(rows[-1] | {"stage": "confirm", "cell": cell.flags})
    assert not compare.lacking("tune", rows, cell, (100, 101))
    without = [row for row in rows if (row["rule"], row["lr"], row["seed"]) != ("kgae", 2e-4, 101)]
    assert compare.lacking("tune", without, cell, (100, 101)) == [
        Trial(cell.flags, 101, "kgae", 2e-4)
    ]
    assert compare.mean_curves(cell, "kgae", without).keys() == {5e-5, 1e-4}
    confirmed = compare.lacking("confirm", rows, cell, [0])
    assert [(trial.rule, trial.lr) for trial in confirmed] == [
        ("grpo", 1e-4),
        ("kgae", 1e-4),
        ("grpo-lora", 1e-3),
    ]
    assert [trial.rule for trial in compare.lacking("advantages", rows, cell, (100, 101))] == [
        "grpo",
        "grpo",
    ]


def test_few_seeds_keep_all_processes_busy():
    """A seed's trials go to several then, each to one; with seeds enough they go from one start."""
    trials = [
        Trial("", seed, rule, lr)
        for seed in (7, 8)
        for rule in ("grpo", "shear")
        for lr in (1e-5, 2e-5)
    ]
    assert compare.parts_of(trials, jobs=2) == [trials[:4], trials[4:]]
    assert compare.parts_of(trials[:4], jobs=2) == [trials[0:4:2], trials[1:4:2]]
    assert compare.parts_of(trials[:1] + trials[6:], jobs=4) == [
        trials[:1],
        [trials[6]],
        [trials[7]],
    ]


def test_names_of_rows_are_methods_with_changes():
    """Any method, any factor, in any order; a name of something else is refused."""
    assert compare.flags_of("oar-g") == {"method": "oar-g"}
    assert compare.flags_of("sdpo") == {"method": "sdpo", "method_option": ("mix=0.9",)}
    both = {"method": "shear", "rescale": "mean1", "negative_scale": 0.5}
    assert (
        compare.flags_of("shear-mean1-wrong-.5")
        == compare.flags_of("shear-wrong-0.5-mean1")
        == both
    )
    assert compare.flags_of("grpo+shear-until=20-share=.2-mean1") == {
        "method": "grpo+shear",
        "method_option": ("until=20", "share=.2"),
        "rescale": "mean1",
    }
    assert compare.flags_of("rsi-low=-6-high=.9")["method_option"] == ("low=-6", "high=.9")
    assert compare.flags_of("grpo-dynamic-lora") == {
        "method": "grpo",
        "dynamic_sampling": 4,
        "lora_rank": 16,
    }
    for name in (
        "nothing",
        "grpo-",
        "grpo-mean2",
        "grpo-wrong-",
        "grpo-wrong-x",
        "grpo-loras",
        "grpo.sdpo",
        "-mean1",
    ):
        with pytest.raises(BadInput, match=f"--methods {name}: is no method"):
            compare.flags_of(name)


def test_intervals_are_scipy_s():
    """Of Student's t at 90%."""
    values = np.array([0.01, 0.03, -0.02, 0.04])
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.90)
    assert compare.with_interval(values) == f"+.015 (-{-low:.3f} to +{high:.3f}), 3/4".replace(
        "0.", "."
    )


def test_every_stage_and_the_same_command_again(tmp_path, in_this_process, monkeypatch, capsys):
    """Rows of four stages, a table of all columns; then nothing is left to run. Evaluations have
    one noise and their step; the first step of each run is slow, and so is an adapter's.
    """
    clock, noise, steps = [0], [], []
    step, sampled, evaluate = train.train_step, compare.sample_and_grade, train.evaluate

    def train_step(run, number):
        clock[0] += 1 + bool(run.config.credit.lora_rank) if number else 9
        return step(run, number)

    def sample_and_grade(run, problems, *sampling):
        noise.append(torch.initial_seed())
        return sampled(run, problems, *sampling)

    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(compare, "sample_and_grade", sample_and_grade)
    monkeypatch.setattr(train, "evaluate", lambda *run: steps.append(run[1]) or evaluate(*run))
    monkeypatch.setattr(compare, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    command = [*SMALL.split(), "--methods", "grpo", "arca-lora", "--seeds", "1", "2"]
    command += ["--tuning-seeds", "7"]
    command += ["--rows", str(tmp_path / "rows.jsonl")]
    assert compare.main(command) == 0
    printed = capsys.readouterr().out
    rows = files.rows(tmp_path / "rows.jsonl")
    expected = dict(tune=2, confirm=4, cost=2, advantages=1)
    stages = {stage: [row for row in rows if row["stage"] == stage] for stage in expected}
    assert {stage: len(found) for stage, found in stages.items()} == expected
    assert {row["lr"] for row in stages["confirm"]} == {
        1e-4,
        1e-3,
    }  # an adapter's is ten times the others'
    assert {(row["rule"], row["step"], row["of_grpo"]) for row in stages["cost"]} == {
        ("grpo", 1, 1),
        ("arca-lora", 2, 1),
    }
    assert all(row["rewards"] == [0.5] for row in stages["confirm"])
    assert set(noise) == {compare.seed_of(seed, "evaluation") for seed in (1, 2)}
    assert steps == [0, 1] * 4
    assert {row["code"] for row in rows} == {compare.code_of_training()}
    assert "arca-lora" not in stages["advantages"][0]["advantages"]["methods"]
    assert printed.count("\n") == 2 + 2
    assert compare.main(command) == 0
    assert capsys.readouterr().out == printed and files.rows(tmp_path / "rows.jsonl") == rows


def test_rates_and_tuning_seeds_can_be_given():
    """Then nothing else is tuned, however the curves rise; the best of these is confirmed."""
    cell, rows = Cell("--steps 2", 1e-4, ["grpo"], [7], [2e-5, 5e-5]), []
    assert [trial.lr for trial in compare.lacking("tune", rows, cell, [7])] == [2e-5, 5e-5]
    for lr in (2e-5, 5e-5):
        trial = Trial(cell.flags, 7, "grpo", lr)._asdict()
        rows.append({"stage": "tune", "rewards": [1e4 * lr], **trial})
    assert not compare.lacking("tune", rows, cell, [7])
    assert compare.lacking("confirm", rows, cell, [0]) == [Trial(cell.flags, 0, "grpo", 5e-5)]


def test_trials_of_other_code_are_not_added_to(tmp_path, assert_refused):
    """Of this task; the file stays as it was. Rows without a digest are not told apart."""
    path, flags = tmp_path / "rows.jsonl", ["--steps", "2", "--methods", "grpo"]
    row = {
        "stage": "tune",
        **Trial("--steps 2", 100, "grpo", 1e-4)._asdict(),
        "rewards": [0.5],
        "code": "0123",
    }
    files.append_rows(path, [row])
    before = path.read_bytes()
    message = "lacks grpo at seed 100, and its trials are of other code (0123); take that code"
    assert_refused(compare.main, ["--rows", path, *flags], message)
    assert path.read_bytes() == before
    for cell in (Cell("--steps 3", 1e-4, ["grpo"]), Cell("--steps 2", 1e-4, ["grpo"])):
        path.write_bytes(
            before
            if cell.flags == "--steps 3"
            else before.replace(b"0123", b"").replace(b'""', b"null")
        )
        compare.refuse_other_code(cell, path, [])


def test_a_start_of_another_task_is_refused(tmp_path, in_this_process, assert_refused, tiny):
    """No trial of it is added, no folder is left."""
    path, start = tmp_path / "new" / "rows.jsonl", saved(tmp_path / "start", tiny[0])
    flags = ["--task", "words", "--model", start, "--methods", "grpo", "--heldout", 64]
    assert_refused(
        compare.main,
        ["--rows", path, *flags],
        "--task words",
        "the model's tokenizer cannot write",
    )
    assert not path.parent.exists()


def test_runs_are_drawn_in_one_picture(tmp_path, monkeypatch, capsys):
    """A line of rewards each, however long; what is no step has none. Nothing is trained."""
    drawn = []
    monkeypatch.setattr(
        compare.figures.Figure, "savefig", lambda figure, path: drawn.append((figure.axes[0], path))
    )
    names = "abcde"
    for length, name in enumerate(names, 1):
        (tmp_path / name).mkdir()
        steps = [
            {"step": step, "reward": step / 10, "equal_groups": 0, "grad_norm": 0}
            for step in range(1, length + 1)
        ]
        steps[2:] = [step | {"reward": None} for step in steps[2:]]  # nothing could be graded
        held_out = {"greedy": [0.5, 0.1, 8], "sampled": [0.5, None, 8]}
        files.append_rows(
            tmp_path / name / "metrics.jsonl", [{"before": held_out}, *steps, {"after": held_out}]
        )
    assert compare.main([str(tmp_path / name) for name in names]) == 0
    ((axes, path),) = drawn
    assert [line.get_label() for line in axes.lines] == [str(tmp_path / name) for name in names]
    assert [len(line.get_ydata()) for line in axes.lines] == [1, 2, 3, 4, 5]
    assert (
        axes.lines[1].get_ydata().tolist() == [0.1, 0.2]
        and len({line.get_color() for line in axes.lines}) == 5
    )
    assert path == tmp_path / "compare.png" and capsys.readouterr().out == f"wrote {path}\n"


def test_the_table_is_of_rows_paired_by_seed():
    """Means over the seeds, D with its interval, AUCs before and after, cost against grpo's; none
    of another rate, nor of a seed that one of both has not run.
    """
    cell, rows = Cell("--steps 2", 1e-4, ["grpo", "shear"]), []
    for rule, more in (("grpo", 0.0), ("shear", 0.1)):
        usual = {"cell": cell.flags, "rule": rule, "lr": 1e-4}
        for seed, curve in ((100, 0.4), (101, 0.4)):
            rows.append(
                usual | {"stage": "tune", "seed": seed, "rewards": [curve], "sampled": curve}
            )
        for seed, curve in (0, 0.4), (1, 0.6), (2 + (rule == "grpo"), 0.5):
            auc = {"auc": 0.5 + more, "auc_step": 0.5 - more}
            numbers = {
                "rewards": [curve + more, None],
                "sampled": curve - more,
                "weight_mean": 1.0,
                "ess": 0.25,
            }
            rows.append(
                usual | {"stage": "confirm", "seed": seed, "before": auc, "after": auc} | numbers
            )
        rows.append(usual | {"stage": "cost", "seed": 100, "step": 2.0 + 10 * more, "of_grpo": 2.0})
    methods = {"grpo": {"corrected": 0.25}, "shear": {"corrected": 0.5}}
    advantages = {
        "stage": "advantages",
        "cell": cell.flags,
        "rule": "grpo",
        "advantages": {"methods": methods},
    }
    of_others = [
        row | {"lr": 2e-4, "rewards": [0.9], "seed": 7 * (row["seed"] >= 100)} for row in rows[:4]
    ]
    grpo, shear = compare.table_of([*rows, *of_others, advantages], cell)
    assert grpo["curve"] == "0.500" and grpo["D, curve"] == "" and shear["curve"] == "0.600"
    assert shear["D, curve"] == "+.100 (+.100 to +.100), 2/2" and shear["D, held out"].startswith(
        "-.100 ("
    )
    assert shear["AUC"] == "0.60 / 0.60" and shear["wrong step"] == "0.40 / 0.40"
    assert (
        shear["correlation"] == "0.50"
        and shear["extra cost"] == "+50%"
        and grpo["extra cost"] == "+0%"
    )
    assert (shear["weight"], shear["share"], shear["lr"]) == ("1.00", "0.25", "0.0001")
    assert len(tables.markdown([grpo, shear])) == 4


def test_the_page_has_what_the_rows_say():
    """The tables of docs/methods.md can be computed again; each row of `compare` is in one
    of them, but for methods whose comparison is only planned.
    """
    newest = ["taco", "cliff", "scapo", "own-side"]
    planned = ["signbalance", "gmts", "bipace", "serl", "iw-opd", "dasd"]
    others = [rule for rule in compare.ARMS if rule not in newest + planned]
    for file, rules in (("compare.jsonl", others), ("compare-newest.jsonl", ["grpo", *newest])):
        rows, cell = files.rows(DOCS / file), Cell("--steps 20", 1e-4, rules)
        assert {row["rule"] for row in rows if row["stage"] == "confirm"} == set(rules)
        assert (
            "\n".join(tables.markdown(compare.table_of(rows, cell)))
            in (DOCS / "methods.md").read_text()
        )


def test_the_page_on_real_weights_has_what_its_rows_say(tmp_path, monkeypatch, capsys):
    """Its script prints each of its tables again, and draws its curves."""
    page = (DOCS / "real-weights.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"## Every number again.*?```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    printed = capsys.readouterr().out.strip().split("\n\n")
    assert len(printed) == 5 and all(table in page for table in printed)
    assert (tmp_path / "docs" / "real-weights-curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--methods shear", "all are compared with grpo; add it"),
        ("--methods grpo oracle --model M", "--method oracle: needs the true first error"),
        ("--seeds 0 0", "--seeds 0 0: --tuning-seeds 100 101 choose the rates"),
        ("--seeds 0 100", "--seeds 0 100: --tuning-seeds 100 101 choose the rates"),
        ("--seed 3", "--seed: the trials set it; leave it out"),
        ("--window 0", "--window: '0' must be from 1"),
        ("--methods grpo nothing", "--methods nothing: is no method of train.py"),
    ],
)
def test_bad_input_is_one_sentence_before_any_trial(flags, words, tmp_path, assert_refused):
    assert_refused(compare.main, ["--rows", tmp_path / "rows.jsonl", *flags.split()], words)
    assert not list(tmp_path.iterdir())
