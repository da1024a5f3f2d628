"""lab/rules/README.md has every rule with its options."""

import inspect
import re

from builders.case_files import ROOT

import lab.rules  # noqa: F401 - enters the rules
from credit.rules import RULES


def test_rules_and_their_options_are_those_of_the_docs():
    """The table of lab/rules/README.md has every rule, and every option with its default."""
    table = re.findall(r"(?m)^\| (`.*)$", (ROOT / "lab/rules/README.md").read_text())
    names = [name for row in table for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert sorted(names) == sorted(RULES)
    written = re.findall(r"`(\w+)=(\S*?)`", "\n".join(table))
    words = {True: "yes", False: "no"}
    defaults = set()
    for rule in RULES.values():
        for name, option in inspect.signature(rule.credit).parameters.items():
            value = option.default
            if option.kind is option.KEYWORD_ONLY:
                is_switch = isinstance(value, bool)
                defaults.add((name, words[value] if is_switch else str(value)))
    assert set(written) == defaults
