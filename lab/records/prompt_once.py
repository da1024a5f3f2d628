"""Seconds of scoring and of a forward and backward pass, with prompts computed once and without.

The model is runs/words-shear-1/start: `python train.py --model models/smollm2 --task words`.
Each line has the tokens of the batch and the two times, by turns.

Run: `python -m lab.records.prompt_once`.
"""

from lab.records.help import show_help

show_help(__doc__)

import time

import torch

from grpo import Policy, rollout, score
from harness.models import stop_ids
from lab.fast import packing
from lab.fast.generate import fast_generate
from lab.records.words_start import load_start

context = load_start().context
policy = Policy(context.policy.model, layout=packing.packing_of(context.policy.model))
torch.set_num_threads(1)
torch.manual_seed(1)
prompts = [context.task.prompt(problem) for problem in context.task.train[:4]]
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
for short in (48, 1000, 48, 1000, 48, 1000):
    packing.SHORT = short  # prompts shorter than this are not shared
    began = time.perf_counter()
    score(policy, rollouts, temperature=1.0, micro_tokens=4096)
    scored = time.perf_counter()
    policy(rollouts, 1.0).log_probs.sum().backward()
    print(packing.pack_rollouts(rollouts)[0].shape[1], scored - began, time.perf_counter() - scored)
