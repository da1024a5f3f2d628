"""train.py: what a step computes, what a run does, and what it refuses."""

import copy
import math
import os
import random
import shutil
import signal
import statistics
import sys
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from unittest import mock

import pytest
import torch
from builders.case_files import cases
from builders.commands import BRIEF_FLAGS, change_json, raising, words_of
from builders.rollouts import batch_of, rollouts_like
from builders.runs import ALONE, config_from, credit_by, recipe_with, sharded
from builders.small_models import SMALL, byte_tokenizer
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import train
from base import files
from base.errors import BadInput, RunFailed
from base.files import read_lines
from credit import rules
from credit.batch import Batch
from credit.rules import RULES, Rule
from grpo import Rollouts, group_advantages, pad_left, token_ids
from harness import models
from harness import run as load
from rewards import Verdict, infra_error
from shear import Weighed, shear_weights
from tasks.task import Task

# ---- a step --------------------------------------------------------------------------------------


def graded(rollouts, verdicts, problems) -> Batch:
    """A batch with the advantages of Eq. (1)."""
    batch = Batch.of(rollouts, verdicts, problems)
    batch.advantages = group_advantages(batch.rewards, batch.group_size)
    return batch


class Step:
    """A run that is ready for a step, and 16 rollouts in the place of those it would sample.

    There are 4 problems with 4 rollouts of 1 to 20 random tokens each, and every other is right. An
    update takes 2 problems, so a step has 2 updates. The model is untrained.
    """

    def __init__(self, folder: str, *flags: str):
        words = words_of(BRIEF_FLAGS, "--model", folder, flags)
        self.run = sharded(load.load_run(config_from(words), ALONE))
        context = self.run.context
        self.problems = context.task.train[:4]
        prompts = [context.task.prompt(self.problems[row // 4]) for row in range(16)]
        prompt = pad_left(token_ids(context.tokenizer, prompts), 0, "cpu")
        lengths = torch.cat([torch.tensor([1, 20]), torch.randint(2, 21, (14,))])
        self.mask = torch.arange(20) < lengths[:, None]
        ids = torch.randint(len(context.tokenizer), self.mask.shape)
        self.rollouts = Rollouts(*prompt, ids, self.mask, torch.zeros(16).bool(), [""] * 16)
        self.old_log_probs = context.score(self.rollouts).log_probs  # (16, 20)
        self.verdicts = [Verdict(row % 2.0, "drawn") for row in range(16)]

    def take(self, step: int) -> tuple[dict, list[dict]]:
        """`train.train_step` of these problems, rollouts and verdicts."""
        self.run.hooks.verdicts = lambda *_: self.verdicts
        drawn = mock.patch.object(Task, "draw", lambda *_: self.problems)
        with drawn, mock.patch.object(train, "sample", lambda *_: self.rollouts):
            return train.train_step(self.run, step)

    def credit(self) -> Batch:
        """The batch of these rollouts, scored and with the token advantages of the run's rule."""
        batch = graded(self.rollouts, self.verdicts, self.problems)
        return train.score_and_credit(self.run, batch, train.log.Clock(ALONE.device))

    def update(self, token_advantages, old_log_probs=None, step: int = 0) -> dict[str, float]:
        """The metrics of the step's updates, by default on the policy that sampled."""
        if old_log_probs is None:
            old_log_probs = self.old_log_probs
        given = dict(log_probs=old_log_probs, token_advantages=token_advantages)
        return train.update(self.run, batch_of(torch.zeros(16), self.rollouts, 4, **given), step)

    def freeze(self) -> None:
        """Let updates change no weight."""
        self.run.optimizer = torch.optim.SGD(self.run.trained.parameters(), lr=0.0)

    def weights(self) -> list[torch.Tensor]:
        """A copy of the trained weights."""
        return [weight.detach().clone() for weight in self.run.trained.parameters()]


@pytest.fixture
def make_step(untaught):
    """Make a `Step` of the untrained model, with further flags."""
    return partial(Step, untaught)


def test_a_rollout_without_a_verdict_counts_for_nothing():
    """Eqs. (1), (4): it has no advantage, no mask, and is on neither side; the others are as alone."""
    mask = torch.ones(4, 6).bool()
    hidden = torch.randn(4, 6, 3)
    rest = torch.tensor([0, 1, 3])
    batch = graded(rollouts_like(mask), [Verdict(s, "known") for s in (1, 0, None, 0)], [{}])
    batch.hidden = hidden[rest].flatten(0, 1)
    settings = dict(window=3, stride=2, eps=0.3, eps_unit="raw")
    ours = credit_by(recipe_with(**settings), batch)
    alone = shear_weights(hidden[rest], mask[rest], batch.correct[rest], **settings).omega
    assert_close(ours[rest], batch.advantages[rest, None] * alone)
    assert batch.advantages[2] == 0 and not batch.mask[2].any() and not ours[2].any()


def written_out_updates(step: Step, old_log_probs, token_advantages) -> tuple[list, list]:
    """The weights after the updates of step 2, and the gradient norms, a rollout at a time in float64.

    Temperature .7, clips .1 and .4, gradients cut to norm .05, AdamW with lr .01 and eps .001.
    """
    model = copy.deepcopy(step.run.trained.model).double()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0)
    groups = torch.arange(16).view(4, 4).tolist()  # rows
    random.Random("minibatches 0 2").shuffle(groups)
    norms = []
    for first, second in (groups[:2], groups[2:]):
        rows = first + second
        adam.zero_grad()
        for row in rows:
            prompt = step.rollouts.prompt_ids[row][step.rollouts.prompt_mask[row]]
            mask = step.mask[row]
            response = step.rollouts.ids[row][mask]
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            log_probs = (logits / 0.7).log_softmax(-1)[range(len(response)), response]
            ratio = (log_probs - old_log_probs[row][mask]).exp()
            advantage = token_advantages[row][mask].double()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.4) * advantage)
            (loss.sum() / step.mask[rows].sum()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        adam.step()
    return list(model.parameters()), norms


def test_updates_are_those_of_a_written_out_loop(make_step):
    """-min(rho A~, clip(rho) A~), summed over two groups and divided by all their tokens; then AdamW.

    Both updates are off-policy, in several micro-batches. Adam's eps is raised on both sides, or it
    would make whole steps of what rounding leaves in gradients near 0.
    """
    flags = "--temperature .7 --lr 1e-2 --clip-low .1 --clip-high .4 --max-grad-norm .05"
    step = make_step(flags)
    step.run.config = replace(step.run.config, micro_tokens=100)
    step.run.optimizer.param_groups[0]["eps"] = 1e-3
    old_log_probs = step.old_log_probs + 0.4 * torch.randn(step.mask.shape)
    token_advantages = torch.randn(step.mask.shape) * step.mask
    token_advantages[4:8] = 0  # a group of equal rewards: no gradient, but its tokens count
    token_advantages[8:12, 0] = 0  # credit for later tokens alone
    expected, norms = written_out_updates(step, old_log_probs, token_advantages)
    metrics = step.update(token_advantages, old_log_probs, step=2)
    assert 0 < metrics["clip_share"] < 1
    assert min(norms) > 0.06 and metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-5)
    for ours, weight in zip(step.weights(), expected, strict=True):
        assert_close(ours.double(), weight.detach(), atol=1e-6, rtol=0)


def test_shear_with_unit_weights_is_grpo_to_the_bit(make_step, monkeypatch):
    """The methods differ in omega alone: a whole step has the same metrics and weights."""

    def whole_step(method):
        torch.manual_seed(0)
        step = make_step("--lr 1e-3 --method", method)
        metrics, _ = step.take(0)
        return [metrics["loss"], metrics["grad_norm"], *step.weights()]

    def unit_weights(hidden, mask, correct, **options):
        return Weighed(mask.float(), 1.0, None)

    grpo = whole_step("grpo")
    assert whole_step("shear")[0] != grpo[0]
    monkeypatch.setattr(rules, "shear_weights", unit_weights)
    assert_close(whole_step("shear"), grpo, atol=0, rtol=0)


def test_rollouts_without_advantage_cost_no_pass(make_step):
    """Groups of equal rewards leave forward and backward, and their tokens still count in the mean.

    The log-ratio is the mean over the tokens that were computed.
    """
    step = make_step("--prompts-per-update 4")
    step.freeze()
    token_advantages = step.mask * torch.randn(step.mask.shape)
    token_advantages[8:] = 0
    computed = []
    step.run.trained.register_forward_hook(
        lambda policy, inputs, output: computed.append(len(inputs[0].texts))
    )
    for all_of_them, count in ((0.0, 8), (1e-30, 16)):
        metrics = step.update(token_advantages + all_of_them, step.old_log_probs - 0.1)
        loss = -math.exp(0.1) * token_advantages.sum() / step.mask.sum()
        assert computed.pop() == count and not computed
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["abs_log_ratio"] == pytest.approx(0.1, rel=1e-4)
    assert step.update(0 * token_advantages)["grad_norm"] == 0


def test_metrics_are_means_over_all_blocks_and_ranks():
    """They are sums and numbers until the end, so that unequal parts count as they should."""
    mask = torch.ones(2, 3).bool()
    rollouts = replace(rollouts_like(mask), prompt_ids=mask.long(), prompt_mask=mask)
    parts = []
    for values in ([1.0], [2.0, 3.0]):
        part = graded(rollouts, [Verdict(1.0, ""), Verdict(0.0, "")], [{}])
        part.log_probs = part.entropies = part.token_advantages = torch.zeros(2, 3)
        part.log("x", torch.tensor(values))
        parts.append(part)
    assert Batch.cat(parts, [{}, {}]).metrics == {"x": 2.0}


def test_training_samples_as_the_run_was_loaded(qwen_folder, math_run, monkeypatch):
    """Up to all stop tokens of its folder, so many at a time; functions of --use reach their users."""
    own = dict(generate=len, shear={"cost": len})
    monkeypatch.setattr(load, "use", lambda hooks, modules: vars(hooks).update(own))
    loaded = load.load_run(config_from(words_of(math_run, qwen_folder)), ALONE)
    with mock.patch("harness.run.rollout") as rollout:
        load.sample(loaded, loaded.context.task.heldout, 2, 1.0)
    asked = rollout.call_args.kwargs
    assert (len(asked["stops"]), asked["batch_tokens"]) == (2, loaded.batch_tokens)
    assert asked["generate"] == loaded.context.hooks["cost"] == len


def test_a_filler_row_counts_for_nothing(make_step, monkeypatch):
    """A rank without work runs it beside the others: neither gradients nor metrics change."""
    step = make_step()
    step.freeze()
    credit = torch.ones(step.mask.shape)
    old_log_probs = step.old_log_probs - 0.1
    plain = step.update(credit, old_log_probs)
    without_row = credit.clone()
    without_row[3] = torch.nan  # its mini-batch is skipped, and must be the only one
    of_others = step.update(without_row, old_log_probs)
    own = train.fsdp.own_micro_batches
    filler = (torch.tensor([3]), True)
    monkeypatch.setattr(train.fsdp, "own_micro_batches", lambda *inputs: [*own(*inputs), filler])
    assert step.update(credit, old_log_probs) == plain and plain["grad_norm"] > 0
    assert step.update(without_row, old_log_probs) == of_others and of_others["skipped"] == 1


def test_updates_that_are_not_finite_are_skipped(make_step):
    """One of two has a loss of NaN: it is counted, and the other's metrics are the step's.

    If the gradients of both are infinite, weights and moments stay, and the run ends.
    """
    step = make_step()
    ones = torch.ones(step.mask.shape)
    before = step.weights()
    overflow = next(step.run.trained.parameters()).register_hook(lambda gradient: gradient / 0)
    with pytest.raises(RunFailed, match="step 1: no update had a finite loss"):
        step.update(ones)
    overflow.remove()
    assert_close(step.weights(), before, atol=0, rtol=0)
    assert not step.run.optimizer.state
    old_log_probs = step.old_log_probs.clone()
    old_log_probs[3] = torch.nan
    metrics = step.update(ones, old_log_probs)
    assert metrics["skipped"] == 1 and metrics["grad_norm"] > 0 and step.run.optimizer.state
    assert all(weight.isfinite().all() for weight in step.weights())


def test_a_step_without_any_verdict_ends_the_run_before_any_update(make_step):
    """One sentence has the first cause."""
    step = make_step()
    before = step.weights()
    with pytest.warns(RuntimeWarning):
        step.verdicts = [infra_error("the judge is down")] * 16
    with pytest.raises(RunFailed, match="step 1: no response could be graded: the judge is down"):
        step.take(0)
    assert_close(step.weights(), before, atol=0, rtol=0)


def test_states_exist_for_a_block_of_whole_groups_at_a_time(make_step, monkeypatch):
    """Blocks of a group, or two, give the token advantages of the whole; states never leave a block."""
    step = make_step()
    seen = []
    shear = step.run.rule.credit

    def noted(block, context):
        assert len(block.hidden) == block.mask.sum()
        assert all(earlier.hidden is None for earlier in seen)
        seen.append(block)
        return shear(block, context)

    step.run.rule = RULES["shear"]._replace(credit=noted)
    whole = step.credit()
    assert whole.token_advantages.abs().max() > 0.01
    blocks = Batch.blocks
    for tokens in (1, int(step.mask[:8].sum())):
        monkeypatch.setattr(Batch, "blocks", partialmethod(blocks, most=tokens))
        batch = step.credit()
        assert_close(batch.token_advantages, whole.token_advantages, atol=2e-5, rtol=1e-4)
        assert_close(batch.log_probs, whole.log_probs, atol=2e-5, rtol=1e-4)
    groups = [len(block.problems) for block in seen]
    assert groups[:6] == [4, 1, 1, 1, 1, 2] and sum(groups[5:]) == 4


def test_states_are_kept_for_a_rule_that_asks_for_them(make_step):
    """GRPO asks for none: at the paper's sizes they are 11 GB. A rule that forgot to is told so.

    Credit is 0 outside of the responses.
    """
    step = make_step("--method grpo")
    grpo = step.run.rule.credit

    def without_states(batch, context):
        assert batch.hidden is None
        return grpo(batch, context)

    step.run.rule = RULES["grpo"]._replace(credit=without_states)
    credit = step.credit().token_advantages
    assert credit[step.mask].all() and not credit[~step.mask].any()
    step.run.rule = RULES["shear"]._replace(needs_states=False)
    with pytest.raises(BadInput, match="add needs_states=True to its @rule"):
        step.credit()


# ---- a run ---------------------------------------------------------------------------------------


@pytest.fixture
def run(untaught, tmp_path):
    """`python train.py` in this process: a small run whose verdicts alternate."""

    def check(*flags) -> int:
        return train.main(words_of(BRIEF_FLAGS, "--model", untaught, "--out", tmp_path, flags))

    return check


def test_held_out_accuracy_is_that_of_known_verdicts(make_step, monkeypatch):
    """One greedy response each; sampled means 2/3, 0 and none: 1/3 ± 1/3, clustered by problem."""
    run = make_step("--heldout 4 --eval-groups 3 --rollouts-per-prompt 8").run
    run.context.task = replace(run.context.task, first_error=None)
    scores = [[1.0, 0.0, None, 1.0], [1, 1, 0, *[None] * 5, *[0] * 8, *[None] * 8]]
    asked = []

    def verdicts(task, problems, rollouts):
        asked.append((problems, rollouts.mask.sum(1).tolist()))
        return [Verdict(score, "timeout" if asked[1:] else "?") for score in scores[len(asked) - 1]]

    monkeypatch.setattr(Task, "verdicts", verdicts)
    result = train.evaluate(run)
    heldout = run.context.task.heldout
    assert [problems for problems, _ in asked] == [heldout, heldout[:3]]
    assert result["greedy"] == pytest.approx((2 / 3, 1 / 3, 3))
    assert result["sampled"] == pytest.approx((1 / 3, 1 / 3, 11))
    assert result["by_problem"] == pytest.approx([2 / 3, 0, math.nan], nan_ok=True)
    assert result["length"] == statistics.median(asked[1][1]) and result["timeout"] == 1


def test_a_rule_is_one_function(make_step, monkeypatch, assert_refused):
    """Its metric is logged, its option is checked; evaluations tell it the steps done, too."""
    steps = []

    def surprisal(batch, context, *, floor: float = 0.01):
        """More on tokens that the policy itself finds unlikely."""
        steps.append(context.step)
        salience = (floor - batch.log_probs) * batch.mask  # (B, T)
        batch.log("salience", salience[batch.mask])
        return batch.A * salience

    monkeypatch.setitem(RULES, "surprisal", Rule(surprisal, "more on unlikely tokens"))
    step = make_step("--method surprisal --method-option floor=2")
    metrics, _ = step.take(0)
    train.evaluate(step.run)
    assert metrics["grad_norm"] > 0 and metrics["salience"] > 2 and steps == [0, 1]
    words = "--method surprisal --method-option floor=high".split()
    assert_refused(train.main, words, "--method surprisal: floor")


def test_ctrl_c_ends_after_the_step(tmp_path, run, monkeypatch, capsys):
    """After a signal during an update the step's row is written, and a checkpoint.

    The second time, they are not. The signals are real; the first is SIGTERM, as Slurm sends it.
    Status 130, and the command that goes on.
    """
    plain = train.policy_loss
    pressed = []

    def press(*inputs):
        pressed.append(os.kill(os.getpid(), signal.SIGINT if pressed else signal.SIGTERM))
        return plain(*inputs)

    monkeypatch.setattr(train, "policy_loss", press)
    once = tmp_path / "once"
    assert run("--prompts-per-step 2 --method grpo --steps 5 --name once") == 130
    before, *steps = read_lines(once / "metrics.jsonl")
    assert before["before"] and [row["step"] for row in steps] == [1] == [len(pressed)]
    assert files.find_checkpoint(once)[1]["step"] == 1
    said = f"resume with: python train.py --resume {once}\ninterrupted\n"
    assert capsys.readouterr().err.endswith(said)
    assert run("--method grpo --prompts-per-update 1 --name twice") == 130
    assert len(pressed) == 2 and not (tmp_path / "twice" / "checkpoints").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- the model that is loaded --------------------------------------------------------------------


def test_weights_are_loaded_straight_to_the_device(qwen_folder, monkeypatch):
    """On `meta` they can have been nowhere else before. Too little memory is no broken folder."""
    meta = torch.device("meta")
    load = partial(models.load_weights, "--model", str(qwen_folder), AutoModelForCausalLM, "auto")
    model = load(meta)
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {meta}
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.23 GiB.")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raising(error))
    with pytest.raises(torch.OutOfMemoryError):
        load(meta)


@pytest.fixture
def math_run(tmp_path) -> str:
    """Flags of a run on forty problems of mathematics."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"problem": "1", "answer": "1"}\n' * 40)
    return f"--data {path} --max-tokens 9 --heldout 1 --eval-groups 1 --out {tmp_path} --model "


def test_a_model_that_never_fits_is_warned_of(qwen_folder, math_run, monkeypatch):
    """Sizes are predictions, so the run may try; an error of memory says what would take less."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")  # the ranks that share this machine
    notes = load.load_run(config_from(words_of("--device cpu", math_run, qwen_folder)), ALONE).notes
    assert [note for note in notes if note.startswith("WARNING: memory")]


def changed(**values):
    """The harm of a config.json with other values."""
    return lambda folder: change_json(folder / "config.json", **values)


def spoiled_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = torch.nan  # of a token that no prompt has
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def failing_template(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")


def missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def without_end(folder):
    """Leave no token that ends a response, but one that has no embedding."""
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    byte_tokenizer(eos_token=None).save_pretrained(folder)
    change_json(folder / "config.json", eos_token_id=999)


def another_family(folder, family, **sizes):
    config = AutoConfig.for_model(family, vocab_size=300, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


HARMS = {
    "weights are not finite: model.embed_tokens.weight": spoiled_weights,
    "not those of its config.json: model.layers.0.mlp.": changed(intermediate_size=32),
    "not those of its config.json: model.layers.2.": changed(
        num_hidden_layers=3, layer_types=["full_attention"] * 3
    ),
    "--template chat: cannot be read (no)": failing_template,
    "its tokenizer is missing": missing_tokenizer,
    "no token ends a response; name one as eos_token_id": without_end,
    "not head(last state)": partial(another_family, family="cohere", logit_scale=0.996, **SMALL),
    "mamba has no attention": partial(
        another_family, family="mamba", hidden_size=32, num_hidden_layers=1
    ),
}


@pytest.mark.parametrize("sentence", HARMS)
def test_a_folder_that_would_train_wrongly_is_refused(
    sentence, qwen_folder, tmp_path, math_run, assert_refused
):
    """Weights, tokenizer, template, config or architecture get one sentence and status 2."""
    folder = tmp_path / "model"
    shutil.copytree(qwen_folder, folder)
    HARMS[sentence](folder)
    assert_refused(train.main, words_of(f"{math_run}{folder}"), "error: --", sentence)


# ---- flags that are refused ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def named(tmp_path_factory, qwen_folder, untaught) -> Path:
    """A folder with what the flags of refusals.jsonl name."""
    folder = tmp_path_factory.mktemp("named")
    for name in ("empty", "run", "runs/taken"):
        (folder / name).mkdir(parents=True)
    for name, model in {"qwen": qwen_folder, "start": untaught}.items():
        shutil.copytree(model, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    os.mkfifo(folder / "pipe")
    problem = '{"problem": "What is 7 * 8?", "answer": "56"}\n'
    (folder / "run/config.json").write_text('{"program": "shear train"}')
    (folder / "data.jsonl").write_text(problem)
    (folder / "two.jsonl").write_text(2 * problem)
    (folder / "bad.jsonl").write_text(problem + "{")
    (folder / "broken.py").write_text("nothing")
    (folder / "ends.py").write_text("raise SystemExit(0)")
    (folder / "own.py").write_text("RIGHT = 1.5\ndef swapped(gold, response): ...")
    (folder / "reads.py").write_text('from base.config import TASKS\nOWN = TASKS["own"]')
    return folder


@pytest.mark.parametrize("case", cases("refusals.jsonl"))
def test_bad_input_is_one_sentence(case, named, monkeypatch, assert_refused):
    """The status is 2, and a sentence has the flag, its value and the remedy; nothing is written.

    What is small is looked at before the minutes that a large model takes to load.
    """
    monkeypatch.chdir(named)
    monkeypatch.setenv("RANK", "x")  # which no torchrun has set
    # otherwise the hub is asked again and again
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # it is not installed
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    there = sorted(named.rglob("*"))
    assert_refused(train.main, case["flags"].split(), case["words"])
    assert sorted(named.rglob("*")) == there
