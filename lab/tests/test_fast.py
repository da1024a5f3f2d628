"""`--use lab.fast` gives a run the numbers of the plain functions, sooner."""

import pytest
from builders.commands import RUN_FLAGS, run_well

import train
from base.files import read_lines

PARTS = ["race=no", "distances=no", "packing=no", "generate=no"]


def numbers(out, name: str, *words: str) -> tuple[list[dict], list[dict]]:
    """A run's metrics of its steps, but for seconds and solver statistics, and its samples."""
    run_well(train, *words, "--name", name, "--out", out)
    steps = []
    for row in read_lines(out / name / "metrics.jsonl")[1:-1]:
        step = {key: value for key, value in row.items() if value is not None}
        steps.append(step)
        for other in "seconds unconverged".split():
            step.pop(other, None)
    return steps, read_lines(out / name / "samples.jsonl")


def test_a_run_has_the_plain_run_s_numbers(taught, tmp_path):
    """Metrics agree to 1e-4, as the race stops elsewhere, and weights; the texts are the same."""
    words = [*RUN_FLAGS, "--model", taught, "--steps", "2", "--seed", "1", "--keep-samples"]
    plain, texts = numbers(tmp_path, "plain", *words)
    fast, same = numbers(tmp_path, "fast", *words, "--use", "lab.fast")
    assert [row["response"] for row in texts] == [row["response"] for row in same]
    for ours, expected in zip(fast, plain, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-4)
    for ours, expected in zip(same, texts, strict=True):
        assert ours["weights"]["shear"] == pytest.approx(expected["weights"]["shear"], abs=2e-4)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_can_be_left_out(part):
    """Then it is the core's."""
    from harness.run import Hooks, use

    whole = Hooks()
    use(whole, ["lab.fast"])
    parts = Hooks()
    use(parts, [f"lab.fast:{part}"])
    plain = Hooks()
    for name in ("layout", "generate"):
        is_left = part == {"layout": "packing=no", "generate": "generate=no"}[name]
        assert (getattr(parts, name) is getattr(plain, name)) == is_left
        assert getattr(whole, name) is not getattr(plain, name)
    left = {"race=no": {"cost"}, "distances=no": {"closest"}}
    assert parts.shear.keys() == left.get(part, {"closest", "cost"})
