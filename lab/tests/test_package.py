"""`pip install .` installs one package under a name of its own, in which README's example runs."""

import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from builders.case_files import DOCS, ROOT, WITHOUT_LINUX
from torch.testing import assert_close
from transformers import GenerationConfig

import shear
from lab.bridges import shear_credit

pytest.importorskip(
    "setuptools",
    minversion="77",
    reason="setuptools >= 77, which builds the wheel, is not installed",
)

MODULES = [
    "__init__",
    "distances",
    "race",
    "shear",
    "sinkhorn",
    "states",
    "trl_shear",
    "verl_shear",
]
EXAMPLE = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
hidden = torch.randn(4, 30, 8)
mask = torch.arange(30) < torch.tensor([[30], [20], [25], [5]])
correct = torch.arange(4) < 2
advantages = correct.float() - 0.5
{}
assert token_advantages.equal(advantages[:, None] * omega)
torch.save([hidden, mask, correct, omega], "omega.pt")
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy, as a build leaves files beside them."""
    copy = tmp_path_factory.mktemp("sources") / "shear"
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(".*", "runs", "evals", "build", "*.egg-info", "tests"),
    )
    return copy


@pytest.fixture(scope="module")
def wheel(sources) -> Path:
    """Built as pip does."""
    program = "from setuptools import build_meta; build_meta.build_wheel('.')"
    run("", sources, "-c", program).check_returncode()
    return next(sources.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    """No name of ours but `shear_credit` is taken, and torch is all that it needs."""
    archive = zipfile.ZipFile(wheel)
    about = {name.split("/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
    names = {f"shear_credit/{name}" for name in ("py.typed", *(f"{part}.py" for part in MODULES))}
    assert names == set(archive.namelist()) - set(about.values())
    metadata = archive.read(about["METADATA"]).decode()
    needed = re.findall(r"(?m)^Requires-Dist: (\w+)(?!.*extra)", metadata)
    assert needed == ["torch"] and f"\nVersion: {shear_credit.__version__}\n" in metadata
    assert b"[verl.plugins]\nshear = shear_credit.verl_shear" in archive.read(
        about["entry_points.txt"]
    )


@pytest.mark.long
def test_the_example_of_the_readme_runs_from_an_empty_folder(wheel, tmp_path):
    """With the installed package alone, as on another system, it has the weights of the files here."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from shear_credit import.*?)```", readme, re.S)
    path = f"{wheel}:{WITHOUT_LINUX}"
    run(path, tmp_path, "-W", "error", "-c", EXAMPLE.format(example)).check_returncode()
    hidden, mask, correct, omega = torch.load(tmp_path / "omega.pt")
    weights = shear_credit.shear_omega(hidden, mask, correct, window=12, stride=6)
    assert omega.equal(weights) and (omega[mask] != 1).any()


def run(wheel: Path | str, folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Python with the installed package, which it imports from the wheel, a zip file."""
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_loop_of_the_docs_trains(wheel, tmp_path, untaught, monkeypatch):
    """Two steps of docs/scaling.md's loop run with the installed package.

    It samples from the whole softmax, which it scores, whatever the model's own settings are.
    """
    text = (DOCS / "scaling.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(import random.*?)```", text, re.S)
    small = {
        "Qwen/Qwen2.5-0.5B": "model",
        "range(100)": "range(2)",
        "max_new_tokens=64": "max_new_tokens=8",
        "answers[i // G] in text.split()": "i % 2 == 0",
        "window=12, stride=6": "window=2, stride=1",
    }
    for theirs, ours in small.items():
        assert theirs in program
        program = program.replace(theirs, ours)
    shutil.copytree(untaught, tmp_path / "model")
    own = GenerationConfig.from_pretrained(untaught)
    own.top_k = 1  # with it all responses to a prompt are equal
    own.do_sample = True
    own.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(wheel)
    names = {}
    exec(program, names)
    for module in MODULES:
        sys.modules.pop(f"shear_credit.{module}", None)
    assert sys.modules.pop("shear_credit").__file__.startswith(str(wheel))
    credit = names["credit"]
    assert names["ids"].unique(dim=0).shape[0] > 4  # prompts
    assert credit[names["mask"]].unique().numel() > len(credit)


@pytest.mark.parametrize(
    "dtype, unit", [(torch.float32, "nbar"), (torch.bfloat16, "nbar"), (torch.float32, "raw")]
)
def test_a_batch_s_groups_do_not_see_each_other(dtype, unit):
    """Token advantages are those of the plain Algorithm 1 for each group, in both units of eps.

    Rollouts share a prefix, padding is on the left, all of the second group are right. On request
    the mean weight of a group is 1.
    """
    hidden = torch.randn(12, 40, 16, dtype=dtype)
    hidden[:, 10:16] = hidden[:1, 10:16]
    mask = torch.arange(40) >= torch.tensor([0, 10, 5, 3] * 3)[:, None]
    correct = torch.arange(12) % 4 < torch.tensor([2, 4, 1]).repeat_interleave(4)
    advantages = torch.randn(12)
    sizes = dict(window=8, stride=3, eps=0.1 if unit == "nbar" else 0.5, eps_unit=unit)
    inputs = advantages, hidden, mask, correct
    credit = shear_credit.token_advantages(*inputs, group_size=4, **sizes)
    rescaled = shear_credit.token_advantages(*inputs, group_size=4, mean1=True, **sizes)
    for group in torch.arange(12).split(4):
        omega = shear.shear_weights(hidden[group], mask[group], correct[group], **sizes).omega
        expected = advantages[group, None] * omega
        assert_close(credit[group], expected, rtol=1e-4, atol=0)
        alone = shear_credit.shear_omega(hidden[group], mask[group], correct[group], **sizes)
        assert_close(alone, omega, rtol=1e-4, atol=0)
        mean = omega[mask[group]].mean()
        assert_close(rescaled[group], expected / mean, rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="12 rollouts cannot be split into groups of 5"):
        shear_credit.token_advantages(*inputs, group_size=5)


def test_a_window_that_no_response_fills_is_told(recwarn):
    """Once per line that calls, not once per group; a batch with a longer response is not told."""
    mask = torch.arange(20) < torch.tensor([20, 10, 10, 8])[:, None]
    inputs = torch.ones(4), torch.randn(4, 20, 8), mask, torch.tensor([True, False] * 2)
    warnings.simplefilter("default")
    for window in (19, 20, 20):
        shear_credit.token_advantages(*inputs, group_size=2, window=window, stride=2)
    (warning,) = recwarn
    assert "longer than the window of 20 tokens" in str(warning.message)
    assert warning.filename == __file__
