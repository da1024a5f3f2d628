"""train.py, run in process as a user would run it: it learns, writes and refuses as it says."""

import copy
import dataclasses
import json
import os
import pickle
import random
import shutil
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from operator import itemgetter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from builders.case_files import cases
from builders.commands import raising, words_of
from builders.near import assert_near
from builders.rollouts import batch_of, rollouts_like
from builders.runs import ALONE, config_from, credit_by, sharded
from builders.small_models import SMALL, byte_tokenizer, save_model, small_gpt2
from builders.stand_ins import generate_together, replace_sampler
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import harness.log
import harness.sampling
import train
from credit import batch as batches
from credit import rules
from credit.rules import RULES, Rule
from grading.sandbox import SandboxError
from grpo import Rollouts
from harness import files, load, models
from harness.files import read_lines
from harness.run import Run
from rewards import Verdict
from shear import Weighed, shear_weights
from tasks import toy
from tasks.errors import RunFailed
from tasks.task import Task

ALTERNATE = "--use builders.alternating"  # verdicts that give gradients
QUICK = "--toy-lines 2 --heldout 4 --eval-groups 2 --prompts-per-step 8"  # learns nothing


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """The folder of an untrained model of the embedded task, to run the loop without learning."""
    return save_model(tmp_path_factory.mktemp("start") / "model", toy.make_model(2, seed=0))


@pytest.fixture
def quick(start) -> str:
    """Flags of a run that learns nothing."""
    return f"--task embedded --model {start} {QUICK}"


def run(tmp_path, *flags) -> int:
    """`python train.py` in this process, writing below `tmp_path`."""
    return train.main(words_of(flags, "--out", tmp_path))


def assembled(*flags) -> Run:
    """What `train.train` assembles from these flags, on one rank."""
    return sharded(load.load_run(config_from(words_of(flags)), ALONE))


def sampled(run: Run, prompts: int, count: int = 8) -> Rollouts:
    """Rollouts of the run's first problems, at temperature 1."""
    return harness.sampling.sample_and_grade(
        run, run.context.task.train[:prompts], count, 1.0, new_clock()
    )[0]


def new_clock() -> train.log.Clock:
    return train.log.Clock(ALONE.device)


def old_log_probs(run: Run, rollouts: Rollouts) -> torch.Tensor:
    """(B, T) of the policy that sampled, as training takes them."""
    count = len(rollouts.texts)
    verdicts = [Verdict(row % 2.0, "drawn") for row in range(count)]
    problems = run.context.task.train[: count // run.config.rollouts_per_prompt]
    batch = batches.Batch.of(rollouts, verdicts, problems)
    return train.score_and_credit(run, batch, new_clock()).log_probs


def credited(
    run: Run, rollouts: Rollouts, old: torch.Tensor, token_advantages: torch.Tensor
) -> batches.Batch:
    """What `train.update` takes, with rewards of 0."""
    size = run.config.rollouts_per_prompt
    return batch_of(
        torch.zeros(len(old)), rollouts, size, log_probs=old, token_advantages=token_advantages
    )


def test_the_default_of_generate_batch_is_decided_once(tmp_path, quick, monkeypatch, capsys):
    """The plan says it, config.json keeps it, and a resumed run takes it from there.

    The sampled tokens depend on it, and a run may be resumed on another machine.
    """
    generate_together(monkeypatch, 5)
    flags = f"{ALTERNATE} --method grpo --steps 1 --name run "
    flags += "--prompts-per-step 2 --prompts-per-update 2"
    assert run(tmp_path, quick, flags) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert " tokens, 5 generated at a time; 1 update(s) per step" in printed
    generate_together(monkeypatch, 9)
    sampler = Mock(wraps=harness.sampling.rollout)
    replace_sampler(monkeypatch, sampler)
    for flags, batch in (("--steps 2", 5), ("--steps 3 --generate-batch 3", 3), ("--steps 4", 3)):
        sampler.reset_mock()
        assert train.main(["--resume", str(tmp_path / "run"), *flags.split()]) == 0
        assert {call.kwargs["batch_size"] for call in sampler.call_args_list} == {batch}
        settings = json.loads((tmp_path / "run" / "config.json").read_text())
        assert settings["generate_batch"] == batch and settings["program"] == "shear train"


def test_shear_with_unit_weights_is_grpo_to_the_bit(tmp_path, quick, monkeypatch):
    """Two whole steps have the same losses, gradient norms and weights.

    So methods differ in one place only.
    """

    def weigh_alike(hidden, mask, correct, **options):
        return Weighed(mask.float(), 1.0, None)

    monkeypatch.setattr(rules, "shear_weights", weigh_alike)
    found = []
    for name in ("grpo", "shear"):
        flags = f"{ALTERNATE} --prompts-per-step 4 --steps 2 --name {name} --method {name}"
        assert run(tmp_path, quick, flags) == 0
        steps = read_lines(tmp_path / name / "metrics.jsonl")[1:3]
        metrics = ("loss", "grad_norm", "clip_share", "reward", "entropy")
        weights = load_file(tmp_path / name / "model" / "model.safetensors")
        values = [itemgetter(*metrics)(step) for step in steps]
        found.append((values, weights))
    (one, same), (other, again) = found
    assert one == other and one[0][1] > 0
    assert all(torch.equal(same[name], again[name]) for name in same)


def test_updates_are_those_of_a_written_out_loop(quick):
    """Three off-policy mini-batches of ragged rollouts give every weight to 1e-6.

    The loop takes a rollout at a time. Clips .1 and .4, temperature .7, a norm that is cut, AdamW
    without decay. Its eps is raised on both sides, or Adam would make whole steps of what rounding
    leaves in gradients near 0.
    """
    flags = (
        "--prompts-per-step 6 --rollouts-per-prompt 4 --prompts-per-update 2 --temperature .7 "
        "--lr 1e-2"
    )
    flags += " --clip-low .1 --clip-high .4 --max-grad-norm .05"
    run = assembled(quick, flags)
    run.config = replace(run.config, micro_tokens=150)  # several passes a mini-batch
    run.optimizer.param_groups[0]["eps"] = 1e-3
    reference = copy.deepcopy(run.trained.model).double()
    rollouts = sampled(run, 6, 4)
    mask = rollouts.mask
    ragged = rollouts.mask.sum(1)
    assert ragged.min() < ragged.max() / 2
    generator = torch.Generator().manual_seed(1)
    old_logp = old_log_probs(run, rollouts)
    assert_near(old_logp, run.trained(rollouts, 0.7).log_probs, 1e-4)  # scored as it is trained
    old_logp += 0.4 * torch.randn(mask.shape, generator=generator)
    token_advantages = torch.randn(mask.shape, generator=generator) * mask
    token_advantages[4:8] = 0  # a group of equal rewards: no gradient, but its tokens count
    metrics = train.update(run, credited(run, rollouts, old_logp, token_advantages), step=2)

    groups = list(torch.arange(24).split(4))
    random.Random("minibatches 0 2").shuffle(groups)
    weights = list(reference.parameters())
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
    norms = []
    for update, minibatch in enumerate(torch.cat(groups).split(8), start=1):
        n_tokens = int(mask[minibatch].sum())
        reference.zero_grad()
        for row in minibatch.tolist():
            prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
            response = rollouts.ids[row][mask[row]]
            logits = reference(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            logp = (logits / 0.7).log_softmax(-1)[torch.arange(len(response)), response]
            loss = 0.0
            for t in range(len(response)):
                ratio = (logp[t] - old_logp[row, t]).exp()
                advantage = token_advantages[row, t].double()
                loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.4) * advantage)
            (loss / n_tokens).backward()
        norms.append(torch.cat([weight.grad.flatten() for weight in weights]).norm().item())
        with torch.no_grad():
            for weight, (first, second) in zip(weights, moments, strict=True):
                gradient = weight.grad * min(1.0, 0.05 / norms[-1])
                first.mul_(0.9).add_(0.1 * gradient)
                second.mul_(0.999).add_(0.001 * gradient**2)
                corrected = (second / (1 - 0.999**update)).sqrt()
                weight -= 1e-2 * first / (1 - 0.9**update) / (corrected + 1e-3)
    assert min(norms) > 0.1 and metrics["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-5)
    for ours, expected in zip(run.trained.model.parameters(), weights, strict=True):
        assert_near(ours.double(), expected, 1e-6)


def test_updates_that_are_not_finite_are_skipped(quick):
    """One of two has a loss of NaN: it is counted, and the other's metrics are the step's.

    If the gradients of both are infinite, weights and moments stay, and the run ends.
    """
    run = assembled(quick, "--prompts-per-update 2 --lr 1")
    rollouts = sampled(run, 4)
    before = {name: value.clone() for name, value in run.trained.state_dict().items()}
    old = old_log_probs(run, rollouts)
    ones = torch.ones(rollouts.ids.shape)
    overflow = next(run.trained.parameters()).register_hook(lambda gradient: gradient / 0)
    with pytest.raises(RunFailed, match="step 1: no update had a finite loss"):
        train.update(run, credited(run, rollouts, old, ones), 0)
    overflow.remove()
    assert all(torch.equal(value, before[name]) for name, value in run.trained.state_dict().items())
    assert not run.optimizer.state
    old[3] = torch.nan
    metrics = train.update(run, credited(run, rollouts, old, ones), 0)
    assert metrics["skipped"] == 1 and metrics["grad_norm"] > 0 and run.optimizer.state
    assert all(weight.isfinite().all() for weight in run.trained.parameters())


def without_momentum(run: Run) -> None:
    """Updates move nothing and remember nothing."""
    run.optimizer = torch.optim.SGD(run.trained.parameters(), lr=0.0)


def test_rollouts_without_advantage_cost_no_pass(quick):
    """Groups of equal rewards leave forward and backward, not the token count.

    The gradient is the same.
    """
    run = assembled(quick, "--prompts-per-step 4")
    without_momentum(run)
    rollouts = sampled(run, 4)
    old_logp = old_log_probs(run, rollouts) - 0.1
    some = torch.randn(rollouts.ids.shape) * (torch.arange(32) < 16)[:, None]
    seen = []
    run.trained.register_forward_hook(
        lambda policy, inputs, output: seen.append(len(inputs[0].texts))
    )

    def updated(token_advantages):
        return train.update(run, credited(run, rollouts, old_logp, token_advantages), 0)

    first = updated(some)
    again = updated(some + 1e-30)
    assert seen == [16, 32]
    assert first["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-5)
    for metrics in (first, again):
        assert metrics["abs_log_ratio"] == pytest.approx(0.1, rel=1e-4)
    assert updated(0 * some)["grad_norm"] == 0


def test_a_filler_row_counts_for_nothing(quick, monkeypatch):
    """A rank without work runs it beside the others: neither gradients nor metrics change."""
    run = assembled(quick)
    without_momentum(run)
    rollouts = sampled(run, 2)
    old_logp = old_log_probs(run, rollouts) - 0.1
    batch = credited(run, rollouts, old_logp, torch.ones(rollouts.ids.shape))
    plain = train.update(run, batch, 0)
    deal = train.fsdp.deal
    filler = (torch.tensor([3]), True)
    monkeypatch.setattr(train.fsdp, "deal", lambda *inputs: [*deal(*inputs), filler])
    assert train.update(run, batch, 0) == plain and plain["grad_norm"] > 0


def with_verdicts(task: Task, verdicts: Callable[[list[dict], Rollouts], list[Verdict]]) -> Task:
    """The task, whose verdicts are those of a function of problems and rollouts."""
    kind = type("Known", (Task,), {"verdicts": lambda self, *parts: verdicts(*parts)})
    return kind(**vars(task))


def test_held_out_accuracy_is_that_of_known_verdicts(quick):
    """Problems have one greedy response, and sampled means 2/3, 0 and none: 1/3 ± 1/3.

    The error is clustered by problem.
    """
    run = assembled(quick, "--eval-groups 3")
    sampled_scores = [1, 1, 0, *[None] * 5, *[0] * 8, *[None] * 8]
    scores = iter([[1.0, 0.0, None, 1.0], sampled_scores])
    asked = []

    def verdicts(problems: list[dict], rollouts: Rollouts) -> list[Verdict]:
        asked.append((problems, rollouts.mask.sum(1).tolist()))
        return [Verdict(score, "known") for score in next(scores)]

    heldout = run.context.task.heldout
    task = dataclasses.replace(run.context.task, first_error=None)
    run.context.task = with_verdicts(task, verdicts)
    result = train.evaluate(run)
    assert [problems for problems, _ in asked] == [heldout, heldout[:3]]
    assert result["greedy"] == pytest.approx((2 / 3, 1 / 3, 3))
    assert result["sampled"] == pytest.approx((1 / 3, 1 / 3, 11))
    assert result["length"] == statistics.median(asked[1][1])


def test_code_problems_train_and_infra_errors_are_counted(
    tmp_path, qwen_folder, monkeypatch, capsys
):
    """A verdict that cannot be had is shown and counted, and does not stop the run.

    It shows below the step's row and in the metrics. The model is a folder and the data a file of
    JSON lines; prompts that are too long are dropped and counted.
    """
    graded = []
    data = tmp_path / "code.jsonl"
    problem = {"problem": "Print 1.", "tests": {"inputs": [""], "outputs": ["1"]}}
    files.append_rows(data, [problem] * 6 + [problem | {"problem": "x" * 490}])

    def grade(response, tests, **options):
        assert options["level"] == "auto" and tests == problem["tests"]
        graded.append(response)
        return Verdict(None, "infra_error") if len(graded) % 2 else Verdict(0.0, "wrong")

    monkeypatch.setattr("tasks.task.grade_code", grade)
    sizes = "--steps 1 --prompts-per-step 2 --rollouts-per-prompt 16 --prompts-per-update 1"
    sizes += " --max-tokens 60 --heldout 2 --eval-groups 2 --task code"
    assert run(tmp_path, sizes, "--model", qwen_folder, "--data", data) == 0
    metrics = read_lines(tmp_path / "code-shear-1" / "metrics.jsonl")[1]
    assert 0 < metrics["infra_errors"] < 32 and metrics["reward"] == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        f"infra_errors {metrics['infra_errors']}",
        "1 problems dropped",
        "WARNING: 1 problem(s) held out are trained on, too",
        "rewards are equal in each group, so nothing is learned",
        "a pass over --data takes",
    ):
        assert words in printed
    assert read_lines(tmp_path / "code-shear-1" / "samples.jsonl")[0]["tests"] == problem["tests"]


def test_a_sandbox_that_is_refused_ends_the_run_before_it_begins(
    qwen_folder, monkeypatch, assert_refused
):
    """Where name spaces are forbidden, `--sandbox strict` gets one sentence and status 2."""
    error = SandboxError("strict: name spaces: Operation not permitted")
    monkeypatch.setattr("grading.sandbox.choose_level", raising(error))
    words = f"--task code --model {qwen_folder} --data d --sandbox strict".split()
    assert_refused(train.main, words, "--sandbox strict", "not permitted")


def test_a_rollout_without_a_verdict_counts_for_nothing():
    """A score of None gives no advantage, no mask, and a place in neither of SHEAR's sets.

    The others are as in a group without it.
    """
    mask = torch.ones(4, 6).bool()
    hidden = torch.randn(4, 6, 3)
    rest = torch.tensor([0, 1, 3])
    verdicts = [Verdict(score, "known") for score in (1.0, 0.0, None, 0.0)]
    batch = batches.Batch.of(rollouts_like(mask), verdicts, [{}])
    batch.hidden = hidden[rest].flatten(0, 1)
    assert batch.advantages[2] == 0 and not batch.rollouts.mask[2].any() and mask[2].all()
    ours = credit_by(config_from(["--window", "3", "--stride", "3"]), batch)
    alone = shear_weights(hidden[rest], mask[rest], batch.correct[rest], window=3, stride=3).omega
    assert_close(ours[rest], batch.advantages[rest, None] * alone)
    assert ours[2].abs().max() == 0


def test_states_exist_for_a_block_of_whole_groups_at_a_time(quick, monkeypatch):
    """Blocks of a group, two, or all give the same token advantages and log-probabilities.

    States never leave a block.
    """
    run = assembled(quick, "--prompts-per-step 5 --prompts-per-update 1")
    of_a_group = 8 * run.config.max_tokens
    seen = []
    found = []

    def noted(block, context, **options):
        assert len(block.hidden) == block.rollouts.mask.sum() <= max(tokens, of_a_group)
        seen.append(len(block.rollouts.texts))
        return shear(block, context, **options)

    shear = RULES["shear"].credit
    blocks = batches.Batch.blocks
    monkeypatch.setitem(RULES, "shear", RULES["shear"]._replace(credit=noted))
    problems = run.context.task.train[:5]
    verdicts = [Verdict(row % 2.0, "drawn") for row in range(40)]
    for tokens in (1, 2 * of_a_group, 2**20):
        monkeypatch.setattr(batches.Batch, "blocks", partialmethod(blocks, most=tokens))
        torch.manual_seed(0)
        batch = batches.Batch.of(sampled(run, 5), verdicts, problems)
        batch = train.score_and_credit(run, batch, new_clock())
        found.append(batch)
        assert batch.hidden is None and len(pickle.dumps(batch)) < 500_000
    assert seen[:5] == [8] * 5 and sum(seen[5:-1]) == seen[-1] == 40 and len(seen) > 7
    first, *others = found
    for batch in others:
        assert_close(batch.token_advantages, first.token_advantages, atol=2e-5, rtol=1e-4)
        assert_near(batch.log_probs, first.log_probs, 1e-5)
        assert batch.rollouts.texts == first.rollouts.texts
    assert first.token_advantages.abs().max() > 0.01


STEPS = []  # of each call of `surprisal`


def surprisal(batch, context, *, floor: float = 0.01):
    """A rule of a user's: more on tokens that the policy itself finds unlikely."""
    STEPS.append(context.step)
    mask = batch.rollouts.mask  # (B, T)
    salience = (floor - batch.log_probs) * mask  # (B, T)
    batch.log("salience", salience[mask])
    return (
        batch.advantages[:, None]
        * salience
        * mask.sum(1, keepdim=True)
        / salience.sum(1, keepdim=True)
    )


def test_a_rule_is_one_function(tmp_path, quick, monkeypatch, assert_refused):
    """It trains two steps, its metric is logged, its option is checked.

    It is told the steps done, also in the evaluations before and after.
    """
    monkeypatch.setitem(RULES, "surprisal", Rule(surprisal, "more on unlikely tokens"))
    flags = f"{quick} {ALTERNATE} --method surprisal --steps 2 --method-option floor"
    assert run(tmp_path, f"{flags}=2 --name mine") == 0
    _, *steps, _ = read_lines(tmp_path / "mine" / "metrics.jsonl")
    assert [step["grad_norm"] > 0 and step["salience"] > 2 for step in steps] == [True, True]
    assert STEPS == [0, 0, 1, 2]
    assert_refused(train.main, f"{flags}=high".split(), "--method surprisal: floor")
    words = f"{flags[:-5]}flor=1".split()
    assert_refused(train.main, words, "no option 'flor'; there is floor=0.01")


@pytest.mark.parametrize("method", ["grpo", "dropping"])
def test_a_rule_says_whether_rollouts_without_credit_count_in_the_loss_s_mean(
    quick, method, monkeypatch
):
    """The second of two groups has no credit, and the mean is over the tokens of both.

    By a rule that drops such rollouts it is over the first's. Where the policy is the one that sampled, the loss is minus the
    sum of the token advantages over the number of tokens.
    """
    dropping = RULES["grpo"]._replace(drops_uncredited=True)
    monkeypatch.setitem(RULES, "dropping", dropping)
    run = assembled(quick, "--method", method)
    rollouts = sampled(run, 2, 4)
    token_advantages = 1.0 * rollouts.mask
    token_advantages[4:] = 0
    batch = credited(run, rollouts, old_log_probs(run, rollouts), token_advantages)
    metrics = train.update(run, batch, 0)
    counted = rollouts.mask[: 4 if method == "dropping" else 8].sum()
    assert metrics["loss"] == pytest.approx(-(token_advantages.sum() / counted).item(), rel=1e-4)


def test_grpo_does_not_keep_hidden_states(quick, monkeypatch):
    """At the paper's sizes they are 11 GB that nothing would read."""
    kept = []

    def noted(batch, context, **options):
        kept.append(batch.hidden is not None)
        return 1.0 * batch.rollouts.mask

    for method in ("grpo", "shear"):
        monkeypatch.setitem(RULES, method, RULES[method]._replace(credit=noted))
        run = assembled(quick, "--method", method)
        old_log_probs(run, sampled(run, 1))
    assert kept == [False, True]


def test_weights_are_loaded_straight_to_the_device(qwen_folder):
    """On `meta` they can have been nowhere else before."""
    meta = torch.device("meta")
    name = ("--model", str(qwen_folder))
    model = models.load_weights(*name, AutoModelForCausalLM, "auto", meta)
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {meta}


def test_a_loaded_model_is_the_plain_one(start):
    """It has the folder's weights to the bit, tied ones tied, and no hooks."""
    model = models.load_model(start, ALONE.device, models.load_tokenizer("--model", start))
    for name, value in load_file(f"{start}/model.safetensors").items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(hasattr(part, "_hf_hook") for part in model.modules())


def test_a_model_that_a_gpu_cannot_hold_is_no_broken_folder(quick, tmp_path, monkeypatch):
    """The error of memory passes; it is no sentence about the folder."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.23 GiB.")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raising(error))
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, quick)


def math_data(tmp_path) -> str:
    """Flags of a run on forty problems of mathematics."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"problem": "1", "answer": "1"}\n' * 40)
    return f"--data {path} --max-tokens 9 --heldout 1 --eval-groups 1"


def test_a_model_that_never_fits_is_warned_of(qwen_folder, tmp_path, monkeypatch):
    """Sizes are predictions, so the run may try; an error of memory says what would take less."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")  # the ranks that share this machine
    flags = words_of(math_data(tmp_path), "--device cpu --model", qwen_folder)
    notes = load.load_run(config_from(flags), ALONE).notes
    assert [note for note in notes if note.startswith("WARNING: memory")]


def with_config(**changes):
    """A folder whose config is of another model than its weights."""

    def harm(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return harm


def spoiled_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = torch.nan  # of a token that no prompt has
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def without_end(folder):
    """Leave no token that ends a response, but one that has no embedding."""
    tokenizer = byte_tokenizer(eos_token=None)
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    tokenizer.save_pretrained(folder)
    with_config(eos_token_id=999)(folder)


def other(family, sizes=SMALL, **more):
    """A folder with a small model of another architecture."""
    config = AutoConfig.for_model(family, vocab_size=300, **sizes | more)
    return lambda folder: AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "cannot be loaded"),
        (
            with_config(num_hidden_layers=3, layer_types=["full_attention"] * 3),
            "not those of its config.json: model.layers.2.",
        ),
        (with_config(intermediate_size=32), "not those of its config.json: model.layers.0.mlp."),
        (spoiled_weights, "weights are not finite: model.embed_tokens.weight"),
        (
            template("{{ raise_exception('no') }}"),
            "--template chat: cannot be read (no)",
        ),
        (template("{% import 'os' as os %}"), "--template chat: cannot be read"),
        (missing_tokenizer, "its tokenizer is missing"),
        (other("granite", logits_scaling=4), "not head(last state)"),
        (other("gemma2", final_logit_softcapping=30.0), "not head(last state)"),
        (other("llama4_text", num_local_experts=2), "not head(last state)"),
        (other("cohere", logit_scale=0.996), "not head(last state)"),
        (
            other("gemma3_text", use_bidirectional_attention=True),
            "or left padding and a cache change them",
        ),
        (other("blenderbot-small", decoder_layers=2), "or left padding and a cache change them"),
        (other("electra"), "cannot be loaded (mat1 and mat2 shapes cannot be multiplied"),
        (without_end, "no token ends a response; name one as eos_token_id"),
        (other("mamba", dict(hidden_size=32, num_hidden_layers=1)), "mamba has no attention"),
    ],
)
def test_a_folder_that_would_train_wrongly_is_refused(
    harm, words, qwen_folder, tmp_path, assert_refused
):
    """Weights, tokenizer, template, config or architecture get one sentence and status 2."""
    folder = tmp_path / "model"
    shutil.copytree(qwen_folder, folder)
    harm(folder)
    flags = words_of(math_data(tmp_path), "--model", folder, "--out", tmp_path)
    assert_refused(train.main, flags, "error: --", words)


def test_ctrl_c_ends_after_the_step(tmp_path, start, quick, monkeypatch, capsys):
    """After a signal during an update the step's row is written, and its weights are saved.

    The second time, they are not. The signals are real; the first is SIGTERM, as Slurm sends it.
    Status 130, and the command that goes on.
    """
    plain = train.policy_loss
    pressed = []

    def press(*inputs):
        pressed.append(os.kill(os.getpid(), signal.SIGINT if pressed else signal.SIGTERM))
        return plain(*inputs)

    def norm_of(folder):
        return load_file(f"{folder}/model.safetensors")["model.norm.weight"]

    monkeypatch.setattr(train, "policy_loss", press)
    flags = f"{quick} {ALTERNATE} --method grpo --eval-groups 1 --heldout 1"
    once = tmp_path / "once"
    assert run(tmp_path, flags, "--prompts-per-update 8 --steps 5 --name once") == 130
    before, *steps = read_lines(once / "metrics.jsonl")
    assert before["before"] and [row["step"] for row in steps] == [1] == [len(pressed)]
    path, report = files.find_checkpoint(once)
    assert report["step"] == 1 and not torch.equal(norm_of(path / "model"), norm_of(start))
    said = f"resume with: python train.py --resume {once}\ninterrupted\n"
    assert capsys.readouterr().err.endswith(said)
    assert run(tmp_path, flags, "--prompts-per-update 2 --name twice") == 130
    assert len(pressed) == 2 and not (tmp_path / "twice" / "checkpoints").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("case", cases("refusals.jsonl"))
def test_bad_input_is_one_sentence(case, tmp_path, qwen_folder, start, monkeypatch, assert_refused):
    """The status is 2, and a sentence has the flag, its value and the remedy.

    Nothing is written or overwritten. What is small is looked at before the minutes that a large
    model takes to load.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "x")  # which no torchrun has set
    # otherwise the hub is asked again and again
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # it is not installed
    for name in ("empty", "run", "runs/taken"):
        os.makedirs(name)
    for name, folder in {"qwen": qwen_folder, "start": start}.items():
        shutil.copytree(folder, name, ignore=shutil.ignore_patterns("*.safetensors"))
    save_model("gpt2", small_gpt2())
    os.mkfifo("pipe")
    problem = '{"problem": "What is 7 * 8?", "answer": "56"}\n'
    texts = {"run/config.json": '{"program": "shear train"}', "data.jsonl": problem}
    texts |= {"two.jsonl": 2 * problem, "bad.jsonl": problem + "{"}
    for name, text in texts.items():
        Path(name).write_text(text)
    there = sorted(tmp_path.rglob("*"))
    assert_refused(train.main, case["flags"].split(), case["words"])
    assert sorted(tmp_path.rglob("*")) == there
