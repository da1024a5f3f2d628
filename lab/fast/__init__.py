"""The same numbers, sooner: `--use lab.fast`. Each of them has its plain twin in the core.

race         which of the opposing spans is closest, without solving every pair
distances    the costs by one matrix product
packing      micro-batches without padding
generate     sampling that drops rollouts that have ended, and reads a prompt once
"""

from typing import TYPE_CHECKING

from lab.fast.distances import token_distances
from lab.fast.generate import fast_generate
from lab.fast.packing import packing_of
from lab.fast.race import race as race_for_closest

if TYPE_CHECKING:
    from harness.run import Hooks


def use(
    hooks: "Hooks",
    *,
    race: bool = True,
    distances: bool = True,
    packing: bool = True,
    generate: bool = True,
) -> None:
    """Replace the plain functions of a run by these, all of them or those that are not `no`."""
    if race:
        hooks.shear["closest"] = race_for_closest
    if distances:
        hooks.shear["cost"] = token_distances
    if packing:
        hooks.layout = packing_of
    if generate:
        hooks.generate = fast_generate
