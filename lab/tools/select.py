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

from harness import files
from harness.config import PathFlag
from harness.evaluation import summarise
from harness.tables import mean_and_error, same_benchmarks, with_average, with_legend
from lab.tools.command import command
from lab.tools.paper_tables import backbone_of
from lab.tools.tables import Backbone, read_generations, select_checkpoints
from tasks.errors import BadInput, printable


def select(
    runs: tyro.conf.Positional[tuple[PathFlag, ...]],
    *,
    evals: PathFlag = Path("evals"),
    paper: Backbone = None,
) -> None:
    """Print the last and the best checkpoint of each run, and the best of all.

    `evals` is a folder that eval.py wrote, or one of several. `paper` is the model of the paper
    whose numbers stand below; default: by the name of the model that was trained.
    """
    if not runs:
        raise BadInput("lab.tools.select: give the folders of runs")
    measured: dict[str, dict[str, dict]] = {}
    for run in runs:
        if files.config_of(run) is None:
            raise BadInput(f"{run}: is no run of train.py; give its folder")
        measured[str(run)] = results_of(run, evals)
    checkpoints = [results for by_step in measured.values() for results in by_step.values()]
    if not same_benchmarks(checkpoints):
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
        print("\n".join([printable(name), "", *with_legend(lines)]))
    origin = files.origin_of(str(runs[0] / "model"))
    chosen = select_checkpoints(measured, paper or backbone_of(origin))
    if chosen:
        best = max(chosen, key=lambda name: chosen[name]["best_average"])
        print(printable(f"best of all: {best}/checkpoints/{chosen[best]['best']}/model"))


def results_of(run: Path, evals: Path) -> dict[str, dict]:
    """Checkpoint -> benchmark -> result, the checkpoints of a run by ascending step.

    Raises BadInput where there is none, and where two folders have the same.
    """
    if (evals / "generations.jsonl").exists():
        folders = [evals]
    else:
        folders = sorted(path.parent for path in evals.glob("*/generations.jsonl"))
    home = (run / "checkpoints").resolve()
    found: dict[str, dict] = defaultdict(dict)
    for folder in folders:
        for (model, benchmark), rows in read_generations(folder).items():
            place = Path(model).resolve()
            if place.name != "model" or place.parent.parent != home:
                continue
            step = place.parent.name
            if benchmark in found[step]:
                raise BadInput(
                    f"--evals {evals}: {benchmark} of {run}, {step} is there twice; give one folder"
                )
            found[step][benchmark] = summarise(rows) | {"rows": len(rows)}
    if not found:
        raise BadInput(
            f"--evals {evals}: has no evaluation of checkpoints of {run}; "
            f"python eval.py --model {run}/checkpoints/*/model"
        )
    return dict(sorted(found.items()))


main = command("lab.tools.select", select)

if __name__ == "__main__":
    sys.exit(main())
