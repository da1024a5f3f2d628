"""Credit rules beside `grpo` and `shear`, one file a family; importing this enters all of them.

    python -m lab.rules     their names, options and a sentence about each

To add one, write a file here with a function under `@rule` (`credit/rules.py`); nothing else names
it.
"""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__, f"{__name__}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
