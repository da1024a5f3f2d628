"""lab/tools/lora.py: an adapter is trained alone, switched off and on, and merged when saved."""

import copy
import shutil

import pytest
import torch
from adapters import add_adapter, fill_adapter
from builders.commands import BRIEF_FLAGS, run_well
from builders.runs import assert_same_run
from builders.small_models import save_model
from near import assert_near
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from base import files
from lab.tools import lora
from tasks import toy

IDS = torch.arange(18).view(2, 9)


def test_an_adapter_starts_as_nothing_and_can_be_switched_off(tiny):
    """Logits are those of before to the bit; the linear layers' adapters alone are trained.

    It is on again after a failure.
    """
    model, _ = tiny
    plain = model(IDS).logits
    lora.add(model, seed=5, rank=3)
    assert torch.equal(model(IDS).logits, plain) and not model.training
    moved = fill_adapter(model)(IDS).logits
    with pytest.raises(ZeroDivisionError), lora.off(model):
        assert torch.equal(model(IDS).logits, plain)
        1 / 0  # noqa: B018 - something fails
    assert torch.equal(model(IDS).logits, moved) and not torch.equal(moved, plain)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


def test_a_saved_model_needs_no_adapter(tiny, tmp_path):
    """transformers loads the folder, lacks no weight, finds no other, and says the same.

    Nothing moves.
    """
    model, tokenizer = tiny
    add_adapter(model)
    before = copy.deepcopy(model.state_dict())
    lora.save_merged(model, tokenizer, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert_near(again(IDS).logits, model(IDS).logits, 1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_a_run_trains_the_adapter_alone_and_goes_on_after_a_cut(tmp_path):
    """arca: two steps are one step, --resume and another, to the bit.

    The base does not move, the saved model does.
    """
    save_model(tmp_path / "start", toy.make_model(1, seed=0))
    flags = "--lr 1e-2 --save-every 1 --method arca --use lab.tools.lora:rank=2"
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    places = ["--model", tmp_path / "start", "--out", tmp_path, "--name whole"]
    run_well(train, BRIEF_FLAGS, flags, places, "--steps 2")
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "model")
    (tmp_path / "start").rename(tmp_path / "moved")  # the checkpoint has what it needs
    run_well(train, "--resume", cut / "checkpoints" / "step-000001")
    assert_same_run(whole, cut)
    _, first, second, _ = files.read_lines(whole / "metrics.jsonl")
    # the adapter is zero at first, so weights are uniform
    assert first["weight_std"] < 1e-6 and second["weight_std"] > 0.01
    start, end = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "moved", whole / "model")
    )
    changed = {name for name in end if not torch.equal(start[name], end[name])}
    assert changed == {name for name in end if name.endswith("_proj.weight")}
