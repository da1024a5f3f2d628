"""Damaged folders, hostile folders and bad values: one sentence, status 2 (or 1 for a full disk), and nothing lost.

Run: pytest tests/test_faults.py
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
from cases import RUN, Hostile, filled
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import eval as evaluation
import harness.run
import harness.run as runs
import train
from grpo import rollout
from harness import checkpoint, files, models
from harness.launch import run_command
from studies import compare, diagnose

SIZES = [*RUN, *"--save-every 1 --keep 9 --steps 2".split()]
ASK = "--bench embedded --toy-lines 1 --heldout 8 --samples 1 --temperature 1 --threads 1".split()
pytestmark = pytest.mark.usefixtures("no_curve")
ODD = '{"protocol": 1, "data": [], "models": {}, "model": [], "benchmark": 1, "seed": "0", "problem": {}}\n'  # types
NOT_ROWS = ["5\n", '{"step": 1\n', "[" * 100_000 + "\n", '{"step": "x"}\n']


@pytest.fixture(scope="module")
def run(tmp_path_factory, taught):
    """A run of two steps, and an evaluation of what it started from."""
    out = tmp_path_factory.mktemp("faults")
    assert train.main([*SIZES, "--model", taught, "--out", str(out), "--name", "run"]) == 0
    assert evaluation.main(["--model", taught, *ASK, "--out", str(out / "evaluation")]) == 0
    return out


@pytest.fixture
def copied(run, tmp_path):
    """A copy of both that may be damaged."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, str]:
    """Every file of a folder, by its digest."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_says(command, argv: list, words: str, folder: Path, capsys, status: int = 2) -> None:
    """The command ends with one sentence that has these words, and leaves the folder as it was."""
    before = contents(folder)
    capsys.readouterr()
    assert command.main([str(word) for word in argv]) == status
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message
    assert contents(folder) == before


@pytest.mark.parametrize("text", ["", *NOT_ROWS])
def test_damaged_metrics_are_named(text, copied, capsys):
    """Before a file is changed."""
    (copied / "run" / "metrics.jsonl").write_text(text)
    words = "metrics.jsonl" if text else "metrics.jsonl lacks rows"
    assert_says(train, ["--resume", copied / "run", "--steps", "3"], words, copied, capsys)


@pytest.mark.parametrize("name", ["config.json", "checkpoints/step-000002/complete.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"step": "x", "files": {}}', "\ud800"])
def test_damaged_settings_of_a_run_are_named(name, text, copied, capsys):
    """Other types, missing keys, deep JSON, half a surrogate pair."""
    (copied / "run" / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert_says(train, ["--resume", copied / "run", "--steps", "3"], "--resume", copied, capsys)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", dict(lr=None), "lr"),
        ("config.json", dict(steps=[]), "steps"),
        ("config.json", dict(method="ppo"), "--method ppo in config.json, shear in its checkpoint; restore the file"),
        ("config.json", dict(temperature=0.5), "--temperature 0.5"),
        ("config.json", dict(digest="of others"), "--digest of others"),
        ("config.json", dict(lr=...), "--lr None"),
        ("checkpoints/step-000002/complete.json", dict(step=1), "is of step 1, not of its folder's"),
        ("checkpoints/step-000002/complete.json", dict(ranks=...), "complete.json cannot be read ('ranks')"),
        ("checkpoints/step-000002/complete.json", dict(metrics=[9, "of another run"]), "is not that of its 2 steps"),
    ],
)
def test_edited_settings_are_refused(name, changes, words, copied, capsys):
    """What no flag takes, what would change numbers, and what is away (...)."""
    path = copied / "run" / name
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    assert_says(train, ["--resume", copied / "run", "--steps", "3"], words, copied, capsys)


@pytest.mark.parametrize("name", ["settings.json", "generations.jsonl"])
@pytest.mark.parametrize("text", ["[]\n", "[" * 100_000 + "\n", '{"model": 1}\n', ODD])
def test_damaged_evaluations_are_named(name, text, copied, taught, capsys):
    """By `--from` and by the same command again."""
    (copied / "evaluation" / name).write_text(text)
    assert_says(evaluation, ["--from", copied / "evaluation"], name, copied, capsys)
    assert_says(evaluation, ["--model", taught, *ASK, "--out", copied / "evaluation"], name, copied, capsys)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000])
def test_a_folder_whose_config_is_damaged_is_no_run(text, copied, capsys):
    """For `eval.py --model`."""
    (copied / "run" / "config.json").write_text(text)
    argv = ["--model", copied / "run", "--select", "best", *ASK, "--out", copied / "new"]
    assert_says(evaluation, argv, "no run of train.py", copied, capsys)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model /no/model", "--model /no/model: cannot be loaded (no such folder)"),
        ("--model RUN", "(it is a run, its model is RUN/model)"),
        ("--data /no/file", "--data /no/file: cannot be read (no such file or folder)"),
        ("--method prm --prm ./none", "--prm ./none: cannot be loaded (no such folder)"),
        ("--method prm --prm QWEN", "--prm QWEN: <extra_0> is not one token"),
        ("--eval-every 1 --bench math500 --bench-data math500=/no", "--bench-data math500=/no: cannot be read"),
        ("--eval-every 1 --bench math500 --bench-data math500=RUN/metrics.jsonl", 'row 1: needs "problem"'),
        ("--heldout 2", "--task math: 2 of its 2 problems"),
        ("--max-tokens 512", "context is 512"),
        ("--template qwen-math --model TOY", "--template qwen-math: the tokenizer of TOY has no"),
    ],
)
def test_weights_are_read_last(flags, words, run, taught, qwen_folder, tmp_path, monkeypatch, capsys):
    """What is small is looked at before the minutes that a large model takes to load."""
    (tmp_path / "rows.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 2)
    places = {"RUN": run / "run", "QWEN": qwen_folder, "TOY": taught}
    flags = [filled(flag, places) for flag in flags.split()]
    monkeypatch.setattr(models, "load_weights", lambda *parts: pytest.fail("weights are read"))
    usual = ["--task", "math", "--model", qwen_folder, "--data", tmp_path / "rows.jsonl", "--max-tokens", "9"]
    usual += ["--heldout", "1", "--eval-groups", "1", "--out", tmp_path]
    assert_says(train, [*usual, *flags], filled(words, places), tmp_path, capsys)


@pytest.mark.parametrize("kind", ["pipe", "device", "link to itself"])
@pytest.mark.parametrize(
    ("command", "flag", "more"),
    [
        (train, "--data", "--model QWEN --max-tokens 9 --out OUT"),
        (evaluation, "--replay", "--out OUT"),
        (diagnose, "--rollouts", "--model QWEN --max-tokens 9 --out OUT"),
        (compare, "--rows", "--methods grpo shear"),
    ],
)
def test_only_files_are_read(command, flag, more, kind, qwen_folder, tmp_path, capsys):
    """A pipe would wait for whoever writes into it, a device might never end."""
    path = tmp_path / "rows.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    more = [filled(word, {"QWEN": qwen_folder, "OUT": tmp_path / "new"}) for word in more.split()]
    assert_says(command, [flag, path, *more], str(path), tmp_path, capsys)
    assert not (tmp_path / "new").exists()


NO_VALUE = [([word], word[:4]) for word in ("--lr=--", "--model=--", "--out=", "--out=a\udcff")]
NO_VALUE += [([name, ""], f"{name}: is empty") for name in ("--resume", "--model", "--data", "--name")]


@pytest.mark.parametrize(("words", "said"), NO_VALUE)
def test_words_that_no_flag_can_take_are_refused(words, said, tmp_path, capsys):
    """argparse would make an empty list of `--lr=--`; a path that is not UTF-8 could not be printed.

    A shell's variable that is not set would begin another run.
    """
    assert_says(train, [*words, *["--out", tmp_path] * (len(words) - 1)], said, tmp_path, capsys)


def test_a_hub_out_of_reach_is_asked_once(tmp_path, monkeypatch, capsys):
    """And what is on the disk is used; transformers would ask again and again, for half a minute a file."""
    requests = []

    def unreachable(self, name, timeout):
        requests.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    words = "--model no/hub: cannot be loaded (no such folder; We couldn't connect"
    assert_says(train, ["--model", "no/hub", "--out", tmp_path], words, tmp_path, capsys)
    assert_says(evaluation, ["--model", "no/hub", *ASK, "--out", tmp_path], words, tmp_path, capsys)
    assert requests == ["no/hub"]


def test_an_evaluation_is_not_overwritten_by_a_replay(copied, tmp_path, capsys):
    """Another folder is; so is the same replay again."""
    file = tmp_path / "responses.jsonl"
    files.append_rows(file, [{"problem": "p", "response": r"\boxed{1}", "answer": "1"}])
    assert_says(evaluation, ["--replay", file, "--out", copied / "evaluation"], "choose another --out", copied, capsys)
    for _ in range(2):
        assert evaluation.main(["--replay", str(file), "--out", str(tmp_path / "new")]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--replay FILE --out RUN", "holds other files, and no settings.json; choose another"),
        ("--model TAUGHT --out RUN", "holds other files, and no settings.json; choose another"),
        ("--model TAUGHT --out BARE", "settings.json"),  # else rows of one temperature would count as another's
        ("--model SPOILED --out NEW", "its weights are not finite"),
        ("--model TAUGHT --greedy --samples 4 --out NEW", "--samples 4: --greedy gives the same one"),
    ],
)
def test_folders_of_others_are_left_alone(flags, words, copied, taught, tmp_path, capsys):
    """And none is left where nothing was written."""
    (copied / "evaluation" / "settings.json").unlink()
    places = {"RUN": copied / "run", "TAUGHT": taught, "NEW": copied / "new", "BARE": copied / "evaluation"}
    places |= {"FILE": tmp_path / "rows.jsonl", "SPOILED": shutil.copytree(taught, tmp_path / "spoiled")}
    places["FILE"].write_text('{"problem": "p", "response": "1", "answer": "1"}\n')
    weights = load_file(places["SPOILED"] / "model.safetensors")
    next(iter(weights.values()))[0] = torch.nan
    save_file(weights, places["SPOILED"] / "model.safetensors", metadata={"format": "pt"})
    words_of = [filled(word, places) for word in flags.split()]
    assert_says(evaluation, [*ASK[:6], *words_of], words, copied, capsys)
    assert not places["NEW"].exists()


@pytest.mark.parametrize("changes", [dict(model=[]), dict(seed="0"), dict(truncated="no"), dict(answer=["1"])])
def test_replayed_rows_of_other_types_are_named(changes, tmp_path, capsys):
    """By their number."""
    row = {"problem": "p", "response": "1", "answer": "1", **changes}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    argv = ["--replay", tmp_path / "r.jsonl", "--out", tmp_path / "new"]
    assert_says(evaluation, argv, "row 1: needs", tmp_path, capsys)


def test_tests_as_json_text_are_tests(tmp_path):
    """A right program is no math answer."""
    row = {"problem": "p", "response": "```python\nprint(1)\n```"}
    files.append_rows(tmp_path / "r.jsonl", [row | {"tests": json.dumps({"inputs": [""], "outputs": ["1"]})}])
    assert evaluation.main(["--replay", str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert files.rows(tmp_path / "out" / "generations.jsonl")[0]["score"] == 1.0


def test_a_folder_that_another_process_writes_is_refused(copied, taught, capsys):
    """A run's and an evaluation's."""
    again = ["--model", taught, *ASK, "--out", copied / "evaluation"]
    resumed = ["--resume", copied / "run", "--steps", "3"]
    for folder, command, argv in ((copied / "run", train, resumed), (copied / "evaluation", evaluation, again)):
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert_says(command, argv, "another process is writing there", copied, capsys)
        os.close(handle)


def test_other_problems_are_refused(copied, monkeypatch, capsys):
    """Resumed on changed --data, a run would train on what it was to be measured by."""
    monkeypatch.setattr(harness.run, "digest_of", lambda problems: "of others")
    assert_says(train, ["--resume", copied / "run", "--steps", "3"], "other problems", copied, capsys)


def digest(folder: Path) -> None:
    """Write the digests of a checkpoint's files as they are now."""
    complete = json.loads((folder / "complete.json").read_text())
    for name in complete["files"]:
        data = (folder / name).read_bytes()
        complete["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    (folder / "complete.json").write_text(json.dumps(complete))


@pytest.mark.parametrize("kind", ["runs code", "cut off", "lacks a tensor", "other shapes"])
def test_a_checkpoint_runs_no_code(kind, copied, tmp_path, capsys, caplog):
    """Nor loads anything but the policy's tensors. Its digests are right: whoever makes a folder makes them, too."""
    folder = copied / "run" / "checkpoints" / "step-000002"
    path = min((folder / "state").iterdir())
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    if kind == "runs code":
        path.write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    elif kind == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        name, tensor = tensors.popitem()
        save_file(tensors | ({name: tensor[..., None]} if kind == "other shapes" else {}), path, metadata)
    digest(folder)
    assert_says(train, ["--resume", copied / "run", "--steps", "3"], "cannot be loaded", copied, capsys)
    assert not (tmp_path / "made").exists()
    assert "root" not in {record.name for record in caplog.records}  # where torch logs a traceback


def test_a_model_folder_runs_no_code(taught, tmp_path, capsys):
    """Nor does it ask on a terminal whether it may, which a piped "y" would answer."""
    folder = Path(shutil.copytree(taught, tmp_path / "model"))
    (folder / "modeling.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n")
    for name, auto_map in (
        ("config.json", {"AutoModelForCausalLM": "modeling.X", "AutoConfig": "modeling.Y"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["modeling.X", None]}),
    ):
        settings = json.loads((folder / name).read_text()) | {"auto_map": auto_map, "model_type": "unknown"}
        (folder / name).write_text(json.dumps(settings))
    assert_says(train, [*SIZES, "--model", folder, "--out", tmp_path / "out"], f"--model {folder}", tmp_path, capsys)
    assert not (tmp_path / "made").exists()


def test_copies_beside_checkpoints_are_not_ours(copied):
    """Neither counted nor removed; what a kill has left of an old checkpoint is removed."""
    folder = copied / "run" / "checkpoints"
    for name in ("step-000002-good", "step-best", "step-000002.bak"):
        shutil.copytree(folder / "step-000002", folder / name)
    shutil.copytree(folder / "step-000001", folder / "step-000007")
    (folder / "step-000007" / "complete.json").unlink()
    assert [path.name for path in checkpoint.complete(copied / "run")] == ["step-000001", "step-000002"]
    assert train.main(["--resume", str(copied / "run"), "--steps", "3", "--keep", "1"]) == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {"step-000003", "step-000002-good", "step-best", "step-000002.bak"}


@pytest.mark.parametrize(
    ("value", "checked", "good", "words"),
    [
        *((value, True, 1, "the policy's logits are not finite") for value in (torch.nan, 3e38)),  # float32: 3.4e38
        (torch.nan, False, 2, "the policy's probabilities are not finite"),  # as if one prompt's logits were finite
    ],
)
def test_a_run_that_diverges_names_the_last_good_checkpoint(value, checked, good, words, copied, monkeypatch, capsys):
    """From which a whole step was finite; the ruined ones behind it are not advised."""
    plain = train.update

    def update(run, *inputs):
        metrics = plain(run, *inputs)
        run.trained.model.base_model.norm.weight.data.fill_(value)
        return metrics

    if not checked:
        monkeypatch.setattr(train, "check_policy", lambda run, step: None)
    monkeypatch.setattr(train, "update", update)
    assert train.main(["--resume", str(copied / "run"), "--steps", "9", "--lr", "1e-3"]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and words in message
    assert f"step-00000{good} " in message and "below 0.001" in message


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "the disk is full"),
        (RuntimeError("I/O error: No space left on device"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "/x/y: Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/x/y"), "/x/y: Read-only"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "of memory; less"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory; less"),
        (MemoryError(), "out of memory; less"),
    ],
)
def test_files_that_cannot_be_written_are_one_sentence(error, words, capsys):
    """Status 1, as what the flags say may be right."""

    def work(argv):
        raise error

    assert run_command(memory="less")(work)() == 1
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


@pytest.mark.parametrize("place", ["harness.checkpoint.save", "harness.report.plot"])
def test_a_full_disk_says_how_to_go_on(place, copied, monkeypatch, capsys):
    """By --resume, not by the command that began; the trained model is saved before the picture."""

    def fail(*parts):
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(place, fail)
    shutil.rmtree(copied / "run" / "model")
    assert train.main(["--resume", str(copied / "run"), "--steps", "3"]) == 1
    steps = 2 + ("plot" in place)
    folder = shlex.quote(str(copied / "run"))
    words = f"a checkpoint holds {steps} of 3 steps; go on with: python train.py --resume {folder}\n"
    assert capsys.readouterr().err.startswith(f"{words}error: the disk is full")
    assert (copied / "run" / "model").exists() == ("plot" in place)


def test_numbers_that_are_not_known_are_null(tmp_path):
    """NaN is no JSON; a resumed run has it again."""
    files.append_rows(tmp_path / "metrics.jsonl", [{"before": {}}, {"step": 1, "loss": float("nan")}])
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()
    kept = runs.rows_until(tmp_path, 1)
    assert math.isnan(kept["metrics.jsonl"][1]["loss"])
    before = contents(tmp_path)
    runs.cut_back(tmp_path, kept)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("words", [[train.__file__], [evaluation.__file__, "--replay", "x"]])
def test_ctrl_c_during_imports_is_silent(words, tmp_path):
    """The first slow import, in its place one that presses it."""
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    hear = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # whatever this process was told
    done = subprocess.run([sys.executable, *words], env=environment, preexec_fn=hear, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_greedy_decoding_of_a_model_that_is_not_finite_is_an_error(tiny):
    """As sampling is: argmax would take NaN for a token."""
    model, tokenizer = tiny
    next(model.parameters()).data[:] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            rollout(model, tokenizer, ["a=1;a?\n"], 1, max_tokens=2, temperature=temperature)


def test_workers_start_below_a_hard_limit_of_memory():
    """Theirs would exceed it."""
    ask = "from grading.workers import in_worker; print(in_worker(r'\\frac12', '0.5', 60))"
    words = ["sh", "-c", 'ulimit -v 3000000 && exec "$0" -c "$1"', sys.executable, ask]
    done = subprocess.run(words, cwd=Path(train.__file__).parent, capture_output=True, text=True, timeout=300)
    assert done.stdout == "correct\n", done.stderr
