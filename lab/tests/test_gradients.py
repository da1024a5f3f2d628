"""The gradient test: the gradients are those of training, and their statistics those of theory."""

import pytest
import torch
from builders.commands import words_of
from builders.runs import ALONE, sharded
from builders.small_models import save_model, small_config, turns_tokenizer
from edited import TINY
from scipy import stats
from torch.nn.functional import cosine_similarity
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from base import files
from harness.run import load_run
from lab.studies import gradients
from lab.studies import stats as statistics
from lab.tools.moments import above_others
from tasks.task import text_task


@pytest.fixture
def run():
    """A run of an untaught model; its verdicts alternate, for one test."""
    return load_run(gradients.settings_of_run(words_of(TINY)), ALONE)


@pytest.mark.parametrize("method", ["grpo", "shear"])
def test_a_gradient_is_that_of_the_first_update(method, run):
    """The gradient is minus the one that `train.update` takes its step by, before clipping."""
    settings = gradients.settings_of(method, words_of(TINY))
    batch = gradients.sample_batch(run, 0)
    arms = gradients.prepared(run, {method: settings})
    credit = gradients.credit_by_arm(batch, arms.values())
    (ours,) = gradients.gradients_of(run, batch, credit, 10**9)
    run.config = settings
    trained = sharded(run)
    batch = train.score_and_credit(trained, batch, train.log.Clock(ALONE.device))
    seen = []
    trained.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(weights.grad.flatten() for weights in trained.trained.parameters())
    )
    metrics = train.update(trained, batch, 0)
    theirs = torch.cat(seen)
    assert metrics["grad_norm"] == pytest.approx(ours.norm().item(), rel=1e-3)
    assert cosine_similarity(ours, -theirs, dim=0) > 1 - 1e-5


def test_a_projection_keeps_dot_products():
    """Cosines of projected gradients are those of the gradients to about 1 / sqrt(numbers)."""
    shared = torch.randn(200_000)
    vectors = [shared + 2 * torch.randn(200_000) for _ in range(2)]
    assert torch.equal(gradients.project(vectors[0].split(50_000), 200_000), vectors[0])
    small = [gradients.project([vector], 4096) for vector in vectors]
    expected = cosine_similarity(*vectors, dim=0)
    assert abs(cosine_similarity(*small, dim=0) - expected) < 5 / 4096**0.5


def test_statistics_have_no_bias():
    """SNR and the cosine of means are right on average, for noisy vectors with a known mean."""
    mean = torch.tensor([3.0, 0.0] + [0.0] * 398)
    other = torch.tensor([3.0, 4.0] + [0.0] * 398)
    ratios = []
    products = []
    for _ in range(400):
        noise = torch.randn(2, 8, 400)
        ratios.append(statistics.signal_to_noise(mean + noise[0]))
        products.append(statistics.product_of_means(mean + noise[0], other + noise[0]))
    assert stats.ttest_1samp(ratios, 9 / 400).pvalue > 0.001
    assert stats.ttest_1samp(products, 9.0).pvalue > 0.001
    assert statistics.cosine_of_means(mean.expand(3, -1), other.expand(3, -1)) == pytest.approx(0.6)


@pytest.mark.parametrize("count", [1, 3])
def test_adam_s_steps_are_the_optimizer_s(count):
    """`adam_steps` gives the last of `count` steps of torch's AdamW, for each row of batches.

    Batches that are left over count in no row.
    """
    batches = torch.randn(7, 5)
    for row, ours in enumerate(gradients.adam_steps(batches, count)):
        weights = torch.zeros(5, requires_grad=True)
        optimizer = torch.optim.AdamW([weights], lr=1.0, weight_decay=0.0, maximize=True)
        for gradient in batches[row * count : (row + 1) * count]:
            before = weights.detach().clone()
            weights.grad = gradient.clone()
            optimizer.step()
        assert torch.allclose(ours, weights.detach() - before, atol=1e-5)
    assert len(gradients.adam_steps(batches, count)) == 7 // count


def test_the_command_writes_a_row_per_arm(tmp_path, capsys, assert_refused):
    """D is paired by batch; an adapter is refused."""
    rows = tmp_path / "runs" / "rows.jsonl"
    words = words_of(TINY, "--batches 3 --reference 2 --rows", rows)
    arms = ["--arms", "shear", "less: scaled --method-option negative=.5"]
    gradients.main([*words, *arms])
    printed = capsys.readouterr().out
    found = files.read_lines(rows)
    assert {row["arm"] for row in found} == {"grpo", "shear", "less"}
    batches = files.read_lines(rows.with_suffix(".batches.jsonl"))
    for row in found:
        own = [batch["cos"] for batch in batches if batch["arm"] == row["arm"]]
        assert sum(own) / 3 == pytest.approx(row["cos"])
    assert "+0.000 | 0.000 | +0.000 \u00b1 0.000 | -" in " ".join(printed.split())
    arm = "lora: grpo --use lab.tools.lora:rank=2"
    message = f"--arms {arm}: may have flags of credit alone"
    assert_refused(gradients.main, [*words, "--arms", arm], message)


def test_groups_of_a_file_take_the_place_of_samples(tmp_path, assert_refused):
    """The gradients of the last layer are those of a loop over the model's log-probabilities.

    Groups of one kind are left out; the first mixed ones are the reference.
    """
    tokenizer = turns_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(small_config(Qwen2Config, vocab_size=len(tokenizer))).eval()
    save_model(tmp_path / "model", model, tokenizer)
    labels = {"3 + 4": [1, 0, 0], "2 + 2": [1, 1, 1], "1 + 6": [0, 1, 1], "5 + 1": [1, 0, 1]}
    labels["4 + 4"] = [1, 1, 0]
    path = tmp_path / "solutions.jsonl"
    for problem, of_problem in labels.items():
        for place, label in enumerate(of_problem):
            text = f"{problem} = {place} or so"[: 9 + place]
            files.append_rows(path, [{"problem": problem, "solution": text, "label": label}])
    rows = tmp_path / "rows.jsonl"
    words = f"--model {tmp_path / 'model'} --rollouts {path} --rows {rows} --layers 1"
    words += " --template plain --device cpu --arms position --reference 2"
    gradients.main(words_of(words, "--batches 2"))

    task = text_task("math", "plain", tokenizer, grade=None)
    last = list(model.base_model.layers[-1].parameters())
    objectives = dict.fromkeys(labels, 0.0)
    for line in files.read_lines(path):
        problem = line["problem"]
        prompt = tokenizer(task.prompt(line))["input_ids"]
        ids = tokenizer(line["solution"])["input_ids"]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        gap = line["label"] - sum(labels[problem]) / 3
        objectives[problem] += gap * logits.log_softmax(-1)[range(len(ids)), ids].sum()

    def taken(problem):
        return torch.cat([g.flatten() for g in torch.autograd.grad(objectives[problem], last)])

    reference = taken("3 + 4") + taken("1 + 6")
    batches = torch.stack([taken("5 + 1"), taken("4 + 4")])
    expected = cosine_similarity(batches, reference[None])
    cosines = files.read_lines(rows.with_suffix(".batches.jsonl"))
    ours = [row["cos"] for row in cosines if row["arm"] == "grpo"]
    assert ours == pytest.approx(expected.tolist(), abs=1e-4)
    message = f"--rollouts {path}: 4 groups have right and wrong solutions, and"
    assert_refused(gradients.main, words_of(words, "--batches 3"), message, "lower them")
    adapted = words_of(words, "--batches 2 --use lab.tools.lora:rank=2")
    assert_refused(gradients.main, adapted, "lab.tools.lora", "one trains an adapter")


def test_an_arm_s_random_draws_do_not_depend_on_the_others(run):
    """`random` has the same credit alone and after `shuffle`."""
    settings = {arm: gradients.settings_of(arm, words_of(TINY)) for arm in ("shuffle", "random")}
    both = gradients.prepared(run, settings).values()
    torch.manual_seed(0)
    (_, after) = gradients.credit_by_arm(gradients.sample_batch(run, 0), both)
    (alone,) = gradients.credit_by_arm(gradients.sample_batch(run, 0), [*both][1:])
    assert after.std() > 0 and torch.equal(after, alone)


def test_the_reference_counts_graded_rollouts_alone():
    """r minus the mean of the other graded ones; nothing where there is no other, or no verdict."""
    rewards = torch.tensor([1.0, 0.0, torch.nan, torch.nan] * 2 + [1.0] + [torch.nan] * 7)
    gaps = above_others(rewards, 8).tolist()
    assert gaps[:8] == pytest.approx([2 / 3, -2 / 3, 0, 0] * 2) and not any(gaps[8:])


def test_the_interval_of_d_has_the_reference_s_noise_too():
    """The 90% interval of few batches and references holds D of endless ones 88 times of 100.

    With the reference held fixed it would be 70 times.
    """
    directions = torch.eye(40)[[0, 0, 0]]
    directions[1, 1] = 0.5

    def draw(count: int) -> list[torch.Tensor]:
        noise = torch.randn(3, count, 40)
        return list(directions[:, None] + torch.tensor([1.0, 0.5, 1.0])[:, None, None] * noise)

    reference, usual, batches = draw(100_000)
    limit = statistics.gaps(batches, usual, directions[0]).mean().item()
    held = 0
    for _ in range(300):
        reference, usual, batches = draw(8)
        difference, half = statistics.gain_of_cosine(batches, usual, reference)
        held += abs(difference - limit) < half
    assert 0.82 < held / 300 < 0.94
