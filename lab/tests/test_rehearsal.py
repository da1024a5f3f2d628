"""The paper's command on two CPU ranks, with a small model of the paper's layout and a stand-in hub.

`python train.py --model Qwen/Qwen2.5-Math-7B` finds model and data in a cache of the hub, is asked
to end, goes on, is killed, goes on with two and with four ranks, and every kept model is evaluated.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from builders.case_files import ROOT
from builders.small_models import small_config, turns_tokenizer
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

from base import files

NAME = "Qwen/Qwen2.5-Math-7B"
FLAGS = (
    f"--model {NAME} --device cpu --dtype bfloat16 --ranks 2 --use lab.fast --use lab.tools.smoke"
)
SIZES = (
    "--prompts-per-step 4 --prompts-per-update 4 --rollouts-per-prompt 2 --max-tokens 12 "
    "--heldout 4 --eval-groups 4 --window 4 --stride 2 --steps 5 --save-every 1 --keep-models 1"
)


def in_cache(home: Path, kind: str, repo: str) -> Path:
    """The folder of a repository's only snapshot in a cache of the hub."""
    folder = home / "hub" / f"{kind}--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    return snapshot


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A cache of the hub with a small model and 100 problems, in the layouts of the real ones."""
    home = tmp_path_factory.mktemp("home")
    tokenizer = turns_tokenizer()
    config = small_config(
        Qwen2Config,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    model.generation_config = GenerationConfig(bos_token_id=0, pad_token_id=0, eos_token_id=[2, 0])
    folder = in_cache(home, "models", NAME)
    model.save_pretrained(folder, max_shard_size="20KB")  # several files and their index
    tokenizer.save_pretrained(folder)
    rows = []
    for number in range(100):
        rows.append(
            {
                "prompt": [{"content": "<|im_start|>user", "role": "user"}],
                "question": f"What is ${number}+1$?",
                "gt_answer": str(number + 1),
                "answer": "",
                "subject": "Algebra",
                "level": 3 + number % 3,
                "extra_info": {"index": number, "split": "train"},
                "ability": "math",
            }
        )
    data = in_cache(home, "datasets", "hkust-nlp/SimpleRL-Zoo-Data") / "simplelr_qwen_level3to5"
    data.mkdir()
    Dataset.from_list(rows).to_parquet(data / "train.parquet")
    return home


def command(home: Path, *words: str) -> subprocess.Popen:
    """A program of this project in a process, on one CPU, with the hub's cache and no network."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["taskset", "-c", "0", sys.executable, *" ".join(map(str, words)).split()],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output(process: subprocess.Popen) -> str:
    """What a process printed, once it has ended well."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    return printed


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("taskset"), reason="needs taskset")
def test_the_papers_command_from_the_hub_to_its_tables(home, tmp_path):
    """Nothing is lost by a kill, by other ranks, or by rounding in bfloat16.

    A rate of 1e-6 moves each float32 weight by about 1e-6 a step, which bfloat16 would round away.
    """
    run = tmp_path / "runs" / "math"
    first = command(home, "train.py", FLAGS, SIZES, "--out", run.parent, "--name math")
    wait_for(run / "checkpoints" / "step-000001", first)
    first.terminate()  # as Slurm does
    printed, _ = first.communicate(timeout=600)
    assert first.returncode == 130 and "resume with: python train.py --resume" in printed
    second = command(home, "train.py --resume", run)
    wait_for(run / "checkpoints" / "step-000003", second)
    os.killpg(second.pid, signal.SIGKILL)
    second.wait()
    four = Path(shutil.copytree(run, run.with_name("four")))
    output(command(home, "train.py --resume", run))
    output(command(home, "train.py --ranks 4 --resume", four))
    for folder in (run, four):
        rows = files.read_lines(folder / "metrics.jsonl")
        assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4, 5]
        assert (folder / "model" / "config.json").exists()
    trained = weights_of(run / "checkpoints" / "step-000005" / "state")
    start = AutoModelForCausalLM.from_pretrained(in_cache(home, "models", NAME), dtype="float32")
    for name, before in start.state_dict().items():
        moved = (trained[f"model.{name}"] - before).abs().max().item()
        assert 0 < moved <= 5 * 1.1e-6, name
    models = sorted(run.glob("checkpoints/*/model"))
    assert len(models) == 5
    data = []
    for name in ("amc23", "math500"):
        problem = {"question": "What is 1+1?", "problem": "What is 1+1?", "answer": "2"}
        files.append_rows(tmp_path / f"{name}.jsonl", [problem] * 2)
        data.append(f"{name}={tmp_path / name}.jsonl")
    asked = "--bench amc23 math500 --samples 1 --max-tokens 8 --ranks 2 --device cpu --data"
    output(command(home, "eval.py --model", *models, asked, *data, "--out", tmp_path / "evals"))
    assert "best of all" in output(command(home, "-m lab.tools.tables", tmp_path / "evals"))


def wait_for(checkpoint: Path, run: subprocess.Popen) -> None:
    """Wait until a run has written a checkpoint."""
    while not (checkpoint / "complete.json").exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.1)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 tensors of a checkpoint's state, put together from the ranks' rows."""
    parts = defaultdict(list)
    for file in sorted(folder.glob("*.safetensors")):
        for name, part in load_file(file).items():
            parts[name].append(part)
    return {name: torch.cat(rows) for name, rows in parts.items() if rows[0].dim()}
