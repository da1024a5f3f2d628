"""How many rollouts of the taught SmolLM2 are wrong, and in how many a first error is found.

It samples 8 rollouts to each of 32 word problems from runs/words-shear-1/start, which
`python train.py --model models/smollm2 --task words` makes. It takes three minutes on two cores.

Run: `python -m lab.records.first_errors`.
"""

from lab.records.help import show_help

show_help(__doc__)

from collections import Counter

import torch

from credit.tokens import tokens_of
from grpo import rollout
from harness.models import stop_ids
from lab.fast.generate import fast_generate
from lab.records.words_start import load_start

context = load_start().context
task = context.task
counts = Counter()  # (verdict's reason, kind of the first error or None) -> rollouts
torch.manual_seed(1)
for first in range(0, 32, 8):
    problems = task.train[first : first + 8]
    prompts = [task.prompt(problem) for problem in problems]
    rollouts = rollout(
        context.policy.model,
        context.tokenizer,
        prompts,
        8,
        max_tokens=128,
        temperature=1.0,
        stops=stop_ids(context.policy.model, context.tokenizer),
        generate=fast_generate,
    )
    for row, verdict in enumerate(task.verdicts(problems, rollouts)):
        tokens = tokens_of(context.tokenizer, rollouts, row)
        error = task.first_error(problems[row // 8], tokens)
        counts[verdict.reason, error and error.kind] += 1
print(counts)
