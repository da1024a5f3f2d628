"""Print the rules of core and lab, with their options."""

import inspect

import lab.rules  # noqa: F401 - enters them
from credit.rules import RULES

for name, entry in RULES.items():
    print(f"{name}: {entry.about}")
    for option in inspect.signature(entry.credit).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            print(f"    {option}")
