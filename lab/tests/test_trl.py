"""lab/bridges/: SHEAR in TRL is Algorithm 1 times TRL's advantages; with weights of 1 it is GRPO."""

import math
import re
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from builders.case_files import DOCS, ROOT
from builders.processes import on_two

pytest.importorskip("trl", reason="TRL is not installed: pip install -r lab/requirements.txt")

import trl_runs
from trl import GRPOTrainer

from lab.bridges import train_trl
from lab.bridges.trl_rewards import code_reward, math_reward
from lab.bridges.trl_shear import ShearGRPOTrainer


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes left."""
    folder = tmp_path_factory.mktemp("two")
    torch.set_num_threads(1)
    on_two(trl_runs.leave_batches, folder)
    return torch.load(folder / "seen.pt")


@pytest.mark.parametrize("case", [{}, {"peft": True, "beta": 0.1}])
def test_with_weights_of_one_it_is_grpo_to_the_bit(case):
    """TRL's trainer and ours end with the same weights, losses and rewards."""
    assert trl_runs.differences(trl_runs.WHOLE, {"max_steps": 2} | case) == []


def test_two_processes_that_split_a_group_are_grpo_to_the_bit(two):
    """They are with weights of one, too, in several updates of a generation and micro-batches."""
    assert two["differences"] == []


def test_omega_is_that_of_credit(two):
    """One process, and two that split a group, have credit's omega, and TRL's advantages times it."""
    assert trl_runs.check_omega([trl_runs.first_batch(12, trl_runs.LEFT_OUT)]) < 1e-6
    assert trl_runs.check_omega(two["batches"]) < 1e-6


@pytest.mark.parametrize("case, passes", [({}, (0, 1)), ({"steps_per_generation": 2}, (1, 1))])
def test_states_cost_a_pass_only_where_trl_scores_nothing(case, passes):
    """Passes of TRL's trainer and of ours are counted.

    With several updates a generation, TRL needs the old log-probabilities.
    """
    name = "_get_per_token_logps_and_entropies"
    counted = dict(autospec=True, side_effect=getattr(GRPOTrainer, name))
    for kind, expected in zip((GRPOTrainer, ShearGRPOTrainer), passes, strict=True):
        trainer = trl_runs.make_trainer(kind, **case)
        trainer.model.train()
        with patch.object(GRPOTrainer, name, **counted) as scoring:
            trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        assert scoring.call_count == expected


def test_states_are_the_adapter_s():
    """They are with PEFT, also where TRL scores the model without its adapter first."""
    alone = trl_runs.first_batch(8, dict(peft=True))
    referred = trl_runs.first_batch(8, dict(peft=True, beta=0.1))
    assert torch.equal(alone["completion_ids"], referred["completion_ids"])
    assert torch.equal(alone["omega"], referred["omega"])
    plain = trl_runs.first_batch(8, {})
    assert not torch.equal(alone["omega"], plain["omega"])


@pytest.mark.long
def test_the_file_of_the_docs_runs(taught, tmp_path, monkeypatch):
    """The file of docs/scaling.md takes a step.

    It warns where a response is just one span or no rollout is right.
    """
    text = (DOCS / "scaling.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(from datasets.*?)```", text, re.S)
    program = program.replace("Qwen/Qwen2.5-0.5B", taught).replace("shear_credit", "lab.bridges")
    program = program.replace(
        "64, report_to", "4, max_steps=1, use_cpu=True, bf16=False, save_strategy='no', report_to"
    )
    monkeypatch.chdir(tmp_path)
    sizes = "window=12, stride=6"
    none_right = "no rollout is right: no first reward is above threshold=1.0"
    with pytest.warns(UserWarning, match="is one span"), pytest.warns(match=none_right):
        exec(program.replace(sizes, "window=4, stride=4, threshold=1.0"), {})


def test_graders_are_reward_functions():
    """They grade texts and last messages.

    They give None where grading failed, and to a row whose answer or tests cannot be read.
    """
    messages = [{"role": "assistant", "content": rf"\boxed{{{digit}}}"} for digit in (4, 5)]
    assert math_reward([r"\boxed{4}", messages], answer=["4", "4"], prompts=[]) == [1.0, 0.0]
    program = "```python\nprint(int(input()) + 1)\n```"
    with pytest.warns(RuntimeWarning, match="no verdict"):
        rewards = code_reward(
            [program] * 4,
            tests=['{"inputs": ["1"], "outputs": ["2"]}', "{}", "no JSON", {"inputs": []}],
        )
    assert rewards == [1.0, None, None, None]
    with pytest.warns(RuntimeWarning, match="no verdict"):
        rewards = math_reward([r"\boxed{4}"] * 4, answer=[r"so \boxed{4}", 4, None, math.nan])
    assert rewards == [1.0, 1.0, None, None]


def test_the_command_trains_by_its_flags(monkeypatch):
    """Flags are this project's and TRL's; the file has the embedded task's spans."""
    trainer = Mock()
    monkeypatch.setattr(train_trl, "ShearGRPOTrainer", trainer)
    monkeypatch.setattr(train_trl.toy, "warm_up", Mock())
    file = str(ROOT / "lab" / "bridges" / "toy.yaml")
    flags = ["--config", file, "--window", "7", "--max_steps", "3"]
    monkeypatch.setattr("sys.argv", ["train_trl", *flags])
    train_trl.main()
    config = trainer.call_args.args[2]
    assert (config.max_steps, config.num_generations) == (3, 8)
    assert {"window": 7, "stride": 6}.items() <= trainer.call_args.kwargs.items()


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(importance_sampling_level="sequence"), "level='sequence' gives all tokens"),
        (dict(cp_enabled=True), "cp_size and sp_size must be 1"),
        (dict(_is_vlm=True), "a model of text alone"),
    ],
)
def test_what_would_lose_credit_is_refused(changes, message, monkeypatch):
    """One ratio a sequence, states on several processes and images are refused in a sentence.

    So is a stride above the window, before a model is loaded.
    """

    def init(self, *args, **kwargs):
        usual = dict(importance_sampling_level="token", _is_vlm=False)
        usual |= dict(cp_enabled=False, sp_enabled=False) | changes
        parallel = SimpleNamespace(parallelism_config=SimpleNamespace(**usual))
        vars(self).update(usual | {"accelerator": parallel})

    monkeypatch.setattr(GRPOTrainer, "__init__", init)
    with pytest.raises(ValueError, match=message):
        ShearGRPOTrainer()
    with pytest.raises(ValueError, match="stride must be between 1 and the window"):
        ShearGRPOTrainer(window=5, stride=6)
