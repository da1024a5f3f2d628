"""The tasks of the lab, and their sizes; importing this enters them."""

from dataclasses import replace

from base.config import TASKS, TaskSpec

# Responses have 30 to 80 tokens. Plain text is the shortest prompt.
TASKS["words"] = TaskSpec(
    make="lab.tools.words:task",
    defaults=dict(TASKS["own"].defaults, template="plain", warmup_steps=40, max_tokens=128),
    makes_problems=True,
    ignores="data toy_lines toy_width sandbox",
    about="The task: word problems, worked out step by step.",
)

# One digit decides, among tokens that decide nothing; the model is the embedded task's.
for cell in ("noise-before", "noise-after", "noise-both", "noise-none"):
    TASKS[cell] = replace(
        TASKS["embedded"],
        make="lab.tools.noise:task",
        ignores=TASKS["embedded"].ignores + " reward",
        about="The task: the first digit of the problem, among letters that decide nothing.",
    )
