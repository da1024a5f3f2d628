"""Numbers that are almost equal."""

from torch.testing import assert_close


def assert_near(ours, expected, apart: float) -> None:
    """Asserts that numbers differ by `apart` at most."""
    assert_close(ours, expected, atol=apart, rtol=0)
