"""The credit rules that were measured and then removed; daaeda9 is the last commit that runs them.

What they were is in methods.md.
"""

ARCHIVED = (
    "signbalance kgae bipace rsi taco gmts delta iw-opd dasd hsd scapo attention grpo+shear "
    "grpo+shear-until=20".split()
)


def marked(rule: str) -> str:
    """A rule as the tables name it, with a dagger if it is archived."""
    return f"{rule} †" if rule in ARCHIVED else rule
