"""Fixtures that several test files need: one thread, a seed for each test, small models.

Nothing is downloaded. Fixtures import torch and transformers themselves: the process that hands out
the tests runs none, and need not wait for them.
"""

import gc
import signal
from collections.abc import Callable, Sequence

import pytest

gc.disable()  # a sixth of the time of the imports, whose objects stay


def pytest_collection_finish():
    """Collect garbage from here on, and none of what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def calm():
    """One thread, and the same random numbers in any order of tests.

    Ctrl-C is heard, whatever a launcher has left, and a broken pipe is an error, whatever flags that
    were refused have left.
    """
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats three tracebacks besides


@pytest.fixture
def tiny():
    """An untrained model of the embedded task, small, and its tokenizer."""
    from tasks import toy

    return toy.make_model(2, seed=1).eval(), toy.make_tokenizer()


@pytest.fixture
def assert_refused(capsys):
    """Assert status 2 and one sentence that has all of the `names`, or tyro's box of one flag.

    Returns what the command had printed before.
    """

    def check(main: Callable[[list[str]], int], words: Sequence, *names: str) -> str:
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:  # tyro's, while flags are parsed
            status = end.code
        printed, message = capsys.readouterr()
        assert status == 2
        if "For full helptext" in message:
            message = " ".join(message.replace("│", " ").split())
        else:
            assert message.startswith("error: ") and message.count("\n") == 1
        assert not [name for name in names if name not in message], message
        return printed

    return check


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory):
    """The Hugging Face folder of a model with the layout of a Qwen2.5 chat model.

    It has a byte-level tokenizer, a template and two stop ids.
    """
    import torch
    from builders.small_models import save_model, small_config, turns_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    tokenizer = turns_tokenizer()
    config = small_config(
        Qwen2Config,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
        max_position_embeddings=512,
    )
    torch.manual_seed(3)
    save_model(folder, Qwen2ForCausalLM(config), tokenizer)
    return folder


@pytest.fixture(scope="session")
def untaught(tmp_path_factory):
    """The folder of an untrained model of the embedded task, narrow, for problems of one line."""
    from builders.small_models import save_model

    from tasks import toy

    folder = tmp_path_factory.mktemp("models") / "untaught"
    return save_model(folder, toy.make_model(1, seed=0, width=16))
