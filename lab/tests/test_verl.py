"""lab/bridges/verl_shear.py: verl's engine makes Algorithm 1's weights; its trainer multiplies.

Where verl is not installed, which needs older transformers than this project, all of this is
skipped; `bash .ci/verl` makes an environment that has it.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

# An installed shear_credit would register its engine beside the one that is tested here.
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
pytest.importorskip(
    "verl", reason="verl is not installed: pip install -r lab/bridges/requirements-verl.txt"
)
import ray
import transfer_queue as tq
import verl.trainer
import verl_cpu  # noqa: F401
from adapters import fill_adapter
from builders.case_files import cases
from datasets import Dataset
from hydra import compose, initialize_config_dir
from omegaconf.errors import ConfigKeyError
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from grpo import group_advantages
from lab.bridges.verl_shear import MODEL_TYPE, ShearTrainer
from lab.fast.race import race
from shear import shear_weights
from tasks import toy

GROUP = 4
PROMPTS = 4
SIZES = dict(window=16, stride=4, eps=0.05)
FLOAT32 = dict(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
LORA = dict(lora_rank=2, lora_alpha=8, target_modules="all-linear")
MICRO_BATCHES = {
    "groups are split": dict(use_dynamic_bsz=True, max_token_len_per_gpu=220),
    "groups are whole": dict(
        use_dynamic_bsz=True, max_token_len_per_gpu=420, force_group_size=GROUP
    ),
    "of a size": dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=2),
}


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows as a nested tensor, in verl's layout."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_engine(packed: bool, **options):
    """verl's engine with SHEAR for a tiny model, whose adapter is something."""
    with tempfile.TemporaryDirectory() as folder:
        toy.make_model(8, seed=0).save_pretrained(folder)
        model = HFModelConfig(
            path=folder,
            load_tokenizer=False,
            use_remove_padding=packed,
            enable_gradient_checkpointing=False,
            model_type=MODEL_TYPE,
            override_config={"attn_implementation": "sdpa"},
            **options,
        )
        engine = EngineRegistry.new(
            model_type=MODEL_TYPE,
            backend="fsdp2",
            model_config=model,
            engine_config=FSDPEngineConfig(
                strategy="fsdp2", use_torch_compile=False, mixed_precision=FLOAT32
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
    fill_adapter(engine.module, std=1.0)
    return engine


def make_rollouts() -> TensorDict:
    """verl's rollouts, of uneven lengths.

    All of the first prompt are right, tools wrote a part of one, two are cut off.
    """
    rows = []
    draw = random.Random(0)
    for i in range(PROMPTS * GROUP):
        ids = torch.randint(len(toy.symbols_of(5)), (draw.randint(25, 90),))
        prompt, response = ids.tensor_split([3 + i // GROUP])
        mask = torch.ones_like(response)
        if i % 6 == 5:
            mask[::3] = 0
        if i % 7 == 6:
            mask[:] = 0
        scores = torch.zeros(len(response))
        scores[-1] = float(i < GROUP or i % GROUP < 2)
        row = dict(prompts=prompt, responses=response, input_ids=ids, rm_scores=scores)
        rows.append(
            row | dict(position_ids=torch.arange(len(ids)), response_mask=mask, loss_mask=mask)
        )
    data = tu.get_tensordict({name: nested([row[name] for row in rows]) for name in rows[0]})
    data["uid"] = NonTensorStack(*[f"prompt-{i // GROUP}" for i in range(len(rows))])
    return data


def scored(engine, data: TensorDict, packed: bool, micro_batches: dict) -> tuple:
    """The engine's omega of each rollout."""
    options = dict(use_remove_padding=packed, use_fused_kernels=False, temperature=1.0)
    options |= dict(calculate_entropy=True, compute_loss=False, shear=SIZES | {"verdict": None})
    tu.assign_non_tensor(data, **options | micro_batches)
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]["shear_weights"].unbind()


def expected(module, data: TensorDict) -> list[torch.Tensor]:
    """omega of each rollout, from the states that transformers returns for it alone."""
    states = []
    masks = data["response_mask"].unbind()
    right = rewards_of(data) > 0.5
    for ids, mask in zip(data["input_ids"].unbind(), masks, strict=True):
        with torch.no_grad():
            output = module(input_ids=ids[None], output_hidden_states=True)
        states.append(output.hidden_states[-1][0, -len(mask) :])
    omega = []
    for start in range(0, len(masks), GROUP):
        group = slice(start, start + GROUP)
        both = (pad_sequence(rows[group], batch_first=True) for rows in (states, masks))
        weights = shear_weights(*both, right[group], closest=race, **SIZES).omega
        omega += [row[: len(own)] for row, own in zip(weights, masks[group], strict=True)]
    return omega


def rewards_of(data: TensorDict) -> torch.Tensor:
    return torch.stack([scores.sum() for scores in data["rm_scores"].unbind()])


def largest_error(ours, theirs) -> float:
    return float((torch.cat([*ours]) - torch.cat([*theirs])).abs().max())


@pytest.fixture(scope="module")
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "packed, options", [(False, {}), (True, {}), (True, LORA)], ids=["padded", "packed", "LoRA"]
)
def test_the_engine_s_weights_are_those_of_algorithm_1(packed, options, alone):
    """They are, however rollouts are laid out and cut into micro-batches.

    A group whose verdicts are equal has weights of 1.
    """
    engine = make_engine(packed, **options)
    data = make_rollouts()
    theirs = expected(engine.module, data)
    for micro_batches in MICRO_BATCHES.values():
        omega = scored(engine, data.copy(), packed, micro_batches)
        assert largest_error(omega, theirs) < 1e-5
        assert all(weights.unique().tolist() == [1] for weights in omega[:GROUP])
        assert torch.cat(omega[GROUP:]).std() > 0.01
    if options:
        with engine.disable_adapter():
            assert largest_error(expected(engine.module, data), theirs) > 1e-3


def make_config(*overrides: str):
    folder = Path(verl.trainer.__file__).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose(
            "ppo_trainer",
            ["algorithm.adv_estimator=grpo", "trainer.v1.trainer_mode=shear", *overrides],
        )


@pytest.mark.parametrize("case", cases("verl_refusals.csv", Path(__file__).with_name("cases")))
def test_what_would_lose_credit_is_refused(case):
    """Each such setting is refused in one sentence, before anything is loaded."""
    with pytest.raises((ValueError, ConfigKeyError), match=re.escape(case["words"])):
        ShearTrainer(make_config(case["override"]))


TRAINER = """
actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.calculate_log_probs=false
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=420
actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.use_dynamic_bsz=true
+trainer.v1.shear.window=16 +trainer.v1.shear.stride=4 +trainer.v1.shear.eps=0.05 +trainer.v1.shear.verdict=null
"""


class Ranks:
    """Two data-parallel ranks of verl's, one after the other."""

    _dispatch_info = {"actor": [0, 1]}  # noqa: RUF012

    def __init__(self, engine):
        self.engine = engine
        self.prompts = []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        half = len(batch) // 2
        for keys in (batch.keys[:half], batch.keys[half:]):
            self.prompts.append({key.split("_")[0] for key in keys})
            data = tq.kv_batch_get(keys=keys, partition_id="train")
            options = dict(use_remove_padding=True, use_fused_kernels=False, use_dynamic_bsz=True)
            options |= batch.extra_info
            tu.assign_non_tensor(data, **options, max_token_len_per_gpu=420)
            with self.engine.eval_mode():
                output = self.engine.infer_batch(data)["model_output"]
            tq.kv_batch_put(keys=keys, partition_id="train", fields=tu.get_tensordict(output))
        return batch


@pytest.fixture
def queue():
    """verl's, which hangs on two CPUs."""
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    tq.init()
    yield
    tq.close()
    ray.shutdown()


def test_the_trainer_multiplies_verl_s_advantages(alone, queue):
    """Ranks get whole prompts, in whatever order rollouts come.

    Passes after the one for the weights are verl's own.
    """
    data = make_rollouts()
    keys = [f"{uid}_{i % GROUP}_0" for i, uid in enumerate(data["uid"])]
    tags = [dict(seq_len=length) for length in data["input_ids"].offsets().diff().tolist()]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)
    order = random.Random(0).sample(range(len(keys)), len(keys))
    trainer = object.__new__(get_trainer_cls("shear"))
    metrics = {}
    trainer.config = make_config(*TRAINER.split())
    engine = make_engine(packed=True)
    trainer.use_critic = False
    trainer.global_steps = 1
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    trainer.actor_rollout_wg = ranks = Ranks(engine)

    def steps(order):
        rows = dict(keys=[keys[i] for i in order], tags=[tags[i] for i in order])
        batch = trainer._balance_batch(KVBatchMeta(**rows, partition_id="train"), metrics=metrics)
        batch = trainer._compute_old_log_prob(batch, metrics)
        assert not {"shear", "force_group_size"} & batch.extra_info.keys()
        return trainer._compute_advantage(batch, metrics)

    steps(order)
    assert sorted(map(len, ranks.prompts)) == [2, 2]
    left = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])
    ours = left["advantages"].unbind()
    advantages = group_advantages(rewards_of(data), GROUP)
    omega = expected(engine.module, data)
    masks = data["response_mask"].unbind()
    theirs = [a * w * mask for a, w, mask in zip(advantages, omega, masks, strict=True)]
    assert largest_error(ours, theirs) < 1e-5 and torch.cat(ours).any()
    weights = [w[mask.bool()] for a, w, mask in zip(advantages, omega, masks, strict=True) if a]
    assert metrics["shear/weight"] == pytest.approx(float(torch.cat(weights).mean()), abs=1e-5)
    with pytest.raises(ValueError, match=r"all rollouts of a prompt on one rank"):
        steps(order[1:])


REWARD = "def score(solution_str, **others):\n    return float(len(solution_str) % 2)\n"


def test_main_ppo_takes_two_steps(tmp_path):
    """verl's whole program with transformers' `generate`: weights change with each step.

    Omega is logged.
    """
    toy.make_model(2, seed=0).save_pretrained(tmp_path / "model")
    tokenizer = toy.make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    usual = {"data_source": "made", "reward_model": {"style": "rule", "ground_truth": ""}}
    problems, _ = toy.make_problems(16, 0, 2, seed=0)
    rows = []
    for problem in problems:
        rows.append(usual | {"prompt": [{"role": "user", "content": problem["problem"]}]})
    Dataset.from_list(rows).to_parquet(tmp_path / "problems.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    here = Path(__file__).parent
    flags = (here / "cases" / "main_ppo.txt").read_text()
    modules = {"VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_hf,lab.bridges.verl_shear"}
    environment = os.environ | modules | {"PYTHONPATH": f"{here.parents[1]}:{here}"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *flags.split()]
    streams = dict(capture_output=True, text=True, timeout=900)
    ended = subprocess.run(command, cwd=tmp_path, env=environment, **streams)
    assert ended.returncode == 0, ended.stderr[-2000:]
    omega = re.findall(r"step:[12] .*shear/weight:([\d.]+)", ended.stdout)
    assert len(omega) == 2 and all(0 < float(weight) < 1 for weight in omega)
    # those of the start and those after each step
    assert len(set(re.findall(r"weights [\d.]+", ended.stdout))) == 3
