"""studies/page.py: the page holds what it was given, and hostile text stays text; `test_browser.py` looks at it."""

import base64
import hashlib
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from cases import Numbers, without_text

from credit.batch import Batch
from credit.measures import effective_weights
from credit.methods import oracle
from harness import files
from studies import page
from tasks.toy import FirstError

SENSE = "So $(2n-19)^2 + 35 = 4x^2$ holds.\n\nThen the two factors, which have the same sign, make 35. "
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
    row = {"step": 1, "problem": "2+2?", "answer": "4", "response": "".join(tokens), "score": 1.0, "reason": "correct"}
    return {**row, "first_error": None, "advantage": 0.5, "tokens": tokens, "weights": {"shear": weights}, **other}


def long_group():
    """8 rollouts of 3,000 tokens."""
    tokens = (re.findall(r" ?\w{1,5}|\s|[^\w\s]", SENSE) * 3000)[:3000]
    weights = [round(0.5 + 0.5 * math.sin(place / 40), 4) for place in range(3000)]
    return [rollout(tokens, weights, score=float(place < 3), advantage=0.6 - 0.3 * place) for place in range(8)]


def make(run, *words):
    """The command of a run's page; its exit status."""
    return page.main([str(run), *map(str, words)])


def data_of(text):
    """What a browser's parser takes for the data: all up to the first end tag."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)[1])


def test_what_goes_in_is_what_the_page_holds():
    """To the last digit, for what is shown; numbers that JSON lacks become null."""
    first = rollout(["a", " b\n"], [0.1236, 1 / 3], first_error=[0, "arith", 2], spans=[(0, 2, 1e-17)])
    second = rollout(["c"], [None], score=None, advantage=0.0, first_error=(1, "format", 2))
    wild = rollout(["d"] * 4, [math.nan, math.inf, -math.inf, -2.5], step=2, advantage=math.nan, tests={"inputs": []})
    held = data_of(page.as_html([[first, second], [wild]], "title"))
    assert [len(group) for group in held] == [2, 1]
    for row, made in zip([*held[0], *held[1]], [first, second, wild], strict=True):
        assert set(row) == set(made) - {"response", "tests"}
        assert all(row[name] == made[name] for name in set(row) - {"weights", "advantage", "first_error", "spans"})
    assert held[0][0]["weights"] == {"shear": [0.1236, 1 / 3]} and held[0][1]["weights"] == {"shear": [None]}
    assert held[0][0]["spans"] == [[0, 2, 1e-17]] and held[0][0]["first_error"] == [0, "arith", 2]
    assert held[0][1]["first_error"] == [1, "format", 2]
    assert held[1][0]["weights"] == {"shear": [None, None, None, -2.5]} and held[1][0]["advantage"] is None


def test_hostile_text_cannot_leave_its_place():
    """Wherever it stands, the page has its own two scripts, its own tags, and the text to the letter."""
    everything = "".join(HOSTILE)
    row = rollout(HOSTILE, [0.5] * len(HOSTILE), problem=everything, answer=everything, reason=everything)
    row["first_error"] = [0, everything, 3]
    row["weights"][everything] = [0.5] * len(HOSTILE)
    text, plain = page.as_html([[row]], everything), page.as_html([[rollout(["a"], [1.0])]], "title")
    assert data_of(text)[0][0]["tokens"] == HOSTILE and data_of(text)[0][0]["problem"] == everything
    assert text.isascii() and "<img" not in text and "<!--" not in text
    for tag in ("<script", "</script", "<", ">"):
        assert text.split("const groups")[0].count(tag) == plain.split("const groups")[0].count(tag)


def test_the_policy_admits_this_script_and_this_style_only():
    """Hashes are of the very text between the tags; nothing else is allowed to load or run."""
    text = page.as_html([[rollout(["a"], [1.0])]], "title")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert len(body) == 1 and rules.pop(name) == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert text.index("Content-Security-Policy") < text.index("<title>")
    text = text.replace("http://www.w3.org/2000/svg", "")  # a name, which is not loaded
    assert not re.search(r"https?:|url\(|@import|innerHTML|\son\w+=|\ssrc=|\shref=", text)


def test_neighbouring_rows_of_one_step_are_a_group(tmp_path):
    """A step's second problem is a group of its own; a last line that is cut off is left out."""
    rows = [rollout([str(place)], [1.0], step=step) for place, step in enumerate([1, 1, 2, 2, 2, 3])]
    rows[4]["problem"] = "3+3?"
    files.append_rows(tmp_path / "samples.jsonl", rows)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prob')
    groups = page.read_groups(tmp_path / "samples.jsonl")
    assert [[row["tokens"][0] for row in group] for group in groups] == [["0", "1"], ["2", "3"], ["4"], ["5"]]
    assert make(tmp_path) == 0 == make(tmp_path, "--out", tmp_path / "other.html")
    text = (tmp_path / "credit.html").read_text()
    assert data_of(text)[0][0]["tokens"] == ["0"] and (tmp_path / "other.html").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["credit.html", "other.html", "samples.jsonl"]


def test_a_long_group_is_small():
    """8 x 3,000 tokens take 20 bytes each and 30,000 for all else, at most."""
    assert len(page.as_html([long_group()], "long")) < 8 * 3000 * 20 + 30_000


def test_controls_are_those_of_training():
    """On a wrong rollout with an error, one without, a right one by luck, and one without a verdict."""
    errors = [[1, "arith", 3], None, [0, "copy", 1], None]
    rewards = torch.tensor([0.0, 0.0, 1.0, math.nan])
    advantages = torch.tensor([-1.0, -1.0, 2.0, 0.0])
    rows = []
    for score, advantage, error in zip([0.0, 0.0, 1.0, None], advantages.tolist(), errors, strict=True):
        rows.append(rollout(list("abcd"), [0.5] * 4, score=score, advantage=advantage, first_error=error))
    found = [error and FirstError(*error) for error in errors]
    task = SimpleNamespace(first_error=lambda problem, tokens: found[int(tokens[0])])
    mask = torch.ones(4, 4, dtype=torch.bool)
    source = SimpleNamespace(task=task, tokenizer=Numbers())
    batch = Batch(without_text(mask), rewards, advantages, 4, [{}], ["drawn"] * 4, source)
    expected = effective_weights(oracle(batch, None), advantages, mask)
    page.with_controls([rows])
    assert [row["weights"]["oracle"] for row in rows] == expected.tolist()
    assert all(row["weights"]["grpo"] == [1] * 4 for row in rows)
    scaled = rollout(["a"], [0.5])
    scaled["weights"] = {"grpo": [0.5]}  # by --negative-scale
    assert page.with_controls([[scaled]])[0][0]["weights"] == {"grpo": [0.5]}
    blind = [rollout(["a"], [0.5])]
    assert set(page.with_controls([blind])[0][0]["weights"]) == {"shear", "grpo"}


GOOD = rollout(["a", "b"], [0.5, 0.5])


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b"no json\n", b'{"step": 1, "reward": 0.5}\n'])
def test_bad_samples_are_one_sentence(tmp_path, assert_refused, content):
    """The file is named, nothing written, and an old page left as it was."""
    source, out = tmp_path / "samples.jsonl", tmp_path / "credit.html"
    if content is not None:
        source.write_bytes(content)
    out.write_text("old")
    assert_refused(page.main, [tmp_path], str(source))
    assert out.read_text() == "old" and len(list(tmp_path.iterdir())) == 1 + source.exists()


@pytest.mark.parametrize("where", ["samples.jsonl", ".", "missing/page.html"])
def test_a_page_that_cannot_be_written_is_one_sentence_at_once(tmp_path, assert_refused, where):
    """The samples themselves are never overwritten."""
    source = tmp_path / "samples.jsonl"
    files.append_rows(source, [GOOD])
    words = [tmp_path, "--out", tmp_path / where]
    assert_refused(page.main, words, f"error: --out {tmp_path / where}: ", "name a")
    assert json.loads(source.read_text()) == GOOD and [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]
