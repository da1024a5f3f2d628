"""Which checkpoint of a run is best, and which run, by saved evaluations.

    python eval.py --model runs/A/checkpoints/*/model runs/B/checkpoints/*/model --bench math
    python -m lab.tools.select runs/A runs/B                     # of all folders in evals/
    python -m lab.tools.select runs/A runs/B --evals evals/NAME  # of this one

A run keeps the models of its checkpoints with --keep-models. Its row has the average of benchmarks
at its last checkpoint, and at its best, which is SELECTED ON THE TEST SETS and so biased upwards;
several runs get the paper's Table 1 of their best checkpoints, too. Nothing is evaluated again.

Left out: checkpoints that were not evaluated, runs that were moved since.
"""

import sys
from collections import defaultdict
from pathlib import Path

import tyro

from eval import GENERATIONS
from harness import files
from harness.log import markdown
from lab.tools.command import command
from lab.tools.tables import (
    Results,
    choose_backbone,
    mean_and_error,
    results_of,
    same_sets,
    select_checkpoints,
    with_average,
)
from tasks.errors import BadInput, printable


def select(
    runs: tyro.conf.Positional[tuple[Path, ...]], *, evals: Path = Path("evals"), paper: str = ""
) -> None:
    """Print the last and the best checkpoint of each run, and the best of all.

    `evals` is a folder that eval.py wrote, or one of several. `paper` is the model of the paper
    whose numbers stand below; default: by the name of the model that was trained.
    """
    if not runs:
        raise BadInput("lab.tools.select: give the folders of runs")
    measured: dict[str, dict[str, Results]] = {}
    for run in runs:
        if files.config_of(run) is None:
            raise BadInput(f"{run}: is no run of train.py; give its folder")
        measured[str(run)] = checkpoints_of(run, evals)
    checkpoints = [results for by_step in measured.values() for results in by_step.values()]
    if not same_sets(checkpoints):
        raise BadInput(
            f"--evals {evals}: the checkpoints were asked different --bench; evaluate them on the "
            "same, or give one folder"
        )
    sizes = {tuple(sorted((name, found[name]["rows"]) for name in found)) for found in checkpoints}
    if len(sizes) > 1:
        print("WARNING: some checkpoints have fewer samples; finish their evaluation first")
    for name, by_step in measured.items():
        lines = []
        for step, results in by_step.items():
            line = {"checkpoint": step}
            for benchmark, result in with_average(results).items():
                line[benchmark] = mean_and_error(result)
            lines.append(line)
        print("\n".join([printable(name), "", *markdown(lines), ""]))
    chosen = select_checkpoints(measured, choose_backbone(paper, str(runs[0] / "model")))
    if chosen:
        best = max(chosen, key=lambda name: chosen[name]["best_average"])
        print(printable(f"best of all: {best}/checkpoints/{chosen[best]['best']}/model"))


def checkpoints_of(run: Path, evals: Path) -> dict[str, Results]:
    """Checkpoint -> benchmark -> result, the checkpoints of a run by ascending step.

    Raises BadInput where there is none, and where two folders have the same.
    """
    if (evals / GENERATIONS).exists():
        folders = [evals]
    else:
        folders = sorted(path.parent for path in evals.glob(f"*/{GENERATIONS}"))
    home = (run / "checkpoints").resolve()
    found: dict[str, dict] = defaultdict(dict)
    for folder in folders:
        for model, results in results_of(folder).items():
            place = Path(model).resolve()
            if place.name != "model" or place.parent.parent != home:
                continue
            step = place.parent.name
            for benchmark in found[step].keys() & results:
                raise BadInput(
                    f"--evals {evals}: {benchmark} of {run}, {step} is there twice; give one folder"
                )
            found[step] |= results
    if not found:
        raise BadInput(
            f"--evals {evals}: has no evaluation of checkpoints of {run}; "
            f"python eval.py --model {run}/checkpoints/*/model"
        )
    return dict(sorted(found.items()))


main = command("lab.tools.select", select)

if __name__ == "__main__":
    sys.exit(main())
