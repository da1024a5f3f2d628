"""What `pip install .` installs: one package under a name of its own, in which README's example
runs.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import shear
from fast import distances
from fast.race import race

pytest.importorskip(
    "setuptools",
    minversion="77",
    reason="setuptools >= 77, which builds the wheel, is not installed",
)

ROOT = Path(__file__).parents[1]
MODULES = ["__init__", "distances", "race", "shear", "sinkhorn", "trl_shear", "verl_shear"]
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
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    return next(sources.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    """No name of ours but `shear_credit` is taken, and torch is all that it needs."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == {f"shear_credit/{module}.py" for module in MODULES}
        read = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    metadata = read["METADATA"]
    for line in (ROOT / "requirements.txt").read_text().splitlines():  # the extra "dev"
        assert line.startswith("#") or re.search(
            rf'Requires-Dist: {re.escape(line)}; extra == "dev"', metadata
        )
    needed = re.findall(r"^Requires-Dist: (\S+)(?!.*extra)", metadata, flags=re.M)
    assert "[verl.plugins]\nshear = shear_credit.verl_shear\n" in read["entry_points.txt"]
    assert [name.split(">")[0] for name in needed] == ["torch"]


def test_an_editable_install_is_refused_in_a_sentence(sources):
    """By setuptools' hook, which pip and uv call."""
    build = "from setuptools import build_meta; build_meta.build_editable('.')"
    ended = subprocess.run(
        [sys.executable, "-c", build], cwd=sources, capture_output=True, text=True
    )
    assert ended.returncode and "leave -e out" in ended.stderr.splitlines()[-1]


def test_the_example_of_the_readme_runs_from_an_empty_folder(wheel, tmp_path):
    """With the installed package alone; the weights are those of the files here."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(
        r"## SHEAR in a trainer of your own.*?```python\n(.*?)```", readme, re.S
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(wheel),
    }  # a wheel is a zip file, from which Python imports
    command = [sys.executable, "-W", "error", "-c", EXAMPLE.format(example)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    hidden, mask, correct, omega = torch.load(tmp_path / "omega.pt")
    ours = shear.shear_weights(
        hidden, mask, correct, closest=race, distances=distances.token_distances
    )
    assert omega.equal(ours) and (omega[mask] != 1).any()
