"""generations.jsonl, an evaluation's responses and verdicts, and which of its blocks are whole.

    read_generations(folder)  its rows
    finished(folder)          the keys of the blocks that it has whole
    newest(rows)              the rows of each model's last weights and settings
    identity_of(path)         what tells a model from another one at the same path

A block is some problems of a set, which are sampled, graded and saved together. A row has all that
decides it: the model and the identity of its files, the set, the settings, the seed and the block
(its key), and of how many rows the block is. So an evaluation continues where it ended, and rows of
another key are not in its table.
"""

import hashlib
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from base import files
from base.errors import bad_input_on_error, printable

GENERATIONS = "generations.jsonl"
KEY = "model", "weights", "set", "settings", "seed", "block"  # what tells blocks apart


def key_of(row: dict) -> str:
    """The key of the block that a row is of."""
    return json.dumps([row[name] for name in KEY])


def read_generations(folder: Path) -> list[dict]:
    """The rows of a folder's generations.jsonl; raises BadInput."""
    path = folder / GENERATIONS
    rows = files.read_lines(path)
    with bad_input_on_error(str(path), "give a folder of this version"):
        for row in rows:
            key_of(row)
    return rows


def finished(folder: Path) -> set[str]:
    """The keys of the blocks that a folder has whole; rows of others are removed from it."""
    if not (folder / GENERATIONS).exists():
        return set()
    rows = read_generations(folder)
    counts = Counter(map(key_of, rows))
    rows = [row for row in rows if counts[key_of(row)] == row["of"]]
    files.write_rows(folder / GENERATIONS, rows)
    return set(map(key_of, rows))


def newest(rows: list[dict]) -> list[dict]:
    """The rows of each model's last weights, and of its last settings for each set.

    A model that was rewritten since is left out, with a warning.
    """
    weights = {row["model"]: row["weights"] for row in rows}
    for model, last in list(weights.items()):
        if last and identity_of(model) not in ("", last):
            print(printable(f"WARNING: {model} was rewritten since: evaluate it again"))
            del weights[model]
    rows = [row for row in rows if row["weights"] == weights.get(row["model"])]
    settings = {(row["model"], row["set"]): row["settings"] for row in rows}
    return [row for row in rows if settings[row["model"], row["set"]] == row["settings"]]


def identity_of(path: str) -> str:
    """What tells the model from another one at the same path: the sizes and times of its files.

    Of a hub id it is the commit in the hub's cache; it is empty where there is no such model.
    """
    if not Path(path).is_dir():
        with suppress(HFValidationError):  # a folder that is gone may have no name of the hub's
            cached = try_to_load_from_cache(path, "config.json")
            return Path(cached).parent.name if isinstance(cached, str) else ""
        return ""
    facts = []
    for file in sorted(filter(Path.is_file, Path(path).iterdir())):
        facts.append((file.name, file.stat().st_size, file.stat().st_mtime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
