"""lab/tools/dynamic.py: dynamic sampling."""

from builders.commands import words_of
from builders.runs import ALONE, config_from
from builders.small_models import save_model

from grpo import Rollouts
from harness.load import load_run
from harness.log import Clock
from lab.tools import dynamic
from rewards import Verdict
from tasks import toy

MIXED = [1.0, 0.0, 1.0, 0.0]
# Rewards of three of the eight groups that are sampled at once; the last has one verdict.
EQUAL = {1: [1.0] * 4, 3: [0.0] * 4, 5: [None, None, None, 0.0]}


def test_dynamic_sampling_replaces_groups_of_equal_rewards(tmp_path):
    """It replaces no others, with other problems, each with its own rollouts and verdicts.

    The share of replaced groups is a metric. Of the three that the first round draws, the second
    is equal, too. test_parallel.py bounds the rounds.
    """
    start = save_model(tmp_path / "start", toy.make_model(2, seed=0))
    flags = "--toy-lines 2 --heldout 4 --eval-groups 2 --prompts-per-step 8 --rollouts-per-prompt 4"
    run = load_run(config_from(words_of("--task embedded --model", start, flags)), ALONE)
    drawn = []

    def verdicts(problems: list[dict], rollouts: Rollouts) -> list[Verdict]:
        drawn.append((problems, rollouts.texts))
        scores = []
        for group in range(len(problems)):
            scores += EQUAL.get(group, MIXED)
        return [Verdict(score, "drawn") for score in scores]

    vars(run.context.task)["verdicts"] = verdicts
    dynamic.use(run.parts, rounds=9)
    problems, rollouts, graded = run.parts.sample(run, 2, Clock(ALONE.device))
    assert run.extra["replaced"] == (3 + 1) / 8
    come_from = [(0, 0), (1, 0), (0, 2), (2, 0), (0, 4), (1, 2), (0, 6), (0, 7)]  # try, group
    for group, (attempt, place) in enumerate(come_from):
        of_problems, texts = drawn[attempt]
        rows = slice(4 * group, 4 * group + 4)
        assert problems[group] == of_problems[place]
        assert rollouts.texts[rows] == texts[4 * place : 4 * place + 4]
        assert [verdict.reward for verdict in graded[rows]] == MIXED
    assert len({problem["problem"] for problem in problems}) == 8
    for ids, mask, text in zip(rollouts.ids, rollouts.mask, rollouts.texts, strict=True):
        assert run.context.tokenizer.decode(ids[mask]).removesuffix("<eos>") == text
