"""eval.py, run in process as a user would: tables, files, going on, and what train.py writes."""

import json
import math
import shutil
from contextlib import nullcontext

import pytest
from cases import saved

import eval as command
import train
from harness import evaluation, files, prepare, tables
from harness.files import rows
from harness.models import fast_rollout
from tasks import toy
from tasks.benchmarks import SUITES
from tasks.rows import BadInput

SMALL = "--bench embedded --toy-lines 1 --heldout 20 --block 16 --samples 2 --temperature 1 --threads 1".split()
pytestmark = pytest.mark.usefixtures("no_curve")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of two untrained models of the embedded task."""
    return [
        saved(tmp_path_factory.mktemp("models") / f"m{seed}", toy.make_model(1, seed=seed))
        for seed in (0, 1)
    ]


def test_a_model_gets_a_table_and_every_generation_a_row(models, tmp_path, monkeypatch, capsys):
    """The printed numbers are those of the file, and of results.json; from these, without a model,
    they come again; and by the same command for fewer seeds, those of these seeds.
    """
    out = tmp_path / "out"
    flags = ["--out", str(out), "--seeds", "0", "3", "--pass-at", "1", "4"]
    assert command.main(["--model", *models, *SMALL, *flags]) == 0
    printed = capsys.readouterr().out
    made = rows(out / "generations.jsonl")
    assert len(made) == 2 * 2 * 20 * 2
    assert set(made[0]) == {
        "model", "benchmark", "seed", "block", "problem", "sample", "score", "reason", "tokens", "limit", "response"
    }  # fmt: skip
    written = (out / "results.json").read_text()
    results = json.loads(written)
    first, second = results["results"]
    mine = [row for row in made if row["model"] == first]
    found = results["results"][first]["embedded"]
    assert (
        found["mean"] == pytest.approx(sum(row["score"] for row in mine) / 80)
        and found["samples"] == 80
    )
    assert found["pass@1"] == pytest.approx(found["mean"]) and found["pass@4"] >= found["pass@1"]
    assert set(found["seeds"]) == {"0", "3"} and found["missing"] == 0
    assert results["differences"][second]["embedded"]["problems"] == 20
    assert (
        results["data"]["embedded"]["revision"] == "chain-1-0"
        and "side by side" in printed
        and "NOTE" not in printed
    )
    assert f"| embedded  | @2  | {100 * found['mean']:.1f} ± " in printed
    assert command.main(["--model", *models, *SMALL, *flags[:3], "3"]) == 0
    of_one = json.loads((out / "results.json").read_text())["results"][first]["embedded"]
    assert of_one["mean"] == found["seeds"]["3"] and of_one["samples"] == 40
    capsys.readouterr()
    monkeypatch.setattr(command, "load_model", None)  # nothing may be loaded
    assert command.main(["--from", str(out), "--pass-at", "1", "4"]) == 0
    assert (out / "results.json").read_text() == written and capsys.readouterr().out == printed
    lines = (out / "generations.jsonl").read_text().splitlines(keepends=True)
    (out / "generations.jsonl").write_text("".join(lines[:-3]))
    assert command.main(["--from", str(out)]) == 0
    assert "embedded: 3 samples are missing" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_to_the_same_rows(models, tmp_path, monkeypatch, assert_refused):
    """Also where the last line was cut off; what is whole is not made again, and then
    nothing is.
    """
    flags = ["--model", models[0], *SMALL, "--out"]
    part = [*flags, str(tmp_path / "part")]
    assert command.main([*flags, str(tmp_path / "whole")]) == 0
    whole = (tmp_path / "whole" / "generations.jsonl").read_text()
    blocks, made = [], []

    def stop(*args, **options):
        if len(blocks) == 2:
            raise KeyboardInterrupt
        blocks.append(args)
        return fast_rollout(*args, **options)

    monkeypatch.setattr(evaluation, "fast_rollout", stop)
    assert command.main(part) == 130
    path = tmp_path / "part" / "generations.jsonl"
    assert whole.startswith(path.read_text()) and len(rows(path)) == 32
    path.write_text(path.read_text()[:-20])  # as a kill in the middle of a line would leave it
    monkeypatch.setattr(
        evaluation, "fast_rollout", lambda *a, **o: made.append(a) or fast_rollout(*a, **o)
    )
    assert command.main(part) == 0
    assert path.read_text() == whole and len(made) == 2
    path.write_text(whole + "".join(whole.splitlines(keepends=True)[32:]))  # a block twice
    assert_refused(command.main, ["--from", path.parent], "line 41: cannot be read (it repeats")
    assert command.main(part) == 0
    assert path.read_text() == whole and len(made) == 3
    monkeypatch.setattr(evaluation, "fast_rollout", None)  # nothing may be sampled
    assert command.main(part) == 0


def test_other_settings_do_not_mix_with_what_is_there(models, tmp_path, assert_refused):
    """Neither another temperature, nor other problems, nor other weights of the same name."""
    out = ["--out", str(tmp_path / "out")]
    assert command.main(["--model", models[0], *SMALL, *out]) == 0
    others = (
        (["--temperature", "0"], "protocol: temperature is 0.0; "),
        (["--toy-seed", "5"], "data: embedded is {'k'"),
    )
    for flags, words in others:
        assert_refused(command.main, ["--model", models[0], *SMALL, *out, *flags], words)
    copy, label = (
        saved(tmp_path / "copy" / "m0", toy.make_model(1, seed=9)),
        command.label_of(models[0]),
    )
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    settings["models"][command.label_of(copy)] = settings["models"].pop(label)
    (tmp_path / "out" / "settings.json").write_text(json.dumps(settings))
    assert_refused(command.main, ["--model", copy, *SMALL, *out], "models: copy/m0 is {'path'")


def test_responses_from_elsewhere_are_graded(tmp_path, capsys):
    """Right, wrong, cut off, and a program; problem means 1/2, 0 and 1, so 1/2 ± 0.289. The same
    again is no other. Another model is right where this one is right half of the time.
    """
    program = {"response": "```python\nprint(1)\n```", "tests": {"inputs": [""], "outputs": ["1"]}}
    lines = [
        {"problem": 0, "response": r"\boxed{7}", "answer": "7"},
        {"problem": 0, "response": r"\boxed{8}", "answer": "7"},
        {"problem": 1, "response": r"\boxed{7}", "answer": "7", "truncated": True},
        {"problem": 1, "response": "7", "answer": 7},
        {"problem": 2, **program},
    ]
    other = {"model": "\x1b", "problem": 0, "response": r"\boxed{7}", "answer": "7"}
    lines += [other, other, other | {"seed": 1}]  # k is a seed's
    files.append_rows(tmp_path / "r.jsonl", lines)
    for _ in range(2):
        assert (
            command.main(["--replay", str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "out")])
            == 0
        )
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    found = results["results"]["replay"]["replay"]
    assert results["differences"]["\x1b"]["replay"]["difference"] == 0.5
    assert (found["mean"], found["samples"], found["right"]) == (0.5, 5, 2)
    assert found["error"] == pytest.approx(0.5 / math.sqrt(3))
    assert found["truncated"] == found["no_answer"] == pytest.approx(1 / 5)
    printed = capsys.readouterr().out
    assert "50.0 ± 28.9" in printed and "\x1b" not in printed and "1 samples are missing" in printed


def test_a_run_measures_itself_as_eval_does(models, tmp_path, monkeypatch, capsys, assert_refused):
    """`train.py --eval-every` and `eval.py` on the checkpoints agree to the last row, also after
    --resume.
    """
    size = "--toy-lines 1 --heldout 16 --eval-groups 4 --prompts-per-step 4 --prompts-per-update 2".split()
    flags = ["--task", "embedded", "--model", models[0], *size, "--save-every", "1", "--keep", "9"]
    flags += ["--out", str(tmp_path), "--name", "run"]
    assert train.main([*flags, "--steps", "2", "--eval-every", "2", "--bench", "embedded"]) == 0
    again = tmp_path / "run" / "eval" / "step-000003.jsonl"
    again.write_text("{}\n")  # as a run leaves it that is killed while it evaluates
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
    assert len(rows(again)) == 64
    assert "on benchmarks: embedded " in capsys.readouterr().out
    steps = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "bench" in row]
    assert [row["step"] for row in steps] == [2, 3]
    found = steps[0]["bench"]["embedded"]
    assert found["samples"] == 64 and found["revision"] == "chain-1-0" and found["window"] is None
    run = str(tmp_path / "run")
    limit = ["--max-tokens", str(toy.response_tokens(1)), "--threads", "1"]
    assert (
        command.main(["--model", run, "--select", "best", "--out", str(tmp_path / "out"), *limit])
        == 0
    )
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["results"]) == [f"run/step-{step:06d}" for step in (1, 2, 3)]
    assert results["results"]["run/step-000002"]["embedded"]["mean"] == found["mean"]
    texts = [row["response"] for row in rows(tmp_path / "run" / "eval" / "step-000002.jsonl")]
    made = [
        row
        for row in rows(tmp_path / "out" / "generations.jsonl")
        if row["model"] == "run/step-000002"
    ]
    assert [row["response"] for row in made] == texts
    assert (
        "SELECTED ON THE TEST SETS" in printed
        and results["selection"]["run"]["last"] == "run/step-000003"
    )
    twin = str(shutil.copytree(run, tmp_path / "b" / "run"))
    words = [
        "--model",
        run,
        twin,
        "--select",
        "best",
        "--greedy",
        "--out",
        str(tmp_path / "both"),
        *limit,
    ]
    assert command.main(words) == 0
    assert set(json.loads((tmp_path / "both" / "results.json").read_text())["selection"]) == {
        run,
        twin,
    }
    monkeypatch.setattr(command, "load_model", None)  # nothing may be loaded
    assert command.main(["--runs", run, run]) == 0
    assert "last" in capsys.readouterr().out
    assert train.main(["--resume", twin, "--steps", "4", "--eval-every", "0"]) == 0
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # as `--resume --bench` would
        file.write(json.dumps(steps[0] | {"step": 5, "bench": {"aime24": found}}) + "\n")
    assert_refused(command.main, ["--runs", run], "were asked different --bench")


def test_the_best_checkpoint_is_chosen_among_those_with_an_average(capsys):
    """Wherever it stands; NaN, a set without any verdict, is never best nor last, nor in a mean
    over runs.
    """
    nan = math.nan
    averages = {
        "a\x1b": {"1": 0.5, "2": 0.9, "3": 0.7},
        "b": {"1": nan, "2": 0.3, "3": nan},
        "c": {"1": nan, "2": nan},
    }
    runs = {}
    for run, checkpoints in averages.items():
        runs[run] = {}
        for name, average in checkpoints.items():  # five sets, one above and one below the average
            means = dict.fromkeys(SUITES["math"], average) | {
                "aime24": average + 0.1,
                "amc23": average - 0.1,
            }
            runs[run][name] = {name: {"mean": mean, "error": 0.01} for name, mean in means.items()}
    chosen = tables.select_checkpoints(runs, "Qwen2.5-Math-7B")
    for choice in chosen.values():
        choice.update(
            {name: round(value, 9) for name, value in choice.items() if name.endswith("average")}
        )
    assert chosen == {
        "a\x1b": {"last": "3", "last_average": 0.7, "best": "2", "best_average": 0.9},
        "b": {"last": "2", "last_average": 0.3, "best": "2", "best_average": 0.3},
    }
    printed = capsys.readouterr().out
    assert (
        "a\\x1b: last 70.0 (3); best 90.0 (2), of 3 " in printed
        and "of 1 with an average" in printed
    )
    assert (
        "last, mean ± standard deviation of 2 runs: 50.0 ± 28.3" in printed
    )  # .4 / sqrt(2), ddof 1
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in printed.split("\n")
        if line.startswith("|")
    ]
    assert table[0] == ["", *SUITES["math"], "average"]
    assert table[2] == [
        "2 runs, best",
        "70.0 ± 42.4",
        "60.0 ± 42.4",
        "50.0 ± 42.4",
        *["60.0 ± 42.4"] * 3,
    ]
    assert [line[0] for line in table[3:]][::4] == ["GRPO †", "SHEAR †"]
    assert table[3][1] == "33.6 ± 1.9" and table[-1][-1] == "51.2 ± 0.8"
    assert tables.same_benchmarks([{"aime24": 0, "amc23": 0}, {"amc23": 0, "aime24": 0}])


def test_a_trained_models_template_is_that_of_what_it_was_trained_from(tmp_path):
    """A folder in runs/ has no name that tells; without this, base and trained would be asked
    differently. Its held-out problems are the run's, but for what a flag says, were it 0.
    """
    for name, origin in (("a", "Qwen/Qwen2.5-Math-7B"), ("b", str(tmp_path / "a" / "model"))):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(
            json.dumps({"toy_lines": 5, "seed": 7, "model": origin})
        )
    path = str(tmp_path / "b" / "model")
    assert files.origin_of(path) == "Qwen/Qwen2.5-Math-7B"
    assert command.heldout_set(command.Embedded(toy_seed=0), {"b": path}).revision == "chain-5-0"
    assert files.origin_of("some/model") == "some/model"
    had = prepare.digest_of(
        [problem for part in toy.make_problems(640, 8, 5, 7) for problem in part]
    )
    for seed, is_refused in ((7, False), (8, True)):
        run = {"task": "embedded", "toy_lines": 5, "heldout": 8, "seed": seed, "digest": had}
        (tmp_path / "b" / "config.json").write_text(json.dumps(run))
        with pytest.raises(BadInput, match="other problems") if is_refused else nullcontext():
            command.heldout_set(command.Embedded(), {"b": path})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give one of --model, --from, --replay and --runs"),
        (
            ["--model", "./N"],
            "--model ./N: cannot be loaded (no such folder or file)",
        ),  # before data are fetched
        (["--model", "M", "--bench", "math500", "--data", "math500=/no/file"], "cannot be read"),
        (["--model", "M", *SMALL, "--pass-at", "3"], "--pass-at 3: embedded has fewer samples"),
        (["--model", "M", "--select", "best"], "M: is no run of train.py"),
        (["--model", "M", "--seeds", "1", "1"], "--seeds 1 1: must be different"),
        (["--model", "M", "--max-tokens", "0"], "--max-tokens: '0' must be from 1"),
        (["--from", "/no/folder"], "/no/folder/settings.json: cannot be read"),
        (["--runs", "/no/run"], "/no/run/metrics.jsonl: cannot be read"),
        (["--replay", "/no/file"], "--replay /no/file: cannot be read"),
        (["--replay", "r.jsonl"], 'a row has "problem", "response", and "answer" or "tests"'),
        (["--runs", "run"], "--runs run: has no benchmarks in metrics.jsonl"),
    ],
)
def test_bad_input_is_one_sentence(flags, words, models, tmp_path, monkeypatch, assert_refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "M").symlink_to(models[0])
    files.append_rows(tmp_path / "r.jsonl", [{"problem": "p", "response": "r", "answer": None}])
    (tmp_path / "run").mkdir()
    files.append_rows(
        tmp_path / "run" / "metrics.jsonl",
        [{"step": 1, "reward": 1, "equal_groups": 0, "grad_norm": 0}],
    )
    assert_refused(command.main, flags, words)
