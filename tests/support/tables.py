"""Tables of cases of which each is one item, and errors of Iris by keys of their sentences."""

import contextlib
import functools
import inspect
import pathlib
import re
import tomllib

import pytest

WORDING = {
    f"{area}.{key}".removeprefix("all."): text
    for area, texts in tomllib.loads(pathlib.Path(__file__).with_name("wording.toml").read_text()).items()
    for key, text in texts.items()
}


def says(*keys, **values):
    """Return a pattern for text that says all that keys of wording.toml stand for; without a key, that names `name`."""
    values = {name: re.escape(str(value)) for name, value in values.items()}
    first, *others = (WORDING[key].format(**values) for key in keys or ["names"])
    return "".join(f"(?=(?s:.*){each})" for each in (first, *others)) if others else first


def raises(error, *keys, **values):
    """As `pytest.raises`, for an error that says what the keys stand for; a key "" stands for no error."""
    return contextlib.nullcontext() if keys == ("",) else pytest.raises(error, match=says(*keys, **values) or None)


def table(names, rows):
    """As `pytest.mark.parametrize`, but one item goes through all rows, and names those that fail.

    For rows that take less time than an item's fixtures.  `monkeypatch`, `tmp_path` and fixtures that have a context
    manager `renewed()` are new for each row, others are the same for all.  Rows marked `exhaustive` are for
    --exhaustive alone; a row that is skipped leaves the others as they are.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    rows = [row if hasattr(row, "marks") else pytest.param(*(row if len(names) > 1 else [row])) for row in rows]
    assert rows
    assert {mark.name for row in rows for mark in row.marks} <= {"exhaustive"}

    def decorate(test):
        wanted = inspect.signature(test).parameters

        @functools.wraps(test)
        def run(request, **fixtures):
            given = {"request": request, **fixtures}
            errors, skipped = [], []
            chosen = [each for each in enumerate(rows) if request.config.getoption("exhaustive") or not each[1].marks]
            if not chosen:
                pytest.skip("only with --exhaustive (make test-all)")
            for number, row in chosen:
                case = dict(zip(names, row.values, strict=True))
                with contextlib.ExitStack() as stack:
                    if "monkeypatch" in given:
                        given["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
                    if "tmp_path" in given:
                        given["tmp_path"] = fixtures["tmp_path"] / f"row{number}"
                        given["tmp_path"].mkdir()
                    for name, value in fixtures.items():
                        if hasattr(value, "renewed"):
                            given[name] = stack.enter_context(value.renewed())
                    try:
                        test(**{name: case[name] if name in case else given[name] for name in wanted})
                    except pytest.skip.Exception as error:
                        skipped.append(error)
                    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - raised below, with the others
                        error.add_note(f"row {number}: {case}")
                        errors.append(error)
            if len(skipped) == len(chosen):
                raise skipped[0]
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(chosen)} rows", errors)

        fixtures = [value for name, value in wanted.items() if name not in names and name != "request"]
        request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([request, *fixtures])
        return run

    return decorate
