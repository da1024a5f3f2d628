"""A table of docs/hardware.md against lab/records/memory_table.py."""

import re

from builders.case_files import DOCS, ROOT

from harness.models import outline_of


def test_the_table_is_what_its_script_prints():
    """The models have the published numbers of parameters, of which tied ones count once."""
    printed = []
    names = {"print": printed.append}
    exec((ROOT / "lab" / "records" / "memory_table.py").read_text(encoding="utf-8"), names)
    page = (DOCS / "hardware.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?:GPUs?|LoRA of rank 16) \| ([\d.]+ \| [\d.]+ \| [\d.]+) \|\n", page)
    assert printed == rows and len(rows) == 5
    assert outline_of(names["LARGE"]).num_parameters() == 7_615_616_512
    assert outline_of(names["SMALL"]).num_parameters() == 1_543_714_304
