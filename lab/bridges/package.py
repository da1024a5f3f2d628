"""What `pip install .` installs: `shear_credit`, SHEAR's weights with their race, and two trainers.

The files at the root import each other by plain names, such as `sinkhorn`, which may mean something
else in a user's environment (a package `shear` is on PyPI). So the build puts them into one
package, and writes its name before theirs in their imports.

pyproject.toml names this command of setuptools, and nothing else is needed. Left out: editable
installs; work in a clone needs none.
"""

from pathlib import Path

from setuptools.command.build_py import build_py

NAME = "shear_credit"
MODULES = {  # in the package -> here
    "__init__": "lab/bridges/shear_credit.py",
    "sinkhorn": "sinkhorn.py",
    "shear": "shear.py",
    "race": "lab/fast/race.py",
    "distances": "lab/fast/distances.py",
    "states": "lab/bridges/states.py",
    "trl_shear": "lab/bridges/trl_shear.py",
    "verl_shear": "lab/bridges/verl_shear.py",
}


def packaged(source: str) -> str:
    """The source with imports of our modules by their names in the package."""
    for name, path in MODULES.items():
        module = path.removesuffix(".py").replace("/", ".")
        target = f"{NAME}.{name}".removesuffix(".__init__")
        source = source.replace(f"\nfrom {module} import", f"\nfrom {target} import")
    return source


class BuildPackage(build_py):
    """Writes the package instead of copying folders."""

    def get_source_files(self) -> list[str]:
        """The files that a source distribution needs."""
        sources = "lab/bridges/package.py", "lab/bridges/requirements.txt", "requirements.txt"
        return [*sources, *MODULES.values()]

    def run(self) -> None:
        """Write the package, or refuse an editable install."""
        if self.editable_mode:
            raise SystemExit(
                "pip install -e: the package is made of these files at install time; leave -e out"
            )
        folder = Path(self.build_lib, NAME)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "py.typed").touch()  # type checkers read the package's annotations
        for name, path in MODULES.items():
            source = Path(path).read_text(encoding="utf-8")
            (folder / f"{name}.py").write_text(packaged(source), encoding="utf-8")
