r"""lab/tools/reward_model.py: a score for each step, read where it ends; each token's step."""

import json
import random
from pathlib import Path

import pytest
import torch
from builders.case_files import cases
from builders.rollouts import rollouts_of
from builders.runs import recipe_with, run_of
from builders.small_models import save_model, small_config, turns_tokenizer
from torch.testing import assert_close
from transformers import Qwen2Config

from base.errors import BadInput
from lab.tools import teacher
from lab.tools.reward_model import (
    SEPARATOR,
    ProcessRewardModel,
    load_reward_model,
    score_steps,
)
from lab.tools.teacher import load_for
from tasks import toy
from tasks.task import Task

SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
WORDS = 259  # tokens without <extra_0>
DEVICE = torch.device("cpu")
STOP = 2  # <|im_end|>

RESPONSES = cases("steps.jsonl", Path(__file__).with_name("cases"))
TEXTS = [row["text"] for row in RESPONSES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model in a folder whose layout and class names are those of Qwen2.5-Math-PRM-7B."""
    torch.manual_seed(0)
    config = small_config(
        Qwen2Config, vocab_size=WORDS + 1, max_position_embeddings=400, initializer_range=0.3
    )
    path = tmp_path_factory.mktemp("models") / "prm"
    save_model(path, ProcessRewardModel(config), turns_tokenizer(SEPARATOR))
    about = json.loads((path / "config.json").read_text())
    about |= {"architectures": ["Qwen2ForProcessRewardModel"], "num_labels": 2}
    about["auto_map"] = {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}
    (path / "config.json").write_text(json.dumps(about))
    return path


@pytest.fixture(scope="module")
def pair(folder):
    return load_reward_model(str(folder), DEVICE, torch.float32)


def scored(pair, texts, questions=None, stop=True):
    """score_steps of texts, a token a byte, whose steps end with an empty line."""
    questions = questions or [f"What is {i} + {i}?" for i in range(len(texts))]
    rollouts = rollouts_of(turns_tokenizer(), questions, texts)
    if not stop:
        rollouts.mask.logical_and_(rollouts.ids != STOP)
    return score_steps(pair, questions, rollouts, turns_tokenizer(), "\n\n", 1000)


def by_hand(pair, question: str, steps: list[str]) -> torch.Tensor:
    """P(good) of each step: the conversation spelt out, scores read at the separators."""
    model, tokenizer = pair
    response = "".join(f"{step}{SEPARATOR}" for step in steps)
    turns = (("system", SYSTEM), ("user", question), ("assistant", response))
    text = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    with torch.no_grad():
        states = model.model(ids[None]).last_hidden_state[0]  # (L, h)
    first = model.score[0]
    second = model.score[2]
    logits = (states @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias  # (L, 2)
    good = (logits[:, 1] - logits[:, 0]).sigmoid()
    return good[ids == tokenizer.convert_tokens_to_ids(SEPARATOR)]


def test_scores_are_those_read_by_hand(pair):
    """They are read from one response at a time, its steps written by hand.

    Scores differ, or nothing would be compared.
    """
    results = scored(pair, TEXTS)
    for i, (good, _) in enumerate(results):
        assert_close(good, by_hand(pair, f"What is {i} + {i}?", RESPONSES[i]["steps"]))
    assert results[0][0].std() > 1e-3


@pytest.mark.parametrize("stop", [True, False])
def test_a_token_belongs_to_the_step_in_which_its_first_character_lies(pair, stop):
    """A token is a byte, so a character's step is that of all of its bytes.

    The stop token ends the last step.
    """
    # without the stop token the last has no token at all
    texts = [text for text in TEXTS if stop or text]
    for i, (_, step) in enumerate(scored(pair, texts, stop=stop)):
        starts = RESPONSES[i]["starts"]
        expected = []
        for place, character in enumerate(texts[i]):
            at = max(0, sum(start <= place for start in starts) - 1)
            expected += [at] * len(character.encode())
        assert step.tolist() == expected + [len(starts) - 1] * stop


def test_a_spelt_separator_adds_no_score(pair):
    """It adds none in the question nor in the response."""
    spelt = "<extra<extra_0>_0>"
    plain = "One.\n\nTwo.\n\nThree."
    texts = [plain, plain.replace("Two.", f"Two{spelt}."), plain]
    results = scored(pair, texts, ["?", "?", f"?{spelt}"])
    assert [len(good) for good, _ in results] == [3, 3, 3]
    assert_close(results[1][0][0], results[0][0][0])  # the first step was not moved


@pytest.mark.long
def test_toy_prm_tells_right_lines_from_wrong_ones():
    """On one-line programs a short teaching beats 3 in 4, the share of good lines."""
    rng = random.Random("scored")
    problems = [toy.make_problem(rng, 1) for _ in range(128)]
    questions = [problem["problem"] for problem in problems]
    policy = toy.make_model(1, seed=0).eval()
    tokenizer = toy.make_tokenizer()
    pair = teacher.make_prm(policy, 1, set(), steps=50, seed=0)  # of 230 problems none to spare
    texts = [toy.demonstrate(problem, rng) for problem in problems]
    labels = []
    for problem, text in zip(problems, texts, strict=True):
        labels += teacher.good_lines(problem, text)
    rollouts = rollouts_of(tokenizer, questions, texts)
    results = score_steps(pair, questions, rollouts, tokenizer, "\n", 4000)
    is_good = torch.cat([good for good, _ in results]) > 0.5
    assert (is_good == torch.tensor(labels)).float().mean() > 0.87


def test_a_resumed_run_is_not_taught_another_reward_model(tmp_path):
    """`prm/` must be there: its model lacks the warm-up that the first one was made from."""
    task = Task("embedded", [], [], None, None)
    run = run_of(recipe_with(task="embedded", resume="a run"), task, torch.nn.Identity(), None)
    with pytest.raises(BadInput, match="prm"):
        load_for(run, tmp_path, "")
