"""JSON files that may be damaged: read, and checked against a pydantic type, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pydantic

T = TypeVar("T")

MAX_NBYTES = 1 << 30
"""Largest file that is read; traces are the largest ones."""


def read_document(path: Path, kind: pydantic.TypeAdapter[T]) -> T:
    """Read a JSON file, which must contain what `kind` says; nothing is converted.

    Raises:
        ValueError: the file cannot be read, or contains something else; the text is one line without the file's name.
    """
    try:
        if not path.is_file():  # opening a pipe would wait
            raise ValueError("it is not a file" if path.exists() else "there is no such file")
        if (size := path.stat().st_size) > MAX_NBYTES:
            raise ValueError(f"it has {size} bytes, and {MAX_NBYTES} are read at most")
        return kind.validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from error
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        where = ".".join(map(str, problems[0]["loc"]))
        text = f"{where}: " * bool(where) + problems[0]["msg"].removeprefix("Value error, ")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(" ".join(text.split()) + more) from error  # keys may have line breaks
