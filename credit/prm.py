r"""A process reward model: how good is each step of a response?

    prm = load_reward_model("Qwen/Qwen2.5-Math-PRM-7B", device, torch.bfloat16)  # (model, tokenizer)
    judge_steps(prm, questions, rollouts, tokenizer, "\n\n", micro_tokens)  # of each rollout good (K,), step (T_i,)

The model is that of "The Lessons of Developing Process Reward Models in Mathematical Reasoning" (arXiv 2501.07301):
Qwen2 with a head of two layers and two classes at every token. It reads a conversation,

    system      Please reason step by step, and put your final answer within \boxed{}.
    user        the question
    assistant   the first step<extra_0>the second step<extra_0> ...

and the chance of class 1 at an <extra_0> is that of the step before it being good. The head is written out below, so
that no code of the model's folder has to run (`trust_remote_code`); its config.json and weights load as they are.

What makes it right, and is easy to get wrong:
  - A score is read wherever <extra_0> stands, so a question or a response that spells it would add steps of its own:
    there it is blanked out, and the separators are counted before any is read.
  - The policy's tokens and the model's never meet. Steps are found in the text, and a policy's token belongs to the
    step in which its first character lies; between two steps, to the one before.
  - A piece of white space is no step: neither what follows a last separator nor what lies between two in a row.
  - What does not fit into the model's context is cut off, and its steps take the last score that was read.

Left out: the separators and layouts of other models (PURE's has a line break where this one has <extra_0>), soft
labels, and the other special tokens that a response may spell: they end turns in the model's eyes, but add no score.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen2Config, Qwen2Model, Qwen2PreTrainedModel

from credit.salience import char_starts
from grpo import Rollouts, cat_padded, pack
from tasks.problems import INSTRUCTIONS, BadInput

SEPARATOR = "<extra_0>"
EXAMPLE = "Qwen/Qwen2.5-Math-PRM-7B"
UNREAD = 0.5  # P(good) of a step when the context ends before the first separator


class ProcessRewardModel(Qwen2PreTrainedModel):
    """Qwen2 with two classes at every token, 1 being "good"; parameters are named as in Qwen2.5-Math-PRM-7B."""

    def __init__(self, config: Qwen2Config):
        super().__init__(config)
        size = config.hidden_size
        self.model = Qwen2Model(config)
        self.score = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 2))
        self.post_init()

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, L), padded on the right, where causal attention never looks -> logits (B, L, 2)."""
        return self.score(self.model(input_ids=ids, use_cache=False).last_hidden_state)


def load_reward_model(name: str, device: torch.device, dtype: torch.dtype) -> tuple[ProcessRewardModel, object]:
    """Model and tokenizer of a folder or hub id; raises BadInput where they cannot judge steps."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, loading = ProcessRewardModel.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except Exception as error:  # loaders raise of every kind; the cause stays attached
        reason = str(error).strip().split("\n")[0]
        raise BadInput(f"--prm {name}: cannot be loaded ({reason}); give a Hugging Face folder or hub id") from error
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])[0]
        raise BadInput(f"--prm {name}: lacks weights ({missing} and perhaps others); give a model like {EXAMPLE}")
    if tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"] != [tokenizer.get_vocab().get(SEPARATOR)]:
        raise BadInput(f"--prm {name}: {SEPARATOR} is not one token of its tokenizer; give a model like {EXAMPLE}")
    if not tokenizer.chat_template:
        raise BadInput(f"--prm {name}: its tokenizer has no chat template; give a model like {EXAMPLE}")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise BadInput(f"--prm {name}: its tokenizer is another model's; save its own in the folder")
    encode((model, tokenizer), "1 + 1 = ?", ["1 + 1 = 2", "It is 2."])  # a template that loses steps shows now
    return model.to(device).eval().requires_grad_(False), tokenizer


@torch.no_grad()
def judge_steps(
    prm: tuple[ProcessRewardModel, object],
    questions: Sequence[str],
    rollouts: Rollouts,
    tokenizer,
    step_end: str,
    micro_tokens: int,
) -> list[tuple[Tensor, Tensor]]:
    """For each rollout P(good) of its K steps, (K,) float32, and the step of each of its tokens, (T_i,) int64.

    `questions` are texts, one a rollout; `tokenizer` is the policy's; steps end with `step_end`. Both tensors are
    empty where the mask is. A response without text is one empty step.
    """
    texts, device = [_blank(text) for text in rollouts.texts], rollouts.ids.device
    bounds = [
        find_steps(text, step_end) if some else [] for text, some in zip(texts, rollouts.mask.any(1), strict=True)
    ]
    inputs = {
        i: encode(prm, _blank(question), [text[begin:end] for begin, end in steps])
        for i, (question, text, steps) in enumerate(zip(questions, texts, bounds, strict=True))
        if steps
    }
    scores = _read_scores(prm, inputs, micro_tokens)
    judged = []
    for i, steps in enumerate(bounds):
        read = scores.get(i, torch.empty(0))  # (n,), n < K where the input was cut
        rest = torch.full((len(steps) - len(read),), read[-1] if len(read) else UNREAD)  # (K - n,)
        ids = rollouts.ids[i][rollouts.mask[i]].tolist()
        starts = torch.tensor(char_starts(tokenizer, ids), dtype=torch.long)  # (T_i,)
        begins = torch.tensor([begin for begin, _ in steps], dtype=torch.long)  # (K,)
        step = (torch.bucketize(starts, begins, right=True) - 1).clamp_min(0)  # (T_i,) int64
        judged.append((torch.cat([read, rest]).to(device), step.to(device)))
    return judged


def size_gb(prm: tuple[ProcessRewardModel, object] | None) -> float:
    """What the model's weights take, in 1e9 bytes; 0 without one."""
    return sum(weight.numel() * weight.element_size() for weight in prm[0].parameters()) / 1e9 if prm else 0.0


def find_steps(text: str, step_end: str) -> list[tuple[int, int]]:
    """Where in a text its steps begin and end; a piece of white space is none, but a text of nothing else is one."""
    bounds, begin = [], 0
    for piece in text.split(step_end):
        if piece.strip():
            bounds.append((begin, begin + len(piece)))
        begin += len(piece) + len(step_end)
    return bounds or [(0, 0)]


def encode(prm: tuple[ProcessRewardModel, object], question: str, steps: list[str]) -> list[int]:
    """The conversation as the model's ids, whole, with as many separators as steps; raises BadInput for others."""
    model, tokenizer = prm
    said = "".join(step + SEPARATOR for step in steps)
    contents = {"system": INSTRUCTIONS["math"], "user": question, "assistant": said}
    turns = [{"role": role, "content": content} for role, content in contents.items()]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = ids.count(tokenizer.convert_tokens_to_ids(SEPARATOR))
    if found != len(steps):
        raise BadInput(
            f"--prm {model.name_or_path}: its chat template and tokenizer make {found} separators of {len(steps)} "
            f"steps; give a model like {EXAMPLE}"
        )
    return ids


def _blank(text: str) -> str:
    """The text with spaces for every separator that it spells, each character in its place."""
    return text.replace(SEPARATOR, " " * len(SEPARATOR))


def _read_scores(prm, inputs: dict[int, list[int]], micro_tokens: int) -> dict[int, Tensor]:
    """P(good) (n,) float32 at the n separators of each input that lie within the model's context."""
    model, tokenizer = prm
    separator = tokenizer.convert_tokens_to_ids(SEPARATOR)
    cut = {i: torch.tensor(ids[: model.config.max_position_embeddings]) for i, ids in inputs.items()}
    scores = {}
    batches = pack(list(cut), {i: len(ids) for i, ids in cut.items()}, micro_tokens)
    for rows in tqdm(batches, desc="judge", leave=False, disable=None):
        ids = cat_padded([cut[i][None] for i in rows.tolist()])  # (b, L) int64
        chances = model(ids.to(model.device)).float().softmax(-1)[..., 1].cpu()  # (b, L) float32
        for i, row in zip(rows.tolist(), chances, strict=True):
            scores[i] = row[: len(cut[i])][cut[i] == separator]  # (n,)
    return scores
