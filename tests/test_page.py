"""harness/page.py: the page holds what it was given, and hostile text stays text; `test_browser.py`
looks at it.
"""

import base64
import hashlib
import json
import math
import re

import pytest

from harness import files, page
from studies import page as command

SENSE = (
    "So $(2n-19)^2 + 35 = 4x^2$ holds.\n\nThen the two factors, which have the same sign, make 35. "
)
HOSTILE = [
    "</script><script>document.title='ran'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "]]>&lt;&amp;&#60;img src=x onerror=alert(1)&#62;",
    "\u2028\u2029\u202e\x00\ud800",
    "{{data}} {{title}} {{script_hash}} %s \\1 \\u003c",
    *("\r\n\t ", ""),
    "javascript:document.title='ran'",
    "<svg onload=\"document.title='ran'\"><use href=x></svg>",
    "<style>*{display:none}</style>",
    "<iframe srcdoc=\"<script>parent.document.title='ran'</script>\"></iframe>",
    *("'\"><a href=//x>&quot;", "${document.title='ran'}`", "__proto__", "constructor"),
]


def rollout(tokens, weights, **other):
    """A row as a run writes it."""
    row = {
        "step": 1,
        "problem": "2+2?",
        "answer": "4",
        "response": "".join(tokens),
        "score": 1.0,
        "reason": "correct",
    }
    return {
        **row,
        "first_error": None,
        "advantage": 0.5,
        "tokens": tokens,
        "weights": {"shear": weights},
        **other,
    }


def long_group():
    """8 rollouts of 3,000 tokens."""
    tokens = (re.findall(r" ?\w{1,5}|\s|[^\w\s]", SENSE) * 3000)[:3000]
    weights = [round(0.5 + 0.5 * math.sin(place / 40), 4) for place in range(3000)]
    return [
        rollout(tokens, weights, score=float(place < 3), advantage=0.6 - 0.3 * place)
        for place in range(8)
    ]


def make(run, *words):
    """The command of a run's page; its exit status."""
    return command.main([str(run), *map(str, words)])


def data_of(text):
    """What a browser's parser takes for the data: all up to the first end tag."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)[1]
    )


def test_what_goes_in_is_what_the_page_holds():
    """To the last digit, for what is shown; numbers that JSON lacks become null."""
    first = rollout(
        ["a", " b\n"], [0.1236, 1 / 3], first_error=[0, "arith", 2], spans=[(0, 2, 1e-17)]
    )
    second = rollout(["c"], [None], score=None, advantage=0.0, first_error=(1, "format", 2))
    wild = rollout(
        ["d"] * 4,
        [math.nan, math.inf, -math.inf, -2.5],
        step=2,
        advantage=math.nan,
        tests={"inputs": []},
    )
    held = data_of(page.as_html([[first, second], [wild]], "title"))
    assert [len(group) for group in held] == [2, 1]
    for row, made in zip([*held[0], *held[1]], [first, second, wild], strict=True):
        assert set(row) == set(made) - {"response", "tests"}
        assert all(
            row[name] == made[name]
            for name in set(row) - {"weights", "advantage", "first_error", "spans"}
        )
    assert held[0][0]["weights"] == {"shear": [0.1236, 1 / 3]} and held[0][1]["weights"] == {
        "shear": [None]
    }
    assert held[0][0]["spans"] == [[0, 2, 1e-17]] and held[0][0]["first_error"] == [0, "arith", 2]
    assert held[0][1]["first_error"] == [1, "format", 2]
    assert (
        held[1][0]["weights"] == {"shear": [None, None, None, -2.5]}
        and held[1][0]["advantage"] is None
    )


def test_hostile_text_cannot_leave_its_place():
    """Wherever it stands, the page has its own two scripts, its own tags, and the text to the
    letter.
    """
    everything = "".join(HOSTILE)
    row = rollout(
        HOSTILE, [0.5] * len(HOSTILE), problem=everything, answer=everything, reason=everything
    )
    row["first_error"] = [0, everything, 3]
    row["weights"][everything] = [0.5] * len(HOSTILE)
    text, plain = (
        page.as_html([[row]], everything),
        page.as_html([[GOOD]], "title"),
    )
    assert data_of(text)[0][0]["tokens"] == HOSTILE and data_of(text)[0][0]["problem"] == everything
    assert (
        text.isascii()
        and "unicode-bidi: isolate" in text
        and "<img" not in text
        and "<!--" not in text
    )
    for tag in ("<script", "</script", "<", ">"):
        assert text.split("const groups")[0].count(tag) == plain.split("const groups")[0].count(tag)


def test_the_policy_admits_this_script_and_this_style_only():
    """Hashes are of the very text between the tags; nothing else loads or runs, and the one link is
    the paper's.
    """
    text = page.as_html([[GOOD]], "title")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert len(body) == 1 and rules.pop(name) == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert text.index("Content-Security-Policy") < text.index("<title>")
    assert text.count('href="https://arxiv.org/abs/2604.23318"') == 1
    text = re.sub(
        r'http://www.w3.org/2000/svg| href="https://arxiv.org/\S+"', "", text
    )  # a name is not loaded
    assert not re.search(r"https?:|url\(|@import|innerHTML|\son\w+=|\ssrc=|\shref=", text)


def test_neighbouring_rows_of_one_step_are_a_group(tmp_path):
    """A step's second problem is a group of its own; a last line that is cut off is left out."""
    rows = [
        rollout([str(place)], [1.0], step=step) for place, step in enumerate([1, 1, 2, 2, 2, 3])
    ]
    rows[4]["problem"] = "3+3?"
    files.append_rows(tmp_path / "samples.jsonl", rows)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prob')
    groups = page.read_groups(tmp_path)
    assert [[row["tokens"][0] for row in group] for group in groups] == [
        ["0", "1"],
        ["2", "3"],
        ["4"],
        ["5"],
    ]
    assert make(tmp_path) == 0 and data_of((tmp_path / "credit.html").read_text())[0][0][
        "tokens"
    ] == ["0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["credit.html", "samples.jsonl"]


def test_a_long_group_is_small():
    """8 x 3,000 tokens take 20 bytes each and 30,000 for all else, at most."""
    assert len(page.as_html([long_group()], "long")) < 8 * 3000 * 20 + 30_000


def test_before_and_after_are_one_group(tmp_path, monkeypatch):
    """Only where both are there; spans count the rollouts of both. `--open` shows the page that was
    written.
    """
    for name, count in (("samples", 1), ("before", 2), ("after", 2)):
        rows = [
            rollout([name], [1.0], spans=[[0, 1, 0.5, 1 - place, 0, 1]]) for place in range(count)
        ]
        files.append_rows(tmp_path / f"{name}.jsonl", rows)
        assert len(page.read_groups(tmp_path)) == 1 + (name == "after")
    both, samples = page.read_groups(tmp_path)
    assert [row["when"] for row in both] == ["before training"] * 2 + ["after training"] * 2
    assert [row["spans"][0][3] for row in both] == [1, 0, 3, 2] and "when" not in samples[0]
    files.write_json(tmp_path / "config.json", {"task": "embedded", "toy_lines": 1})
    opened = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    assert make(tmp_path, "--open") == 0 and opened == [(tmp_path / "credit.html").as_uri()]
    assert "all arithmetic is mod 10" in (tmp_path / "credit.html").read_text()


GOOD = rollout(["a", "b"], [0.5, 0.5])


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\xfe\n", b"no json\n", b'{"step": 1, "reward": 0.5}\n']
)
def test_bad_samples_are_one_sentence(tmp_path, assert_refused, content):
    """The file is named, nothing written, and an old page left as it was."""
    source, out = tmp_path / "samples.jsonl", tmp_path / "credit.html"
    if content is not None:
        source.write_bytes(content)
    out.write_text("old")
    assert_refused(command.main, [tmp_path], str(source))
    assert out.read_text() == "old" and len(list(tmp_path.iterdir())) == 1 + source.exists()
