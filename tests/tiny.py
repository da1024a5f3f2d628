"""What the small models of several test files have in common. (No import of transformers before a test needs it.)"""

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Flags of a short run of the embedded task.
RUN = "--task embedded --toy-lines 1 --prompts-per-step 4 --rollouts-per-prompt 4 --prompts-per-update 2 ".split()
RUN += "--heldout 8 --eval-groups 4".split()
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)


def byte_tokenizer(*special: str, more=(), merges=(), eos_token="<|endoftext|>", extra_special_tokens=()):
    """Qwen2's: <|endoftext|>, the `special` tokens, a token a byte, and `more` that `merges` make."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    symbols = ["<|endoftext|>", *special, *sorted(ByteLevel.alphabet()), *more]
    tokens = dict(eos_token=eos_token, pad_token="<|endoftext|>", extra_special_tokens=list(extra_special_tokens))
    return Qwen2Tokenizer(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=list(merges), **tokens)


def turns_tokenizer(*special: str, template: str | None = CHAT):
    """`byte_tokenizer` with the turns of Qwen's chat models, and further special tokens."""
    turns = dict(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>", *special])
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>", **turns)
    tokenizer.chat_template = template
    return tokenizer


def small_gpt2():
    """A model whose positions are absolute."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = dict(vocab_size=29, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, **ids)).eval()


def small_mixtral():
    """A model with experts, for the embedded task's vocabulary."""
    from transformers import MixtralConfig, MixtralForCausalLM

    ids = dict(vocab_size=29, bos_token_id=None, eos_token_id=None)
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SMALL, **ids)).eval()
