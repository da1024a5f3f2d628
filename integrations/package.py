"""What `pip install .` installs: `shear_credit`, the files of `shear_weights` with its race and of
the two trainers.

The files at the root import each other by plain names, such as `sinkhorn`, which in an environment
of others may mean something else (a package `shear` is on PyPI). So the build puts them into one
package, and its name before theirs.

pyproject.toml names this command of setuptools. Left out: editable installs; work in a clone needs
none.
"""

import re
from pathlib import Path

from setuptools.command.build_py import build_py

NAME = "shear_credit"
MODULES = {  # in the package -> here
    "sinkhorn": "sinkhorn",
    "shear": "shear",
    "race": "fast.race",
    "distances": "fast.distances",
    "trl_shear": "integrations.trl_shear",
    "verl_shear": "integrations.verl_shear",
}
INIT = '''"""SHEAR's token weights for your trainer; `trl_shear`, `verl_shear`: for TRL and verl."""

from shear import shear_advantages, shear_weights
from fast.distances import token_distances
from fast.race import race

__all__ = ["race", "shear_advantages", "shear_weights", "token_distances"]
'''


def packaged(source: str) -> str:
    """The source with imports of our modules by their names in the package."""
    for name, module in MODULES.items():
        source = re.sub(
            rf"^from {re.escape(module)} import", f"from {NAME}.{name} import", source, flags=re.M
        )
    return source


class BuildPackage(build_py):
    """Writes the package instead of copying folders."""

    def get_source_files(self) -> list[str]:
        """What a source distribution needs."""
        sources = "integrations/package.py", "integrations/requirements.txt", "requirements.txt"
        return [*sources, *(f"{module.replace('.', '/')}.py" for module in MODULES.values())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files of the package."""
        return [f"{self.build_lib}/{NAME}/{name}.py" for name in ("__init__", *MODULES)]

    def run(self) -> None:
        """Writes them. An editable install ends here."""
        if self.editable_mode:
            raise SystemExit(
                "pip install -e: the package is made of these files at install time; leave -e out"
            )
        folder = Path(self.build_lib, NAME)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(packaged(INIT), encoding="utf-8")
        for name, module in MODULES.items():
            source = Path(f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            (folder / f"{name}.py").write_text(packaged(source), encoding="utf-8")
