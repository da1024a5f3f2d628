"""Every path of a run on a make-believe GPU (`make_believe.py`), and that it refuses what a GPU would."""

import functools
import json

import make_believe
import pytest
import torch
from cases import saved
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2ForCausalLM

import eval
import train
from credit import teacher
from credit.table import METHODS
from fast import packing
from harness import models
from harness.files import rows
from harness.launch import parse_args
from harness.parallel import Ranks
from harness.run import prepared
from rewards import Verdict
from studies import diagnose, figures
from tasks import toy
from tasks.problems import Task

MODEL = "--task embedded --device cuda --toy-lines 1 --window 4 --stride 4 --max-iters 5 --heldout 2 --eval-groups 2 "
STEPS = "--smoke --steps 1 --prompts-per-step 2 --rollouts-per-prompt 2 --prompts-per-update 1 --micro-tokens 60 "
CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU finds its mistakes itself"),
    pytest.mark.usefixtures("no_curve"),
]


@pytest.fixture(autouse=True, scope="module")
def gpu():
    """All of this file is done on the make-believe GPU."""
    with make_believe.cuda():
        yield
    torch.backends.cuda.enable_cudnn_sdp(True)  # which a rank on a GPU turns off


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of an untrained model of the embedded task, the smallest that has everything."""
    config = toy.make_model(1, seed=0).config
    config.update(dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, max_position_embeddings=64))
    return saved(tmp_path_factory.mktemp("start") / "model", Qwen2ForCausalLM(config))


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    """A training run, which starts with the process reward model's lessons; its rollouts are `written`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "hf_generate", written)
        patch.setattr(teacher, "make_prm", functools.partial(teacher.make_prm, steps=1))
        folder = tmp_path_factory.mktemp("runs")
        args = parse_args([*f"{MODEL} {STEPS} --method prm".split(), "--model", start, "--out", str(folder)])
        with prepared(args, Ranks(0, 1, CUDA)) as run:
            yield run


def written(model, prompt_ids, prompt_mask, *, pad, **limits):
    """In the place of `hf_generate`: responses of two lengths, all but every third with an answer in a box."""
    tokenizer = toy.make_tokenizer()
    boxed = tokenizer("a=1+2=1+2=3\n\\boxed{3}<eos>")["input_ids"]
    short = tokenizer("a=1+2=3\n<eos>")["input_ids"]
    short += [pad] * (len(boxed) - len(short))
    return torch.tensor([boxed if row % 3 else short for row in range(len(prompt_ids))], device=prompt_ids.device)


# ---- what a user runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"arca"}))
def test_a_step_with_every_method(run, method):
    """From rollouts to moved weights, in float32."""
    run.args.method = method
    before = [parameter.clone() for parameter in run.trained.parameters()]
    metrics, _ = train.train_step(run, 0)
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    for old, new in zip(before, run.trained.parameters(), strict=True):
        assert new.device == CUDA and not torch.equal(old, new)


def test_an_adapter_and_generate(start, tmp_path):
    """arca on LoRA, sampled by transformers' own loop, evaluated before and after and on a benchmark."""
    flags = f"{MODEL} {STEPS} --method arca --lora-rank 2 --eval-every 1 --bench embedded --name arca"
    assert train.main([*flags.split(), "--model", start, "--out", str(tmp_path)]) == 0
    _, step, after = rows(tmp_path / "arca" / "metrics.jsonl")
    assert step["grad_norm"] > 0 and "embedded" in step["bench"] and after["after"]


def test_half_precision_and_what_follows(start, tmp_path, monkeypatch):
    """FSDP over a mesh of one, packed rollouts, layers recomputed; then --resume, and eval.py on the run."""
    attended = []  # numbers of tokens

    def noted(query, *parts, **options):
        attended.append(len(query))
        return make_believe.varlen_attn(query, *parts, **options)

    monkeypatch.setattr(packing, "varlen_attn", noted)
    flags = f"{MODEL} {STEPS} --dtype bfloat16 --recompute --save-every 1 --name half"
    assert train.main([*flags.split(), "--model", start, "--out", str(tmp_path)]) == 0
    assert train.main(["--resume", f"{tmp_path}/half", "--steps", "2"]) == 0
    _, first, second, _ = rows(tmp_path / "half" / "metrics.jsonl")
    assert first["grad_norm"] > 0 and first["checksum"] != second["checksum"] and attended
    flags = ["--model", f"{tmp_path}/half", "--out", f"{tmp_path}/evaluated"]
    assert eval.main(["--device", "cuda", *flags, "--samples", "1", "--max-tokens", "4"]) == 0


def test_diagnose(start, tmp_path, monkeypatch):
    """Prefixes, distances, and every method and ablation against a first error."""
    monkeypatch.setattr(models, "hf_generate", written)
    monkeypatch.setattr(teacher, "make_prm", functools.partial(teacher.make_prm, steps=1))
    monkeypatch.setattr(toy, "first_error", lambda problem, text: toy.FirstError(4, "copy", 8))
    monkeypatch.setattr(figures, "save_png", lambda figure, path: None)
    drawn = [Verdict(0.0, "drawn"), Verdict(1.0, "drawn")]
    monkeypatch.setattr(Task, "verdicts", lambda task, problems, rollouts: drawn * (len(rollouts.texts) // 2))
    flags = f"{MODEL} --groups 1 --continuations 2 --rollouts-per-prompt 4"
    assert diagnose.main([*flags.split(), "--model", start, "--out", str(tmp_path)]) == 0
    methods = json.loads((tmp_path / "diagnose.json").read_text())["methods"]
    assert set(methods) == set(METHODS) - {"arca"}


# ---- and that it could have failed --------------------------------------------------------------------------


MIXED = {  # x and rows are on CUDA, y is not
    "sum": lambda x, y, rows: x + y,
    "list": lambda x, y, rows: torch.cat([x, y]),
    "keyword": lambda x, y, rows: torch.where(x > 0, input=x, other=y),
    "number of CUDA": lambda x, y, rows: y * x.sum(),
    "weights": lambda x, y, rows: torch.nn.Linear(3, 2, device=y.device)(x),
    "index": lambda x, y, rows: y[rows],
    "values": lambda x, y, rows: x.__setitem__(rows, y[:2]),
    "noise": lambda x, y, rows: torch.randn(3, generator=torch.Generator(y.device), device=x.device),
    "like another": lambda x, y, rows: x.new_zeros(3, 3) + torch.zeros_like(y),
    "backward": lambda x, y, rows: mixed_later(x.requires_grad_(), y).sum().backward(),
    "grad": lambda x, y, rows: torch.autograd.grad(mixed_later(x.requires_grad_(), y).sum(), x),
}


def mixed_later(x, y):
    """exp(x + x); when that is computed anew for the backward pass, it is exp(x + y)."""
    terms = [x, y]
    return checkpoint(lambda: (x + terms.pop(0)).exp(), use_reentrant=False)


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_raise(name):
    """As on a GPU; on one device alone nothing is refused."""
    rows = torch.tensor([0, 2])
    MIXED[name](torch.eye(3), torch.eye(3), rows)
    if name != "noise":
        MIXED[name](torch.eye(3, device=CUDA), torch.eye(3, device=CUDA), rows.to(CUDA))
    with pytest.raises(RuntimeError, match=r"same device|generator"):
        MIXED[name](torch.eye(3, device=CUDA), torch.eye(3), rows.to(CUDA))


def test_what_a_gpu_allows():
    """Numbers from the CPU, rows chosen by the CPU, copies; and where results, gradients and copies are."""
    weight = torch.nn.Parameter(torch.ones(2, 3, device=CUDA))
    rows = torch.tensor([1, 0])
    total = (weight[rows] * torch.tensor(2.0) + weight.mean()).sum()
    total.backward()
    weight.data[rows] = torch.tensor(1.0)
    weight.data.copy_(torch.zeros(2, 3))
    on_cuda = [weight, total, weight.grad, weight.data, weight.T, *weight.unbind(), weight.max(0).values]
    on_cuda += [torch.ones_like(weight), weight.new_ones(2), rows.to(weight.device), rows.cuda(), rows.to(weight)]
    assert all(tensor.device == CUDA and tensor.is_cuda for tensor in on_cuda)
    on_cpu = [weight.cpu(), weight.detach().to("cpu"), torch.zeros(3), rows, torch.eye(2)[rows]]
    assert not any(tensor.is_cuda for tensor in on_cpu)
    assert weight.cpu() is not weight and weight.to(CUDA) is weight and weight.to(torch.float64).is_cuda
    assert torch.nn.Linear(2, 2).to(CUDA).weight.is_cuda and total.item() == pytest.approx(18)


def test_numpy_takes_no_cuda_tensor():
    """Nor does what calls NumPy on it; a copy on the CPU it takes."""
    tensor = torch.ones(2, device=CUDA)
    for convert in (torch.Tensor.numpy, torch.Tensor.__array__):
        with pytest.raises(TypeError, match="numpy"):
            convert(tensor)
    assert tensor.cpu().numpy().sum() == 2


def test_varlen_attn_is_attention_in_each_segment_and_strict():
    """Against a mask over all pairs; other devices, dtypes and bounds are refused."""
    q, k, v = torch.randn(3, 5, 2, 4, dtype=torch.bfloat16, device=CUDA).unbind()
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32, device=CUDA)
    options = dict(scale=0.3, window_size=(-1, 0))
    output = packing.varlen_attn(q, k, v, bounds, bounds, 3, 3, **options)
    segment = torch.tensor([0, 0, 1, 1, 1], device=CUDA)
    mask = (segment[:, None] == segment).tril()
    whole = [tensor.transpose(0, 1).float() for tensor in (q, k, v)]
    expected = scaled_dot_product_attention(*whole, attn_mask=mask, scale=0.3).transpose(0, 1).bfloat16()
    torch.testing.assert_close(output, expected)
    assert output.is_cuda
    wrong = [(q.float(), k, v, bounds, 3), (q, k, v, bounds.long(), 3), (q, k, v, bounds.cpu(), 3)]
    wrong += [(q, k, v, bounds[:2], 3), (q, k, v, bounds, 2), (q, k[:, :1], v[:, :1], bounds, 3)]
    for query, key, value, starts, longest in wrong:
        with pytest.raises(AssertionError):
            packing.varlen_attn(query, key, value, starts, starts, longest, longest, **options)
