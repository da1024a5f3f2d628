"""lab/learn/: the checker says what is wrong, and the hunt's mistakes can be planted.

`.ci/hunts` runs their tests.
"""

import filecmp

import pytest

from lab.learn import cases, check, hunt
from shear import span_bounds


def test_empty_exercises_fail_and_the_root_s_functions_pass(tmp_path, monkeypatch, capsys):
    """Each exercise has a check, which its stub fails and the root's function passes."""
    monkeypatch.chdir(tmp_path)
    assert check.main([]) == 1
    printed = capsys.readouterr().out
    assert printed.count("not written yet") == 5 and "0 of 5 right" in printed
    assert check.main(["span_bounds", "--hint"]) == 1
    assert "hint: Walk" in capsys.readouterr().out
    solutions = "from lab.learn.cases import EXERCISES\n"
    for name in cases.EXERCISES:
        solutions += f"def {name}(*inputs): return EXERCISES['{name}'].solution(*inputs)\n"
    check.MINE.write_text(solutions)
    assert check.main([]) == 0


def test_a_learner_writes_in_a_copy(tmp_path, monkeypatch, capsys):
    """The copy is made once; what is written there is checked."""
    monkeypatch.chdir(tmp_path)
    check.main(["span_bounds"])
    assert capsys.readouterr().out.startswith("wrote mine/exercises.py")
    assert check.MINE.read_text() == check.EXERCISES.read_text()
    for end, status in (("", 0), ("[:-1]", 1)):
        text = f"from shear import span_bounds as its\ndef span_bounds(*x): return its(*x){end}\n"
        check.MINE.write_text(text)
        assert check.main(["span_bounds"]) == status and check.MINE.read_text() == text


@pytest.mark.parametrize(
    "name, wrong, words",
    [
        ("span_bounds", lambda *sizes: span_bounds(*sizes)[:-1], "mismatch: 4 != 5\n  got [(0, 12)"),
        ("clipped_loss", lambda logp, *rest: 1 / 0, "in <lambda>\n"),
    ],
)  # fmt: skip
def test_a_wrong_solution_is_told_where_it_differs(name, wrong, words):
    """The checker rejects a plausible mistake, and shows the values that differ."""
    is_right, sentence = cases.assess(name, wrong)
    assert not is_right and words in sentence, sentence


def test_a_mistake_is_one_change_of_a_copy(tmp_path, monkeypatch, capsys):
    """Its line still stands in its file; the copy lacks what gives it away."""
    monkeypatch.chdir(tmp_path)
    for mistake in hunt.MISTAKES:
        assert (hunt.ROOT / mistake.file).read_text().count(mistake.was) == 1, mistake.was
    hunt.main(["8"])
    assert hunt.MISTAKES[7].symptom in capsys.readouterr().out
    compared = filecmp.dircmp(hunt.ROOT, "hunts/8")
    assert compared.diff_files == ["shear.py"] and not compared.right_only
    assert "learn" in compared.subdirs["lab"].left_only and "tests" in compared.left_only
