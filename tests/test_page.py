"""studies/page.py: the page holds what it was given, hostile text stays text, a real browser shows it.

Run: pytest tests/test_page.py (two tests need Chromium or Chrome, and are skipped without)
"""

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess

import pytest

from harness import report
from studies import diagnose, page

SENSE = "So $(2n-19)^2 + 35 = 4x^2$ holds.\n\nThen the two factors, which have the same sign, make 35. "
HOSTILE = [
    "</script><script>document.title='ran'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "]]>&lt;&amp;&#60;img src=x onerror=alert(1)&#62;",
    "\u2028\u2029\u202e\x00\ud800",
    "{{data}} {{title}} {{script_hash}} %s \\1 \\u003c",
    "\r\n\t ",
    "",
]


def rollout(tokens, weights, **other):
    """A row as a run writes it."""
    row = {"step": 1, "problem": "2+2?", "answer": "4", "response": "".join(tokens), "score": 1.0, "reason": "correct"}
    return {**row, "first_error": None, "advantage": 0.5, "tokens": tokens, "weights": weights, **other}


def long_group():
    """8 rollouts of 3,000 tokens."""
    tokens = (re.findall(r" ?\w{1,5}|\s|[^\w\s]", SENSE) * 3000)[:3000]
    weights = [round(0.5 + 0.5 * math.sin(place / 40), 4) for place in range(3000)]
    return [rollout(tokens, weights, score=float(place < 3), advantage=0.6 - 0.3 * place) for place in range(8)]


def make(samples, out):
    """The command of a training run's page; its exit status."""
    return diagnose.main(["--html", str(out), "--samples", str(samples)])


def data_of(text):
    """What a browser's parser takes for the data: all up to the first end tag."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)[1])


def test_what_goes_in_is_what_the_page_holds():
    """To the last digit, for what is shown; numbers that JSON lacks become null."""
    first = rollout(["a", " b\n"], [0.1236, 1 / 3], first_error=[0, "arith", 2], spans=[(0, 2, 1e-17)])
    second = rollout(["c"], [None], score=None, advantage=0.0, first_error=(1, "format"))
    wild = rollout(["d"] * 4, [math.nan, math.inf, -math.inf, -2.5], step=2, advantage=math.nan, tests={"inputs": []})
    held = data_of(page.render([[first, second], [wild]], "title"))
    assert [len(group) for group in held] == [2, 1]
    for row, made in zip([*held[0], *held[1]], [first, second, wild], strict=True):
        assert set(row) == set(made) - {"response", "tests"}
        assert all(row[name] == made[name] for name in set(row) - {"weights", "advantage", "first_error", "spans"})
    assert held[0][0]["weights"] == [0.1236, 1 / 3] and held[0][1]["weights"] == [None]
    assert held[0][0]["spans"] == [[0, 2, 1e-17]] and held[0][0]["first_error"] == [0, "arith", 2]
    assert held[0][1]["first_error"] == [1, "format"]
    assert held[1][0]["weights"] == [None, None, None, -2.5] and held[1][0]["advantage"] is None


def test_hostile_text_cannot_leave_its_place():
    """Wherever it stands, the page has its own two scripts, its own tags, and the text to the letter."""
    everything = "".join(HOSTILE)
    row = rollout(HOSTILE, [0.5] * 8, problem=everything, answer=everything, reason=everything)
    row["first_error"] = [0, everything, 3]
    text, plain = page.render([[row]], everything), page.render([[rollout(["a"], [1.0])]], "title")
    assert data_of(text)[0][0]["tokens"] == HOSTILE and data_of(text)[0][0]["problem"] == everything
    assert text.isascii() and "<img" not in text and "<!--" not in text
    for tag in ("<script", "</script", "<", ">"):
        assert text.split("const groups")[0].count(tag) == plain.split("const groups")[0].count(tag)


def test_the_policy_admits_this_script_and_this_style_only():
    """Hashes are of the very text between the tags; nothing else is allowed to load or run."""
    text = page.render([[rollout(["a"], [1.0])]], "title")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert len(body) == 1 and rules.pop(name) == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert text.index("Content-Security-Policy") < text.index("<title>")
    assert not re.search(r"https?:|url\(|@import|innerHTML|\son\w+=|\ssrc=|\shref=", text)


def test_neighbouring_rows_of_one_step_are_a_group(tmp_path):
    """A step's second problem is a group of its own; a last line that is cut off is left out."""
    rows = [rollout([str(place)], [1.0], step=step) for place, step in enumerate([1, 1, 2, 2, 2, 3])]
    rows[4]["problem"] = "3+3?"
    report.append(tmp_path / "samples.jsonl", rows)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "prob')
    groups = page.read_groups(tmp_path / "samples.jsonl")
    assert [[row["tokens"][0] for row in group] for group in groups] == [["0", "1"], ["2", "3"], ["4"], ["5"]]
    assert make(tmp_path / "samples.jsonl", tmp_path / "page.html") == 0
    assert data_of((tmp_path / "page.html").read_text())[0][0]["tokens"] == ["0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "samples.jsonl"]


def test_a_long_group_is_small():
    """8 x 3,000 tokens take 20 bytes each and 30,000 for all else, at most."""
    assert len(page.render([long_group()], "long")) < 8 * 3000 * 20 + 30_000


GOOD = rollout(["a", "b"], [0.5, 0.5])
BAD = {
    "not JSON": "no json\n",
    "not text": b"\xff\xfe\n",
    "nothing": "",
    "only a cut line": json.dumps(GOOD),
    "too deep": "[" * 100_000 + "\n",
    "not rows": "[1, 2]\n",
    "rows of metrics": '{"step": 1, "reward": 0.5}\n',
    "numbers for tokens": json.dumps({**GOOD, "tokens": [1, 2]}) + "\n",
    "one text for tokens": json.dumps({**GOOD, "tokens": "ab"}) + "\n",
    "texts for weights": json.dumps({**GOOD, "weights": ["a", "b"]}) + "\n",
    "fewer weights than tokens": json.dumps({**GOOD, "weights": [0.5]}) + "\n",
    "a number for a problem": json.dumps({**GOOD, "problem": 7}) + "\n",
    "a list for a step": json.dumps({**GOOD, "step": [1]}) + "\n",
    "a text for a score": json.dumps({**GOOD, "score": "1"}) + "\n",
    "a list for an advantage": json.dumps({**GOOD, "advantage": [0.5]}) + "\n",
    "a number for an error": json.dumps({**GOOD, "first_error": 3}) + "\n",
    "an error without a kind": json.dumps({**GOOD, "first_error": [3]}) + "\n",
    "a place that is text": json.dumps({**GOOD, "first_error": ["3", "arith", 4]}) + "\n",
    "spans that are none": json.dumps({**GOOD, "spans": [3]}) + "\n",
    "a deep answer": json.dumps(GOOD).replace('"4"', "[" * 100_000 + "]" * 100_000) + "\n",
    "a row without weights": json.dumps({name: GOOD[name] for name in set(GOOD) - {"weights"}}) + "\n",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_samples_are_one_sentence(tmp_path, capsys, name):
    """Status 2, the file and the remedy, nothing written, and an old page left as it was."""
    source, out = tmp_path / "samples.jsonl", tmp_path / "page.html"
    source.write_bytes(BAD[name] if isinstance(BAD[name], bytes) else BAD[name].encode())
    out.write_text("old")
    assert make(source, out) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and str(source) in said.err
    assert said.err.startswith("error: ") and re.search("give the samples.jsonl|restore", said.err)
    assert out.read_text() == "old" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("where", ["samples.jsonl", ".", "missing/page.html"])
def test_a_page_that_cannot_be_written_is_one_sentence_at_once(tmp_path, capsys, where):
    """The samples themselves are never overwritten."""
    source = tmp_path / "samples.jsonl"
    report.append(source, [GOOD])
    assert make(source, tmp_path / where) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"error: --html {tmp_path / where}: ") and "name a" in said
    assert json.loads(source.read_text()) == GOOD and [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_missing_samples_are_bad_input(tmp_path, capsys):
    """A file that is not there is named, and nothing is written."""
    assert make(tmp_path / "no.jsonl", tmp_path / "page.html") == 2
    assert "no.jsonl" in capsys.readouterr().err and not list(tmp_path.iterdir())


# ---- in a browser ---------------------------------------------------------------------------------------------


@pytest.fixture
def look(tmp_path):
    """From a page to the title and the rollouts, as HTML, that headless Chromium makes of it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not browser:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")

    def run(text):
        (tmp_path / "page.html").write_text(text)
        flags = "--headless --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=5000".split()
        command = [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()]
        made = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode()
        return re.search("<title>(.*?)</title>", made)[1], re.search("<main.*?</main>", made, re.DOTALL)[0]

    return run


def tokens_of(shown):
    """(text, title, classes) of every token."""
    found = re.findall(r'<span class="token ([^"]*)" title="([^"]*)"[^>]*>(.*?)</span>', shown, re.DOTALL)
    plain = (re.sub("<[^>]*>", "", text) for *_, text in found)
    return [
        (html.unescape(text), html.unescape(title), set(classes.split()))
        for text, (classes, title, _) in zip(plain, found, strict=True)
    ]


def test_a_browser_shows_hostile_text_as_text(look):
    """Even without the policy. The right arrow has come to the second group; right rollouts stand first."""
    texts = ["a b", "\n", *HOSTILE[:4], "x\n\ny", "z"]
    weights = [0.5, -0.25, None, math.nan, 0.0, 0.1236, 0.3, 0.4]
    wrong = rollout(texts, weights, score=0.0, reason=HOSTILE[2], advantage=-0.5, first_error=[1, HOSTILE[2], 3])
    right = rollout(["4", "5"], [1.0, 0.5], spans=[[0, 1, 0.7], [0, 2, 0.31234]], first_error=[2, "format", 3])
    unsure = rollout(["6"], [1.0], score=None, reason=None, advantage=0.0, first_error=[0, "copy"])
    group = [{**row, "step": 2, "problem": "".join(HOSTILE[:4])} for row in (unsure, wrong, right)]
    text = re.sub("<meta http-equiv[^>]*>", "", page.render([[GOOD], group], HOSTILE[0]))
    press = '<script>document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}))'
    title, shown = look(text.replace("</html>", f"{press}</script></html>"))
    assert html.unescape(title) == HOSTILE[0] and "<img" not in shown and "<script" not in shown
    found = tokens_of(shown)
    assert [text for text, *_ in found] == ["4", "5", *texts, "6"]
    assert [re.search("weight (.*)", title)[1] for _, title, _ in found] == (
        ["1", "0.5", "0.5", "-0.25", "unknown", "unknown", "0", "0.1236", "0.3", "0.4", "1"]
    )
    assert found[0][1] == '"4"\nposition 0 of 2\nweight 1\ndistances of its spans 0.7, 0.312'
    assert found[1][1].endswith("spans 0.312")
    assert found[3][1].startswith('"\\n"\nposition 1 of 8\n') and "distances" not in found[3][1]
    colours = [classes for *_, classes in found]
    assert colours[:4] == [{"up"}, {"up"}, {"down"}, {"up"}]  # a negative weight turns the sign of A around
    strengths = [float(value) for value in re.findall(r'style="--strength: ([^;]*);"', shown)]
    assert strengths == [1, 0.5, 0.5, 0.25, 0, 0, 0, 0.124, 0.3, 0.4, 1]
    assert colours[4] == colours[5] == {"even", "unknown"} and colours[-1] == {"even"}
    assert re.findall(r"<h2[^>]*>(.*?)<span", shown) == ["\u2713 right", "\u2717 wrong", "? no verdict"]
    marks = re.findall(r'<b class="kind"[^>]*>(.*?)</b>(?:<span class="error">(.*?</span>)</span>)?', shown, re.DOTALL)
    assert [html.unescape(kind) for kind, _ in marks] == ["\u2717 format", f"\u2717 {HOSTILE[2]}", "\u2717 copy"]
    assert [[text for text, *_ in tokens_of(inside)] for _, inside in marks] == [[], ["\n", HOSTILE[0]], ["6"]]


def test_a_browser_shows_a_long_group_and_runs_no_foreign_script(look):
    """Every token of 8 x 3,000 is there; a script that had come into the page is stopped by the policy."""
    group = long_group()
    foreign = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
    title, shown = look(page.render([group], "long").replace("<header>", f"{foreign}<header>", 1))
    found = tokens_of(shown)
    assert title == "long" and len(found) == 8 * 3000
    assert [text for text, *_ in found[:3000]] == group[0]["tokens"]
    assert [float(re.search("weight (.*)", title)[1]) for _, title, _ in found[-3000:]] == group[-1]["weights"]
