"""`--use lab.fast` gives a run the numbers of the plain functions, sooner."""

import pytest
from builders.commands import run_well

import train
from base import files
from harness.run import Hooks, use
from lab.fast import generate

RUN_FLAGS = "--use builders.alternating --task embedded --toy-lines 1 --prompts-per-step 4 "
RUN_FLAGS += "--rollouts-per-prompt 4 --prompts-per-update 2 --heldout 8 --eval-groups 4 --steps 2 --seed 1 --keep-samples"


def test_a_run_has_the_plain_run_s_numbers(untaught, tmp_path, monkeypatch):
    """Metrics agree to 1e-4, as the race stops elsewhere, and weights; the texts are the same."""
    monkeypatch.setattr(generate, "LEAVING", 0)  # rows that leave change what the others draw
    words = [RUN_FLAGS, "--model", untaught]
    for name, use_fast in (("plain", []), ("fast", "--use lab.fast")):
        run_well(train, words, use_fast, "--name", name, "--out", tmp_path)
    steps, plain_steps = (
        files.read_lines(tmp_path / f"{n}/metrics.jsonl") for n in ("fast", "plain")
    )
    for ours, expected in zip(steps[1:-1], plain_steps[1:-1], strict=True):
        for other in ("seconds", "unconverged"):
            del ours[other], expected[other]
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-4)
    rows, plain_rows = (
        files.read_lines(tmp_path / f"{n}/samples.jsonl") for n in ("fast", "plain")
    )
    for ours, expected in zip(rows, plain_rows, strict=True):
        assert ours["response"] == expected["response"]
        assert ours["weights"]["shear"] == pytest.approx(expected["weights"]["shear"], abs=2e-4)


@pytest.mark.parametrize("part", ["race", "distances", "packing", "generate"])
def test_each_part_can_be_left_out(part):
    """Then it is the core's, and the others are not."""
    plain = Hooks()
    hooks = Hooks()
    use(hooks, [f"lab.fast:{part}=no"])
    faster = {
        "race": "closest" in hooks.shear,
        "distances": "cost" in hooks.shear,
        "packing": hooks.layout is not plain.layout,
        "generate": hooks.generate is not plain.generate,
    }
    assert [name for name in faster if not faster[name]] == [part]
