"""lab/tools/plan.py: the batches are those of train.py, and the numbers those of a calculation."""

import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

from builders.commands import run_well, words_of

from base import files
from base.config import parse_train
from grpo import hf_generate
from harness import fsdp
from harness.run import load_run, resolve, sample
from lab.records.random_model import LARGE
from lab.tools import plan


def test_a_plan_needs_a_config_json_alone(tmp_path, capsys):
    """Where prompts cannot be read, they have 256 tokens.

    At least 300 steps x 3 batches x 3,000 decoding steps of 24 ms; 1.2288e6 responses x 3,000 tokens
    x 7.62e9 parameters x 10 FLOP, at 30% of 8 x 989e12 FLOP/s. At most the decoding steps take 19 +
    3.6 x 7.6 ms, and three times the caches of 174 rows at 3.35 TB/s.
    """
    LARGE.save_pretrained(tmp_path)
    run_well(plan, "H100 8 --model", tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "26.7 GB stay; sampling 67.7 GB, training 34.2 GB" in printed
    assert "18 hours to 50 hours of sampling, and 33 hours of scoring and updates" in printed
    assert "assumes prompts of 256 tokens (--model" in printed


def test_one_long_prompt_shrinks_no_other_batch_in_plan_and_run(tmp_path, qwen_folder):
    """Both put the rollouts of a step into the same batches, by the prompts of the data."""
    model = shutil.copytree(qwen_folder, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    files.write_json(model / "config.json", settings | {"max_position_embeddings": 4096})
    problems = [{"problem": f"What is {number}+1?", "answer": "1"} for number in range(12)]
    problems[3]["problem"] += " " * 1000 + "?"
    files.append_rows(tmp_path / "own.jsonl", problems)
    flags = words_of("--task own --data", tmp_path / "own.jsonl", "--model", model)
    flags += words_of("--prompts-per-step 10 --prompts-per-update 10 --heldout 2 --eval-groups 2")
    flags += words_of("--max-tokens 4 --rollouts-per-prompt 4 --generate-batch 2 --device cpu")
    config = resolve(parse_train(flags))
    run = load_run(config, fsdp.join("cpu"))
    generate = Mock(wraps=hf_generate)
    run.hooks = replace(run.hooks, generate=generate)
    drawn = run.context.task.draw(0, 10, config.seed)
    assert max(len(problem["problem"]) for problem in drawn) > 1000
    sample(run, drawn, 4, 1.0)
    sizes = [len(call.args[1]) for call in generate.call_args_list]
    assert sizes[:2] == [2, 2] and max(sizes) > 4 and sum(sizes) == 40
    lines = plan.foresee("H100", 1, plan.configure(flags))
    assert f"{len(sizes)} batch(es) of at most {max(sizes)} rows per step" in lines[-1]
