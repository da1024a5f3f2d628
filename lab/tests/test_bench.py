"""lab/studies/bench.py: everyone solves the same problem, and the command prints what it measured."""

from builders.commands import run_well

from lab.studies import bench


def test_all_solvers_find_the_same_distances(capsys):
    """They do to a percent, as some stop early."""
    run_well(bench, "--tokens 26 --width 8 --group 4 --pairs 40 --window 6 --stride 5 --device cpu")
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[3:]]
    assert [float(row[2]) < 1e-2 for row in rows] == [True] * 4
