"""train.py, run in process as a user would run it: it learns, it writes what it says, it refuses
bad input.
"""

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import random
import shlex
import shutil
import signal
from types import SimpleNamespace

import little
import pytest
import torch
from cases import (
    ALONE,
    SMALL,
    configured,
    credit_by,
    filled,
    interrupt,
    made_batch,
    saved,
    without_text,
)
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import grpo
import harness.run
import train
from credit import batch as batches
from credit import shear_settings
from credit.methods import FUNCTIONS
from credit.table import METHODS, Method, Option
from grading.sandbox import SandboxError
from grpo import Rollouts, log_probs
from harness import checkpoint, config, files, models, prepare
from harness.config import changed
from harness.files import rows
from harness.launch import RunFailed
from harness.run import Run, build_run
from rewards import Verdict
from shear import Weighed, shear_weights
from tasks import lessons, toy

# Of little.py's task, which a small model learns in eight steps of a third of a second.
LEARN = "--toy-lines 4 --toy-width 64 --warmup-steps 200 --window 4 --stride 2"
LEARN += (
    " --heldout 64 --eval-groups 16 --prompts-per-step 8 --prompts-per-update 4 --steps 8 --lr 4e-4"
)
PLOT = harness.run.report.plot  # which other runs here do without
QUICK = (
    "--toy-lines 2 --heldout 4 --eval-groups 2 --prompts-per-step 8".split()
)  # for what has nothing to learn
pytestmark = pytest.mark.usefixtures("no_curve")


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """The folder of an untrained model of the embedded task: enough to run the loop, not to
    learn.
    """
    return saved(tmp_path_factory.mktemp("start") / "model", toy.make_model(2, seed=0))


@pytest.fixture
def quick(start) -> list[str]:
    """Flags of a run that learns nothing."""
    return ["--task", "embedded", "--model", start, *QUICK]


def run(tmp_path, *flags: str) -> int:
    """`python train.py` in this process, writing below `tmp_path`."""
    return train.main([*flags, "--out", str(tmp_path)])


def assembled(flags: list[str]) -> Run:
    """What `train.train` assembles from these flags, on one rank."""
    config = configured(flags)
    return build_run(prepare.load_parts(config, ALONE), None, ALONE)


def old_log_probs(run: Run, rollouts: Rollouts) -> torch.Tensor:
    """(B, T) of the policy that sampled, as training takes them."""
    count = len(rollouts.texts)
    verdicts = [Verdict(row % 2.0, "drawn") for row in range(count)]
    problems = run.task.train[: count // run.config.sampling.rollouts_per_prompt]
    batch = batches.Batch.of(rollouts, verdicts, problems)
    train.add_credit(run, batch, 0, train.report.Clock(torch.device("cpu")))
    return batch.log_probs


def credited(
    run: Run, rollouts: Rollouts, old: torch.Tensor, token_advantages: torch.Tensor
) -> batches.Batch:
    """What `train.update` takes, with rewards of 0."""
    size = run.config.sampling.rollouts_per_prompt
    return made_batch(
        torch.zeros(len(old)), rollouts, size, log_probs=old, token_advantages=token_advantages
    )


@pytest.fixture(scope="module")
def learning(tmp_path_factory):
    """Where LEARN wrote its run, and what it `printed`."""
    folder = tmp_path_factory.mktemp("learning")
    with pytest.MonkeyPatch.context() as patch, (folder / "printed").open("w") as printed:
        for name in ("make_problem", "demonstrate", "first_error", "response_tokens"):
            patch.setattr(toy, name, getattr(little, name))
        patch.setattr(harness.run.report, "plot", PLOT)
        for module in (harness.run.report, lessons):
            patch.setattr(module, "SILENCE", 0)
        patch.chdir(folder)
        with contextlib.redirect_stdout(printed):
            assert train.main([*LEARN.split(), "--threads", "1", "--out", "."]) == 0
    return folder


def test_shear_learns_the_embedded_task(learning):
    """From a warm-up to a better policy: held-out accuracy up by .20, and weights that find the
    error.

    Fails if credit, loss or update pull the wrong way: then accuracy stays or falls.
    """
    first, *_, last = rows(learning / "embedded-shear-1" / "metrics.jsonl")
    before, after = first["before"], last["after"]
    assert after["greedy"][0] >= before["greedy"][0] + 0.20
    assert after["sampled"][0] >= before["sampled"][0] + 0.20
    assert (
        after["localisation"]["auc"] > 0.85
        and after["localisation"]["auc"] > after["localisation"]["auc_position"]
    )
    printed = (learning / "printed").read_text()
    assert max(len(line) for line in printed.splitlines()) <= 88
    assert "greedy accuracy" in printed


def test_a_run_leaves_what_it_promises(learning):
    """config, metrics, samples with token weights, a picture, and a folder that
    transformers loads.
    """
    folder = learning / "embedded-shear-1"
    config = json.loads((folder / "config.json").read_text())
    assert config["lr"] == 4e-4 and config["window"] == 4 and "torch" in config["versions"]
    before, *metrics, after = rows(folder / "metrics.jsonl")
    assert (
        before["before"]
        and after["after"]
        and [row["step"] for row in metrics] == list(range(1, 9))
    )
    assert metrics[0]["abs_log_ratio"] < 1e-5 and metrics[0]["nbar"] > 0
    assert metrics[0]["eps_over_nbar"] == pytest.approx(0.05)
    assert set(metrics[0]["seconds"]) == {"generate", "grade", "score", "weights", "wait", "train"}
    samples = rows(folder / "samples.jsonl")
    assert len(samples) == 64 and all(
        len(row["tokens"]) == len(row["weights"]["shear"]) for row in samples
    )
    assert {"response", "reason", "first_error", "advantage"} <= set(samples[0])
    for row in (
        samples
    ):  # a token's weight is the largest distance of its spans, where right opposes wrong
        for place, weight in enumerate(row["weights"]["shear"]):
            covering = [far for begin, end, far, *_ in row.get("spans", []) if begin <= place < end]
            assert weight == pytest.approx(max(covering, default=1), abs=2e-4)
        assert bool(row.get("spans")) == (row["advantage"] != 0)
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    model, tokenizer = (
        kind.from_pretrained(folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model(**tokenizer(["a=1+2;a?\n"], return_tensors="pt")).logits.shape[-1] == len(
        toy.SYMBOLS
    )
    before, after = (learning / "printed").read_text().split("\n 2/8 ")
    assert "8 prompts x 8 rollouts" in before and "\n  warm-up: 1 of 200 steps\n" in before
    most = f"{(64 + 16 * 8) * config['max_tokens']:,}"  # greedy, and sampled
    for printed in (before, after):
        assert f"\n  evaluating: 64 of at most {most} tokens\n" in printed


def test_smoke_runs_every_part_whatever_the_model_says(tmp_path, quick, capsys):
    """An untrained model is never right; drawn rewards still give weights, a gradient, a checkpoint
    and a model.
    """
    flags = [
        *quick,
        "--smoke",
        "--steps",
        "1",
        "--eval-groups",
        "2",
    ]
    assert run(tmp_path, *flags) == 0
    before, step, _ = rows(tmp_path / "smoke-1" / "metrics.jsonl")
    assert before["before"]["sampled"][0] == step["reward"] == 0.5 and step["grad_norm"] > 0
    samples = rows(tmp_path / "smoke-1" / "samples.jsonl")
    assert step["weight_std"] > 0 and {row["reason"] for row in samples} == {"drawn"}
    printed = capsys.readouterr().out
    assert "rewards are drawn" in printed and printed.count("smoke test passed") == 1
    assert harness.run.free_name(configured(["--smoke", "--out", str(tmp_path)])) == "smoke-2"


def test_shear_with_unit_weights_is_grpo_to_the_bit(tmp_path, quick, monkeypatch, unequal):
    """Two whole steps: the same losses, gradient norms and weights, so methods differ in one place
    only.
    """
    monkeypatch.setattr(
        shear_settings,
        "weigh_group",
        lambda hidden, mask, correct, **options: Weighed(mask.float(), 1.0, None),
    )
    flags = [
        *quick,
        "--prompts-per-step",
        "4",
        "--steps",
        "2",
    ]
    for method in ("grpo", "shear"):
        assert run(tmp_path, *flags, "--name", method, "--method", method) == 0
    one, other = (rows(tmp_path / method / "metrics.jsonl")[1:3] for method in ("grpo", "shear"))
    for name in ("loss", "grad_norm", "clip_share", "reward", "entropy"):
        assert [row[name] for row in one] == [row[name] for row in other]
    assert one[0]["grad_norm"] > 0
    same, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / m / "model").state_dict()
        for m in ("grpo", "shear")
    )
    assert all(torch.equal(same[name], again[name]) for name in same)


def test_updates_are_those_of_a_written_out_loop(quick):
    """Three off-policy mini-batches of ragged rollouts in float64, a rollout at a time: every
    weight to 1e-6.

    Clips .1 and .4, temperature .7, a norm that is cut, AdamW without decay. Its eps is raised on
    both sides, or Adam would make whole steps of what rounding leaves in gradients near 0.
    """
    flags = (
        "--prompts-per-step 6 --rollouts-per-prompt 4 --prompts-per-update 2 --temperature .7 "
        "--lr 1e-2"
    )
    flags += " --clip-low .1 --clip-high .4 --max-grad-norm .05"
    run = assembled([*quick, *flags.split()])
    run.config = changed(run.config, {"micro_tokens": 150})  # several passes a mini-batch
    run.optimizer.param_groups[0]["eps"] = 1e-3
    reference = copy.deepcopy(run.trained.model).double()
    rollouts = harness.run.sample(run, run.task.train[:6], 4, 1.0)
    mask, ragged = rollouts.mask, rollouts.mask.sum(1)
    assert ragged.min() < ragged.max() / 2
    generator = torch.Generator().manual_seed(1)
    old_logp = old_log_probs(run, rollouts)
    assert_close(
        old_logp, run.trained(rollouts, 0.7).log_probs, atol=1e-4, rtol=0
    )  # scored as it is trained
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
                ratio, advantage = (
                    (logp[t] - old_logp[row, t]).exp(),
                    token_advantages[row, t].double(),
                )
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
        assert_close(ours.double(), expected, atol=1e-6, rtol=0)


def test_updates_that_are_not_finite_are_skipped(quick):
    """One of two, whose loss is NaN: counted, and the other's metrics are the step's. Both, whose
    gradients are infinite: weights and moments stay; the run ends.
    """
    run = assembled([*quick, "--prompts-per-update", "2", "--lr", "1"])
    rollouts = harness.run.sample(
        run, run.task.train[:4], run.config.sampling.rollouts_per_prompt, 1.0
    )
    before = {name: value.clone() for name, value in run.trained.state_dict().items()}
    old, ones = old_log_probs(run, rollouts), torch.ones(rollouts.ids.shape)
    overflow = next(run.trained.parameters()).register_hook(lambda gradient: gradient / 0)
    with pytest.raises(RunFailed, match="step 1: no update had a finite loss"):
        train.update(run, credited(run, rollouts, old, ones), 0)
    overflow.remove()
    assert all(torch.equal(value, before[name]) for name, value in run.trained.state_dict().items())
    assert not run.optimizer.state
    old[3] = torch.nan
    metrics = train.update(run, credited(run, rollouts, old, ones), 0)
    assert metrics["skipped"] == 1 and metrics["grad_norm"] > 0
    assert (
        all(weight.isfinite().all() for weight in run.trained.parameters()) and run.optimizer.state
    )


def test_rollouts_without_advantage_cost_no_pass(quick):
    """Groups of equal rewards leave forward and backward, not the token count; the gradient is the
    same.
    """
    run = assembled([*quick, "--prompts-per-step", "4"])
    run.optimizer = torch.optim.SGD(run.trained.parameters(), lr=0.0)
    rollouts = harness.run.sample(
        run, run.task.train[:4], run.config.sampling.rollouts_per_prompt, 1.0
    )
    old_logp = old_log_probs(run, rollouts) - 0.1
    some = torch.randn(rollouts.ids.shape) * (torch.arange(32) < 16)[:, None]
    seen = []
    run.trained.register_forward_hook(
        lambda policy, inputs, output: seen.append(len(inputs[0].texts))
    )
    first = train.update(run, credited(run, rollouts, old_logp, some), 0)
    assert seen == [16]
    again = train.update(run, credited(run, rollouts, old_logp, some + 1e-30), 0)
    assert seen == [16, 32] and first["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-5)
    assert (
        first["abs_log_ratio"]
        == pytest.approx(0.1, rel=1e-4)
        == pytest.approx(again["abs_log_ratio"], rel=1e-4)
    )
    assert train.update(run, credited(run, rollouts, old_logp, 0 * some), 0)["grad_norm"] == 0


def test_a_filler_row_counts_for_nothing(quick, monkeypatch):
    """What a rank runs beside the others when it has no work left: neither gradients nor metrics
    change.
    """
    run = assembled(quick)
    run.optimizer = torch.optim.SGD(run.trained.parameters(), lr=0.0)
    rollouts = harness.run.sample(run, run.task.train[:2], 8, 1.0)
    batch = credited(
        run, rollouts, old_log_probs(run, rollouts) - 0.1, torch.ones(rollouts.ids.shape)
    )
    plain, deal = train.update(run, batch, 0), train.parallel.deal
    filler = (torch.tensor([3]), True)
    monkeypatch.setattr(
        train.parallel, "deal", lambda *inputs, **options: [*deal(*inputs, **options), filler]
    )
    assert train.update(run, batch, 0) == plain and plain["grad_norm"] > 0


def test_held_out_accuracy_is_that_of_known_verdicts(quick, monkeypatch):
    """One response each, greedy; sampled, means of problems 2/3, 0 and none: 1/3 ± 1/3, clustered
    by problem.
    """
    run = assembled(
        [
            *quick,
            "--eval-groups",
            "3",
            "--temperature",
            ".7",
        ]
    )
    run.task = dataclasses.replace(run.task, first_error=None)
    masks = [SimpleNamespace(mask=torch.ones(1, length)) for length in (9, 14)]
    asked, scores = (
        [],
        [[1.0, 0.0, None, 1.0], [1, 1, 0, None, None, None, None, None] + [0] * 8 + [None] * 8],
    )

    def sample_and_grade(run, problems, count, temperature, clock):
        asked.append((problems, count, temperature))
        return masks[len(asked) - 1], [Verdict(score, "known") for score in scores[len(asked) - 1]]

    monkeypatch.setattr(train, "sample_and_grade", sample_and_grade)
    result = train.evaluate(run, 0)
    assert asked == [(run.task.heldout, 1, 0.0), (run.task.heldout[:3], 8, 0.7)]
    assert result["greedy"] == pytest.approx((2 / 3, 1 / 3, 3))
    assert result["sampled"] == pytest.approx((1 / 3, 1 / 3, 11)) and result["length"] == 14


def test_code_problems_train_and_infra_errors_are_counted(
    tmp_path, qwen_folder, monkeypatch, capsys
):
    """A verdict that cannot be had shows below the step's row and in the metrics, and does not stop
    the run.

    Of a model's folder and a file of JSON lines; prompts that are too long are dropped and counted.
    """
    graded = []
    problem = {"problem": "Print 1.", "tests": {"inputs": [""], "outputs": ["1"]}}
    files.append_rows(tmp_path / "code.jsonl", [problem] * 6 + [{**problem, "problem": "x" * 490}])

    def grade(response, tests, **options):
        assert options["level"] == "auto" and tests == problem["tests"]
        graded.append(response)
        return Verdict(None, "infra_error") if len(graded) % 2 else Verdict(0.0, "wrong")

    monkeypatch.setattr("tasks.problems.grade_code", grade)
    sizes = "--steps 1 --prompts-per-step 2 --rollouts-per-prompt 16 --prompts-per-update 1 --max-tokens 60".split()
    sizes += "--heldout 2 --eval-groups 2".split()
    flags = (
        "--model",
        str(qwen_folder),
        "--task",
        "code",
        "--data",
        str(tmp_path / "code.jsonl"),
        *sizes,
    )
    assert run(tmp_path, *flags) == 0
    metrics = rows(tmp_path / "code-shear-1" / "metrics.jsonl")[1]
    assert 0 < metrics["infra_errors"] < 32 and metrics["reward"] == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"infra {metrics['infra_errors']}" in printed and "1 problems dropped" in printed
    assert "WARNING: 1 problem(s) held out are trained on, too" in printed
    assert "all rewards are 0, so nothing can be learnt" in printed
    assert "a pass over --data takes" in printed
    assert rows(tmp_path / "code-shear-1" / "samples.jsonl")[0]["tests"] == problem["tests"]


def test_a_sandbox_that_is_refused_ends_the_run_before_it_begins(
    qwen_folder, monkeypatch, assert_refused
):
    """`--sandbox strict` where name spaces are forbidden: one sentence, status 2."""

    def refuse(level):
        raise SandboxError(f"{level}: name spaces: Operation not permitted")

    monkeypatch.setattr("grading.sandbox.choose_level", refuse)
    words = f"--task code --model {qwen_folder} --data d --sandbox strict".split()
    assert_refused(train.main, words, "--sandbox strict", "not permitted")


def test_a_rollout_without_a_verdict_counts_for_nothing():
    """Score None: no advantage, no mask, in neither of SHEAR's sets; the others are as in a group
    without it.
    """
    mask, hidden = torch.ones(4, 6).bool(), torch.randn(4, 6, 3)
    verdicts = [
        Verdict(1.0, "correct"),
        Verdict(0.0, "wrong"),
        Verdict(None, "infra_error"),
        Verdict(0.0, "wrong"),
    ]
    batch = batches.Batch.of(without_text(mask), verdicts, [{}])
    batch.hidden = hidden[[0, 1, 3]].flatten(0, 1)
    assert batch.advantages[2] == 0 and not batch.rollouts.mask[2].any() and mask[2].all()
    ours = credit_by(configured(["--window", "3", "--stride", "3"]), batch)
    rest = torch.tensor([0, 1, 3])
    alone = shear_weights(hidden[rest], mask[rest], batch.correct[rest], window=3, stride=3)
    assert_close(ours[rest], batch.advantages[rest, None] * alone)
    assert ours[2].abs().max() == 0


def test_states_exist_for_a_block_of_whole_groups_at_a_time(quick, monkeypatch, unequal):
    """A group, two, or all together: the same token advantages and log-probabilities; states never
    leave a block.
    """
    flags = [*quick, "--prompts-per-step", "5"]
    seen, found = [], []

    def noted(policy, rollouts, **options):
        scored = log_probs(policy, rollouts, **options)
        assert (
            len(scored.hidden)
            == rollouts.mask.sum()
            <= max(batches.BLOCK_TOKENS, 8 * run.config.sampling.max_tokens)
        )
        seen.append(len(rollouts.texts))
        return scored

    monkeypatch.setattr(train, "log_probs", noted)
    run = assembled([*flags, "--prompts-per-update", "1"])
    problems = run.task.train[:5]
    verdicts = [Verdict(row % 2.0, "drawn") for row in range(40)]
    for tokens in (1, 2 * 8 * run.config.sampling.max_tokens, 2**20):
        monkeypatch.setattr(batches, "BLOCK_TOKENS", tokens)
        torch.manual_seed(0)
        batch = batches.Batch.of(harness.run.sample(run, problems, 8, 1.0), verdicts, problems)
        train.add_credit(run, batch, 0, train.report.Clock(torch.device("cpu")))
        found.append(batch)
        assert batch.hidden is None and len(pickle.dumps(batch)) < 500_000
    assert seen[:5] == [8] * 5 and sum(seen[5:-1]) == seen[-1] == 40 and len(seen) > 7
    for batch in found[1:]:
        assert_close(batch.token_advantages, found[0].token_advantages, atol=2e-5, rtol=1e-4)
        assert_close(batch.log_probs, found[0].log_probs, atol=1e-5, rtol=0)
        assert batch.rollouts.texts == found[0].rollouts.texts
    assert found[0].token_advantages.abs().max() > 0.01


def test_dynamic_sampling_replaces_groups_of_equal_rewards(quick, monkeypatch):
    """And no others; the problems that come in are others, each with its own rollouts and verdicts;
    N bounds it.
    """
    run = assembled([*quick, "--rollouts-per-prompt", "4"])
    drawn = []

    def verdicts(task, problems, rollouts):
        """Of equal rewards in the groups 1 and 3 of what is sampled at once, with one verdict alone
        in 5.
        """
        drawn.append((problems, rollouts.texts))
        scores = [1.0, 0.0, 1.0, 0.0] * len(problems)
        for group, score in ((1, 1.0), (3, 0.0), (5, None)):
            scores[4 * group : 4 * group + 4] = [score, score, score, score or 0.0][
                : len(scores) - 4 * group
            ]
        return [Verdict(score, "drawn") for score in scores]

    monkeypatch.setattr(type(run.task), "verdicts", verdicts)
    for most, expected in (1, 3), (9, 3 + 1):
        drawn.clear()
        run.config = changed(run.config, {"dynamic_sampling": most})
        clock = train.report.Clock(torch.device("cpu"))
        problems = run.task.draw(2, 8, 0)
        sampled = train.sample_and_grade(run, problems, 4, 1.0, clock)
        problems, rollouts, graded, replaced = train.resample_equal(
            run, 2, problems, *sampled, clock
        )
        assert replaced == expected
    first, second, third = drawn
    come_from = [
        (first, 0),
        (second, 0),
        (first, 2),
        (third, 0),
        (first, 4),
        (second, 2),
        (first, 6),
        (first, 7),
    ]
    for group, ((of_problems, texts), place) in enumerate(come_from):
        rows = slice(4 * group, 4 * group + 4)
        assert (
            problems[group] == of_problems[place]
            and rollouts.texts[rows] == texts[4 * place : 4 * place + 4]
        )
        assert [verdict.reward for verdict in graded[rows]] == [1.0, 0.0, 1.0, 0.0]
        for ids, mask, text in zip(
            rollouts.ids[rows], rollouts.mask[rows], rollouts.texts[rows], strict=True
        ):
            assert run.tokenizer.decode(ids[mask]).removesuffix("<eos>") == text


NEEDS = {"arca": "--lora-rank 2"}
STEPS = []  # of each call of `surprisal`


def surprisal(batch, context, *, floor: float):
    """A method of a user's: more on tokens that the policy itself finds unlikely."""
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


def test_a_method_is_one_function_and_one_entry(tmp_path, quick, monkeypatch, assert_refused):
    """It trains two steps, its metric is logged, its option is checked; it is told the steps done,
    also in the evaluations before and after.
    """
    option = Option(0.01, "added to every token's -log-probability", 0, 100)
    entry = Method("more on unlikely tokens", options={"floor": option})
    monkeypatch.setitem(FUNCTIONS, "surprisal", surprisal)
    monkeypatch.setitem(METHODS, "surprisal", entry)
    flags = [
        *quick,
        "--smoke",
        "--method",
        "surprisal",
        "--steps",
        "2",
    ]
    assert run(tmp_path, *flags, "--method-option", "floor=2", "--name", "mine") == 0
    _, *steps, _ = rows(tmp_path / "mine" / "metrics.jsonl")
    assert [step["grad_norm"] > 0 and step["salience"] > 2 for step in steps] == [True, True]
    assert STEPS == [0, 0, 1, 2]
    assert_refused(
        train.main,
        [*flags, "--method-option", "floor=-1"],
        "--method-option floor=-1: must be from 0",
    )


@pytest.mark.parametrize("method", ["sdpo", "grpo"])
def test_a_method_says_whether_rollouts_without_credit_count_in_the_loss_s_mean(
    quick, monkeypatch, method
):
    """Two groups of four, the second without credit: the mean is over all tokens, but for sdpo over
    the first's.
    """
    run = assembled([*quick, "--method", method])
    rollouts, counts = harness.run.sample(run, run.task.train[:2], 4, 1.0), []
    token_advantages = 1.0 * rollouts.mask
    token_advantages[4:] = 0
    batch = credited(run, rollouts, old_log_probs(run, rollouts), token_advantages)

    def noted(*inputs):
        counts.append(inputs[4])
        return grpo.policy_loss(*inputs)

    monkeypatch.setattr(train, "policy_loss", noted)
    train.backward(run, batch, torch.arange(8))
    assert set(counts) == {int(rollouts.mask[: 4 if method == "sdpo" else 8].sum())}


@pytest.mark.parametrize("method", [*METHODS, "grpo+shear", "rlsd+pure"])
def test_every_method_starts_with_the_defaults(method):
    """And what it NEEDS: prompts that tell an answer and a response fit into the embedded model's
    context, too.
    """
    flags = ["--method", method, *NEEDS.get(method, "").split()]
    assert prepare.load_parts(configured(flags), ALONE).task.heldout


def test_grpo_does_not_keep_hidden_states(quick, monkeypatch):
    """At the paper's sizes they are 11 GB that nothing would read."""
    kept = []
    monkeypatch.setattr(
        train,
        "log_probs",
        lambda *_, keep_hidden, **limits: kept.append(keep_hidden) or interrupt(),
    )
    for method in ("grpo", "shear"):
        run = assembled([*quick, "--method", method])
        with pytest.raises(KeyboardInterrupt):
            old_log_probs(run, harness.run.sample(run, run.task.train[:1], 8, 1.0))
    assert kept == [False, True]


def test_weights_are_loaded_straight_to_the_device(qwen_folder):
    """On `meta` they can have been nowhere else before."""
    meta = torch.device("meta")
    tokenizer = models.load_tokenizer("--model", str(qwen_folder))
    model = models.load_weights(
        "--model", str(qwen_folder), AutoModelForCausalLM.from_pretrained, "auto", meta, tokenizer
    )
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {meta}


def test_a_loaded_model_is_the_plain_one(start):
    """The folder's weights to the bit, tied ones tied, without hooks that copies, sharding or
    adapters would meet.
    """
    device = torch.device("cpu")
    model = models.load_model(start, device, models.load_tokenizer("--model", start))
    for name, value in load_file(f"{start}/model.safetensors").items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not hasattr(model, "hf_device_map") and not any(
        hasattr(part, "_hf_hook") for part in model.modules()
    )


def test_a_model_that_a_gpu_cannot_hold_is_no_broken_folder(quick, tmp_path, monkeypatch, capsys):
    """Status 1, and what would take less memory."""

    def fail(*names, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.23 GiB.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert run(tmp_path, *quick) == 1
    message = capsys.readouterr().err
    assert "out of memory" in message and "use more GPUs" in message and message.count("\n") == 1


def test_a_model_that_never_fits_is_refused_before_it_is_read(
    qwen_folder, tmp_path, monkeypatch, assert_refused
):
    """Status 2, the need, and no folder; --force goes on to the weights."""
    monkeypatch.setattr(prepare.memory, "room_gb", lambda device: 0.0001)
    monkeypatch.setattr(models, "load_model", lambda *inputs: interrupt())
    (tmp_path / "data.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 9)
    flags = [
        "--model",
        str(qwen_folder),
        "--data",
        str(tmp_path / "data.jsonl"),
        "--max-tokens",
        "9",
    ]
    flags += ["--heldout", "1", "--eval-groups", "1", "--name", "small"]
    assert_refused(
        train.main,
        [*flags, "--out", tmp_path],
        "more GPUs or a smaller model, or continue with --force",
    )
    assert run(tmp_path, *flags, "--force") == 130 and not (tmp_path / "small").exists()


def with_config(**changes):
    """A folder whose config is of another model than its weights."""

    def harm(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return harm


def layers(count):
    return with_config(num_hidden_layers=count, layer_types=["full_attention"] * count)


def spoiled_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = torch.nan  # of a token that no prompt has
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def piped_weights(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def written(text, name="chat_template.jinja"):
    return lambda folder: (folder / name).write_text(text)


def missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def other(family, sizes=SMALL, **more):
    """A folder with a small model of another architecture."""
    config = AutoConfig.for_model(family, vocab_size=300, **sizes, **more)
    return lambda folder: AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "cannot be loaded"),
        (layers(3), "not those of its config.json (model.layers.2."),
        (layers(1), "not those of its config.json (model.layers.1."),
        (with_config(intermediate_size=32), "not those of its config.json (model.layers.0.mlp."),
        (spoiled_weights, "weights are not finite (model.embed_tokens.weight)"),
        (
            with_config(rope_parameters={"rope_theta": 0, "rope_type": "default"}),
            "weights are not finite (model.rotary_emb.inv_freq)",
        ),
        (piped_weights, "(its model.safetensors is no file)"),
        (
            written('{"eos_token_id": ["</s>"]}', "generation_config.json"),
            "its eos_token_id is no number",
        ),
        (written("{{ raise_exception('no') }}"), "--template chat: the model's own one fails (no)"),
        (written("{% import 'os' as os %}"), "--template chat: the model's own one fails"),
        (
            written("{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}"),
            "does not end",
        ),
        (missing_tokenizer, "its tokenizer is missing"),
        (other("granite", logits_scaling=4), "not head(last hidden state)"),
        (
            other("falcon_h1", mamba_d_ssm=64, mamba_n_heads=4),
            "rank 2: [PEFT:PeftType.LORA] Module 'out_proj' is",
        ),
        (other("mamba", dict(hidden_size=32, num_hidden_layers=1)), "mamba has no attention"),
    ],
)
def test_a_folder_that_would_train_wrongly_is_refused(
    harm, words, qwen_folder, tmp_path, monkeypatch, assert_refused
):
    """Weights, tokenizer, template, config, architecture: one sentence, status 2."""
    monkeypatch.setattr(models, "TEMPLATE_SECONDS", 0.2)
    folder = tmp_path / "model"
    shutil.copytree(qwen_folder, folder)
    harm(folder)
    (tmp_path / "data.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 40)
    flags = [
        "--data",
        str(tmp_path / "data.jsonl"),
        "--max-tokens",
        "9",
        "--heldout",
        "1",
        "--eval-groups",
        "1",
    ]
    flags += ["--lora-rank", "2", "--out", str(tmp_path)]
    assert_refused(train.main, ["--model", folder, *flags], "error: --", words)


def test_ctrl_c_ends_after_the_step(tmp_path, start, quick, monkeypatch, capsys, unequal):
    """A real signal during an update: the step's row is written, its weights are saved; the second
    time, they are not.

    The first is SIGTERM, as Slurm sends it. Status 130, and the command that goes on.
    """
    plain, pressed = train.backward, []

    def press(*inputs):
        pressed.append(os.kill(os.getpid(), signal.SIGINT if pressed else signal.SIGTERM))
        return plain(*inputs)

    monkeypatch.setattr(train, "backward", press)
    flags = [
        *quick,
        "--method",
        "grpo",
        "--eval-groups",
        "1",
        "--heldout",
        "1",
    ]
    assert (
        run(tmp_path, *flags, "--prompts-per-update", "8", "--steps", "5", "--name", "once") == 130
    )
    before, *steps = rows(tmp_path / "once" / "metrics.jsonl")
    assert before["before"] and [row["step"] for row in steps] == [1] == [len(pressed)]
    path, step = checkpoint.find(tmp_path / "once")
    trained = load_file(path / "model" / "model.safetensors")["model.norm.weight"]
    assert step == 1 and not torch.equal(
        trained, load_file(f"{start}/model.safetensors")["model.norm.weight"]
    )
    folder = shlex.quote(str(tmp_path / "once"))
    said = (
        "a checkpoint holds 1 of 5 steps; resume with: python train.py --resume "
        f"{folder}\ninterrupted\n"
    )
    assert capsys.readouterr().err.endswith(said)
    assert run(tmp_path, *flags, "--prompts-per-update", "2", "--name", "twice") == 130
    assert len(pressed) == 2 and not (tmp_path / "twice").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_step_is_clean(tmp_path, monkeypatch, capsys):
    """During the warm-up nothing is worth saving: a message, and the folder's name is free
    again.
    """

    monkeypatch.setattr(toy, "warm_up", interrupt)
    assert run(tmp_path, *QUICK) == 130
    assert "run the same command again" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--stride 13", "--stride 13: exceeds --window"),
        ("--prompts-per-step 10", "--prompts-per-step 10: no multiple of --prompts-per-update"),
        (
            "--max-tokens 140",
            "--max-tokens 140: with a prompt of 33 tokens it exceeds the model's context of 165",
        ),
        ("--max-tokens 65 --method hsd", "--max-tokens 65: with a prompt of 37 tokens it exceeds"),
        (
            "--shard-over 2 --model START --toy-lines 2 --task embedded",
            "--shard-over 2: does not divide 1 ranks",
        ),
        (
            "--toy-lines 1 --heldout 300",
            "--toy-lines 1: too few different problems for --heldout 300",
        ),
        ("--data x.jsonl", "--data x.jsonl: the task makes its own; give --task math and --model"),
        ("--task math", "--task math: needs --model"),
        ("--task code --model QWEN --data DATA --max-tokens 9", "--data DATA, line 1: "),
        ("--model QWEN --max-tokens 9", "hkust-nlp/SimpleRL-Zoo-Data"),
        ("--model FOLDER --data DATA", "--model FOLDER: cannot be loaded"),
        ("--model QWEN --data BAD --max-tokens 9", "line 2"),
        ("--task embedded --model QWEN", "--model QWEN: not a model of the embedded task"),
        ("--name taken", "--name taken: OUT/taken exists already"),
        ("--method arca", "--method arca: needs a LoRA adapter; give --lora-rank"),
        (
            "--method prm --model QWEN --max-tokens 9",
            "--method prm: needs a process reward model; give --prm",
        ),
        ("--prm FOLDER", "--prm FOLDER: --method shear uses none"),
        ("--method oar-g --task code --model QWEN", "; programs have none; choose another method"),
        (
            "--method oracle --model QWEN",
            "--method oracle: needs the true first error; only --task",
        ),
        ("--method scapo --model QWEN", "--method scapo: needs its problems in other words"),
        ("--method pure --rescale mean1", "--rescale mean1: the method has no weights"),
        ("--method entropy --method-option kappa=1", "--method-option kappa=1: must be"),
        ("--out DATA", "--out DATA/embedded-shear-1: cannot be made"),
        ("--model QWEN --max-tokens 0", "--max-tokens 0: only --task embedded knows"),
        ("--bench math500", "--eval-every 0: needs --bench, which needs it"),
        (
            "--eval-every 1 --bench x --model START --task embedded --toy-lines 2",
            "--bench x: no such",
        ),
        ("--track tensorboard", "--track tensorboard: this package is not installed"),
        ("--method sheer", "--method: 'sheer' must be one of grpo, signbalance"),
        ("--model=", "--model: '' is empty"),
    ],
)
def test_bad_input_is_one_sentence(
    flags, words, tmp_path, qwen_folder, start, monkeypatch, assert_refused
):
    """Status 2; names the flag, its value and the remedy; no traceback, nothing written or
    overwritten.
    """
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # or the hub is asked again and again
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"problem": "1", "answer": "1"}\n{"problem"\n')
    (tmp_path / "data.jsonl").write_text('{"problem": "1", "answer": "1"}\n')
    places = {"FOLDER": "empty", "BAD": "bad.jsonl", "DATA": "data.jsonl"}
    places = {name: tmp_path / place for name, place in places.items()} | {
        "QWEN": qwen_folder,
        "START": start,
    }
    there = sorted(tmp_path.rglob("*"))
    argv = ["--out", tmp_path, *(filled(flag, places) for flag in flags.split())]
    assert_refused(train.main, argv, filled(words, places | {"OUT": tmp_path}))
    assert sorted(tmp_path.rglob("*")) == there
