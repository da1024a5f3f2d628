"""lab/tools/page.py: the page holds what it was given, and hostile text stays text.

`test_browser.py` looks at it in a browser.
"""

import base64
import hashlib
import json
import math
import re

import pytest
from builders.commands import RUN_FLAGS, run_well
from builders.pages import GOOD_ROW, HOSTILE, page_row

import train
from harness import files
from lab.tools import page


def data_of(text):
    """The data as a browser's parser reads it: all up to the first end tag."""
    begin = '<script type="application/json" id="data">'
    end = "</script"
    return json.loads(text.split(begin)[1].split(end)[0])


def test_what_goes_in_is_what_the_page_holds():
    """All numbers that are shown keep every digit; those that JSON lacks become null."""
    row = page_row(["a", " b\n"], [0.1236, 1 / 3], first_error=[1, "arith", 2])
    row |= {"spans": [[0, 2, 1e-17]]}
    wild = page_row(["d"] * 3, [math.nan, -math.inf, -2.5], step=2, advantage=math.nan)
    expected = [dict(row), wild | {"weights": {"shear": [None, None, -2.5]}, "advantage": None}]
    for each in expected:
        del each["response"]
    held = data_of(page.as_html([[row], [wild | {"tests": {"inputs": []}}]], "title"))
    assert held == [expected[:1], expected[1:]]


def test_hostile_text_cannot_leave_its_place():
    """Wherever hostile text stands, the page has only its own two scripts and its own tags.

    The text itself is kept to the letter.
    """
    everything = "".join(HOSTILE)
    flat = [0.5] * len(HOSTILE)
    row = page_row(HOSTILE, flat, **dict.fromkeys(("problem", "answer", "reason"), everything))
    row["first_error"] = [0, everything, 3]
    row["weights"][everything] = flat
    text = page.as_html([[row]], everything)
    plain = page.as_html([[GOOD_ROW]], "title")
    ((held,),) = data_of(text)
    assert held["tokens"] == HOSTILE and held["problem"] == everything
    assert text.isascii() and "unicode-bidi: isolate" in text
    assert "<img" not in text and "<!--" not in text
    for tag in ("<script", "</script", "<", ">"):
        assert text.split("const groups")[0].count(tag) == plain.split("const groups")[0].count(tag)


def test_the_policy_admits_this_script_and_this_style_only():
    """The policy's hashes are of the very text between the tags; nothing else loads or runs."""
    text = page.as_html([[GOOD_ROW]], "title")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert len(body) == 1 and rules.pop(name) == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    # Left out: the one link, and a name that is not loaded.
    text = re.sub(r'http://www.w3.org/2000/svg| href="https://arxiv.org/\S+"', "", text)
    assert not re.search(r"https?:|url\(|@import|innerHTML|\son\w+=|\ssrc=|\shref=", text)


def test_neighbouring_rows_of_one_step_are_a_group(tmp_path):
    """A step's second problem is a group of its own; a last line that is cut off is left out."""
    path = tmp_path / "samples.jsonl"
    steps = {"1": 1, "2": 1, "3": 2}
    rows = [
        page_row([name], [1.0], problem=name[0], step=steps[name[0]])
        for name in "1a 1b 2a 3a 3b".split()
    ]
    files.append_rows(path, rows)
    with path.open("a") as file:
        file.write('{"step": 3, "prob')
    assert page.read_groups(tmp_path) == [rows[:2], rows[2:3], rows[3:]]
    run_well(page, tmp_path)
    assert data_of((tmp_path / "credit.html").read_text())[0][0]["tokens"] == ["1a"]


def test_before_and_after_are_one_group(tmp_path, monkeypatch):
    """They are shown only where both files are there; spans count the rollouts of both.

    `--open` shows the page that was written.
    """
    rows = [page_row(["a"], [1.0], spans=[[0, 1, 0.5, k, 0, 1]]) for k in (1, 0)]
    files.append_rows(tmp_path / "samples.jsonl", rows[:1])
    files.append_rows(tmp_path / "before.jsonl", rows)
    assert len(page.read_groups(tmp_path)) == 1
    files.append_rows(tmp_path / "after.jsonl", rows)
    both, samples = page.read_groups(tmp_path)
    assert [row["when"] for row in both] == ["before training"] * 2 + ["after training"] * 2
    assert [row["spans"][0][3] for row in both] == [1, 0, 3, 2] and "when" not in samples[0]
    opened = []
    monkeypatch.setattr(page.webbrowser, "open", opened.append)
    run_well(page, tmp_path, "--open")
    assert opened == [(tmp_path / "credit.html").as_uri()]


@pytest.mark.parametrize("modules", ["lab.fast --use lab.tools.page", "lab.tools.page"])
def test_a_run_records_the_spans_that_its_weights_come_from(modules, tmp_path):
    """A token's weight is the largest distance of the spans over it, whatever finds the closest.

    The page has them of each step's first group with both sides; that closest span is on the other
    side.
    """
    flags = "--steps 2 --warmup-steps 1 --toy-width 16 --window 4 --stride 2 --keep-samples"
    use = "--use builders.alternating --use"
    run_well(train, RUN_FLAGS, flags, use, modules, "--out", tmp_path, "--name run")
    run_well(page, tmp_path / "run")
    groups = data_of((tmp_path / "run" / "credit.html").read_text())
    with_spans = [group for group in groups if "spans" in group[0]]
    assert [group[0]["step"] for group in with_spans] == [1, 2] and len(groups) == 1 + 2 * 4
    for group in with_spans:
        for row in group:
            for token, weight in enumerate(row["weights"]["shear"]):
                over = [span for span in row["spans"] if span[0] <= token < span[1]]
                assert max(span[2] for span in over) == pytest.approx(weight, abs=1e-4)
            for _, _, _, other, start, end in row["spans"]:
                assert group[other]["score"] != row["score"]
                assert 0 <= start < end <= len(group[other]["tokens"])


def test_spans_are_those_of_the_first_group_with_both_sides(tmp_path):
    """A rollout without a verdict makes no side."""
    rows = []
    for problem, scores in {"1": [1.0, None], "2": [1.0, 0.0], "3": [1.0, 0.0]}.items():
        rows += [page_row(["a"], [1.0], problem=problem, score=score) for score in scores]
    files.append_rows(tmp_path / "samples.jsonl", rows)
    spans = [[[0, 1, 1.0, 1, 0, 1]], [[0, 1, 1.0, 0, 0, 1]]]
    files.write_rows(tmp_path / "spans.jsonl", [{"step": 1, "spans": spans}])
    shown = [[row.get("spans") for row in group] for group in page.read_groups(tmp_path)]
    assert shown == [[None, None], spans, [None, None]]


@pytest.mark.parametrize("content", [b"", b"no json\n"])
def test_bad_samples_are_one_sentence(tmp_path, assert_refused, content):
    """The file is named, nothing is written, and an old page is left as it was."""
    source = tmp_path / "samples.jsonl"
    out = tmp_path / "credit.html"
    source.write_bytes(content)
    out.write_text("old")
    assert_refused(page.main, [tmp_path], str(source))
    assert out.read_text() == "old"
