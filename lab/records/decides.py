r"""What decides: the optimizer, the states, or time? The trainings of plans/decides-plan.md.

    python -c "from lab.records import decides; decides.run('rows.jsonl', 'starts', ['E1'])"
    python -c "from lab.records import decides; decides.weights('weights.jsonl', 'starts')"
    python -c "from lab.records import decides; decides.print_all('lab/records/rows')"

A trial is an experiment's task, an optimizer, an arm, a learning rate and a seed. Every trial of a
seed starts from the same taught model. Finished trials are appended to the rows, and the same
command continues where it was interrupted. All trials use `lab.fast`.

The tasks are the embedded one, `noise-before`, and `twins`: the embedded task in which each symbol
of a response has two spellings. The two have the same logit, because their rows of the output
matrix start equal and get the same gradient. So each of them is drawn with equal chances, whatever
the policy learns, and the draw has no gradient. Their embeddings differ. Two rollouts with the same
work share hardly any run of words.
"""

import contextlib
import io
import tempfile
import time
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase, Qwen2ForCausalLM

import lab.rules  # noqa: F401 - enters the rules
import train
from base import files
from base.config import TASKS, Config, Problems, parse_train
from credit.batch import Batch, Context, effective_weights, tokens_of
from credit.measures import auc_matched, positions
from credit.rules import find, rule, weigh
from grpo import Policy, Rollouts, group_advantages, score
from harness import fsdp, log
from harness.run import Run, load_run, resolve, sample, seed_of, start_run
from lab.tools import noise
from rewards import Verdict, rewards_of
from shear import span_bounds
from tasks import toy
from tasks.task import FirstError, Task, grader

RUN = 8  # words in a run, as in real-states.md
HELDOUT = 256
MOMENTUM = 0.9
TUNING = (100, 101, 102, 103, 104)

# ---- arms ----------------------------------------------------------------------------------------


@rule("digit", "credit on the digit in the last box alone")
def digit(batch: Batch, context: Context) -> Tensor:
    """A_t = A on the deciding digit of right and wrong rollouts, 0 elsewhere."""
    kept = torch.zeros_like(batch.mask)
    for row, ids in enumerate(batch.rollouts.ids.tolist()):
        place = noise.digit_place(context.tokenizer.convert_ids_to_tokens(ids))
        if place is not None:
            kept[row, place] = True
    return batch.A * (kept & batch.mask)


def prepare_untrained(run: Any, folder: Path, **options: object) -> None:
    """Keep a model of the policy's shape with random weights."""
    run.context.kept["untrained"] = untrained_like(run.context.policy.model, run.config.seed)


def untrained_like(model: PreTrainedModel, seed: int) -> Policy:
    """A policy of the same shape, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(10_000 + seed)
        return Policy(type(model)(model.config).eval())


@rule("untrained", "shear, on an untrained model's states", prepare=prepare_untrained)
def untrained(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t as in `shear`, with the states of a random model."""
    states = score(
        context.kept["untrained"],
        batch.rollouts,
        temperature=1.0,
        micro_tokens=context.micro_tokens,
        keep_hidden=True,
    ).hidden
    return weighed_by(batch, context, states)


@rule("embeddings", "shear, on token embeddings")
def embeddings(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t as in `shear`, with token embeddings in place of states."""
    embed = context.policy.model.get_input_embeddings()
    return weighed_by(batch, context, embed(batch.rollouts.ids[batch.mask]).detach())


def weighed_by(batch: Batch, context: Context, states: Tensor) -> Tensor:
    """SHEAR's token advantages (B, T) with these states (n, d) of all response tokens."""
    batch = replace(batch, hidden=states)
    omega = [weigh(context, own, mask, right).omega for _, own, mask, right in batch.groups()]
    return batch.A * torch.cat(omega)


def opposing(batch: Batch, row: int) -> list[int]:
    """The rollouts of a row's group with the other verdict."""
    first = row - row % batch.group_size
    group = range(first, first + batch.group_size)
    return [o for o in group if batch.mask[o].any() and batch.correct[o] != batch.correct[row]]


def words_of(batch: Batch, row: int) -> list[int]:
    """The ids of a rollout's response."""
    return batch.rollouts.ids[row][batch.mask[row]].tolist()


@rule("trie", "no credit on the longest prefix shared with an opposing rollout")
def trie(batch: Batch, context: Context) -> Tensor:
    """A_t = A from the first token on that no opposing rollout has after the same words."""
    weights = batch.mask.float()  # (B, T)
    for row in batch.advantages.nonzero().flatten().tolist():
        own = words_of(batch, row)
        shared = 0
        for other in opposing(batch, row):
            both = zip(own, words_of(batch, other), strict=False)
            same = [a == b for a, b in both]
            shared = max(shared, [*same, False].index(False))
        weights[row, : min(shared, len(own) - 1)] = 0.0
    return batch.A * weights


@rule("words", "shear, by shared runs of words in place of states")
def words(batch: Batch, context: Context) -> Tensor:
    """A_t = A w_t; a span's distance is the share of its tokens in no run that is shared.

    Runs have RUN words, and are shared with an opposing rollout. A token has the largest distance
    of its spans (real-states.md).
    """
    weights = batch.mask.float()  # (B, T)
    for row in batch.advantages.nonzero().flatten().tolist():
        theirs = set()
        for other in opposing(batch, row):
            theirs |= set(runs_of(words_of(batch, other)))
        own = words_of(batch, row)
        is_new = np.ones(len(own))
        for start, run in enumerate(runs_of(own)):
            if run in theirs:
                is_new[start : start + RUN] = 0.0
        of_row = np.zeros(len(own))
        for start, end in span_bounds(len(own), context.shear.window, context.shear.stride):
            of_row[start:end] = of_row[start:end].clip(min=is_new[start:end].mean())
        weights[row, : len(own)] = torch.tensor(of_row, dtype=torch.float32)
    return batch.A * weights


def runs_of(ids: list[int]) -> list[tuple[int, ...]]:
    """All runs of RUN words of a response."""
    return [tuple(ids[start : start + RUN]) for start in range(len(ids) - RUN + 1)]


# ---- the task in which wording and meaning part --------------------------------------------------

SPELLED = [symbol for symbol in toy.symbols_of(5) if symbol not in ("<pad>", "<eos>")]
TWIN_OF = {symbol: chr(0xE000 + number) for number, symbol in enumerate(SPELLED)}
SYMBOL_OF = {twin: symbol for symbol, twin in TWIN_OF.items()}
BASE = len(toy.symbols_of(5))  # the twins' ids follow


def as_symbols(text: str) -> str:
    """A text in the embedded task's own spelling."""
    return "".join(SYMBOL_OF.get(letter, letter) for letter in text)


def twin_ids() -> Tensor:
    """Each id's twin (V,) int64; <pad> and <eos> are their own."""
    ids = torch.arange(BASE + len(SPELLED))
    for number, symbol in enumerate(SPELLED):
        ids[toy.IDS[symbol]] = BASE + number
        ids[BASE + number] = toy.IDS[symbol]
    return ids


def tie_twins(model: PreTrainedModel) -> None:
    """Give both spellings the same gradient in the output matrix, so that their rows stay equal."""
    twins = twin_ids()
    model.lm_head.weight.register_hook(lambda gradient: (gradient + gradient[twins]) / 2)


def make_twins(seed: int, folder: Path) -> None:
    """Teach a model the embedded task with two spellings, and save it."""
    config = toy.make_model(5, seed).config
    config.vocab_size = BASE + len(SPELLED)
    config.tie_word_embeddings = False
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    twins = twin_ids()
    with torch.no_grad():
        model.lm_head.weight[BASE:] = model.lm_head.weight[twins[BASE:]]
    tie_twins(model)
    _, heldout = toy.make_problems(toy.MADE_PROBLEMS, HELDOUT, 5, seed)
    forbidden = set(map(itemgetter("problem"), heldout))
    rng = toy.demonstration_rng(seed)
    draws = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        """`toy.batch_loss` with a random spelling of each symbol of the response."""
        rows, weights_of_rows = [], []
        for problem, response in toy.demonstrations(5, forbidden, rng):
            symbols = toy.SYMBOL.findall(problem["problem"])
            weight = [0.0] * len(symbols)
            prompt = len(symbols)
            for symbol in toy.SYMBOL.findall(response + "<eos>"):
                weight.append(3.0 if symbol.isdigit() and symbols[-1] == "=" else 1.0)
                symbols.append(symbol)
            ids = torch.tensor([toy.IDS[symbol] for symbol in symbols])
            other = torch.rand(len(ids), generator=draws) < 0.5
            other[:prompt] = False
            rows.append(torch.where(other, twins[ids], ids).tolist())
            weights_of_rows.append(weight)
        ids = toy.pad_right(rows, toy.IDS["<pad>"], model.device)
        weights = toy.pad_right(weights_of_rows, 0.0, model.device)
        logits = model(input_ids=ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
        return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()

    toy.teach(model, batch_loss, 600, "twins")
    tokenizer = toy.make_tokenizer(5)
    tokenizer.add_tokens([AddedToken(TWIN_OF[s], normalized=False) for s in SPELLED])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def twins_task(
    settings: Problems, tokenizer: PreTrainedTokenizerBase, model_name: str
) -> tuple[Task, list[str]]:
    """The embedded task, graded and judged in its own spelling."""
    problems, heldout = toy.make_problems(toy.MADE_PROBLEMS, settings.heldout, 5, settings.seed)
    grade = grader("math", settings.grade_timeout, settings.sandbox)

    def grade_symbols(response: str, reference: object) -> Verdict:
        return grade(as_symbols(response), reference)

    def first_error(problem: dict, tokens: list[str]) -> FirstError | None:
        return toy.first_error(problem, list(map(as_symbols, tokens)))

    return Task(
        "twins", problems, heldout, itemgetter("problem"), grade_symbols, first_error=first_error
    ), []


TASKS["twins"] = replace(TASKS["embedded"], make="lab.records.decides:twins_task")


# ---- verdicts by steps ---------------------------------------------------------------------------


def by_steps(
    tokenizer: PreTrainedTokenizerBase, task: Task, problems: list[dict], rollouts: Rollouts
) -> list[Verdict]:
    """The task's verdicts, with a right answer by a wrong step as wrong."""
    verdicts = task.verdicts(problems, rollouts)
    group = len(verdicts) // len(problems)
    for row, verdict in enumerate(verdicts):
        if verdict.reward and verdict.reward > 0.5:
            tokens = tokens_of(tokenizer, rollouts, row)[:-1]  # without the stop token
            if task.first_error(problems[row // group], tokens):
                verdicts[row] = Verdict(0.0, "wrong")
    return verdicts


# ---- trials --------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """What identifies a trial."""

    experiment: str
    stage: str
    task: str  # flags of train.py
    optimizer: str
    arm: str
    lr: float
    seed: int


def method_of(arm: str) -> list[str]:
    """An arm's flags; "NAME-own" has its own baseline."""
    if arm.endswith("-own"):
        return ["--method", "own-baseline", "--method-option", f"of={arm[:-4]}"]
    return ["--method", arm]


def settings_of(trial: Trial, start: Path, out: str) -> Config:
    """The settings of a trial."""
    words = [*trial.task.split(), *method_of(trial.arm), "--use", "lab.fast"]
    words += ["--heldout", str(HELDOUT), "--seed", str(trial.seed), "--lr", str(trial.lr)]
    words += ["--model", str(start), "--threads", "1", "--name", "trial", "--out", out]
    return resolve(parse_train(words))


def start_of(trial: Trial, starts: Path) -> Path:
    """The folder of the taught model of a trial's task and seed."""
    words = trial.task.split()
    task = words[words.index("--task") + 1]
    lines = words[words.index("--toy-lines") + 1] if "--toy-lines" in words else "5"
    return starts / f"{task}-{lines}-{trial.seed}"


def make_start(trial: Trial, starts: Path) -> None:
    """Teach the model of a trial's task and seed, if it is not there."""
    folder = start_of(trial, starts)
    if (folder / "config.json").exists():
        return
    task, lines, seed = folder.name.rsplit("-", 2)
    torch.set_num_threads(1)
    if task == "twins":
        return make_twins(int(seed), folder)
    lines = int(lines)
    settings = resolve(
        parse_train(f"--task {task} --toy-lines {lines} --seed {seed} --heldout {HELDOUT}".split())
    )
    tokenizer = toy.make_tokenizer(lines)
    model = toy.make_model(lines, int(seed), settings.toy_width)
    make = noise.task if task in noise.CELLS else toy.task
    of_task, _ = make(replace(settings, warmup_given=True), tokenizer, "made here")
    forbidden = set(map(itemgetter("problem"), of_task.heldout))
    of_task.warm_up(model, forbidden=forbidden, steps=settings.warmup_steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_trial(rows: str, starts: Path, trial: Trial) -> None:
    """Train, and append the trial's row."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        config = settings_of(trial, start_of(trial, starts), out)
        ranks = fsdp.join(config.device, config.threads)
        try:
            loaded = load_run(config, ranks)
            tokenizer = loaded.context.tokenizer
            if "steps" in trial.experiment.split("/"):
                loaded.hooks.verdicts = partial(by_steps, tokenizer)
            with log.open_folder(loaded) as folder:
                run = start_run(loaded, folder)
                if "twins" in trial.task:
                    tie_twins(run.trained.model)
                if trial.optimizer == "sgd":
                    weights = run.trained.parameters()
                    run.optimizer = torch.optim.SGD(weights, trial.lr, momentum=MOMENTUM)
                result = train_and_measure(run, trial.stage)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    seconds = {"cpu_s": round(time.process_time() - began, 1)}
    files.append_rows(Path(rows), [trial._asdict() | result | seconds])


KEPT = "reward entropy equal_groups grad_norm weight_mean ess skipped".split()


def train_and_measure(run: Run, stage: str) -> dict:
    """Each step's metrics, and after training the share of right responses to held-out problems."""
    before = localisation(run) if stage == "confirm" else None
    result: dict = {name: [] for name in KEPT}
    for step in range(run.config.steps):
        metrics, _ = train.train_step(run, step)
        for name in KEPT:
            result[name].append(round(float(metrics[name]), 5))
    if stage == "confirm":
        result["before"] = before
        result["after"] = localisation(run)
        torch.manual_seed(seed_of(run.config.seed))
        task = run.context.task
        drawn = sample(run, task.heldout, run.config.rollouts_per_prompt, 1.0)
        verdicts = run.hooks.verdicts(task, task.heldout, drawn)
        result["sampled"] = float(np.nanmean(rewards_of(verdicts)))
    return result


def localisation(run: Run) -> dict | None:
    """The AUC of the rule's weights against first errors, on held-out problems."""
    return train.evaluate(run).get("localisation")


# ---- the plan ------------------------------------------------------------------------------------

NOISE = "--task noise-before --toy-lines 5 --steps 10"
TOY = "--task embedded --steps 20"
TWINS = "--task twins --steps 20"
LONG = "--task embedded --toy-lines 10 --prompts-per-update 1 --steps 150"
RATES = {"adamw": (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3), "sgd": (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)}
E1_ARMS = "grpo shear shear-own shuffle digit".split()
E1B_ARMS = "grpo shear shear-own".split()
E2_ARMS = "grpo shear untrained embeddings words trie position oracle shuffle".split()
E2_ARMS += [f"{arm}-own" for arm in "grpo shear untrained words trie position".split()]
TWIN_ARMS = "grpo shear untrained words trie position oracle grpo-own shear-own shuffle-own".split()
E3_ARMS = "grpo shear grpo-own shear-own".split()


def tuned(rows: str, experiment: str, task: str, arms: list[str], seeds: range, rates: dict):
    """The trials of an experiment whose rates are tuned: first all of tuning, then the best."""
    tuning = []
    for seed in TUNING:
        for optimizer, own in rates.items():
            for arm in arms:
                tuning += [Trial(experiment, "tune", task, optimizer, arm, lr, seed) for lr in own]
    yield tuning
    table = read(rows)
    table = table[(table["experiment"] == experiment) & (table["stage"] == "tune")]
    best = []
    for (optimizer, arm), own in table.groupby(["optimizer", "arm"]):
        curves = own.groupby("lr")["curve"].mean()
        lr = float(curves.idxmax())
        best += [Trial(experiment, "confirm", task, optimizer, arm, lr, seed) for seed in seeds]
    yield sorted(best, key=itemgetter(6))


def fixed(experiment: str, task: str, arms: list[str], seeds: range, lr: float):
    """The trials of an experiment at one rate."""
    yield [Trial(experiment, "confirm", task, "adamw", arm, lr, s) for s in seeds for arm in arms]


def plan(rows: str) -> dict:
    """The stages of each experiment, as generators of lists of trials."""
    toy_rates = {"adamw": (1e-4, 2e-4, 4e-4), "sgd": RATES["sgd"]}
    return {
        "E1": tuned(rows, "E1", NOISE, E1_ARMS, range(8), RATES),
        "E1c": iter([SAFE]),
        "E1d": controls(rows),
        "E2": fixed("E2", TOY, E2_ARMS, range(8), 2e-4),
        "twins": fixed("E2/twins/steps", TWINS, TWIN_ARMS, range(8), 2e-4),
        "E1b": tuned(rows, "E1b", TOY, E1B_ARMS, range(5), toy_rates),
        "E1e": lower(rows),
        "E3": fixed("E3/steps", LONG, E3_ARMS, range(3), 1e-4),
    }


# The addendum of E1: SGD at rates that no tuning seed collapsed at.
SAFE_RATES = {"shear": 0.1, "shear-own": 0.4, "digit": 0.1}
SAFE = [
    Trial("E1c", "confirm", NOISE, "sgd", arm, lr, seed)
    for seed in range(8)
    for arm, lr in SAFE_RATES.items()
]


FALL = 0.2  # of the mean reward of the last two steps below the best step's
CONTROLS = ("grpo-own", "shuffle-own")


def controls(rows: str):
    """E1c's controls with SGD: tuned among rates that no tuning seed collapsed at."""
    yield [
        Trial("E1d", "tune", NOISE, "sgd", arm, lr, seed)
        for seed in TUNING
        for arm in CONTROLS
        for lr in (0.1, 0.2, 0.4, 0.8)
    ]
    table = read(rows)
    best = steady_rates(table[(table["experiment"] == "E1d") & (table["stage"] == "tune")])
    yield [
        Trial("E1d", "confirm", NOISE, "sgd", arm, best[arm], seed)
        for seed in range(8)
        for arm in CONTROLS
    ]


LOWER_RATES = (0.00625, 0.0125, 0.025)


def lower(rows: str):
    """E1b with SGD at lower rates: the best of both grids."""
    yield [
        Trial("E1e", "tune", TOY, "sgd", arm, lr, seed)
        for seed in TUNING
        for arm in E1B_ARMS
        for lr in LOWER_RATES
    ]
    table = read(rows)
    table = table[table["experiment"].isin(["E1b", "E1e"]) & (table["optimizer"] == "sgd")]
    curves = table[table["stage"] == "tune"].groupby(["arm", "lr"])["curve"].mean()
    yield [
        Trial("E1e", "confirm", TOY, "sgd", arm, float(curves[arm].idxmax()), seed)
        for seed in range(5)
        for arm in E1B_ARMS
    ]


def steady_rates(tune: pd.DataFrame) -> dict[str, float]:
    """Each arm's rate with the best mean curve among those at which no tuning seed collapsed."""
    fall = [max(rewards) - np.mean(rewards[-2:]) for rewards in tune["reward"]]
    worst = tune.assign(fall=fall).groupby(["arm", "lr"])["fall"].max()
    curves = tune.groupby(["arm", "lr"])["curve"].mean()[worst <= FALL]
    return {arm: float(own.droplevel("arm").idxmax()) for arm, own in curves.groupby("arm")}


def read(rows: str) -> pd.DataFrame:
    """A row per finished trial, with its mean training reward as `curve`."""
    path = Path(rows)
    table = pd.DataFrame(files.read_lines(path) if path.exists() else [])
    if len(table):
        table["curve"] = [np.mean(rewards) for rewards in table["reward"]]
    return table.reindex(columns=sorted({*table.columns, *Trial._fields, "curve"}))


def run(rows: str, starts: str, experiments: list[str], jobs: int = 2) -> None:
    """Run the trials of these experiments that are missing, in the plan's order."""
    Path(starts).mkdir(parents=True, exist_ok=True)
    for name in experiments:
        for trials in plan(rows)[name]:
            ran = read(rows)[list(Trial._fields)].itertuples(index=False, name=None)
            done = set(ran)
            missing = [trial for trial in trials if tuple(trial) not in done]
            first = list({start_of(t, Path(starts)): t for t in missing}.values())
            with get_context("spawn").Pool(jobs) as pool:
                pool.map(partial(make_start, starts=Path(starts)), first, chunksize=1)
                job = partial(run_trial, rows, Path(starts))
                for _ in pool.imap_unordered(job, missing):
                    pass
            print(name, len(trials), "trials", time.strftime("%X"), flush=True)


# ---- E2: weights before training -----------------------------------------------------------------

WEIGHED = "shear untrained embeddings words trie position".split()


def weights(rows: str, starts: str, groups: int = 64) -> None:
    """A row per task, seed and group: how the arms' weights find the first error, and agree."""
    for task in ("embedded", "twins"):
        for seed in range(5):
            trial = Trial("E2", "weights", f"--task {task}", "adamw", "shear", 2e-4, seed)
            make_start(trial, Path(starts))
            with tempfile.TemporaryDirectory() as out:
                config = settings_of(trial, start_of(trial, Path(starts)), out)
                loaded = load_run(config, fsdp.join("cpu", 1))
                files.append_rows(Path(rows), rows_of_weights(loaded, task, seed, groups))


def rows_of_weights(loaded: Any, task: str, seed: int, groups: int) -> list[dict]:
    """The rows of one start."""
    context = loaded.context
    torch.manual_seed(seed_of(seed))
    problems = context.task.heldout[:groups]
    rollouts = sample(loaded, problems, 8, 1.0)
    verdicts = by_steps(context.tokenizer, context.task, problems, rollouts)
    batch = Batch.of(rollouts, verdicts, problems)
    answers = Batch.of(rollouts, context.task.verdicts(problems, rollouts), problems)
    lucky = int((answers.correct & ~batch.correct).sum())
    table: list[dict] = [
        {"task": task, "seed": seed, "right": int(answers.correct.sum()), "lucky": lucky}
    ]
    batch.advantages = group_advantages(batch.rewards, 8)
    prepare_untrained(loaded, Path())
    for number, block in enumerate(batch.blocks(most=1)):
        if not block.advantages.any():
            continue
        block.log_probs, block.entropies, block.hidden = context.score(block.rollouts)
        error = block.true_errors(context.task, context.tokenizer)[:, :1]  # (8, 1)
        place = positions(block.mask)
        counts = block.mask & (error >= 0)
        of_arm = {}
        for arm in WEIGHED:
            credit = find(arm).credit(block, context)
            of_arm[arm] = effective_weights(credit, block.advantages, block.mask)  # (8, T)
        row: dict = {"task": task, "seed": seed, "group": number}
        for arm, own in of_arm.items():
            after, before = counts & (place >= error), counts & (place < error)
            row[f"auc {arm}"] = auc_matched(own, after, before)
            row[f"pairs {arm}"] = count_pairs(after, before)
            row[f"rank {arm}"], row[f"partial {arm}"] = agreement(of_arm["shear"], own, block.mask)
            # the same wording of the next rollout of the group, whose tokens it does not describe
            other = own.roll(1, 0)
            both = block.mask & block.mask.roll(1, 0)
            row[f"null {arm}"], row[f"null partial {arm}"] = agreement(of_arm["shear"], other, both)
        table.append(row)
    return table


def count_pairs(after: Tensor, before: Tensor) -> int:
    """The pairs of tokens at equal position that an AUC is of."""
    return int((after.sum(0) * before.sum(0)).sum())


def agreement(of_shear: Tensor, other: Tensor, mask: Tensor) -> tuple[float, float]:
    """Spearman's correlation over a group's tokens, and the partial one given position."""
    place = positions(mask)[mask].double().numpy()
    x, y = of_shear[mask].double().numpy(), other[mask].double().numpy()
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan"), float("nan")
    xy, xp, yp = (float(spearmanr(a, b)[0]) for a, b in ((x, y), (x, place), (y, place)))
    rest = (1 - xp**2) * (1 - yp**2)
    return xy, (xy - xp * yp) / rest**0.5 if rest > 1e-9 else float("nan")


# ---- tables --------------------------------------------------------------------------------------

LESS = [(arm, "grpo") for arm in E1_ARMS[1:]]  # planned comparisons of E1, with each optimizer
LESS_TOY = [("shear", "grpo"), ("shear-own", "grpo")]
LESS_STATES = [("shear", other) for other in "untrained words trie position".split()]
LESS_STATES += [("shear-own", "grpo-own"), ("oracle", "grpo")]
# the last is the positive control
LONG_PAIRS = [("shear", "grpo"), ("shear-own", "grpo-own"), ("grpo-own", "grpo")]


def told(differences: pd.Series) -> dict:
    """A mean difference over seeds with its 95% interval, signs and p (Student's t)."""
    values = differences.dropna()
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    low, high = values.mean() - half, values.mean() + half
    signs = f"{(values > 0).sum()}/{len(values)}"
    return {
        "D": f"{values.mean():+.3f} ({low:+.3f} to {high:+.3f}), {signs}",
        "p": float(stats.ttest_1samp(values, 0).pvalue),
    }


def holm(lines: list[dict]) -> list[dict]:
    """The lines with p corrected by Holm's method."""
    order = sorted(range(len(lines)), key=lambda place: lines[place]["p"])
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(lines) - rank) * lines[place]["p"]))
        lines[place]["Holm's p"] = f"{largest:.3f}"
    return [line | {"p": f"{line['p']:.3f}"} for line in lines]


def arms_table(table: pd.DataFrame) -> list[dict]:
    """A line per optimizer and arm of a confirmed experiment."""
    lines = []
    for (optimizer, arm), own in table.groupby(["optimizer", "arm"], sort=False):
        own = own.set_index("seed")
        usual = table[(table["optimizer"] == optimizer) & (table["arm"] == "grpo")].set_index(
            "seed"
        )
        line = {"optimizer": optimizer, "arm": arm, "lr": f"{own['lr'].iloc[0]:g}"}
        for outcome, title in (("curve", "curve"), ("sampled", "held out")):
            line[title] = f"{own[outcome].mean():.3f}"
            line[f"D, {title}"] = "" if arm == "grpo" else told(own[outcome] - usual[outcome])["D"]
        lines.append(line)
    return lines


def planned(table: pd.DataFrame, pairs: list[tuple[str, str]], outcome: str) -> list[dict]:
    """The planned comparisons of an outcome, for each optimizer."""
    lines = []
    for optimizer, own in table.groupby("optimizer"):
        by_arm = own.pivot(index="seed", columns="arm", values=outcome)
        for arm, other in pairs:
            line = {"optimizer": optimizer, "comparison": f"{arm} less {other}"}
            lines.append(line | told(by_arm[arm] - by_arm[other]))
    return lines


def print_tables(*tables: list[dict]) -> None:
    """Print tables as Markdown."""
    for lines in tables:
        print("\n".join(["", *log.markdown(lines)]))


def print_rates(rows: pd.DataFrame, experiment: str) -> None:
    """Print the mean curve of each rate on the tuning seeds, and each seed's best rate."""
    tune = rows[(rows["experiment"] == experiment) & (rows["stage"] == "tune")]
    for optimizer, own in tune.groupby("optimizer"):
        means = own.pivot_table(index="arm", columns="lr", values="curve", sort=False)
        lines = []
        for arm, line in means.iterrows():
            of_arm = own[own["arm"] == arm].pivot(index="seed", columns="lr", values="curve")
            best = ", ".join(f"{lr:g}" for lr in of_arm.idxmax(axis=1))
            cells = {f"{lr:g}": f"{value:.3f}" for lr, value in line.items()}
            lines.append({f"{optimizer}": str(arm)} | cells | {"best by seed": best})
        print_tables(lines)


def print_e1(rows: pd.DataFrame, experiment: str, pairs: list[tuple[str, str]]) -> None:
    """Print an experiment of two optimizers."""
    print(f"\n{experiment}")
    print_rates(rows, experiment)
    table = rows[(rows["experiment"] == experiment) & (rows["stage"] == "confirm")]
    print_tables(arms_table(table))
    for outcome in ("curve", "sampled"):
        lines = planned(table, pairs, outcome)
        if experiment == "E1":
            gains = {}
            for optimizer, own in table.groupby("optimizer"):
                by_arm = own.pivot(index="seed", columns="arm", values=outcome)
                gains[optimizer] = by_arm["shear"] - by_arm["grpo"]
            line = {"optimizer": "sgd less adamw", "comparison": "shear less grpo"}
            lines.append(line | told(gains["sgd"] - gains["adamw"]))
        print(f"\n{outcome}:")
        print_tables(holm(lines))


def print_split(rows: pd.DataFrame) -> None:
    """Print SHEAR less GRPO in two parts of E1's steps, which the plan does not have."""
    table = rows[(rows["experiment"] == "E1") & (rows["stage"] == "confirm")].copy()
    for title, part in {"2 to 5": slice(1, 5), "6 to 10": slice(5, 10)}.items():
        table[title] = [np.mean(rewards[part]) for rewards in table["reward"]]
        print(f"\nsteps {title}:")
        lines = planned(table, [("shear", "grpo")], title)
        print_tables([line | {"p": f"{line['p']:.3f}"} for line in lines])


def print_e1c(rows: pd.DataFrame) -> None:
    """Print SGD at rates that no tuning seed collapsed at, beside GRPO and shuffle at theirs."""
    table = rows[(rows["experiment"] == "E1") & (rows["stage"] == "confirm")]
    table = table[(table["optimizer"] == "sgd") & table["arm"].isin(["grpo", "shuffle"])]
    table = pd.concat([table, rows[rows["experiment"] == "E1c"]])
    print_tables(arms_table(table), holm(planned(table, LESS, "curve")))
    print_rates(rows, "E1d")
    own = rows[(rows["experiment"] == "E1d") & (rows["stage"] == "confirm")]
    table = pd.concat([table, own])
    pairs = [("shear-own", arm) for arm in CONTROLS]
    print_tables(arms_table(table), holm(planned(table, pairs, "curve")))
    print_tables(holm(planned(table, pairs, "sampled")))
    print_tables(holm(planned(table, [("grpo-own", "grpo")], "curve")))


def print_e2(rows: pd.DataFrame) -> None:
    """Print the trainings of E2: one family of twelve comparisons."""
    lines: dict[str, list] = {"curve": [], "sampled": []}
    for experiment in ("E2", "E2/twins/steps"):
        table = rows[rows["experiment"] == experiment]
        print(f"\n{experiment}")
        print_tables(arms_table(table))
        own = [(arm, arm[:-4]) for arm in table["arm"].unique() if arm.endswith("-own")]
        gains = planned(table, [pair for pair in own if pair[1] in set(table["arm"])], "curve")
        print_tables([line | {"p": f"{line['p']:.3f}"} for line in gains])
        for outcome, of_outcome in lines.items():
            for line in planned(table, LESS_STATES, outcome):
                of_outcome.append(line | {"optimizer": experiment})
    for outcome, of_outcome in lines.items():
        print(f"\n{outcome}:")
        print_tables(holm(of_outcome))


def print_e3(rows: pd.DataFrame) -> None:
    """Print the long runs, by thirds."""
    table = rows[rows["experiment"] == "E3/steps"].copy()
    parts = {"1 to 50": slice(0, 50), "51 to 100": slice(50, 100), "101 to 150": slice(100, 150)}
    for title, part in parts.items():
        table[title] = [np.mean(rewards[part]) for rewards in table["reward"]]
        table[f"no signal, {title}"] = [np.mean(shares[part]) for shares in table["equal_groups"]]
        table[f"entropy, {title}"] = [np.mean(values[part]) for values in table["entropy"]]
    lines = []
    for (arm, seed), own in table.groupby(["arm", "seed"], sort=False):
        line = {"arm": arm, "seed": str(seed)}
        for title in [*parts, "sampled", *(name for name in own if ", " in name)]:
            line[title] = f"{own[title].iloc[0]:.3f}"
        lines.append(line)
    print_tables(lines)
    for title in [*parts, "sampled"]:
        print(f"\n{title}:")
        lines = planned(table, LONG_PAIRS, title)
        print_tables(holm(lines[:2]), holm(lines[2:]))


def print_weights(table: pd.DataFrame) -> None:
    """Print how the weights of E2 find errors, and agree with SHEAR's."""
    for task, own in table.groupby("task"):
        counts = own.dropna(subset="right")
        lucky, right = counts["lucky"].sum(), counts["right"].sum()
        print(f"\n{task}: {lucky:.0f} of {right:.0f} right answers hold a wrong step")
        groups = own.dropna(subset="group")
        lines = []
        for arm in WEIGHED:
            pairs = groups[f"pairs {arm}"]
            of_arm = (groups[f"auc {arm}"] * pairs).sum() / pairs[
                groups[f"auc {arm}"].notna()
            ].sum()
            line = {"weights": arm, "AUC": f"{of_arm:.3f}"}
            for name in ("rank", "partial", "null", "null partial"):
                by_seed = groups.groupby("seed")[f"{name} {arm}"].mean()
                line[name] = f"{by_seed.mean():.2f} ({by_seed.min():.2f} to {by_seed.max():.2f})"
            lines.append(line)
        print(f"{len(groups)} mixed groups")
        print_tables(lines)


def print_equal(path: str) -> None:
    """Print the trainings at equal rates (rows of `lab.studies.compare` at eb43e56)."""
    table = pd.DataFrame(files.read_lines(Path(path)))
    table = table[table["stage"] == "confirm"]
    for _, own in table.groupby("lr"):
        rows = own.copy()
        rows["curve"] = [np.mean(rewards) for rewards in rows["rewards"]]
        lines = []
        for outcome in ("curve", "sampled"):
            by_arm = rows.pivot(index="seed", columns="rule", values=outcome)
            for arm in ("grpo", "shear", "half", "quarter"):
                line = {"lr": f"{rows['lr'].iloc[0]:g}", "outcome": outcome, "arm": arm}
                line["mean"] = f"{by_arm[arm].mean():.3f}"
                for other in ("grpo", "shear"):
                    line[f"less {other}"] = (
                        "" if arm == other else told(by_arm[arm] - by_arm[other])["D"]
                    )
                lines.append(line)
        print_tables(lines)


def print_all(folder: str) -> None:
    """Print all tables of decides.md from the rows in a folder."""
    path = Path(folder)
    print_equal(str(path / "decides-rates.jsonl"))
    rows = read(str(path / "decides.jsonl"))
    print_e1(rows, "E1", LESS)
    print_split(rows)
    print_e1c(rows)
    print_e1(rows, "E1b", LESS_TOY)
    print_e1(rows, "E1e", LESS_TOY)
    print_e2(rows)
    print_e3(rows)
    print_weights(pd.DataFrame(files.read_lines(path / "decides-weights.jsonl")))
