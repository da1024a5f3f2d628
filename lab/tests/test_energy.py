"""The energy table: sums over the tokens of each part of a response, by a loop."""

from dataclasses import replace

import pytest
import torch
from builders.commands import words_of
from builders.runs import ALONE
from builders.small_models import small_config, turns_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from credit.batch import Batch
from harness.files import read_lines, write_rows
from harness.load import load_run
from lab.studies import energy, gradients
from lab.tools.salience import logit_gradients
from tasks.task import text_task

FLAGS = "--use builders.alternating --toy-lines 1 --toy-width 16 --warmup-steps 1 --heldout 8 --eval-groups 2"
FLAGS += " --prompts-per-step 4 --prompts-per-update 4"
START, END = 2, 5  # of every wrong rollout's first wrong step


def errors_at_one_place(batch, *_):
    """In place of `Batch.true_errors`: the untaught model's responses have no form."""
    places = torch.tensor([START, END]).expand(len(batch.rewards), 2)
    return torch.where(batch.correct[:, None], -1, places)


def load_without_errors(*args):
    """In place of `load_run`: a task that knows no first errors."""
    run = load_run(*args)
    run.context.task = replace(run.context.task, first_error=None)
    return run


def part_of(token: int, length: int, parts: tuple[str, ...]) -> str:
    """Which part of a response of this length a token is in."""
    if parts == energy.AROUND_ERROR:
        return parts[(token >= START) + (token >= END)]
    return parts[sum(token >= share * length / 4 for share in (1, 2, 3))]


@pytest.mark.parametrize("parts", [energy.AROUND_ERROR, energy.QUARTERS])
def test_the_table_has_the_sums_of_a_loop_over_tokens(parts, tmp_path, monkeypatch, capsys):
    """Of two batches, with weights that differ from token to token, t / T.

    Wrong rollouts count where errors are known, and else all, as each group has both kinds.
    """
    monkeypatch.setattr(Batch, "true_errors", errors_at_one_place)
    if parts == energy.QUARTERS:
        monkeypatch.setattr(energy, "load_run", load_without_errors)
    rows = tmp_path / "runs" / "rows.jsonl"
    energy.main(words_of(FLAGS, "--batches 2 --arms position --rows", rows))
    assert f"| position | {parts[-1]}" in capsys.readouterr().out
    found = {row["part"]: row for row in read_lines(rows) if row["arm"] == "position"}
    run = load_run(gradients.settings_of_run(words_of(FLAGS)), ALONE)
    energy.teach(run)
    sums = {part: torch.zeros(4) for part in parts}  # tokens, n, w, w^2 n
    rollouts = 0
    for index in range(2):
        batch = gradients.sample_batch(run, index)
        norms = logit_gradients(batch.rollouts, run.context)
        counts = ~batch.correct if parts == energy.AROUND_ERROR else batch.advantages != 0  # (B,)
        for row in counts.nonzero().flatten().tolist():
            rollouts += 1
            length = batch.lengths[row].item()
            for t in range(length):
                part = part_of(t, length, parts)
                n, w = norms[row, t].item(), (t + 1) / length
                sums[part] += torch.tensor([1, n, w, w * w * n])
    totals = sum(sums.values())
    for part, (tokens, n, w, weighted) in sums.items():
        expected = {
            "tokens": tokens / rollouts,
            "energy": n / rollouts,
            "share": 100 * n / totals[1],
            "weight": w / tokens,
            "w2 share": 100 * weighted / totals[3],
        }
        for name, value in expected.items():
            assert found[part][name] == pytest.approx(value.item(), rel=1e-3)


@pytest.mark.parametrize("labelled", [True, False])
def test_labelled_solutions_of_a_file_take_the_place_of_samples(tmp_path, labelled):
    """The energy is that of a loop over the model's logits, of the first mixed group.

    A text that is wrong elsewhere in another problem keeps its place.
    """
    tokenizer = turns_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(small_config(Qwen2Config, vocab_size=len(tokenizer))).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    solutions = {"3 + 4 = 8, so 8": 0, "3 + 4 = 7": 1, "7": 1}
    lines = []
    for text, label in solutions.items():
        lines.append({"problem": "What is 3 + 4?", "solution": text, "label": label})
    if labelled:
        lines[0]["error"] = [8, 9]
    for text, label in {"2": 1, "3 + 4 = 8, so 8": 0}.items():
        line = {"problem": "What is 1 + 1?", "solution": text, "label": label, "error": [0, 1]}
        lines.append(line if labelled else line | {"error": None})
    write_rows(tmp_path / "solutions.jsonl", lines)
    rows = tmp_path / "rows.jsonl"
    words = f"--model {tmp_path / 'model'} --rollouts {tmp_path / 'solutions.jsonl'} --rows {rows}"
    energy.main(words_of(words, "--template plain --device cpu --arms position --batches 1"))
    found = {row["part"]: row for row in read_lines(rows)}
    if not labelled:
        assert list(found) == list(energy.QUARTERS)
        tokens = sum(row["tokens"] for row in found.values())
        assert tokens == pytest.approx(sum(map(len, solutions)) / 3)
        return
    assert [found[part]["tokens"] for part in energy.AROUND_ERROR] == [8, 1, 6]
    task = text_task("math", "plain", tokenizer, grade=None)
    prompt = tokenizer(task.prompt({"problem": "What is 3 + 4?"}))["input_ids"]
    response = tokenizer("3 + 4 = 8, so 8")["input_ids"]
    probabilities = (
        model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 :].softmax(-1)
    )
    norms = []
    for place, token in enumerate(response):
        p = probabilities[place]
        norms.append((1 - 2 * p[token] + p.square().sum()).item())
    for part, tokens in zip(energy.AROUND_ERROR, (norms[:8], norms[8:9], norms[9:]), strict=True):
        assert found[part]["energy"] == pytest.approx(sum(tokens), rel=1e-4)


def test_an_arm_that_needs_samples_of_its_own_is_refused(assert_refused):
    """All arms share a run's batches."""
    arm = "hot: shear --temperature 0.2"
    words = [*words_of(FLAGS), "--arms", arm]
    assert_refused(energy.main, words, f"--arms {arm}", "credit alone")
