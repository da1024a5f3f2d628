r"""credit/reward_model.py: a score for each step, read where the step ends, and the step of each
policy's token.
"""

import json
import random
from dataclasses import replace

import pytest
import torch
from cases import CHAT, SMALL, saved, turns_tokenizer, with_a_stop
from torch.testing import assert_close
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit import teacher
from credit.reward_model import SEPARATOR, ProcessRewardModel, score_steps
from grpo import Rollouts
from harness.models import load_reward_model
from tasks import toy
from tasks.rows import BadInput

SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
WORDS = 259  # tokens without <extra_0>
DEVICE = torch.device("cpu")
STOP = 2  # <|im_end|>

RESPONSES = [  # text, its steps, the first character of each
    ("One.\n\nTwo é€😀.\n\nThree.", ["One.", "Two é€😀.", "Three."], [0, 6, 16]),
    ("One.\n\n\n\n \n\nTwo.\n\n", ["One.", "Two."], [0, 11]),
    ("\n\nOne.\nStill.", ["One.\nStill."], [2]),
    ("\n\n", [""], [0]),
    ("", [""], [0]),
]
TEXTS = [text for text, _, _ in RESPONSES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model in a folder that is laid out, and names its classes, as Qwen2.5-Math-PRM-7B
    does.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS + 1, max_position_embeddings=400, initializer_range=0.3, **SMALL
    )
    path = tmp_path_factory.mktemp("models") / "prm"
    saved(path, ProcessRewardModel(config), turns_tokenizer(SEPARATOR))
    about = json.loads((path / "config.json").read_text())
    about |= {"architectures": ["Qwen2ForProcessRewardModel"], "num_labels": 2}
    about["auto_map"] = {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}
    (path / "config.json").write_text(json.dumps(about))
    return path


@pytest.fixture(scope="module")
def pair(folder):
    return load_reward_model(str(folder), DEVICE, torch.float32)


def respond(texts: list[str], stop: bool = True) -> Rollouts:
    """Rollouts of these texts, a token a byte, and the stop token."""
    rollouts = with_a_stop(turns_tokenizer(), ["?"] * len(texts), texts)
    return rollouts if stop else replace(rollouts, mask=rollouts.mask & (rollouts.ids != STOP))


def scored(pair, texts, questions=None, micro_tokens=1000, stop=True):
    """score_steps of texts whose steps end with an empty line."""
    questions = questions or [f"What is {i} + {i}?" for i in range(len(texts))]
    return score_steps(
        pair, questions, respond(texts, stop), turns_tokenizer(), "\n\n", micro_tokens
    )


def by_hand(pair, question: str, steps: list[str]) -> torch.Tensor:
    """P(good) of each step: the conversation spelt out, scores read at the separators."""
    model, tokenizer = pair
    response = "".join(f"{step}{SEPARATOR}" for step in steps)
    turns = (("system", SYSTEM), ("user", question), ("assistant", response))
    ids = tokenizer("".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns))[
        "input_ids"
    ]
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]  # (L, h)
    first, second = model.score[0], model.score[2]
    logits = (states @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias  # (L, 2)
    places = [place for place, id in enumerate(ids) if tokenizer.decode([id]) == SEPARATOR]
    return torch.stack([(logits[place, 1] - logits[place, 0]).sigmoid() for place in places])


def test_scores_are_those_read_by_hand(pair):
    """One response at a time, its steps written by hand; scores differ, or nothing would be
    compared.
    """
    results = scored(pair, TEXTS)
    assert len(results) == len(TEXTS)
    for i, (good, step) in enumerate(results):
        assert_close(good, by_hand(pair, f"What is {i} + {i}?", RESPONSES[i][1]))
        assert good.dtype == torch.float32 and step.dtype == torch.int64
    assert results[0][0].std() > 1e-3


@pytest.mark.parametrize("stop", [True, False])
def test_a_token_belongs_to_the_step_in_which_its_first_character_lies(pair, stop):
    """A token a byte, so that a character's step is that of all of its bytes; the stop token ends
    the last step.
    """
    texts = [
        text for text in TEXTS if stop or text
    ]  # without the stop token the last has no token at all
    for i, (_, step) in enumerate(scored(pair, texts, stop=stop)):
        text, _, starts = RESPONSES[i]
        expected = []
        for place, character in enumerate(text):
            at = max(0, sum(start <= place for start in starts) - 1)
            expected += [at] * len(character.encode())
        assert step.tolist() == expected + [len(starts) - 1] * stop


def test_micro_batches_and_order_do_not_matter(pair, monkeypatch):
    """Alone, together, backwards: the same scores and steps, of no more than micro_tokens at a time
    with padding.
    """
    shapes, forward = [], ProcessRewardModel.forward
    monkeypatch.setattr(
        ProcessRewardModel,
        "forward",
        lambda self, ids: shapes.append(ids.shape) or forward(self, ids),
    )
    questions = [f"{i}?" for i in range(len(TEXTS))]
    together = scored(pair, TEXTS, questions, 10**6)
    assert [len(shape) for shape in shapes] == [2] and shapes[0][0] == len(TEXTS)
    assert_close(scored(pair, TEXTS, questions, 1), together)
    shapes.clear()
    assert_close(scored(pair, TEXTS, questions, 450), together)
    assert 1 < len(shapes) < len(TEXTS) == sum(shape[0] for shape in shapes)
    assert all(shape.numel() <= 450 for shape in shapes)
    assert_close(scored(pair, TEXTS[::-1], questions[::-1], 450)[::-1], together)


def test_a_rollout_without_tokens_has_no_steps_and_is_not_read(pair):
    """An empty mask gives two empty tensors; the others' scores stay."""
    texts, questions = TEXTS[:3], ["?"] * 3
    rollouts, expected = respond(texts), scored(pair, texts, questions)
    rollouts.mask[1] = False
    results = score_steps(pair, questions, rollouts, turns_tokenizer(), "\n\n", 1000)
    assert [values.shape for values in results[1]] == [(0,), (0,)]
    for i in (0, 2):
        assert_close(results[i], expected[i])
    rollouts.mask[:] = False
    for good, step in score_steps(pair, questions, rollouts, turns_tokenizer(), "\n\n", 1000):
        assert not good.numel() and not step.numel()


@pytest.mark.parametrize("spelt", [SEPARATOR, "<extra<extra_0>_0>", "<extra_0>\n\n<extra_0>"])
def test_a_spelt_separator_adds_no_score(pair, spelt):
    """Neither in the question nor in the response; the number of steps is that of the text without
    it.
    """
    plain = "One.\n\nTwo.\n\nThree."
    texts = [plain, plain.replace("Two.", f"Two{spelt}."), plain]
    results = scored(pair, texts, ["?", "?", f"?{spelt}"])
    assert [len(good) for good, _ in results] == [3, 3 + spelt.count("\n\n"), 3]
    for i, (good, step) in enumerate(results):
        assert len(step) == len(texts[i]) + 1 and step.max() == len(good) - 1
    assert_close(results[1][0][0], results[0][0][0])  # the first step was not moved


def test_what_exceeds_the_context_takes_the_last_score(pair):
    """400 tokens: a step that is cut, and all behind it, take the last score; if there is none, one
    half.
    """
    steps = ["One.", "Two.", "3" * 400, "Four.", "Five."]
    (good, step), (unread, _) = scored(
        pair, ["\n\n".join(steps), "\n\n".join(steps[2:])], ["?", "?"]
    )
    expected = by_hand(pair, "?", steps[:2])
    assert_close(good, torch.cat([expected, expected[-1:].expand(3)]))
    assert unread.tolist() == [0.5] * 3
    assert step[-1] == 4


def test_folders_that_cannot_score_steps_are_refused(tmp_path):
    """Each in a sentence that begins with the flag and the folder."""
    config = Qwen2Config(vocab_size=WORDS + 1, **SMALL)
    model = ProcessRewardModel(config)
    small = ProcessRewardModel(Qwen2Config(vocab_size=WORDS, **SMALL))
    whole = turns_tokenizer(SEPARATOR)
    losing = turns_tokenizer(SEPARATOR, template=CHAT.replace("m['content']", "m['content'][:30]"))
    folders = {
        str(tmp_path / "missing"): "cannot be loaded",
        saved(
            tmp_path / "causal", Qwen2ForCausalLM(config), whole
        ): r"not those of its config.json \(score",
        saved(tmp_path / "other", model, turns_tokenizer()): "<extra_0> is not one token",
        saved(
            tmp_path / "plain", model, turns_tokenizer(SEPARATOR, template=None)
        ): "no chat template",
        saved(tmp_path / "losing", model, losing): "1 separators of 2 steps",
        saved(tmp_path / "small", small, whole): "another model's",
    }
    for name, reason in folders.items():
        with pytest.raises(BadInput, match=f"^--prm {name}: .*{reason}"):
            load_reward_model(name, DEVICE, torch.float32)


def test_a_loaded_model_is_ready(folder, pair):
    """In the dtype asked for, not in training, without gradients, and with the folder's weights
    under its names.
    """
    model, _ = load_reward_model(str(folder), DEVICE, torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    names = set(pair[0].state_dict())
    assert {
        "score.0.weight",
        "score.0.bias",
        "score.2.weight",
        "score.2.bias",
        "model.norm.weight",
    } <= names
    good, _ = scored((model, pair[1]), ["One."])[0]
    exact, _ = scored(pair, ["One."])[0]
    assert good.dtype == torch.float32
    assert_close(good, exact, atol=0.05, rtol=0.05)


def test_toy_prm_tells_right_lines_from_wrong_ones_and_survives_saving(tmp_path):
    """One-line programs: three in four lines are good, a short teaching does better; loaded, it
    says the same.
    """
    rng = random.Random("scored")
    problems = [toy.make_problem(rng, 1) for _ in range(128)]
    questions = [problem["problem"] for problem in problems]
    policy, words = toy.make_model(1, seed=0).eval(), toy.make_tokenizer()
    pair = teacher.make_prm(
        policy, 1, set(), steps=50, seed=0
    )  # of 230 problems none can be spared
    assert policy.config.vocab_size == len(words)
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in policy.parameters()
    )
    texts = [toy.demonstrate(problem, rng) for problem in problems]
    labels = []
    for problem, text in zip(problems, texts, strict=True):
        labels += teacher.good_lines(problem, text)
    labels = torch.tensor(labels)
    rollouts = with_a_stop(words, questions, texts)
    results = score_steps(pair, questions, rollouts, words, "\n", 4000)
    good = torch.cat([good for good, _ in results])
    assert 0.6 < labels.float().mean() < 0.85
    assert ((good > 0.5) == labels).float().mean() > 0.87
    assert results[0][1].tolist() == [0] * 12 + [1] * 4
    loaded = load_reward_model(saved(tmp_path / "toy", pair[0], pair[1]), DEVICE, torch.float32)
    again = score_steps(loaded, questions, rollouts, words, "\n", 4000)
    assert_close(again, results, atol=0, rtol=0)


@pytest.mark.parametrize("lines", [1, 3])
def test_toy_labels_are_bad_from_the_first_error_on(lines):
    """The verifier's first wrong token, counted in lines; the box counts as one."""
    rng, seen = random.Random(lines), set()
    for _ in range(200):
        problem = toy.make_problem(rng, lines)
        text = toy.demonstrate(problem, rng)
        error = toy.first_error(problem, text)
        right = error.token // 12 if error else lines + 1  # a line is 12 tokens
        assert teacher.good_lines(problem, text) == [True] * right + [False] * (lines + 1 - right)
        seen.add(right)
    assert {0, lines + 1} <= seen


def test_forbidden_prompts_are_not_demonstrated():
    """Neither to the policy nor to the process reward model: both draw their demonstrations
    here.
    """
    forbidden = {
        problem["problem"] for problem, _ in toy.demonstrations(1, set(), random.Random(1))
    }
    for seed in range(20):
        shown = {
            problem["problem"]
            for problem, _ in toy.demonstrations(1, forbidden, random.Random(seed))
        }
        assert not shown & forbidden
