"""A module of `--use` that generates by another function, which does the same."""

from grpo import hf_generate
from harness.run import Hooks


def use(hooks: Hooks) -> None:
    """Replace how responses are generated."""
    hooks.generate = lambda *inputs, **options: hf_generate(*inputs, **options)
