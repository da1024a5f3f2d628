"""Where weights lie around first errors, from the groups that `lab.studies.diagnose` has sampled.

    python -m lab.studies.diagnose --model models/smollm2 --task words --heldout 320 --groups 264 \\
      --continuations 0 --out runs/words
    python -m lab.records.quick_places runs/words lab/records/real-weights-places.json
    python -m lab.studies.diagnose --toy-lines 24 --heldout 256 --groups 256 --continuations 0 \\
      --out runs/lines-24
    python -m lab.records.quick_places runs/lines-24 runs/lines-24/places.json

It reads the groups and the taught model in the folder, also where `lab.studies.diagnose` was
interrupted, and measures as that does, but few kinds of weights: without `first`, which solves
every pair of spans. It leaves a file per group in the folder, so that the same command continues
where it was interrupted.
"""

from lab.records.help import show_help

show_help(__doc__)

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from grpo import cat_padded
from harness import files, fsdp
from harness.load import load_run
from lab.studies.advantages import FOLDS, jackknife_half, measure_place, weights_of
from lab.studies.needs import settings_of_run
from lab.studies.prefixes import Prefixes, context_at_start, score_group
from lab.studies.where import localisation, wrong_steps

METHODS = ["shear", "own-side", "position"]

folder = Path(sys.argv[1])
flags = files.read_json(folder / "config.json")
command = ["--model", str(folder / "start")]
for name in ("task", "window", "stride"):
    command += [f"--{name}", str(flags[name])]
if flags["task"] == "embedded":
    command += ["--toy-lines", str(flags["toy_lines"])]
context = context_at_start(load_run(settings_of_run(command), fsdp.join("cpu")))
# SHEAR with one setting changed, by the names of `lab.studies.diagnose`
changes = {"eps 0.25": {"eps": 0.25}, f"window 32, stride {flags['stride']}": {"window": 32}}
groups = [Prefixes(**files.read_json(path)) for path in sorted(folder.glob("group-*.json"))]
mixed = [group for group in groups if group.mixed]
for number, group in enumerate(tqdm(mixed, "groups", disable=None)):
    path = folder / f"weights-{number:04d}.pt"
    if path.exists():
        continue
    batch = score_group(group, context)
    weights = {name: weights_of(batch, context, name) for name in METHODS}
    for name, change in changes.items():
        changed = replace(context, shear=replace(context.shear, **change))
        weights[name] = weights_of(batch, changed, "shear")
    weights["surprisal"] = -batch.log_probs
    wrong_step = wrong_steps(batch, context)  # (G, 3)
    torch.save((weights, batch.mask, wrong_step), path)

parts = [torch.load(path) for path in sorted(folder.glob("weights-*.pt"))]
wrong_step = torch.cat([part[2] for part in parts])  # (B, 3)
wrong_step = torch.where(wrong_step[:, :1] > 0, wrong_step, -1)  # a first token has none before
mask = cat_padded([part[1] for part in parts])  # (B, T)
group_of = torch.cat([torch.full((len(part[2]),), n) for n, part in enumerate(parts)])  # (B,)
results = {"flags": flags, "groups": len(groups), "mixed_groups": len(mixed)}
results |= {"methods": {}, "settings": {}}
for name in parts[0][0]:
    weights = cat_padded([part[0][name] for part in parts])  # (B, T)
    section = results["methods" if name in METHODS else "settings"]
    section[name] = measure_place(weights, mask, wrong_step, group_of, reach=24)
opposing = cat_padded([part[0]["shear"] for part in parts])  # (B, T)
own = cat_padded([part[0]["own-side"] for part in parts])  # (B, T)
without = []  # what the side adds at equal position, without each fold of groups
for fold in range(min(FOLDS, len(parts))):
    kept = group_of % FOLDS != fold  # (B,)
    aucs = [
        localisation(weights[kept], mask[kept], wrong_step[kept]) for weights in (opposing, own)
    ]
    without.append(aucs[0]["auc_matched"] - aucs[1]["auc_matched"])
matched = [results["methods"][name]["auc_matched"] for name in ("shear", "own-side")]
results["shear - own-side"] = [matched[0] - matched[1], jackknife_half(pd.Series(without))]
print(
    "AUC at equal position, shear - own-side: {:+.3f} ± {:.3f}".format(*results["shear - own-side"])
)
files.write_json(Path(sys.argv[2]), results)
