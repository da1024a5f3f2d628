"""The embedded task's process reward model: made from a policy, taught by careless demonstrations.

    make_prm(policy, lines, forbidden, seed=1)  -> `reward_model.RewardModel`: model and tokenizer
    good_lines(problem, response)               -> which lines come before the first error
    load_for(run, place, name)                  -> the reward model of a name, or this one

It learns which lines come before the first error, from demonstrations alone. It may call a line
good whose fault is in no demonstration: a line left out or repeated, a wrong box.
"""

import copy
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AddedToken, PreTrainedModel, Qwen2Config

from base import files
from base.errors import BadInput
from harness import fsdp
from harness.run import Loaded, heldout_prompts, save_pretrained
from lab.tools.reward_model import (
    EXAMPLE,
    SEPARATOR,
    ProcessRewardModel,
    RewardModel,
    encode,
    load_reward_model,
)
from tasks.toy import (
    IDS,
    LINE,
    SYMBOL,
    apply,
    demonstrations,
    first_error,
    make_tokenizer,
    pad_right,
    teach,
)

NO_RESULT = -100  # label of a line without work, which has no result


def make_prm(
    policy: PreTrainedModel, lines: int, forbidden: set[str], *, steps: int = 400, seed: int
) -> RewardModel:
    """A process reward model of the task, with its tokenizer.

    It starts as the policy, which should be warmed up, and is taught by `steps` batches of 32 fresh
    demonstrations of 1 to `lines` lines; `forbidden` prompts are never shown. Whether a result is
    right depends on three symbols at once, which a label of one bit hardly teaches: so at each
    separator it also learns to predict the right result.
    """
    tokenizer = make_tokenizer(lines)
    tokenizer.add_tokens([AddedToken(SEPARATOR, normalized=False, special=True)])
    tokenizer.chat_template = (
        "{% for turn in messages if turn.role != 'system' %}{{ turn.content }}{% endfor %}"
    )
    torch.manual_seed(seed)
    config = copy.deepcopy(policy.config)
    assert isinstance(config, Qwen2Config)  # as `tasks.toy.make_model` makes it
    model = ProcessRewardModel(config)
    model.model.load_state_dict(policy.base_model.state_dict())
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    torch.nn.Module.to(model, policy.device)
    rng = random.Random(f"process rewards {seed}")

    def batch_loss() -> torch.Tensor:
        """The loss on a batch of 32 demonstrations, at the separators.

        It is the cross-entropy of the labels, plus that of the right results.
        """
        rows = []
        labels = []  # per line: whether it comes before the first error
        digits = []  # per line: the right result
        for problem, text in demonstrations(rng.randint(1, lines), forbidden, rng):
            rows.append(encode(tokenizer, problem["problem"], text.splitlines()))
            labels += good_lines(problem, text)
            digits += [_right_result(line) for line in text.splitlines(keepends=True)]
        ids = pad_right(rows, IDS["<pad>"], model.device)  # (32, L) int64
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state  # (32, L, d)
        states = states[ids == tokenizer.convert_tokens_to_ids(SEPARATOR)]  # (n, d), n lines in all
        next_token = states @ model.get_input_embeddings().weight.T  # (n, V)
        good = torch.tensor(labels, device=model.device).long()  # (n,)
        results = torch.tensor(digits, device=model.device)  # (n,) int64
        return cross_entropy(model.score(states), good) + cross_entropy(
            next_token, results, ignore_index=NO_RESULT
        )

    teach(model, batch_loss, steps, "process rewards")
    return model.eval().requires_grad_(False), tokenizer


def good_lines(problem: dict, response: str) -> list[bool]:
    """Of each line of a response, whether it comes before the first error."""
    error = first_error(problem, response)
    good, begin = [], 0  # `begin`: the line's first token
    for line in response.splitlines(keepends=True):
        good.append(error is None or begin < error.token)
        begin += len(SYMBOL.findall(line))
    return good


def _right_result(line: str) -> int:
    """The id of the digit that a line of work should end with, given the values it puts in."""
    match = LINE.fullmatch(line)
    return IDS[str(apply(match[4], int(match[6]), int(match[8])))] if match else NO_RESULT


def load_for(run: Loaded, place: Path, name: str) -> RewardModel:
    """The process reward model of a name; without one, the embedded task's, `prm/` in that place.

    That is taught unless it is there. Raises BadInput where there is none.
    """
    config = run.config
    context = run.context
    device = run.ranks.device
    if name:
        return load_reward_model(name, device, getattr(torch, config.dtype))
    if config.task != "embedded":
        raise BadInput(
            f"--method {config.method}: needs a process reward model; add "
            f"--method-option model={EXAMPLE}"
        )
    folder = place / "prm"
    if run.ranks.main and not config.resume and not folder.exists():
        model, tokenizer = make_prm(
            context.policy.model,
            config.toy_lines,
            heldout_prompts(context.task),
            seed=config.seed,
        )
        with files.whole_folder(folder) as draft:
            save_pretrained(model, tokenizer, draft)
    fsdp.gather(None, run.ranks)  # until it is there
    return load_reward_model(str(folder), device, torch.float32)
