"""lab/tools/page.py: the page holds what it was given, and hostile text stays text."""

import base64
import hashlib
import json
import math
import re

from pages import GOOD_ROW, HOSTILE, page_row

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
    held = data_of(page.as_html([[row], [wild]], "title"))
    assert held == [expected[:1], expected[1:]]


def test_hostile_text_cannot_leave_its_place():
    """Wherever hostile text stands, the page has its own tags alone.

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
    assert text.isascii()
    for mark in "<>":
        assert text.count(mark) == plain.count(mark)


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


def test_bad_samples_are_one_sentence(tmp_path, assert_refused):
    """The file is named, and nothing is written."""
    source = tmp_path / "samples.jsonl"
    for content in ("", "no json\n"):
        source.write_text(content)
        assert_refused(page.main, [tmp_path], str(source))
    assert list(tmp_path.iterdir()) == [source]
