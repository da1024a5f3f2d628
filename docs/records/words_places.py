"""Where weights lie around first errors on word problems, for docs/records/real-weights.md.

    python -m studies.diagnose --model smollm2 --task words --heldout 320 --groups 264 \\
      --continuations 0 --out runs/words
    python -m docs.records.words_places runs/words    # these groups -> real-weights-places.json

It reads the groups and the taught model that `studies.diagnose` has left in the folder, also where
that was interrupted, and measures as `studies.diagnose` does, but fewer kinds of weights. It leaves
a file per group in the folder, so that the same command continues where it was interrupted.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from credit.settings import Credit
from docs.records.words_start import load_start
from grpo import cat_padded
from harness import files
from studies.advantages import measure_place, weights_of
from studies.prefixes import Prefixes, context_at_start, score_group

ROWS = Path(__file__).with_name("real-weights-places.json")
METHODS = ["shear", "own-side", "position"]
SETTINGS = {"eps 0.25": {"eps": 0.25}, "window 32, stride 4": {"window": 32, "stride": 4}}

folder = Path(sys.argv[1])
context = context_at_start(load_start(folder / "start"))
shear = context.shear
groups = [Prefixes(**files.read_settings(path)) for path in sorted(folder.glob("group-*.json"))]
mixed = [group for group in groups if group.mixed]
for number, group in enumerate(tqdm(mixed, "groups", disable=None)):
    path = folder / f"weights-{number:04d}.pt"
    if path.exists():
        continue
    batch = score_group(group, context)
    weights = {name: weights_of(batch, context, Credit(name)) for name in METHODS}
    for name, change in SETTINGS.items():
        changed = replace(context, shear=replace(shear, **change))
        weights[name] = weights_of(batch, changed, Credit("shear"))
    weights["surprisal"] = -batch.log_probs
    wrong_step = batch.true_errors(context.task, context.tokenizer)  # (G, 3)
    torch.save((weights, batch.mask, wrong_step), path)

parts = [torch.load(path) for path in sorted(folder.glob("weights-*.pt"))]
wrong_step = torch.cat([part[2] for part in parts])  # (B, 3)
wrong_step = torch.where(wrong_step[:, :1] > 0, wrong_step, -1)  # a first token has none before
mask = cat_padded([part[1] for part in parts])  # (B, T)
group_of = torch.cat([torch.full((len(part[2]),), n) for n, part in enumerate(parts)])  # (B,)
results: dict[str, dict] = {"methods": {}, "settings": {}}
for name in parts[0][0]:
    weights = cat_padded([part[0][name] for part in parts])  # (B, T)
    section = "methods" if name in METHODS else "settings"
    results[section][name] = measure_place(weights, mask, wrong_step, group_of, reach=24)
files.write_json(ROWS, {"groups": len(groups), "mixed_groups": len(mixed)} | results)
