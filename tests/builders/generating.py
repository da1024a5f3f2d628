"""A module of `--use` that generates by another function, which does the same."""

from grpo import hf_generate
from harness.run import Parts


def use(parts: Parts) -> None:
    """Replace how responses are generated."""
    parts.generate = lambda *inputs, **options: hf_generate(*inputs, **options)
