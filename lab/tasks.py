"""The tasks of the lab, and their sizes; importing this enters them."""

from dataclasses import replace

from harness.config import OWN, PRESETS
from tasks.settings import TASKS, Kind, Problems

TASKS["words"] = Kind(
    "The task: word problems, worked out step by step.",
    makes_problems=True,
    make="lab.tools.words:task",
)
# Responses have 30 to 80 tokens. Plain text is the shortest prompt.
PRESETS["words"] = replace(
    OWN,
    task="words",
    problems=Problems(heldout=64, template="plain", warmup_steps=40),
    sampling=replace(OWN.sampling, max_tokens=128),
)
