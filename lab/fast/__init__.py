"""The same numbers, sooner: `--use lab.fast`. Each of them has its plain twin in the core.

race         which of the opposing spans is closest, without solving every pair
distances    the costs by one matrix product
packing      micro-batches without padding
generate     sampling that drops rollouts that have ended, and reads a prompt once
decode       on CUDA: decoding steps that are captured and replayed without Python

`decode` has not run on a GPU so far, so it is off unless asked for: `--use lab.fast:decode=yes`. It
becomes the default once `lab/records/gpu_decode.py` shows, on a GPU and at 1.5B, that the
log-probabilities of its tokens differ from those of the scoring pass by less than .02 nat in mean
absolute value and by less than .002 in mean. Its samples have the same distribution, but for a seed
they are others than those of `generate`. Where it does not apply, `generate` samples; a line before
step 1 says so.
"""

from typing import TYPE_CHECKING

from lab.fast.decode import graph_generate
from lab.fast.distances import token_distances
from lab.fast.generate import fast_generate
from lab.fast.packing import packing_of
from lab.fast.race import race as race_for_closest

if TYPE_CHECKING:
    from harness.run import Parts


def use(
    parts: "Parts",
    *,
    race: bool = True,
    distances: bool = True,
    packing: bool = True,
    generate: bool = True,
    decode: bool = False,
) -> None:
    """Replace the plain functions of a run by these, all of them or those that are not `no`."""
    if race:
        parts.hooks["closest"] = race_for_closest
    if distances:
        parts.hooks["distances"] = token_distances
    if packing:
        parts.layout = packing_of
    if decode:
        parts.generate = graph_generate
    elif generate:
        parts.generate = fast_generate
