"""lab/*/README.md have every rule with its options, and the word problems' sizes; studies' flags."""

import inspect
import re
import subprocess
import sys
from dataclasses import asdict

from builders.case_files import ROOT

import lab.rules  # noqa: F401 - enters the rules
from base import config
from credit.rules import RULES
from harness.run import resolve


def settings(*argv: str) -> dict:
    """What `train.py` resolves."""
    return asdict(resolve(config.parse_train(argv)))


def test_the_table_of_the_word_problems_is_true():
    """lab/tools/README.md has what the word problems replace in the paper's recipe."""
    part = (ROOT / "lab/tools/README.md").read_text().split("## The word problems")[1]
    words = settings("--model", "M", "--task", "words")
    changed = dict(words.items() - settings("--model", "M").items())
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `--")]
    written = dict(re.findall(r"`--(\S+) (\S+?)`", " ".join(cells)))
    written = {name.replace("-", "_"): value for name, value in written.items()}
    assert written == {name: str(words[name]) for name in written}
    plain = {"task", "given", "device", "dtype", "recompute"}
    assert set(written) >= changed.keys() - plain


def test_rules_and_their_options_are_those_of_the_docs():
    """The table of lab/rules/README.md has every rule, and every option with its default."""
    table = re.findall(r"(?m)^\| (`.*)$", (ROOT / "lab/rules/README.md").read_text())
    names = [name for row in table for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert sorted(names) == sorted(RULES)
    written = re.findall(r"`(\w+)=(\S*?)`", "\n".join(table))
    words = {True: "yes", False: "no"}
    defaults = set()
    for rule in RULES.values():
        for name, option in inspect.signature(rule.credit).parameters.items():
            value = option.default
            if option.kind is option.KEYWORD_ONLY:
                is_switch = isinstance(value, bool)
                defaults.add((name, words[value] if is_switch else str(value)))
    assert set(written) == defaults


RUN = """
import runpy, sys
sys.argv = ["lab/studies/compare.py", "--jobs", "modell"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("status", end.code, {"torch", "transformers"} & set(sys.modules))
"""


def test_mistakes_are_answered_without_torch():
    """The answer names the study's own flag."""
    options = dict(cwd=ROOT, env={"COLUMNS": "80", "PYTHONPATH": "."}, text=True)
    ended = subprocess.run([sys.executable, "-c", RUN], capture_output=True, **options)
    assert "status 2 set()" in ended.stdout, ended
    assert "Error parsing --jobs: " in ended.stdout + ended.stderr
