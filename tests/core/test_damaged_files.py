"""Tables and results that are damaged: used as they are, or left out with one line that names the file."""

import contextlib
import copy
import json
import math
import os
import pathlib
import tempfile
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import table_files
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from iris_core import documents
from iris_core.cli import main
from iris_core.dispatch.choice import Chooser, Tables
from iris_core.dispatch.tables import read_table
from iris_core.logs import logger
from iris_core.types import Availability, CollectiveRequest, DeviceTarget, DeviceType, FusedRequest

CPU = DeviceTarget(DeviceType.CPU)
CALL = {"dtype": "bfloat16", "rank": 0, "target": CPU}
REQUESTS = [
    CollectiveRequest(op="all_reduce", shape=(nbytes,), nbytes=nbytes, group_size=size, **CALL)
    for nbytes in (0, 4096, 1 << 40)
    for size in (1, 3, 4)
]
FUSED = [
    FusedRequest(
        op="matmul_all_gather", m=8, n=16, k=32, out_dtype="bfloat16", nbytes=256, members=tuple(range(size)),
        a_stride=(32, 1), b_stride=(16, 1), out_stride=(16, 1), out_shape=(8, 16), bias_stride=None, reach_a=True,
        reach_out=True, aligned=(True, True, True, True),
        options={"gather_dim": 0, "layout": "torch", "bias": "none", "config": {}, "tf32": False}, **CALL,
    )
    for size in (1, 3, 4)
]  # fmt: skip
HEAD = table_files.HEAD | {"versions": {"torch": "2"}, "note": "a note"}
ROW = {"op": "all_reduce", "dtype": "*", "algorithm": "slow", "seconds": 2e-6, "config": {"comm_sms": 4}}
PRODUCT = {"op": "matmul_all_gather", "dtype": "bfloat16", "m": 8, "n": 16, "k": 32, "gather_dim": 0}
TABLE = HEAD | {
    "entries": [
        ROW | {"nbytes": 4096, "place": "heap"},
        ROW | {"nbytes": 1024, "place": "input", "algorithm": "fast", "config": {"num_warps": 8}},
        ROW | PRODUCT | {"config": {"num_sms": 4}},
    ]
}
FIELDS = {*ROW, *PRODUCT, "nbytes", "place"}
REPORT = {
    "schema": 1, "name": "b", "machine": {"cpu": "a CPU", "gpus": 8, "versions": {"torch": "2"}, "date": "2026-01-02"},
    "run": {"num_ranks": 2}, "results": [{"benchmark": "b", "provider": "ours", "params": {"n": 1}, "num_ranks": 2}],
}  # fmt: skip


SCALARS = (
    st.none() | st.booleans() | st.text(max_size=5) | st.floats() | st.integers()
    | st.sampled_from([0, -1, 1e-320, 1e300, 10**400, "", "all_reduce", "cpu", math.nan, math.inf])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(content, path=()):
    """Every key of a document, by its path."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def damaged(draw, document):
    """A document with one or two values gone or replaced."""
    content = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        *parents, last = draw(st.sampled_from(list(places(content))))
        where = content
        for key in parents:
            where = where[key]
        if draw(st.booleans()):
            del where[last]
        else:
            where[last] = draw(VALUES)
        if not content:
            break
    return content


@contextlib.contextmanager
def warnings_of_tables():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "warning", lambda text, *args: seen.append(text % args))
        yield seen


def algorithm(name):
    answers = {"supports": lambda request: Availability.yes(), "cost": lambda request: 1.0}
    return SimpleNamespace(op="all_reduce", info=SimpleNamespace(name="mine"), name=name, **answers)


@settings(deadline=None, max_examples=100)
@given(damaged(TABLE))
def test_a_table_is_used_as_it_is_or_left_out(content):
    with tempfile.TemporaryDirectory() as folder, warnings_of_tables() as warned:
        path, good = pathlib.Path(folder, "bad.json"), pathlib.Path(folder, "good.json")
        path.write_text(json.dumps(content))
        good.write_text(json.dumps(TABLE))
        tables = Tables(pathlib.Path(folder), [], "cpu")
        chooser = Chooser([algorithm("slow"), algorithm("fast")], tables, ())
        for request in REQUESTS:
            chooser.choose(request, None)
            chooser.explain(request, None)
        found = [tables.nearest(request).entries for request in REQUESTS + FUSED]
        if warned:
            (warning,) = warned
            assert str(path) in warning
            assert "\n" not in warning
            assert {entry.source for entries in found for entry in entries} == {str(good)}
            return
        table = read_table(path)
        assert (table.device, table.group_size) == (content["device"], content["group_size"])
        entries = [row for row in content["entries"] if not isinstance(row["seconds"], bool)]
        rows = [{"config": {}, "place": "heap"} | row | {"seconds": float(row["seconds"])} for row in entries]
        said = [{name: value_of(entry, name) for name in FIELDS} for entry in table.entries]
        assert as_text(said) == as_text({name: row.get(name) for name in FIELDS} for row in rows)


def value_of(entry, name):
    sizes = dict(zip("mnk", entry.size, strict=True)) if len(entry.size) == 3 else {"nbytes": entry.size[0]}
    return sizes.get(name) if name in (*"mnk", "nbytes") else getattr(entry, name)


def as_text(rows):
    """For comparison also of the types."""
    return sorted(map(repr, map(sorted, map(dict.items, rows))))


def replace(path, make, *args):
    path.unlink()
    make(path, *args)


IN_PLACE = {
    "nothing in it": lambda path: path.write_bytes(b""),
    "a part of it": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "more than is read": lambda path: os.truncate(path, documents.MAX_NBYTES + 1),
    "no text": lambda path: path.write_bytes(bytes(range(256))),
    "another encoding": lambda path: path.write_bytes(path.read_text().encode("utf-16")),
    "deep nesting": lambda path: path.write_bytes(b"[" * 200_000), "a number": lambda path: path.write_bytes(b"5"),
    "a list": lambda path: path.write_bytes(b"[1, 2]"),
    "another format": lambda path: path.write_text('{"format": 1, "schema": 2}'),
    "a folder": lambda path: replace(path, pathlib.Path.mkdir), "a pipe": lambda path: replace(path, os.mkfifo),
    "a circle of links": lambda path: replace(path, pathlib.Path.symlink_to, path.name),
    "a link to nothing": lambda path: replace(path, pathlib.Path.symlink_to, "there_is_no_such"),
}  # fmt: skip


@table("damage", IN_PLACE.values())
def test_whatever_is_in_place_of_a_file_is_left_out(tmp_path, capsys, damage):
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("a.json", "b.json"):
        (folder / name).write_text(json.dumps(TABLE))
    damage(folder / "a.json")
    with warnings_of_tables() as warned:
        tables = Tables(folder, [], "cpu")
        assert all(tables.nearest(request).entries for request in (REQUESTS[0], FUSED[-1]))
    (warning,) = warned
    assert str(folder / "a.json") in warning
    assert "\n" not in warning

    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    for path in (good, bad):
        path.write_text(json.dumps(REPORT))
    damage(bad)
    assert main(["bench", "compare", str(good), str(bad)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"iris: {bad} ")


def test_a_folder_that_one_may_not_read_is_left_out(tmp_path, monkeypatch):
    denied = PermissionError(13, "Permission denied", str(tmp_path))  # root may read everything
    monkeypatch.setattr(pathlib.Path, "iterdir", Mock(side_effect=denied))
    with warnings_of_tables() as warned:
        assert Tables(tmp_path, [], "cpu").nearest(REQUESTS[0]).entries == ()
    (warning,) = warned
    assert str(tmp_path) in warning
    assert "IRIS_CACHE_DIR" in warning
