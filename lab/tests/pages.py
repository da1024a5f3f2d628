"""Rows of the page of samples, among them texts that try to run."""

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


GOOD_ROW = page_row(["a", "b"], [0.5, 0.5])
