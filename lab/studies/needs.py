"""Which credit rules need more than a policy: by what their `prepare` is."""

import lab.rules  # noqa: F401 - enters the rules
from credit.rules import RULES, find
from lab.rules import adapter, prm

WITH_MODEL = {name for name, rule in RULES.items() if rule.prepare is prm.load}
WITH_ADAPTER = {name for name, rule in RULES.items() if rule.prepare is adapter.needs_adapter}
# Rules that are made of others: their arms have to name these.
MADE = {"scaled"}


def weighs(name: str) -> bool:
    """Whether a rule multiplies A by weights."""
    return find(name).weighs
