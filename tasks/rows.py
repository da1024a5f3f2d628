"""Reading rows (dictionaries from column to value) from files and the hub.

    read_rows(path)                         the rows of a local file or folder
    from_files(paths, blame)                source, revision and rows of local files
    from_hub(repo, pattern, blame, remedy)  source, revision and rows of a data set on the hub

A file is a table (.parquet or .csv), a JSON list or JSON lines; JSON may be compressed (.gz). A
folder holds such files, or was saved by `datasets`; of its splits, "train" is read. Numbers keep
their decimal digits, and a byte order mark is skipped.
"""

import csv
import gzip
import hashlib
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tasks.errors import bad_input_on_error

if TYPE_CHECKING:
    import pyarrow

Split = TypeVar("Split")
# Half of a surrogate pair: JSON can spell one, but no tokenizer reads it.
SURROGATE = re.compile("[\ud800-\udfff]")


def lacks(row: dict, needed: str) -> ValueError:
    """The error for a row without the `needed` keys.

    Its message lists the keys found, with the types of values that are not text.
    """
    found = [f"{name}: {type(row[name]).__name__}".removesuffix(": str") for name in row]
    keys = textwrap.shorten(", ".join(found), 200, placeholder=" ...")
    return ValueError(f"needs {needed} (found: {keys or 'no keys'})")


# ---- local files ---------------------------------------------------------------------------------


def check_is_file(path: Path) -> Path:
    """Return the path, if it is a file or a folder or does not exist.

    Raises OSError for a pipe or a device, which may never end.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError("neither a file nor a folder")
    return path


def read_rows(path: Path) -> Iterable[dict]:
    """The rows of a local file or folder.

    Raises whatever the libraries raise.
    """
    check_is_file(path)
    if path.is_dir():
        return _folder_rows(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        from pyarrow import parquet  # imported late: slow, and the embedded task does without

        # a folder "level=3" adds no column
        return _table_rows(parquet.read_table(path, partitioning=None))
    if suffix == ".csv":
        return _csv_rows(path)
    text = text_of(path)
    values = json.loads(text) if text.lstrip().startswith("[") else _json_lines(text)
    # what is no object becomes an empty row, which later checks refuse
    return [value if isinstance(value, dict) else {} for value in values]


def _table_rows(table: "pyarrow.Table") -> Iterator[dict]:
    """The rows of a table, with float32 .1 as .1: its value in Python is .10000000149."""
    short = [field for field in table.schema if "float" in str(field.type)]
    for batch in table.to_batches(1000):
        for row in batch.to_pylist():
            for field in short:
                row[field.name] = _as_written(row[field.name], field.type)
            yield row


def _as_written(value: object, kind: "pyarrow.DataType") -> object:
    """A value of a column of this type, where float16 and float32 have the digits they need."""
    if isinstance(value, dict):
        return {name: _as_written(part, kind.field(name).type) for name, part in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):  # a map is a list, too
        return [_as_written(part, kind.value_type) for part in value]
    if isinstance(value, float) and str(kind) in ("float", "halffloat"):
        return float(str(kind.to_pandas_dtype()(value)))
    return value


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


def text_of(path: Path) -> str:
    """The text of a file, compressed or not, without a byte order mark.

    Raises OSError for what is no file.
    """
    open_text = gzip.open if path.suffix.lower() == ".gz" else open
    with open_text(check_is_file(path), "rt", encoding="utf-8-sig") as file:
        return file.read()


def _csv_rows(path: Path) -> list[dict]:
    """The rows of a CSV file.

    Raises ValueError for a line that would lose cells. `datasets` would guess types: an answer of
    007 would be 7.
    """
    csv.field_size_limit(2**31 - 1)
    rows = []
    start = 1  # the line where a row starts; a quoted cell may span several
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = reader.fieldnames or []
            if len(names) == 1 and ";" in names[0]:
                raise ValueError("line 1: cells are divided by ; not by ,")
            for name in filter(None, names):
                if names.count(name) > 1:
                    raise ValueError(f"line 1: two columns are named {name}")
            start = reader.line_num + 1
            for row in reader:
                if None in row:
                    raise csv.Error("more cells than the header has")
                rows.append(row)
                start = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"line {start}: {error}; put quotes around a cell with commas, and double the "
                "quotes in it"
            ) from None
    return rows


def _folder_rows(folder: Path) -> Iterable[dict]:
    """The rows of a folder that `datasets` saved, or else of the files in it.

    Raises ValueError for a file that belongs to no split.
    """
    import datasets  # imported late: slow, and the embedded task does without

    datasets.disable_progress_bars()
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        saved = datasets.load_from_disk(str(folder))
        split = _training(saved) if isinstance(saved, datasets.DatasetDict) else saved
        tables = split.with_format("arrow").iter(1000)
        return itertools.chain.from_iterable(map(_table_rows, tables))
    # The names of the files tell which belong to which split.
    patterns = {"all": ["**"]} | datasets.data_files.get_data_patterns(str(folder))
    extensions = ".parquet .csv .json .jsonl .PARQUET .CSV .JSON .JSONL".split()
    splits = datasets.data_files.DataFilesDict.from_patterns(patterns, str(folder), extensions)
    unread = set(splits.pop("all")).difference(*splits.values())
    if unread:
        raise ValueError(f"{Path(min(unread)).name} belongs to no split; rename or remove it")
    tables = []
    for path in map(Path, _training(splits)):
        try:
            tables.append(read_rows(path))
        except ValueError as error:
            raise ValueError(f"{path.name}, {error}") from None
    return itertools.chain.from_iterable(tables)


def _training(splits: dict[str, Split]) -> Split:
    """The split "train".

    Raises ValueError if there is none.
    """
    if "train" not in splits:
        raise ValueError(f"its splits are {', '.join(map(str, splits))}, not train")
    return splits["train"]


def from_files(paths: Sequence[str], blame: str) -> tuple[str, str, Iterable[dict]]:
    """Source, shortened SHA-256 and rows of local files.

    Raises BadInput, whose sentence begins with `blame`.
    """
    digest = hashlib.sha256()
    rows: list[dict] = []
    with bad_input_on_error(blame, "give JSON lines (also .gz), .json, .csv or .parquet"):
        for path in map(Path, paths):
            rows += read_rows(path)
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return ", ".join(paths), f"sha256:{digest.hexdigest()[:12]}", rows


# ---- the hub -------------------------------------------------------------------------------------


def from_hub(repo: str, pattern: str, blame: str, remedy: str) -> tuple[str, str, Iterable[dict]]:
    """Source, commit and rows of a data set on the hub.

    It reads the files whose names match `pattern`; they stay on disk. Raises BadInput, without
    delay if the hub is out of reach; its sentence begins with `blame` and ends with `remedy`.
    """
    from huggingface_hub import snapshot_download  # imported late: slow, and rarely needed

    with bad_input_on_error(f"{blame} on the hub", remedy):
        folder = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=pattern))
        paths = sorted(folder.rglob(pattern))
        if not paths:
            raise FileNotFoundError(f"no file is named {pattern}")
        tables = [read_rows(path) for path in paths]
    return f"{repo} (hub)", folder.name[:12], itertools.chain.from_iterable(tables)
