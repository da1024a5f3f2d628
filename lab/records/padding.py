"""How many tokens padded and packed micro-batches compute with, over the real ones.

Lengths are drawn log-normal (median 815 tokens, at most 3,150); each row is the mean of 20 draws.

Run: `python -m lab.records.padding`.
"""

from lab.records.help import show_help

show_help(__doc__)

import random

import grpo
from lab.fast import packing

rng = random.Random(0)
for count, ranks in ((256, 8), (256, 1), (32, 8), (64, 2)):
    computed = {"padded": 0, "packed": 0}
    real = 0
    for _ in range(20):
        lengths = [150 + min(3000, int(rng.lognormvariate(6.5, 0.8))) for _ in range(count)]
        real += sum(lengths)
        for kind, pack in (("padded", grpo.pack), ("packed", packing.pack)):
            sizes = []
            for rows in pack(range(count), lengths, 16_384, ranks):
                of_rows = [lengths[row] for row in rows.tolist()]
                sizes.append(max(of_rows) * len(of_rows) if kind == "padded" else sum(of_rows))
            # what ranks do together lasts as long as the largest
            computed[kind] += ranks * sum(sizes[::ranks])
    print(count, ranks, " ".join(f"{tokens / real:.2f}" for tokens in computed.values()))
