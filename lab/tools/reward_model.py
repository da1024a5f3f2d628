r"""A process reward model: how good is each step of a response?

    load_reward_model(name, device, dtype)  -> model and tokenizer
    score_steps(prm, questions, rollouts, tokenizer, ...)  -> per rollout: good (K,), step (T_i,)

The model is that of "The Lessons of Developing Process Reward Models in Mathematical Reasoning"
(arXiv 2501.07301): Qwen2 with a head of two layers and two classes at every token. It reads a
conversation,

    system      Please reason step by step, and put your final answer within \boxed{}.
    user        the question
    assistant   the first step<extra_0>the second step<extra_0> ...

and the probability of class 1 at an <extra_0> is P(good) of the step before it. The head is written
out below, so that no code of the model's folder has to run (`trust_remote_code`); its config.json
and weights load as they are.

Details that are easy to get wrong:
  - A score is read wherever <extra_0> stands, so a question or a response that spells it would add
    steps of its own: there it is blanked out, and the separators are counted before any is read.
  - The policy's tokens and the model's never meet. Steps are found in the text, and a policy's
    token belongs to the step in which its first character lies; between two steps, to the one
    before.
  - A piece of white space is no step: neither what follows a last separator nor what lies between
    two in a row.
  - What does not fit into the model's context is cut off, and its steps take the last score that
    was read.

Left out: the separators and layouts of other models (PURE's has a line break where this one has
<extra_0>), soft labels, and the other special tokens that a response may spell: they end turns in
the model's eyes, but add no score.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2Model, Qwen2PreTrainedModel

from base.errors import BadInput
from credit.batch import char_starts
from grpo import Rollouts, cat_padded, pack
from harness.models import check_embedded, check_finite, load_tokenizer, load_weights
from tasks.task import INSTRUCTIONS

SEPARATOR = "<extra_0>"
FLAG = "--method-option model"
EXAMPLE = "Qwen/Qwen2.5-Math-PRM-7B"
UNREAD = 0.5  # P(good) of a step when the context ends before the first separator


class ProcessRewardModel(Qwen2PreTrainedModel):
    """Qwen2 with two classes at every token, of which class 1 is "good".

    Parameters are named as in Qwen2.5-Math-PRM-7B.
    """

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        size = config.hidden_size
        self.model = Qwen2Model(config)
        self.score = torch.nn.Sequential(
            torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 2)
        )
        self.post_init()

    def forward(self, ids: Tensor) -> Tensor:
        """The logits (B, L, 2) of ids (B, L).

        Padding stands on the right, where causal attention never looks.
        """
        return self.score(self.model(input_ids=ids, use_cache=False).last_hidden_state)


RewardModel = tuple[ProcessRewardModel, PreTrainedTokenizerBase]  # with its tokenizer


@torch.no_grad()
def score_steps(
    prm: RewardModel,
    questions: Sequence[str],
    rollouts: Rollouts,
    tokenizer: PreTrainedTokenizerBase,
    step_end: str,
    micro_tokens: int,
) -> list[tuple[Tensor, Tensor]]:
    """Return P(good) of the steps of each rollout, and the step of each of its tokens.

    `questions` are texts, one per rollout; `tokenizer` is the policy's; steps end with `step_end`.
    For each rollout the result is P(good) of its K steps, (K,) float32, and the number of the step
    of each token, (T_i,) int64. A response without text is one empty step.
    """
    model, reader = prm
    separator = reader.convert_tokens_to_ids(SEPARATOR)
    steps = [find_steps(_blank(text), step_end) for text in rollouts.texts]  # K starts and texts
    inputs = []  # (L,) int64 each, a conversation, cut to the model's context
    for question, of_response in zip(questions, steps, strict=True):
        turns = encode(reader, _blank(question), [text for _, text in of_response])
        inputs.append(torch.tensor(turns[: model.config.max_position_embeddings]))
    micro_batches = pack(range(len(inputs)), list(map(len, inputs)), micro_tokens)
    device = rollouts.ids.device
    results = {}
    for rows in tqdm(micro_batches, desc="score steps", leave=False, disable=None):
        ids = cat_padded([inputs[row][None] for row in rows.tolist()])  # (b, L) int64
        chances = model(ids.to(model.device)).float().softmax(-1)[..., 1].cpu()  # (b, L) float32
        for i, row in enumerate(rows.tolist()):
            scores = chances[i][ids[i] == separator]  # (n,), n < K if cut
            good = torch.full((len(steps[row]),), scores[-1] if len(scores) else UNREAD)  # (K,)
            good[: len(scores)] = scores
            token_starts = char_starts(tokenizer, rollouts.ids[row][rollouts.mask[row]].tolist())
            step_starts = torch.tensor([start for start, _ in steps[row]])  # (K,)
            # (T_i,), -1 before the first step
            step = torch.bucketize(torch.tensor(token_starts), step_starts, right=True) - 1
            results[row] = good.to(device), step.clamp_min(0).to(device)
    return [results[row] for row in range(len(inputs))]


def find_steps(text: str, step_end: str) -> list[tuple[int, str]]:
    """Where each step of a text begins, and its text.

    White space is not a step. A text of nothing but white space is one empty step.
    """
    steps = []
    start = 0
    for piece in text.split(step_end):
        if piece.strip():
            steps.append((start, piece))
        start += len(piece) + len(step_end)
    return steps or [(0, "")]


def encode(tokenizer: PreTrainedTokenizerBase, question: str, steps: list[str]) -> list[int]:
    """The conversation as the model's ids, with a separator after each step.

    Raises BadInput if the ids hold more or fewer separators than there are steps.
    """
    turns = [
        {"role": "system", "content": INSTRUCTIONS["math"]},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "".join(step + SEPARATOR for step in steps)},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    count = ids.count(tokenizer.convert_tokens_to_ids(SEPARATOR))
    if count != len(steps):
        raise BadInput(
            f"{FLAG} {tokenizer.name_or_path}: its chat template and tokenizer make {count} "
            f"separators of {len(steps)} steps; give a model like {EXAMPLE}"
        )
    return ids


def _blank(text: str) -> str:
    """The text with spaces for every separator that it spells, each character in its place."""
    return text.replace(SEPARATOR, " " * len(SEPARATOR))


def load_reward_model(name: str, device: torch.device, dtype: torch.dtype) -> RewardModel:
    """A process reward model and its tokenizer; raises BadInput if they cannot score steps."""
    tokenizer = load_tokenizer(FLAG, name)
    if not tokenizer.chat_template:
        raise BadInput(
            f"{FLAG} {name}: its tokenizer has no chat template; give a model like {EXAMPLE}"
        )
    # raises if the template loses steps, or the separator is not one token
    ids = encode(tokenizer, "1 + 1 = ?", ["1 + 1 = 2", "It is 2."])
    model = load_weights(FLAG, name, ProcessRewardModel, dtype, device)
    check_finite(FLAG, name, model)
    assert isinstance(model, ProcessRewardModel)  # for mypy: its own `from_pretrained` made it
    check_embedded(FLAG, name, model, tokenizer, [ids])
    return model.eval().requires_grad_(False), tokenizer
