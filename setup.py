"""`pip install .` makes `shear_credit` of the files that `lab/bridges/package.py` names."""

from pathlib import Path

from setuptools import setup

if not Path("lab/bridges/package.py").exists():
    raise SystemExit(
        "pip install: the package is made of files of lab/, which is missing; restore it"
    )
setup()
