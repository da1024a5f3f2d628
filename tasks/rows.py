"""Reading rows (dictionaries from column to value) from files and the hub.

    read_rows(path)                         the rows of a local file
    from_file(path, blame)                  the same; what is wrong is a user's mistake
    from_hub(repo, pattern, blame, remedy)  the rows of a data set on the hub

A file is a table (.parquet or .csv), a JSON list or JSON lines; JSON may be compressed (.gz).
Numbers keep their decimal digits, cells of a CSV stay text, and a byte order mark is skipped.
`datasets` reads parquet alone: of text it would guess types, and make 7 of 007.
"""

import csv
import glob
import gzip
import json
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from base.errors import bad_input_on_error

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset


def lacks(row: dict, needed: str) -> ValueError:
    """The error for a row without the `needed` keys.

    Its message lists the keys found, with the types of values that are not text.
    """
    found = [f"{name}: {type(row[name]).__name__}".removesuffix(": str") for name in row]
    return ValueError(f"needs {needed} (found: {', '.join(found)[:200] or 'no keys'})")


# ---- local files ---------------------------------------------------------------------------------


def from_file(path: str, blame: str) -> Iterable[dict]:
    """The rows of a local file; raises BadInput, whose sentence begins with `blame`."""
    with bad_input_on_error(blame, "give JSON lines (also .gz), .json, .csv or .parquet"):
        return read_rows(Path(path))


def read_rows(path: Path) -> Iterable[dict]:
    """The rows of a local file; raises whatever the libraries raise."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _table_rows(table_of(path))
    if suffix == ".csv":
        return _csv_rows(path)
    text = text_of(path)
    rows = json.loads(text) if text.lstrip().startswith("[") else _json_lines(text)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number}: is no object")
    return rows


def check_is_file(path: Path) -> Path:
    """Return the path, if it is a file or a folder or does not exist.

    Raises OSError for a pipe or a device, which may never end.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError("neither a file nor a folder")
    return path


def text_of(path: Path) -> str:
    """The text of a file, compressed or not, without a byte order mark.

    Raises OSError for what is no file.
    """
    open_text = gzip.open if path.suffix.lower() == ".gz" else open
    with open_text(check_is_file(path), "rt", encoding="utf-8-sig") as file:
        return file.read()


def table_of(path: Path) -> "Dataset":
    """The table in a parquet file, in memory.

    Raises OSError for what is no file.
    """
    import datasets  # imported late: slow, and the embedded task does without

    check_is_file(path).open("rb").close()  # a folder's splits would be read as one
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # an error is one sentence
    # a cache of its own: the usual one finds a file by path and time, and would hand out the rows
    # that a file had before it was written again
    with tempfile.TemporaryDirectory() as cache:
        return datasets.Dataset.from_parquet(
            glob.escape(str(path)), cache_dir=cache, keep_in_memory=True
        )


def _table_rows(table: "Dataset") -> Iterator[dict]:
    """The rows of a table, with float32 .1 as .1: its value in Python is .10000000149."""
    short = [field for field in table.features.arrow_schema if "float" in str(field.type)]
    for row in table:  # one at a time: Eurus's at once would fill many GB
        for field in short:
            row[field.name] = _as_written(row[field.name], field.type)
        yield row


def _as_written(value: object, kind: "pyarrow.DataType") -> object:
    """A value of a column of this type, where float16 and float32 have the digits they need."""
    if isinstance(value, dict):
        return {name: _as_written(part, kind.field(name).type) for name, part in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_as_written(part, kind.value_type) for part in value]
    if isinstance(value, float) and str(kind) in ("float", "halffloat"):
        return float(str(kind.to_pandas_dtype()(value)))
    return value


def _csv_rows(path: Path) -> list[dict]:
    """The rows of a CSV file.

    Raises ValueError where a cell would be lost. `datasets` would guess types: an answer of 007
    would be 7.
    """
    csv.field_size_limit(2**31 - 1)
    rows: list[dict] = []
    with check_is_file(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = list(filter(None, reader.fieldnames or []))
            if len(names) == 1 and re.search("[;\t]", names[0]):
                mark = "semicolons" if ";" in names[0] else "tabs"
                raise ValueError(f"{mark} separate its columns; save it with commas")
            if len(set(names)) < len(names):
                raise csv.Error("two columns have one name")
            for row in reader:
                if None in row:
                    raise csv.Error("more cells than the header has")
                rows.append(row)
        except csv.Error as error:
            raise ValueError(
                f"row {len(rows) + 1}: {error}; put quotes around a cell with commas, and double "
                "the quotes in it"
            ) from None
    return rows


def _json_lines(text: str) -> list:
    """The value of each line that is not blank.

    Raises ValueError for a line that is not JSON.
    """
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                # from None, so that `cause` names the line
                raise ValueError(f"line {number}: not JSON ({error})") from None
    return values


# ---- the hub -------------------------------------------------------------------------------------


def from_hub(repo: str, pattern: str, blame: str, remedy: str) -> Iterable[dict]:
    """The rows of the files of a data set on the hub whose names match; the files stay on disk.

    Raises BadInput, without delay if the hub is out of reach; its sentence begins with `blame` and
    ends with `remedy`.
    """
    from huggingface_hub import snapshot_download  # imported late: slow, and rarely needed

    with bad_input_on_error(f"{blame} on the hub", remedy):
        folder = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=pattern))
        paths = sorted(folder.rglob(pattern))
        if not paths:
            raise FileNotFoundError(f"no file is named {pattern}")
        return chain.from_iterable([read_rows(path) for path in paths])
