"""The page of a default run with every sixth of its groups: docs/credit.html.

Run after `python train.py --use lab.tools.page`: `python -m lab.records.small_page`.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

from harness.files import read_json
from lab.tools.page import as_html, floor_of, read_groups
from tasks.settings import TASKS

RUN = Path("runs/embedded-shear-1")

settings = read_json(RUN / "config.json")
groups = read_groups(RUN)[::6]  # the first is the held-out group before and after training
page = as_html(groups, str(RUN), TASKS[settings["task"]].about, floor_of(settings))
Path("docs/credit.html").write_text(page, encoding="utf-8")
