r"""Evaluation sets: from files to rows, and from published rows to problems, {"problem", and "answer" or "tests"}.

    from_files, from_hub        source, revision, rows
    math_row, aime24_row, olympiad_row, humaneval_row, mbpp_row, livecodebench_row

Readers of rows raise ValueError, which says what a row lacks. `tasks/benchmarks.py` says which set has which rows.

LiveCodeBench's private tests are plain JSON, or JSON that is pickled, compressed and written in base64. A pickle may
name any function to be called while it is read: `TextOnly` admits no name, so that nothing but plain values come out.
Tests that do not decode give a problem without tests, whose grading is then an infra error, never a pass.
"""

import base64
import fnmatch
import glob
import gzip
import hashlib
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rewards import style_of
from tasks.problems import BadInput, as_problem, cause, local_rows

# ---- files ----------------------------------------------------------------------------------------------------


def from_files(paths: Sequence[str], blame: str) -> tuple[str, str, Iterable]:
    """Source, shortened SHA-256 and rows of local files; raises BadInput."""
    digest, rows = hashlib.sha256(), []
    for path in map(Path, paths):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
            rows += local_rows(path) if path.suffix in (".parquet", ".csv") else json_rows(path)
        except (OSError, ValueError, EOFError, zlib.error) as error:  # a BadInput is a ValueError, and as good a reason
            reason = f"cannot be read ({cause(error)}); give JSON lines (also .gz), .json, .csv or .parquet"
            raise BadInput(f"{blame}: {reason}") from error
    return ", ".join(paths), f"sha256:{digest.hexdigest()[:12]}", rows


def json_rows(path: Path) -> list:
    """JSON lines, or one list; compressed or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        text = file.read()
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def from_hub(repo: str, patterns: tuple[str, ...], blame: str) -> tuple[str, str, Iterable]:
    """Source, commit and rows of the hub's files, kept on disk once loaded; raises BadInput, soon where it is away."""
    import huggingface_hub as hub  # slow to import, and only this needs it

    wanted = dict(repo_id=repo, repo_type="dataset")
    try:
        try:
            folder = Path(hub.snapshot_download(**wanted, local_files_only=True, allow_patterns=list(patterns)))
            names = fitting([str(path.relative_to(folder)) for path in folder.rglob("*")], patterns)
        except hub.errors.LocalEntryNotFoundError:
            names = []
        if not names:
            about = hub.HfApi().dataset_info(repo, timeout=10)  # a download would retry for long
            names = fitting([file.rfilename for file in about.siblings], patterns)
            if not names:
                raise FileNotFoundError(f"no file is named {' or '.join(patterns)}")
            folder = Path(
                hub.snapshot_download(**wanted, revision=about.sha, allow_patterns=list(map(glob.escape, names)))
            )
        rows = from_files([str(folder / name) for name in names], blame)[2]
    except Exception as error:  # libraries raise of every kind; the cause stays attached
        reason = cause(error)
        raise BadInput(
            f"{blame}: {repo} cannot be loaded from the hub ({reason}); give a local file with --data NAME=FILE"
        ) from error
    return f"{repo} (hub)", folder.name[:12], rows


def fitting(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """The file names that the first pattern fits which fits any."""
    found = ([name for name in sorted(names) if fnmatch.fnmatch(name, pattern)] for pattern in patterns)
    return next(filter(None, found), [])


# ---- rows -----------------------------------------------------------------------------------------------------


def math_row(row: dict) -> dict:
    """The usual columns, as for training; AMC's answers are 27.0."""
    answer = row.get("answer")
    if type(answer) is float and answer.is_integer():
        row = {**row, "answer": int(answer)}
    return as_problem(row, "math")


def aime24_row(row: dict) -> dict | None:
    """The year is in the url; a file without one holds one year."""
    return math_row(row) if "2024" in str(row.get("url") or "2024") else None


def olympiad_row(row: dict) -> dict:
    """Answers are a list of texts, most often of one."""
    answers = row.get("final_answer")
    if not isinstance(answers, list) or not answers:
        raise ValueError('needs "final_answer", a list of text')
    return as_problem({"problem": row.get("question"), "answer": ", ".join(map(str, answers))}, "math")


def humaneval_row(row: dict) -> dict:
    """A function's beginning and `check(candidate)`."""
    tests = {name: row.get(name) for name in ("prompt", "test", "entry_point")}
    return as_problem(
        {"problem": f"Complete this function:\n```python\n{tests['prompt']}\n```", "tests": tests}, "code"
    )


def mbpp_row(row: dict, plus: bool) -> dict:
    """A task in words, with its base tests shown; EvalPlus's columns, or with `plus` false also the first edition's."""
    shown, imports = row.get("test_list"), row.get("test_imports")
    text = row.get("prompt") or row.get("text")
    if not isinstance(shown, list) or not shown or not text:
        raise ValueError('needs "prompt" and "test_list"')
    setup = "\n".join([*(imports if isinstance(imports, list) else []), row.get("test_setup_code") or ""])
    if plus and not row.get("test"):
        raise ValueError('needs "test", the added tests')
    tests = {"asserts": [row["test"]] if plus else shown, "setup": setup}
    listed = "\n".join(shown)
    return as_problem(
        {"problem": f"{text}\nThe program must pass these tests:\n```python\n{listed}\n```", "tests": tests}, "code"
    )


def livecodebench_row(row: dict) -> dict:
    """A contest's problem. "tests" is None where its tests cannot be read, and "fault" says why."""
    text, starter = row.get("question_content"), row.get("starter_code")
    if not isinstance(text, str) or not text.strip() or "private_test_cases" not in row or "contest_date" not in row:
        raise ValueError('needs "question_content", "contest_date" and "private_test_cases"')
    if starter:
        text += f"\nComplete this program:\n```python\n{starter}\n```"
    else:
        text += "\nThe program reads from standard input and writes to standard output."
    try:
        return {"problem": text, "tests": livecodebench_tests(row)}
    except (ValueError, TypeError, KeyError, EOFError, zlib.error, pickle.UnpicklingError, RecursionError) as error:
        return {"problem": text, "tests": None, "fault": f"tests cannot be read: {type(error).__name__}: {error}"}


def livecodebench_tests(row: dict) -> dict:
    """Public and private tests in our form; raises an error of one of several kinds for what does not decode."""
    cases = json.loads(row["public_test_cases"]) + private_tests(row["private_test_cases"])
    kinds = {case["testtype"] for case in cases}
    inputs, outputs = ([case[name] for case in cases] for name in ("input", "output"))
    if kinds == {"stdin"}:
        tests = {"inputs": inputs, "outputs": outputs}
    elif kinds == {"functional"}:
        metadata = json.loads(row["metadata"]) if isinstance(row["metadata"], str) else row["metadata"]
        arguments = [[json.loads(line) for line in text.split("\n") if line.strip()] for text in inputs]
        tests = {"fn_name": metadata["func_name"], "inputs": arguments, "outputs": list(map(json.loads, outputs))}
    else:
        raise ValueError(f"kinds of tests {sorted(map(str, kinds))}")
    style_of(tests)
    return tests


class TextOnly(pickle.Unpickler):
    """An unpickler that looks nothing up."""

    def find_class(self, module: str, name: str):
        """Refuses all."""
        raise pickle.UnpicklingError(f"names {module}.{name}")

    def persistent_load(self, pid):
        """Refuses all."""
        raise pickle.UnpicklingError("refers to something outside")


def private_tests(text: str) -> list[dict]:
    """The list of tests in plain JSON, or in JSON that is pickled, compressed and written in base64."""
    try:
        cases = json.loads(text)
    except ValueError:
        inner = TextOnly(io.BytesIO(zlib.decompress(base64.b64decode(text, validate=True)))).load()
        if not isinstance(inner, str):
            raise ValueError(f"a pickle of {type(inner).__name__}, not of text") from None
        cases = json.loads(inner)
    if not isinstance(cases, list) or not cases:
        raise ValueError("no list of tests")
    return cases
