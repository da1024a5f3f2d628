"""Rows of the page of samples, among them texts that try to run."""

import math
import re

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


def page_row(tokens, weights, **other):
    """A row as a run writes it."""
    row = {"step": 1, "problem": "2+2?", "answer": "4", "response": "".join(tokens)}
    row |= {"score": 1.0, "reason": "correct", "first_error": None, "advantage": 0.5}
    return row | {"tokens": tokens, "weights": {"shear": weights}} | other


def long_group():
    """8 rollouts of 3,000 tokens."""
    text = "So $(2n-19)^2 + 35 = 4x^2$.\n\nThen the factors, which have the same sign, make 35. "
    tokens = (re.findall(r" ?\w{1,5}|\s|[^\w\s]", text) * 3000)[:3000]
    weights = [round(0.5 + 0.5 * math.sin(place / 40), 4) for place in range(3000)]
    return [
        page_row(tokens, weights, score=float(place < 3), advantage=0.6 - 0.3 * place)
        for place in range(8)
    ]


GOOD_ROW = page_row(["a", "b"], [0.5, 0.5])
