"""Find a planted mistake: in a copy of the sources one place of the method is wrong.

    python -m lab.learn.hunt 1                    # writes the copy hunts/1, prints the symptom
    python -m lab.learn.hunt 1 --at shear.py:160  # says warm or cold: the mistake is there, or not
    python -m lab.learn.hunt 1 --answer           # shows the mistake, and how to test the copy

There are twelve mistakes, each in a file at the root. Read the copy beside the paper (arXiv
2604.23318), or try its functions: most copies still train, and no error says what is wrong. Two
have no symptom. `.ci/hunts` plants every mistake and runs its test.

Left out of the copy: tests and `lab/learn/`, which would give the mistake away, as would `diff -r`;
and `lab/records/`.
"""

import argparse
import shutil
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mistake(NamedTuple):
    """One wrong change of a source file."""

    symptom: str
    file: str
    was: str  # the right text, which the file has once
    now: str  # the wrong text
    test: str  # it fails with the mistake


NO_SYMPTOM = "none, the copy learns. Compare it with the paper."
MISTAKES = [
    Mistake(
        "Some responses have one span more than Eq. (2) gives them.",
        "shear.py",
        "max(length - window, 0) + stride, stride)",
        "max(length - window, 0) + stride + 1, stride)",
        "test_shear.py::test_spans_cover_every_token_and_stop_at_the_end",
    ),
    Mistake(
        "Weights rise one token before the first token that differs.",
        "grpo.py",
        "states[is_response] if details",
        "states.roll(-1, 1)[is_response] if details",
        "test_grpo.py::test_scores_are_the_model_s_own_at_the_sampled_tokens",
    ),
    Mistake(
        "The states that are compared are not the ones that the head reads.",
        "grpo.py",
        """        states = self.model.base_model(
            input_ids=ids, use_cache=False, **model_kwargs
        ).last_hidden_state  # (b, S, d)
        before = states[:, :-1][is_response[:, 1:]]  # (n, d)
""",
        """        outputs = self.model.base_model(
            input_ids=ids, use_cache=False, output_hidden_states=True, **model_kwargs
        )
        states = outputs.hidden_states[-2]  # (b, S, d), of the layer before the last
        before = outputs.last_hidden_state[:, :-1][is_response[:, 1:]]  # (n, d)
""",
        "test_grpo.py::test_scores_are_the_model_s_own_at_the_sampled_tokens",
    ),
    Mistake(
        NO_SYMPTOM,
        "grpo.py",
        "std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp_min(1)).sqrt()",
        "std = (centred.square().sum() / (count.sum() - 1).clamp_min(1)).sqrt()",
        "test_grpo.py::test_group_advantages_are_equation_1",
    ),
    Mistake(
        "A ratio of 1.25 has no gradient, a ratio of .75 always has one.",
        "grpo.py",
        "ratio.clamp(1 - clip_low, 1 + clip_high)",
        "ratio.clamp(1 - clip_high, 1 + clip_low)",
        "test_grpo.py::test_the_clip_token_by_token",
    ),
    Mistake(
        "States that are ten times as large get other weights.",
        "shear.py",
        'unit = nbar if eps_unit == "nbar" else 1.0',
        'unit = nbar if eps_unit == "raw" else 1.0',
        "test_shear.py::test_eps_may_be_in_units_of_nbar_or_of_the_distances",
    ),
    Mistake(
        "The weights of wrong rollouts do not depend on the states of right ones.",
        "shear.py",
        """    costs = cost(right.states, wrong.states)  # (N+, N-), Eq. (3)
    unit = nbar if eps_unit == "nbar" else 1.0
    nearest = closest(costs, right, wrong, eps * unit, measure)  # Alg. 1 line 5, Step 1
    omega[right.mask] = pool(nearest.of_right / nbar, right.spans)  # Alg. 1 line 14, Step 3
    omega[wrong.mask] = pool(nearest.of_wrong / nbar, wrong.spans)
""",
        """    unit = nbar if eps_unit == "nbar" else 1.0
    for side in (right, wrong):
        costs = cost(side.states, side.states)  # (N, N), Eq. (3)
        nearest = closest(costs, side, side, eps * unit, measure)  # Alg. 1 line 5, Step 1
        omega[side.mask] = pool(nearest.of_right / nbar, side.spans)  # Alg. 1 line 14, Step 3
""",
        "test_shear.py::test_weights_are_those_of_a_slow_loop",
    ),
    Mistake(
        "The weight of the first token that differs is smaller than its span's distance.",
        "shear.py",
        '"amax"',
        '"mean"',
        "test_shear.py::test_weights_are_those_of_a_slow_loop",
    ),
    Mistake(
        "A token of a short response counts more than a token of a long one.",
        "grpo.py",
        "loss = -torch.where(mask, surrogate, 0.0).sum()",
        "loss = -(torch.where(mask, surrogate, 0.0).sum(1) / mask.sum(1).clamp_min(1)).sum()",
        "test_grpo.py::test_the_loss_is_the_sum_over_all_tokens",
    ),
    Mistake(
        NO_SYMPTOM,
        "shear.py",
        "nbar = mean_norm(states)",
        "nbar = mean_norm(hidden.flatten(0, -2))",
        "test_shear.py::test_scale_and_order_and_padding_change_nothing",
    ),
    Mistake(
        "At a temperature of 0.7, log-probabilities are not those of the sampler.",
        "grpo.py",
        "(head(states).float() / temperature).log_softmax(-1)",
        "head(states).float().log_softmax(-1)",
        "test_grpo.py::test_scores_are_the_model_s_own_at_the_sampled_tokens",
    ),
    Mistake(
        "No token is ever clipped, however many updates a batch gets.",
        "train.py",
        "        batch.log_probs[rows, :width],\n",
        "        run.trained(rollouts, run.context.temperature).log_probs.detach(),\n",
        "test_train.py::test_updates_are_those_of_a_written_out_loop",
    ),
]


def plant(mistake: Mistake, folder: Path) -> None:
    """Write a copy of the sources with this mistake into a new folder.

    Raises AssertionError if the sources have changed, so that the mistake no longer fits.
    """
    folder.mkdir(parents=True)
    skipped = shutil.ignore_patterns("__pycache__", "learn", "records", "tests")
    for path in sorted(ROOT.iterdir()):
        if path.suffix == ".py":
            shutil.copy(path, folder)
        elif (path / "__init__.py").exists():
            shutil.copytree(path, folder / path.name, ignore=skipped)
    source = folder / mistake.file
    text = source.read_text(encoding="utf-8")
    assert text.count(mistake.was) == 1, f"{mistake.file} has changed: {mistake.was}"
    source.write_text(text.replace(mistake.was, mistake.now), encoding="utf-8")


def answer(mistake: Mistake, folder: Path) -> str:
    """The changed lines as a diff, and a command for the test that fails on the copy."""
    lines = [
        f"{mistake.file}:",
        indent(mistake.was.rstrip(), "  - "),
        indent(mistake.now.rstrip(), "  + "),
        "its test fails until the copy is mended:",
        f"  cp -r tests pyproject.toml {folder}",
        f"  cd {folder} && python -m pytest -n 0 tests/{mistake.test}",
    ]
    return "\n".join(lines)


def warmth(mistake: Mistake, file: str, line: int) -> str:
    """How near a line of the copy is to the mistake: "here", "warm" (its file) or "cold"."""
    if file != mistake.file:
        return "cold"
    before = (ROOT / file).read_text(encoding="utf-8").partition(mistake.was)[0]
    first = before.count("\n") + 1
    return "here" if first <= line <= first + mistake.now.strip().count("\n") else "warm"


def main(argv: list[str] | None = None) -> None:
    """Plant a mistake, or show the answer; bad input ends with exit status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.learn.hunt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = range(1, len(MISTAKES) + 1)
    parser.add_argument("number", type=int, choices=numbers, help="which mistake")
    parser.add_argument("--answer", action="store_true", help="show the mistake and its test")
    parser.add_argument("--at", metavar="FILE:LINE", help="a guess: here, warm (its file) or cold")
    args = parser.parse_args(argv)
    mistake = MISTAKES[args.number - 1]
    folder = Path("hunts") / str(args.number)
    if args.answer:
        print(answer(mistake, folder))
        return
    if args.at:
        file, _, line = args.at.partition(":")
        if not line.isdecimal():
            parser.error(f"--at {args.at}: give a file and a line of the copy, as in shear.py:160")
        print(warmth(mistake, file, int(line)))
        return
    if not folder.exists():
        plant(mistake, folder)
    print(f"{folder} has one mistake, in a file at its root. Symptom: {mistake.symptom}")


if __name__ == "__main__":
    main()
