"""A warm-up by imitation: a pretrained model learns to respond as it is shown.

    --use lab.tools.warm_up --warmup-steps 40  on the column "solution" of --data, before training
    imitate(model, forbidden, ...)             what it calls, and `lab/tools/words.py` too

Left out: several ranks (one warms up, the others get its weights).
"""

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from base.errors import BadInput
from grpo import Policy, Rollouts, pad_left, token_ids
from lab.fast.packing import packing_of
from rewards import last_box
from tasks.toy import pad_right, teach

if TYPE_CHECKING:
    from credit.batch import Context
    from harness.run import Hooks

PER_BATCH = 8  # demonstrations per batch
PRETRAINED_LR = 1e-4  # learning rate


def use(hooks: "Hooks") -> None:
    """Give a run a warm-up by the solutions of its problems."""
    hooks.warm_up = warm_up_by_solutions


def warm_up_by_solutions(context: "Context") -> Callable[..., float]:
    """`imitate` on the solutions of the problems that are trained on; raises BadInput without."""
    task = context.task
    held = {problem["problem"] for problem in task.heldout}
    solved = [row for row in task.train if "solution" in row and row["problem"] not in held]
    if not solved:
        raise BadInput('--use lab.tools.warm_up: no row that is trained on has a "solution"')
    return partial(
        imitate,
        tokenizer=context.tokenizer,
        prompt=task.prompt,
        make=partial(random.Random(f"lessons {context.seed}").choice, solved),
        show=with_box,
    )


def with_box(problem: dict) -> str:
    """What the warm-up shows: the solution, with the answer in a box below it if it has none."""
    solution = problem["solution"]
    return solution if last_box(solution) else f"{solution}\n\\boxed{{{problem['answer']}}}"


def imitate(
    model: PreTrainedModel,
    forbidden: set[str],
    *,
    steps: int,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Callable[[dict], str],
    make: Callable[[], dict],
    show: Callable[[dict], str],
) -> float:
    """Teach a pretrained model to respond as `show` does; return the last loss.

    It takes `steps` batches of the problems that `make` returns. `prompt` makes the text that the
    model continues; `forbidden` problems (the held-out ones) are never shown.
    """
    policy = Policy(model, layout=packing_of(model))

    def batch_loss() -> Tensor:
        """Minus the mean log-probability of the response tokens of a batch of demonstrations."""
        problems: list[dict] = []
        texts: list[str] = []
        while len(problems) < PER_BATCH:
            problem = make()
            if problem["problem"] not in forbidden:
                problems.append(problem)
                texts.append(show(problem))  # at once, as both may draw from one generator
        prompts = token_ids(tokenizer, list(map(prompt, problems)))
        responses = [[*ids, tokenizer.eos_token_id] for ids in token_ids(tokenizer, texts)]
        prompt_ids, prompt_mask = pad_left(prompts, 0, model.device)  # (8, P), (8, P)
        ids = pad_right(responses, -1, model.device)  # (8, T)
        mask = ids >= 0  # (8, T)
        truncated = mask.new_zeros(len(texts))  # (8,) bool
        rollouts = Rollouts(prompt_ids, prompt_mask, ids.clamp_min(0), mask, truncated, texts)
        return -policy(rollouts, 1.0).log_probs[mask].mean()

    return teach(model, batch_loss, steps, "warm-up", lr=PRETRAINED_LR, rise=5)
