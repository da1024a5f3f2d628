"""Evaluate models on the paper's ten benchmarks, or on what a run of train.py held out.

    python eval.py --model runs/NAME                                   # its own held-out problems
    python eval.py --model Qwen/Qwen2.5-Math-7B --bench math           # the five sets of math
    python eval.py --model BASE runs/NAME --bench code                 # two models, side by side
    python eval.py --model runs/NAME/start runs/NAME                   # before and after training
    python eval.py --model PATH --bench math500 --data math500=FILE    # a local copy of a set
    python eval.py --model runs/A/checkpoints/*/model --bench math     # models of --keep-models
    python eval.py --from evals/NAME                                   # the saved table again

`harness/evaluation.py` describes the protocol (the paper's), the numbers and their errors. The
folder `--out` gets settings.json (what must not change), generations.jsonl (every response and
verdict, written as they are made) and results.json (the table). The same command continues where it
was interrupted.

Left out: serving engines (`python -m lab.tools.replay` grades their responses), tensor parallelism.
"""

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.config import PRESETS, flat
from harness.eval_config import Embedded, EvalConfig, check_eval, parse_eval

if __name__ == "__main__":
    parse_eval()  # --help and wrong flags end here: the imports below take seconds

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from grpo import hf_generate
from harness import evaluation, files, fsdp, tables
from harness.command import resolve_machine, run_command
from harness.evaluation import Sampler, paired_difference, summarise
from harness.fsdp import launch, processes
from harness.load import task_of_run
from harness.models import check_embedded, load_model, load_tokenizer, round_weights
from harness.run import Parts, Ranks
from harness.sampling import sample_step
from harness.tables import Columns, no_columns
from tasks import benchmarks
from tasks.benchmarks import Benchmark, Loaded, math_row
from tasks.errors import BadInput, printable
from tasks.plug import use
from tasks.problems import digest_of

KINDS = "protocol", "data", "models"  # the parts of settings.json that must not change


@run_command(memory="lower --generate-batch or --max-tokens")
def main(argv: list[str] | None = None) -> int | None:
    """Run the command.

    The exit status is 0; 1 if memory or disk is full or a model's probabilities are not finite, 2
    for bad input, 130 after Ctrl-C.
    """
    config = check_eval(parse_eval(argv))
    machine = resolve_machine(config.machine)
    config = dataclasses.replace(config, machine=machine)
    if config.saved:
        show(Path(config.saved))
    elif processes(machine) > 1:
        return launch(processes(machine), __file__, argv)
    else:
        evaluate_models(config, fsdp.join(machine.device, machine.threads))
    return None


def find_models(config: EvalConfig) -> list[str]:
    """Paths of the models; a run stands for its last model."""
    paths = []
    for name in config.model:
        paths.append(str(Path(name) / "model") if files.config_of(Path(name)) else name)
    return paths


def own_set(models: list[str]) -> str:
    """The set of models by default: what their run held out, or math for other models."""
    for run in map(files.run_of, models):
        if run.get("task") == "embedded":
            return "embedded"
        if run.get("data") or run.get("task") not in (None, "math", "code"):
            return "heldout"
    return "math"


def own_problems(models: list[str]) -> Loaded:
    """The problems that the models' run held out of --data or --task words, with its grader.

    A response may be as long as in training. Raises BadInput if there is no such run, if its
    problems are not there any more, or if runs hold out different ones.
    """
    sets = {}  # digest of the held-out problems -> the set
    for path in models:
        run = files.run_of(path)
        if not run or run.get("task") == "embedded":
            continue
        config, task = task_of_run(path)
        problems = [{"id": str(number)} | row for number, row in enumerate(task.heldout, 1)]
        kind = "math" if task.reference == "answer" else "code"
        digest = digest_of(task.heldout)
        sets[digest] = Loaded(
            Benchmark("heldout", kind, 8, (), "", "", math_row),
            problems,
            source=f"held out of {config.problems.data or 'words'}, seed {config.seed}",
            revision=digest,
            max_tokens=config.sampling.max_tokens,
            task=task,
        )
    if len(sets) != 1:
        raise BadInput(
            "--bench heldout: needs models of one run of train.py, with --data or --task words; "
            "name another set"
        )
    return sets.popitem()[1]


def heldout_set(embedded: Embedded, models: list[str]) -> Loaded:
    """The held-out set of the embedded task: the models' runs name it, unless the flags do.

    Raises BadInput if the runs hold out different problems.
    """
    given = {name: value for name, value in vars(embedded).items() if value is not None}
    chosen = set()
    for path in models:
        run = files.run_of(path)
        if run.get("task") == "embedded":
            task_of_run(path)  # refuses another config.json
        settings = flat(PRESETS["embedded"]) | run | given
        chosen.add((settings["toy_lines"], settings["heldout"], settings["seed"]))
    if len(chosen) > 1:
        raise BadInput(
            "--bench embedded: the models' runs hold out different problems; give --toy-seed and "
            "the like"
        )
    return benchmarks.embedded_set(*chosen.pop())


# ---- generations ---------------------------------------------------------------------------------


def evaluate_models(config: EvalConfig, ranks: Ranks) -> None:
    """Evaluate every model on every benchmark, into `--out`; then print the tables."""
    parts = parts_of(config)
    models = find_models(config)
    names = list(config.bench) or [own_set(models)]
    # raises BadInput for a path that is no model
    tokenizers = {path: load_tokenizer("--model", path) for path in models}
    protocol = config.protocol
    make_heldout = {
        "embedded": partial(heldout_set, config.embedded, models),
        "heldout": partial(own_problems, models),
    }
    sets = benchmarks.load_sets(names, list(config.data), make_heldout)
    for loaded in sets:
        for path in models:  # an error here comes before any model is evaluated
            task = evaluation.as_task(loaded, protocol, tokenizers[path], path)
            task.prompt(loaded.problems[0])
        if ranks.main:
            for note in loaded.notes:
                print(printable(note))
    label = "-".join([*models, *config.bench]).replace("/", "_")[:120]
    folder = Path(config.out or f"evals/{label}")
    settings = {
        "protocol": dataclasses.asdict(protocol) | {"dtype": config.machine.dtype},
        "data": {
            loaded.benchmark.name: evaluation.describe_set(loaded, protocol) for loaded in sets
        },
        "models": {},
        "generate_batch": {},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    with files.locked_folder(folder, ranks, "settings.json"):
        with fsdp.together(ranks):
            if (folder / "settings.json").exists():
                saved = files.read_settings(folder / "settings.json")
                settings["generate_batch"] = saved.get("generate_batch", {})
        for path in models:
            evaluate_model(path, tokenizers[path], config, parts, sets, settings, folder, ranks)
        if ranks.main:
            show(folder)


def parts_of(config: EvalConfig) -> Parts:
    """The functions of `--use`; raises BadInput where none of them is called here."""
    parts = Parts(sample_step)
    use(parts, config.use)
    if config.use and parts.generate is hf_generate:
        raise BadInput(f"--use {' '.join(config.use)}: changes no evaluation; leave it out")
    return parts


def evaluate_model(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: EvalConfig,
    parts: Parts,
    sets: list[Loaded],
    settings: dict,
    folder: Path,
    ranks: Ranks,
) -> None:
    """Evaluate one model on every benchmark, but skip the blocks that the folder already has.

    Adds the model, with its origin, its template and the checksum of its weights, to `settings`,
    and how many responses it generates at a time unless they say so already.
    """
    generations = folder / "generations.jsonl"
    model = load_model(path, ranks.device, tokenizer)
    for loaded in sets:
        task = evaluation.as_task(loaded, config.protocol, tokenizer, path)
        prompts = map(task.prompt, loaded.problems)
        check_embedded("--model", path, model, tokenizer, prompts)
    round_weights(model, getattr(torch, config.machine.dtype))
    checksum = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for number, weight in enumerate(model.parameters()):
        checksum += fsdp.checksum(weight, number)
    settings["models"][path] = {
        "origin": files.origin_of(path),
        "template": evaluation.template_of(config.protocol, path, tokenizer),
        "checksum": int(checksum),
    }
    batch = config.machine.generate_batch or settings["generate_batch"].get(path)
    if config.use:
        settings["models"][path]["use"] = list(config.use)
    sampler = Sampler(model.eval(), tokenizer, path, batch or 0, parts.generate)
    if not batch:
        batch = evaluation.choose_batch_of_model(sampler, sets, config.protocol, config.machine)
        sampler = sampler._replace(generate_batch=batch)
    settings["generate_batch"][path] = batch
    done: set[tuple] = set()
    with fsdp.together(ranks):
        if ranks.main:
            add_settings(folder, settings)
            done = evaluation.finished_blocks(generations, sets, config.protocol)
    done = fsdp.from_main(done, ranks)
    for loaded in sets:
        evaluation.evaluate_benchmark(
            sampler, loaded, config.protocol, ranks, generations, config.seeds, done
        )


def add_settings(folder: Path, settings: dict) -> None:
    """Write `settings` to settings.json; other models and benchmarks that it has stay there.

    Raises BadInput if a setting differs from that of the generations in the folder.
    """
    path = folder / "settings.json"
    saved = files.read_settings(path) if path.exists() else settings
    for kind in KINDS:
        for name, value in settings[kind].items():
            # a model or benchmark may be new, a setting of the protocol may not
            had = saved[kind].get(name, None if kind == "protocol" else value)
            if value != had:
                raise BadInput(
                    f"{kind}: {name} is {value}; {folder} has generations of {had}; choose another "
                    "--out"
                )
    merged = {kind: saved[kind] | settings[kind] for kind in KINDS}
    files.write_json(path, settings | merged)


# ---- tables --------------------------------------------------------------------------------------


def show(folder: Path, passes: Sequence[int] = (), columns: Columns = no_columns) -> dict:
    """Print the tables of the generations in a folder, and write its results.json; returns it.

    With pass@k for the k in `passes` and further `columns`. Raises BadInput.
    """
    settings = files.read_settings(folder / "settings.json")
    data = settings["data"]
    generations = defaultdict(list)  # (model, benchmark) -> rows
    for row in files.read_lines(folder / "generations.jsonl"):
        if row["model"] not in settings["models"] or row["benchmark"] not in data:
            raise BadInput(
                f"--from {folder}: settings.json has no {row['model']} on {row['benchmark']}, "
                "which generations.jsonl has; restore them"
            )
        generations[row["model"], row["benchmark"]].append(row)
    if not generations:
        raise BadInput(f"--from {folder}: holds no generations yet; give another")
    first, _ = next(iter(generations))
    results: dict[str, dict] = defaultdict(dict)  # model -> benchmark -> its statistics
    differences: dict[str, dict] = defaultdict(dict)  # model -> benchmark -> to the first
    for (model, name), rows in generations.items():
        result = summarise(rows, passes)
        seeds = {row["seed"] for row in rows}
        result["missing"] = data[name]["problems"] * data[name]["k"] * len(seeds) - len(rows)
        limit = data[name].get("limit", 0)
        short = {row["problem"] for row in rows if row.get("limit", limit) < limit}
        which = printable(f"{model}, {name}")
        if short:
            print(
                f"NOTE: {which}: {len(short)} problems had a lower limit, to fit the model's "
                "context"
            )
        if result["missing"]:
            print(
                f"WARNING: {which}: {result['missing']} samples are missing; finish it before "
                "reading on"
            )
        results[model][name] = result
        if model != first and (first, name) in generations:
            differences[model][name] = paired_difference(generations[first, name], rows)
    print(printable(f"{folder}/"))
    tables.print_tables(settings, results, differences, columns)
    settings |= {"results": results, "differences": differences}
    files.write_json(folder / "results.json", settings)
    return settings


if __name__ == "__main__":
    sys.exit(main())
