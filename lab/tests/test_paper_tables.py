"""lab/tools/paper_tables.py: the paper's numbers, and beside whose they stand."""

import hashlib
import json
from itertools import product

from lab.tools import paper_tables
from lab.tools.tables import paper_means, suite_of
from tasks.benchmarks import SUITES


def test_the_papers_numbers_average_to_what_it_prints():
    """The paper's averages are the means of their rows, but for two that the paper prints so.

    All 126 numbers were compared with its text.
    """
    wrong = []
    for backbone, methods in paper_tables.PAPER_TABLES.items():
        for (method, printed), (suite, names) in product(methods.items(), SUITES.items()):
            if suite in printed:
                mean = sum(printed[name][0] for name in names) / 5
                if abs(mean - printed[suite][0]) > 0.11:
                    wrong.append((backbone, method, suite))
    own = "PRM(Reshape adv.)", "SHEAR"
    assert wrong == [("Qwen2.5-Math-7B", method, "math") for method in own]
    digest = hashlib.sha256(json.dumps(paper_tables.PAPER_TABLES).encode()).hexdigest()
    assert digest.startswith("1ad2e0252d33")


def test_the_paper_s_average_of_a_suite_is_the_one_that_it_prints():
    """It stands beside the average of exactly these benchmarks, and nothing beside others."""
    assert suite_of(reversed(SUITES["math"])) == "math"
    assert suite_of([*SUITES["math"], "math", "x"]) == ""
    cells = paper_means("Qwen2.5-Math-7B", "math")
    assert cells == {"GRPO †": "49.6", "SHEAR †": "51.2"}
    assert paper_means("Qwen2.5-Math-7B", "") == {"GRPO †": "-", "SHEAR †": "-"}
