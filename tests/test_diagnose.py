"""studies/diagnose.py, its prefixes, truth and figures: planted effects are found; files and flags."""

import functools
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import interrupt
from scipy.stats import spearmanr

from credit import teacher
from credit.measures import around, peak
from credit.shear_settings import Closest
from credit.table import METHODS
from grpo import Rollouts, pad_left, rollout
from harness import models
from rewards import Verdict
from studies import diagnose, figures, page, prefixes
from studies.prefixes import SPANS, Prefixes
from tasks import toy
from tasks.problems import BadInput, Task

SIZES = "--task embedded --toy-lines 1 --window 4 --stride 4 --heldout 16 --eval-groups 2 --max-iters 5".split()
SPANS_OF_4 = dict(window=4, stride=4)
TEXT = "Step {0}: so it is {0}.\n\nTherefore \\boxed{{{0}}}."
FIGURES = {"fig_1a", "fig_1b", "fig_3", "fig_9", "fig_10", "fig_11"}


@pytest.fixture(autouse=True)
def coarse(monkeypatch, request):
    """Pictures that are quickly written, or drawn alone where no run is to leave them."""
    monkeypatch.setattr(figures, "DPI", 20)
    if not {"taught", "qwen_folder"} & set(request.fixturenames):
        monkeypatch.setattr(figures, "save_png", lambda figure, path: None)


def table(rows: list[tuple]) -> dict[str, np.ndarray]:
    """Rows of (rollout, right, end, distance, success) as the table that figures take, numbered by rollout."""
    seen, numbered = Counter(), []
    for first, *row in rows:
        numbered.append((first, seen[first], *row))
        seen[first] += 1
    return dict(zip(SPANS, np.array(numbered, dtype=float).T, strict=True))


def made(effect: float, seed: int = 0, rollouts: int = 60) -> dict[str, np.ndarray]:
    """Rollouts of 10 prefixes; with effect 1 distance is what success lacks, and right rollouts have more success."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(rollouts):
        right, success = number % 2, rng.uniform(0.4, 0.6)
        for end in range(10, 110, 10):
            success = np.clip(success + rng.choice((-1, 0, 1)) / 16 + effect * (0.05 if right else -0.08), 0, 1)
            distance = effect * (1 - success) + (1 - effect) * rng.uniform()
            rows.append((number, right, end, distance, success))
    return table(rows)


# ---- statistics -----------------------------------------------------------------------------------------------


def test_fig_1a_is_the_rank_correlation_of_the_means_by_position(tmp_path):
    """Means written out; a length with too few prefixes is left out; no correlation of what does not change."""
    rows = [(0, 1, end, end / 100, 1 - end / 50 + 0.1) for end in (10, 20, 30, 40)]
    rows += [(1, 0, end, end / 50, 1 - end / 50 - 0.1) for end in (10, 20, 30, 40)] + [(1, 0, 50, 9.0, 1.0)]
    found = figures.fig_1a_position(table(rows), tmp_path / "a.png", least=2)
    assert found["ends"] == [10, 20, 30, 40] and found["spearman"] == pytest.approx(-1) and found["n"] == 4
    assert found["success"] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert found["distance"] == pytest.approx([0.15, 0.3, 0.45, 0.6])
    assert found["success_right"] == pytest.approx([0.9, 0.7, 0.5, 0.3])
    flat = table([(row, 1, end, end, 0.5) for row in range(3) for end in (10, 20, 30)])
    assert figures.fig_1a_position(flat, tmp_path / "b.png", least=2)["spearman"] is None


def test_means_and_errors_by_key_are_written_out_numbers():
    """1 and 3 of key 0: mean 2, deviation sqrt(2) (ddof 1), error 1; one value has no error, no value no mean."""
    mean, error = figures.mean_by(np.array([0, 1, 0]), np.array([1.0, 5.0, 3.0]), np.array([0, 1, 2]))
    assert mean[:2].tolist() == [2, 5] and error[0] == pytest.approx(1)
    assert np.isnan([mean[2], *error[1:]]).all()


def test_fig_1b_takes_changes_within_rollouts_that_one_continuation_can_show(tmp_path):
    """Events by hand: none across two rollouts, none below 1/16; rho is scipy's."""
    ninth, small = 9 / 16, 1 / 17
    rows = [(0, 1, 10, 0.1, 0.5), (0, 1, 20, 0.4, 0.25), (0, 1, 30, 0.3, ninth), (0, 1, 40, 9.0, ninth)]
    rows += [(1, 0, 10, 0.7, 0.0), (1, 0, 20, 0.8, 1 / 16), (1, 0, 30, 5.0, 1 / 16 + small)]
    success, distance = figures.changes(table(rows), 1 / 16)
    assert success == pytest.approx([-1 / 4, 5 / 16, 1 / 16]) and distance == pytest.approx([0.3, -0.1, 0.1])
    gap = figures.rows_where(np.arange(7) != 1, table(rows))  # two strides lie between its neighbours
    assert figures.changes(gap, 1 / 16)[0] == pytest.approx([1 / 16])
    across = figures.rows_where(np.isin(np.arange(7), [0, 5, 6]), table(rows))  # one ends with 0, the next begins at 1
    assert figures.changes(across, 0)[0] == pytest.approx([small])
    found = figures.fig_1b_changes(table(rows), tmp_path / "a.png")
    expected = spearmanr([-1 / 4, 5 / 16, 1 / 16], [0.3, -0.1, 0.1])
    assert found["n"] == 3 and found["spearman"] == pytest.approx(expected.statistic)
    assert found["p"] == pytest.approx(expected.pvalue) and found["at_least_quarter"]["n"] == 2


def test_fig_3_auc_and_densities_of_each_bin(tmp_path):
    """Two bins by hand: success tells nothing among near spans and everything among far ones, ties counting half."""
    near = [(0, right, 10, 0.1, success) for right, success in ((1, 0.5), (1, 1.0), (0, 0.5), (0, 1.0))]
    far = [(0, right, 10, 0.9, success) for right, success in ((1, 0.75), (1, 1.0), (0, 0.0), (0, 0.25), (0, 0.75))]
    found = figures.fig_3_separation(table(near + far), tmp_path / "a.png", bins=2)
    assert found["auc"] == [0.5, pytest.approx(5.5 / 6)]
    assert found["right"] == [2, 2] and found["wrong"] == [2, 3]
    for side in ("right", "wrong"):
        assert all(sum(shares) == pytest.approx(1) for shares in found[f"density_{side}"])
    assert found["density_wrong"][1][0] == pytest.approx(1 / 3)
    assert found["density_right"][1][-1] == pytest.approx(1 / 2)
    alone = figures.fig_3_separation(table(near[:2]), tmp_path / "b.png", bins=2)
    assert alone["auc"] == [None]  # nobody to compare with


def test_planted_effects_are_found_and_none_where_none_is_planted(tmp_path):
    """The figures of spans on made rollouts."""
    path, rng = tmp_path / "x.png", np.random.default_rng(2)
    changes, depth = (make(made(1.0), path) for make in (figures.fig_1b_changes, figures.fig_9_depth))
    assert changes["spearman"] < -0.95 and changes["p"] < 1e-20
    assert all(each["spearman"] < -0.99 and each["p"] < 1e-6 for each in depth["bins"])
    assert all(each["means"] == sorted(each["means"], reverse=True) for each in depth["bins"])
    assert depth["bins"][-1]["auc_distance"] > 0.95
    far, right = rng.uniform(size=1600), rng.integers(0, 2, 1600)  # the farther, the better success tells right ones
    success = 0.5 + (right - 0.5) * far + rng.normal(0, 0.1, 1600)
    parted = table([(0, *row) for row in zip(right, 0 * right, far, success, strict=True)])
    aucs = figures.fig_3_separation(parted, path)["auc"]
    assert len(aucs) == 8 and aucs[0] < 0.75 and aucs[-1] > 0.97 and spearmanr(aucs, range(8)).statistic > 0.9
    changes, depth = (make(made(0.0), path) for make in (figures.fig_1b_changes, figures.fig_9_depth))
    assert abs(changes["spearman"]) < 0.15 and changes["p"] > 0.01 and changes["n"] > 200
    assert all(abs(each["spearman"]) < 0.2 and 0.35 < each["auc_distance"] < 0.65 for each in depth["bins"])
    assert all(0.35 < auc < 0.65 for auc in figures.fig_3_separation(made(0.0, rollouts=400), path)["auc"])


def test_fig_9_holds_depth_fixed(tmp_path):
    """Distance and success that both follow depth, and nothing else, correlate overall and not within a bin."""
    rng = np.random.default_rng(1)
    ends = np.repeat([10, 20, 30, 40], 200)
    rows = []
    for i, end in enumerate(ends):
        rows.append((i, i % 2, end, end / 40 + rng.normal(0, 0.02), 1 - end / 50 + rng.normal(0, 0.02)))
    spans = table(rows)
    assert figures.correlation(spans["distance"], spans["success"])["spearman"] < -0.9
    found = figures.fig_9_depth(spans, tmp_path / "a.png")["bins"]
    assert [(each["from"], each["to"], each["n"]) for each in found] == [(end, end, 200) for end in (10, 20, 30, 40)]
    assert all(abs(each["spearman"]) < 0.2 for each in found)


def test_fig_10_and_11_count_and_average(tmp_path, monkeypatch):
    """Mixed groups are those with an accuracy between 0 and 1, the axis; minima are over the other rollout's spans; the
    line stands before the column of the first error.
    """
    drawn = []
    monkeypatch.setattr(figures, "save_png", lambda figure, path: drawn.append(figure))
    found = figures.fig_10_accuracies(np.array([0, 0.25, 0.25, 0.5, 1, 1]), tmp_path / "a.png")
    assert found == {"mixed": 0.5, "accuracies": [0, 0.25, 0.5, 1], "groups": [1, 2, 1, 2]}
    lowest, highest = drawn[0].axes[0].get_xlim()
    assert -0.2 < lowest < 0 and 1 < highest < 1.2  # all of the scale, and the bars at its ends whole
    one = np.array([[0.0, 1.0], [2.0, 5.0]])
    pairs = {"one": (one, [4, 7], [4, 6], 1), "two": (np.ones((2, 3)), [4, 7], [4, 6, 8], None)}
    found = figures.fig_11_matrices(pairs, tmp_path / "b.png")
    assert found == {"one": {"mean": 2, "mean_minimum": 0.5}, "two": {"mean": 1, "mean_minimum": 1}}
    one, two, _ = drawn[-1].axes
    assert [list(line.get_xdata()) for line in one.lines] == [[0.5, 0.5]] and not two.lines
    assert [label.get_text() for axis in (one.xaxis, one.yaxis) for label in axis.get_ticklabels()] == list("4647")


def test_panels_say_what_they_show(tmp_path, monkeypatch):
    """A title and both axes, for the first two panels of a figure; those side by side may share the vertical axis."""
    drawn = []
    monkeypatch.setattr(figures, "save_png", lambda figure, path: drawn.append(figure))
    for draw in (figures.fig_1a_position, figures.fig_1b_changes, figures.fig_3_separation, figures.fig_9_depth):
        draw(made(0.5), tmp_path / "a.png")
    figures.fig_10_accuracies(np.array([0.5, 1]), tmp_path / "a.png")
    place = {"auc": 0.7, "auc_step": 0.6, "auc_position": 0.8, "peak": None}
    figures.credit_placement({"one": place}, "method", tmp_path / "a.png")
    figures.pooling_smear({"max": [0.1] * 5}, 2, tmp_path / "a.png")
    for figure in drawn:
        assert figure.axes[0].get_ylabel()
        for axes in figure.axes[:2]:
            assert axes.get_title() and axes.get_xlabel()


def test_where_the_peak_lies_and_what_is_around_a_place():
    """Offsets by hand; constant rows and rows without an error do not count."""
    weights = torch.tensor([[0, 0, 1, 3, 2], [5, 1, 1, 1, 0], [2, 2, 2, 2, 2], [9, 0, 0, 0, 0]]).float()
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, 4] = False
    places = torch.tensor([[2, 3], [2, 3], [2, 3], [-1, -1]])
    assert peak(weights, mask, places) == {"quartiles": [-1.25, -0.5, 0.25], "rollouts": 2}
    assert peak(weights[2:], mask[2:], places[2:]) is None
    assert around(weights, mask, places[:, 0], 2) == pytest.approx([7 / 3, 1, 4 / 3, 2, 2])
    assert around(weights, mask, places[:, 1], 2) == [1, pytest.approx(4 / 3), 2, 2, None]


def test_where_half_of_the_rise_is_done(tmp_path):
    """Curves written out, offsets -6 to 6 and spans of 3 tokens; a straight line has it in the middle."""
    early = [0.1, 0.15, 0.12, 0.1, 0.3, 0.6, 0.6, 0.9, 0.9, 0.9, 1.5, None, None]
    line = [place / 10 for place in range(13)]
    found = figures.pooling_smear({"max": early, "mean": line}, 3, tmp_path / "a.png")
    assert [each["half_risen"] for each in found.values()] == [-1, 0]
    assert (found["max"]["base"], found["max"]["top"]) == (0.15, 0.9) and found["mean"]["weights"] == line
    short = [None, None, 0.2, 0.4, None]
    assert figures.pooling_smear({"max": short, "mean": short}, 9, tmp_path / "b.png")["max"]["half_risen"] is None


# ---- prefixes -------------------------------------------------------------------------------------------------


def test_prefixes_end_with_full_spans_and_before_the_reasoning_does(tiny):
    """Lengths written out; the prefix that holds the whole reasoning is left out, and with it the box."""
    assert prefixes.prefix_ends(64, 60, 12, 6) == [12, 18, 24, 30, 36, 42, 48, 54]
    assert prefixes.prefix_ends(64, 61, 12, 6)[-1] == 60
    assert prefixes.prefix_ends(64, None, 12, 6)[-1] == 60 and prefixes.prefix_ends(60, None, 12, 6)[-1] == 54
    assert prefixes.prefix_ends(200, 150, 100, 25) == [100, 125]
    assert prefixes.prefix_ends(12, None, 12, 6) == prefixes.prefix_ends(7, None, 12, 6) == []
    _, tokenizer = tiny
    text = "a=3-6=3-6=7\nb=3+a=3+7=0\n\\boxed{0}"
    ids = tokenizer(text)["input_ids"]
    rollouts = prefixes.as_rollouts([1], [ids, ids[:24]], [text, text[:24]], [False, True], tokenizer, "cpu")
    verdicts = [Verdict(1.0, ""), Verdict(0.0, "")]
    group = prefixes.as_group(SimpleNamespace(window=8, stride=4), tokenizer, {}, rollouts, verdicts)
    assert group.ends == [[8, 12, 16, 20], [8, 12, 16, 20]] and tokenizer.decode(ids[24]) == r"\boxed{"


def test_rollout_takes_ids_as_they_are(tiny):
    """Ids and the text they stand for give the same greedy responses; prompts of several lengths may be mixed."""
    model, tokenizer = tiny
    texts = ["a=3-6;a?\n", "a=1+2;b=a+3;b?\n"]
    ids = tokenizer(texts)["input_ids"]
    options = dict(max_tokens=5, temperature=0.0, batch_size=2)
    by_text, by_ids = (rollout(model, tokenizer, prompts, 2, **options) for prompts in (texts, ids))
    assert torch.equal(by_text.ids, by_ids.ids) and by_text.texts == by_ids.texts
    assert torch.equal(by_text.prompt_ids, by_ids.prompt_ids)


def test_each_group_has_random_numbers_of_its_own(tiny, tmp_path, monkeypatch):
    """That of its seed and number: not those of another group, and the same when it is made alone."""

    def draw(*parts):
        ids = torch.randint(20, (12,)).tolist()
        return Prefixes({"problem": "?"}, [], [ids], [""], [False], [1.0], [""], [[]], [])

    monkeypatch.setattr(prefixes, "sampled", draw)
    args = SimpleNamespace(out=tmp_path, rollouts=None, continuations=0, seed=1, **SPANS_OF_4)
    groups = prefixes.collect(args, None, tiny[0], None, [{}, {}])
    assert groups[0] != groups[1]
    (tmp_path / "group-0001.json").unlink()
    assert prefixes.collect(args, None, tiny[0], None, [{}, {}]) == groups


def test_damaged_groups_are_one_sentence(tiny, tmp_path):
    """The file and the remedy are named; nothing is changed."""
    args = SimpleNamespace(out=tmp_path, rollouts=None, continuations=0, seed=1, **SPANS_OF_4)
    path = tmp_path / "group-0000.json"
    for text in ("", "{", "[1]", "{}", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(BadInput, match=r"--out .*: group-0000.json is damaged \(.*\); delete it"):
            prefixes.collect(args, None, tiny[0], None, [{}])
        assert path.read_text() == text


def test_continuations_start_from_the_sampled_ids_and_whole_responses_are_graded(tiny, monkeypatch):
    """Of a text whose ids are not the tokenizer's own: prompt and prefix reach the sampler untouched, with what is
    left of the length limit; what is graded is prefix and continuation, without the stop; each verdict finds its place.
    """
    model, tokenizer = tiny
    prompt, responses = [5, 6, 7], [[4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4]]
    problem, texts, reasons = {"problem": "?", "answer": "1"}, ["", ""], ["", ""]
    group = Prefixes(problem, prompt, responses, texts, [False] * 2, [1.0, 0.0], reasons, [[2, 4], [2]], [])
    asked, graded = [], []

    def sampler(model, tokenizer, prompts, count, *, max_tokens, temperature, generate):
        asked.append((prompts, count, max_tokens, temperature))
        rows = len(prompts) * count
        ids = torch.tensor([[20 + row, 1] for row in range(rows)])  # a token of its own, and the stop
        padded = pad_left([ids for ids in prompts for _ in range(count)], 0, "cpu")
        return Rollouts(*padded, ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros(rows).bool(), [""] * rows)

    def grade(text, reference):
        graded.append(text)
        return Verdict(float(len(graded)), "counted")

    monkeypatch.setattr(prefixes, "rollout", sampler)
    monkeypatch.setattr("tasks.problems.grade_all", lambda *parts: list(map(*parts)))
    args = SimpleNamespace(max_tokens=10, temperature=0.7, generate_batch=0)
    found = prefixes.continued(group, 2, args, Task("x", [], [], None, grade), model, tokenizer)
    assert asked == [([[5, 6, 7, 4, 5], [5, 6, 7, 9, 8]], 2, 8, 0.7), ([[5, 6, 7, 4, 5, 6, 7]], 2, 6, 0.7)]
    assert graded[0] == tokenizer.decode([4, 5, 20]) and graded[3] == tokenizer.decode([9, 8, 23])
    assert graded[4] == tokenizer.decode([4, 5, 6, 7, 20])
    assert found.continued == [[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0]]]
    unsure = Prefixes({}, prompt, responses, texts, [False] * 2, [None, 0.0], reasons, [[2], []], [])
    closest = []
    for rows in [[0.1, 0.2, 0.3], [0.4]], [[0.5], []]:
        closest.append([[Closest(0, 0, distance, 0, 0, 0) for distance in distances] for distances in rows])
    spans = prefixes.span_table([found, unsure], closest)  # no verdict, no row
    assert spans["success"].tolist() == [1.5, 5.5, 3.5] and spans["distance"].tolist() == [0.1, 0.2, 0.4]
    assert spans["right"].tolist() == [1, 1, 0] and spans["end"].tolist() == [2, 4, 2]


# ---- the command ----------------------------------------------------------------------------------------------


def test_a_run_has_every_figure_and_samples_nothing_twice(taught, tmp_path, monkeypatch, capsys, assert_refused):
    """PNGs, keys and a page; the same command again reads the disk; a missing group alone is made again, and is the
    same; other flags are refused.
    """
    flags = ["--model", taught, *SIZES, "--groups", "2", "--continuations", "3", "--out", str(tmp_path)]
    made = []
    # the one line of this model's programs would be the error, from its first token on: say that it starts later
    monkeypatch.setattr(toy, "first_error", lambda problem, text: toy.FirstError(4, "arith", 12))
    monkeypatch.setattr(teacher, "make_prm", functools.partial(teacher.make_prm, steps=2))
    monkeypatch.setattr(prefixes, "rollout", lambda *parts, **options: made.append(1) or rollout(*parts, **options))
    assert diagnose.main(flags) == 0 and made
    results, printed = json.loads((tmp_path / "diagnose.json").read_text()), capsys.readouterr().out
    assert results.keys() >= FIGURES | {"methods", "settings", "pooling", "paper", "flags", "left_out"}
    pictures = {path.stem for path in tmp_path.glob("*.png") if path.read_bytes().startswith(b"\x89PNG")}
    assert pictures == FIGURES | {"truth_methods", "truth_settings", "pooling"}
    groups = [Prefixes(**json.loads(path.read_text())) for path in sorted(tmp_path.glob("group-*.json"))]
    ends = [each for group in groups if group.mixed for each in group.ends]
    assert results["groups"] == len(groups) == 2 and results["spans"] == sum(map(len, ends)) > 0
    assert "-0.96" in printed and "left out: arca" in printed and "not comparable" in printed
    assert max(len(line) for line in printed.splitlines() if line.startswith("|")) <= 100
    assert results["methods"]["oracle"]["auc_step"] == 1 and results["methods"]["grpo"]["peak"] is None
    assert set(results["pooling"]) == {"max", "mean"} and "as given" in results["settings"]
    assert set(results["methods"]) == set(METHODS) - {"arca"}
    settings = {name: each["weight_after"] for name, each in results["settings"].items()}
    assert len(set(settings.values())) == len(settings) - 1  # a window of one line or two: every change has an effect
    assert sum(results["fig_10"]["groups"]) == len(groups) == results["groups"]
    assert page.main([str(tmp_path)]) == 0  # the command that its last line names
    assert printed.endswith(f"next: python -m studies.page {tmp_path}\n")
    shown = json.loads((tmp_path / "credit.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert [row["score"] for rows in shown for row in rows] == [x for each in groups if each.mixed for x in each.scores]
    wrong = [row for rows in shown for row in rows if row["score"] == 0]
    late = [row["weights"]["shear"][11] for row in wrong]  # of the wrong step's last token
    assert results["pooling"]["max"]["weights"][8] == pytest.approx(sum(late) / len(late), abs=1e-4)
    row = shown[0][0]  # a token's weight is the largest distance of its spans
    for place, weight in enumerate(row["weights"]["shear"]):
        covering = [far for start, end, far, *_ in row["spans"] if start <= place < end]
        assert weight == pytest.approx(max(covering), abs=2e-4)
    assert set(row["weights"]) == {"shear", "grpo", "first", "oracle"}
    made.clear()

    monkeypatch.setattr(diagnose, "scored", interrupt)  # what comes after sampling is not of interest again
    assert diagnose.main(flags) == 130 and not made
    gone = tmp_path / "group-0001.json"
    before = gone.read_text()
    gone.unlink()
    assert diagnose.main(flags) == 130 and made and gone.read_text() == before
    assert_refused(diagnose.main, [*flags, "--continuations", "5"], "--continuations 5", "have 3")


def solutions(path, rows: int = 4, **changed) -> list[str]:
    """A file of one mixed group and one that is not; the flags that read it."""
    problems = [("1+1?", [1, 0, 1, 0]), ("2+2?", [1] * 4)]
    numbered = [(problem, *pair) for problem, labels in problems for pair in enumerate(labels[:rows])]
    lines = [dict(problem=problem, solution=TEXT.format(i), label=label, extra=0) for problem, i, label in numbered]
    lines[0] |= changed
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--rollouts", str(path), "--window", "16", "--stride", "8", "--max-iters", "10"]


def test_solutions_from_a_file_are_encoded_once_and_not_continued(qwen_folder, tmp_path, monkeypatch, capsys):
    """Figs. 10 and 11; what needs continuations or a first error is left out, and named."""
    flags = [*solutions(tmp_path / "s.jsonl"), "--model", str(qwen_folder), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(prefixes, "rollout", None)  # nothing may be sampled
    assert diagnose.main(flags) == 0
    printed, results = capsys.readouterr().out, json.loads((tmp_path / "out" / "diagnose.json").read_text())
    assert "left out: Figs. 1(a), 1(b), 3, 9: they need --continuations" in printed and "first error" in printed
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"fig_10", "fig_11"}
    assert results["fig_10"] == {"mixed": 0.5, "accuracies": [0.5, 1], "groups": [1, 1]}
    assert results["mixed_groups"] == 1 and not {"fig_1a", "methods"} & results.keys()
    group = Prefixes(**json.loads((tmp_path / "out" / "group-0000.json").read_text()))
    text = TEXT.format(1)
    assert group.texts[1] == text and len(group.responses[1]) == len(text) and group.scores == [1, 0, 1, 0]
    assert bytes(group.problem["problem"], "utf8") == b"1+1?" and group.ends[1][-1] < text.index("\\boxed")


def test_solutions_from_a_file_can_be_continued(qwen_folder, tmp_path, monkeypatch, assert_refused):
    """With an answer to grade against, each prefix has its continuations' verdicts, if the limits leave them room."""
    asked = []

    def grade(*pair):
        asked.append(pair)
        return Verdict(1.0, "")

    monkeypatch.setattr(diagnose, "grader", lambda *_: grade)
    path = tmp_path / "s.jsonl"
    flags = [*solutions(path), "--continuations", "2", "--max-tokens", "50", "--model", str(qwen_folder)]
    path.write_text(path.read_text().replace('"extra": 0', '"answer": "1"'))
    monkeypatch.setattr("tasks.problems.grade_all", lambda *parts: list(map(*parts)))
    assert diagnose.main([*flags, "--out", str(tmp_path / "out")]) == 0
    group = Prefixes(**json.loads((tmp_path / "out" / "group-0000.json").read_text()))
    assert [len(each) for each in group.continued] == [len(ends) for ends in group.ends]
    assert {len(scores) for each in group.continued for scores in each} == {2}
    assert all(answer == "1" and text.startswith("Step ") for text, answer in asked)
    assert (tmp_path / "out" / "fig_1a.png").exists()
    for limit, *names in (("40", "has 41 tokens", "raise it"), ("600", "context is 512", "lower --max-tokens")):
        words = [*flags, "--max-tokens", limit, "--out", tmp_path / limit]
        assert_refused(diagnose.main, words, *names)
        assert not (tmp_path / limit).exists()


def test_refused_solutions_leave_nothing_that_refuses_mended_ones(qwen_folder, tmp_path, monkeypatch, assert_refused):
    """All are checked before one is saved; other solutions than the groups' are refused by the flag that gives them."""
    path, out = tmp_path / "s.jsonl", tmp_path / "out"
    flags = [*solutions(path), "--model", str(qwen_folder), "--out", str(out)]
    sound = path.read_text()
    path.write_text(sound + sound.replace("1+1", "3+3").replace(TEXT.format(2)[:4], "a" * 600))
    assert_refused(diagnose.main, flags, f"--rollouts {path}: a problem and its solutions need", "leave it out")
    assert not out.exists()
    path.write_text(sound)
    monkeypatch.setattr(diagnose, "scored", interrupt)  # what comes after the groups is not of interest
    assert diagnose.main(flags) == 130 and len(list(out.glob("group-*.json"))) == 1
    before = {file: file.read_bytes() for file in out.iterdir()}
    path.write_text(sound.replace("Step", "Stop"))
    assert_refused(diagnose.main, flags, "--rollouts sha256:", f": the groups in {out} have sha256:", "another --out")
    assert {file: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize("config", ["", "[1]", "{", "[" * 100_000, None])
def test_a_damaged_config_is_one_sentence(config, qwen_folder, tmp_path, assert_refused):
    """Also one that is gone, with groups of nobody knows what; nothing is changed."""
    flags = [*solutions(tmp_path / "s.jsonl"), "--model", str(qwen_folder), "--out", str(tmp_path)]
    (tmp_path / "group-0000.json").write_text("{}")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert_refused(diagnose.main, flags, "config.json")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_start_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """A kill while the tokenizer is written: the same command warms up again, and the next time no more."""
    flags = [*SIZES, "--warmup-steps", "1", "--groups", "1", "--out", str(tmp_path)]
    warmed = []
    warm_up = toy.warm_up
    monkeypatch.setattr(toy, "warm_up", lambda *parts, **options: warmed.append(1) or warm_up(*parts, **options))
    monkeypatch.setattr(diagnose, "own_prm", interrupt)
    with monkeypatch.context() as cut:
        cut.setattr(toy.make_tokenizer().__class__, "save_pretrained", interrupt)
        assert diagnose.main(flags) == 130 and len(warmed) == 1 and not (tmp_path / "start").exists()
    assert diagnose.main(flags) == 130 and len(warmed) == 2 and (tmp_path / "start" / "tokenizer.json").exists()
    assert diagnose.main(flags) == 130 and len(warmed) == 2


def test_weights_are_rounded_and_rotary_frequencies_are_not():
    """As on a GPU, where the model computes in bfloat16."""
    model = toy.make_model(1, seed=0)
    models.round_weights(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (dict(label=2), ["line 1", '"label" is 2', "0 or 1"]),
        (dict(solution=7), ["line 1", '"solution"']),
        (dict(solution="\ud800"), ["line 1", '"solution"']),
        (dict(problem=" \udc00?"), ["line 1", '"problem"']),
        (dict(label=[1]), ["line 1", '"label" is [1]']),
        (dict(problem="once?", label=0), ["no problem"]),
    ],
)
def test_bad_solutions_are_one_sentence(changed, names, qwen_folder, tmp_path, assert_refused):
    """Status 2 and no folder; the last: the changed row was the mixed group's only right one."""
    flags = solutions(tmp_path / "s.jsonl", rows=2, **changed)
    words = [*flags, "--model", qwen_folder, "--out", tmp_path / "out"]
    assert_refused(diagnose.main, words, "error: --rollouts", *names)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--groups 0", ["--groups 0", "at least 1"]),
        ("--continuations -1", ["--continuations -1"]),
        ("--groups 513", ["--groups 513", "--heldout 512"]),
        ("--method grpo", ["--method", "leave it out"]),
        ("--rollouts nowhere.jsonl", ["--rollouts nowhere.jsonl", "--model"]),
        ("--rollouts nowhere.jsonl --model x", ["--rollouts nowhere.jsonl", "cannot be read"]),
        ("--stride 13", ["--stride 13", "--window"]),
        ("--prm x", ["--prm", "leave it out"]),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_made(flags, names, tmp_path, assert_refused):
    """Status 2, no folder, no traceback."""
    assert_refused(diagnose.main, ["--out", tmp_path / "out", *flags.split()], *names)
    assert not (tmp_path / "out").exists()
