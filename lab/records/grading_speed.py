"""Programs graded per second, of 512 short ones.

Run: `python -m lab.records.grading_speed`.
"""

from lab.records.help import show_help

show_help(__doc__)

import time

from rewards import grade_all, grade_code

programs = ["```python\nn = int(input())\nprint(sum(map(int, input().split())))\n```"] * 512
tests = [{"inputs": ["3\n1 2 3\n"], "outputs": ["6\n"]}] * 512
grade_code(programs[0], tests[0])  # chooses the level
start = time.perf_counter()
grade_all(grade_code, programs, tests)
print(512 / (time.perf_counter() - start))
