"""Measured tables: their files, and the nearest measured point."""

from dataclasses import replace

import pytest
from table_files import table_file
from tables import table

from iris_core.dispatch.choice import Tables, file_name, place_of, size_of
from iris_core.dispatch.tables import Entry, read_table, write_table
from iris_core.errors import SettingsError
from iris_core.types import CollectiveRequest, DeviceTarget, DeviceType

REQUEST = CollectiveRequest(
    op="all_reduce", shape=(512,), dtype="bfloat16", nbytes=1 << 20, rank=0, group_size=4,
    target=DeviceTarget(DeviceType.CPU),
)  # fmt: skip
MIB = 1 << 20


def tables(*folders):
    cache, *shipped = folders
    return Tables(cache, shipped, "cpu")


def names(found):
    return [entry.algorithm for entry in found.entries]


def test_a_file_named_for_another_device_is_not_read(tmp_path, caplog):
    for name in ("another-gpu-4.json", "cpu-x.json", "mine.json"):
        (tmp_path / name).write_text("{")
    assert tables(tmp_path).nearest(REQUEST).entries == ()
    assert len(caplog.messages) == 2
    assert "another-gpu" not in caplog.text


# -- the nearest point ------------------------------------------------------------------------------------------------
def one_point(folder, algorithm, **row):
    """A file with one point, of one algorithm with a config."""
    head = {name: row.pop(name) for name in ("device", "group_size") if name in row}
    row = {"nbytes": MIB, "algorithm": algorithm, "config": {"comm_sms": 4}} | row
    return table_file(folder, row, **head)


@table("way", [2, 0.5])
@table(
    ("octaves", "is_near", "config"),
    [(0, True, True), (0.49, True, True), (0.51, False, True), (1, False, True), (1.01, False, False),
     (3, False, False)],
)  # fmt: skip
def test_near_close_and_far(tmp_path, way, octaves, is_near, config):
    """Near, a point says what is the fastest; close, its configs serve, too; far, it is better than an estimate."""
    path = one_point(tmp_path, "a", nbytes=int(MIB * way**octaves))
    found = tables(tmp_path).nearest(REQUEST)
    assert (names(found), found.is_near, bool(found.entries[0].config)) == (["a"], is_near, config)
    assert found.reason == (
        f"measured as the fastest in {path}"
        if is_near
        else f"measured as the fastest at {found.entries[0].size[0]} bytes, heap tensors, 4 ranks in {path}"
    )
    far = MIB * 8 + 8 if way == 2 else MIB // 8 - 8
    one_point(tmp_path / "far", "a", nbytes=far)
    assert tables(tmp_path / "far").nearest(REQUEST) == ((), False)


def test_the_order_of_what_is_near(tmp_path):
    """First the number of ranks, then the place; then whether the size is near, the type, and the distance."""
    order = [
        ("the same", {}), ("in size", {"nbytes": int(MIB * 1.3)}), ("as fast a type", {"dtype": "float16"}),
        ("any type", {"dtype": "*"}), ("its type, at twice the size", {"nbytes": 2 * MIB}),
        ("its type, at four times the size", {"nbytes": 4 * MIB}),
        ("any type, at twice the size", {"nbytes": 2 * MIB, "dtype": "*"}), ("another place", {"place": "ordinary"}),
        ("other ranks", {"group_size": 2}),
    ]  # fmt: skip
    others = ({"dtype": "float32"}, {"op": "reduce"}, {"device": "a GPU"}, {"nbytes": 9 * MIB})
    for number, other in enumerate(others):
        one_point(tmp_path, f"other {number}", **other)
    for name, point in reversed(order):
        one_point(tmp_path, name, **({"dtype": "bfloat16"} | point))
        found = tables(tmp_path).nearest(REQUEST)
        assert names(found) == [name]
        assert found.is_near == (name in ("the same", "in size", "as fast a type", "any type"))
    assert names(tables(tmp_path).nearest(replace(REQUEST, dtype="float32"))) == ["other 0"]
    assert names(tables(tmp_path).nearest(replace(REQUEST, dtype="int8"))) == ["any type"]


def test_the_nearest_number_of_ranks(tmp_path):
    """Without its configs: they may not fit so many ranks."""
    for size in (2, 4, 16):
        one_point(tmp_path, str(size), group_size=size)
    known = tables(tmp_path)
    for size, name in ((2, "2"), (3, "4"), (4, "4"), (7, "4"), (12, "16"), (64, "16")):
        found = known.nearest(replace(REQUEST, group_size=size))
        assert (names(found), found.is_near, bool(found.entries[0].config)) == ([name], *[str(size) == name] * 2)


@table(
    ("op", "direct_in", "direct_out", "place"),
    [
        ("all_reduce", True, True, "heap"), ("all_reduce", False, False, "ordinary"),
        ("all_reduce", True, False, "input"), ("all_reduce", False, True, "output"),
        ("gather", False, True, "output"), ("gather", True, False, "heap"),  # not all have an output
        ("scatter", False, True, "heap"), ("scatter", True, False, "input"),
    ],
)  # fmt: skip
def test_places(tmp_path, op, direct_in, direct_out, place):
    request = replace(REQUEST, op=op, direct_in=direct_in, direct_out=direct_out, options={"root": 0})
    assert place_of(request) == place
    for each in ("heap", "ordinary", "input", "output"):
        one_point(tmp_path, each, op=op, place=each, nbytes=size_of(request)[0])
    found = tables(tmp_path).nearest(request)
    assert (names(found), found.is_near) == ([place], True)


def test_sizes(tmp_path):
    """All members look the same one up; splits of each member have none."""
    root = replace(REQUEST, op="scatter", nbytes=4 * MIB, options={"root": 0})
    assert size_of(root) == size_of(replace(root, nbytes=MIB, rank=1)) == (MIB,)
    assert size_of(replace(REQUEST, op="broadcast", options={"root": 0})) == (MIB,)
    assert size_of(replace(REQUEST, nbytes=1)) == size_of(replace(REQUEST, nbytes=1024)) == (1024,)
    table_file(tmp_path, {"op": "all_to_all", "nbytes": MIB})
    uneven = replace(REQUEST, op="all_to_all", options={"uneven": True})
    assert size_of(uneven) is None
    assert tables(tmp_path).nearest(uneven).entries == ()
    assert tables(tmp_path).nearest(replace(uneven, options={})).is_near


def test_the_first_folder_counts_and_is_compared_with_itself_alone(tmp_path):
    """Times of two files were not measured together."""
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    table_file(own, {"nbytes": MIB, "algorithm": "own"})
    table_file(shipped, {"nbytes": MIB, "algorithm": "shipped", "seconds": 1e-7}, {"algorithm": "small"})
    found = tables(own, shipped, tmp_path / "absent")
    assert names(found.nearest(REQUEST)) == ["own"]
    assert names(found.nearest(replace(REQUEST, nbytes=1024))) == ["small"]  # which the first one does not know
    assert names(tables(shipped, own).nearest(REQUEST)) == ["shipped"]


# -- what this process measures ---------------------------------------------------------------------------------------
def entry(algorithm="new", seconds=1e-6, **more):
    return Entry("all_reduce", "bfloat16", (MIB,), algorithm, seconds, group_size=4, **more)


def test_what_was_measured_here_counts_before_all_files(tmp_path):
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    table_file(shipped, {"nbytes": MIB, "dtype": "bfloat16", "algorithm": "shipped", "seconds": 1e-9})
    known = tables(own, shipped)
    assert names(known.nearest(REQUEST)) == ["shipped"]
    known.add([entry("new", 2e-6), entry("newer", 1e-6)], write=False)
    assert names(known.nearest(REQUEST)) == ["newer", "new"]
    assert known.nearest(REQUEST).reason == "measured as the fastest here"
    assert not own.exists()
    known.add([entry("again")], write=True)
    assert names(known.nearest(REQUEST)) == ["again"]
    assert names(tables(own, shipped).nearest(REQUEST)) == ["again"]
    assert [path.name for path in own.iterdir()] == ["cpu-4.json"]
    known.add([replace(entry("of two"), group_size=2)], write=False)  # which says nothing of four
    assert names(known.nearest(REQUEST)) == ["again"]
    assert names(known.nearest(replace(REQUEST, group_size=2))) == ["of two"]


def test_points_that_others_have_measured_meanwhile_stay_in_the_file(tmp_path):
    known, other = tables(tmp_path), entry("of another process")
    points = ({"size": (2 * MIB,)}, {"dtype": "int8"}, {"place": "input"}, {"op": "reduce"})
    tables(tmp_path).add([other, *(replace(other, **each) for each in points)], write=True)
    known.add([entry("first")], write=True)
    known.add([entry("second", config={"num_warps": 4})], write=True)
    found = read_table(tmp_path / "cpu-4.json")
    assert sorted((e.algorithm, e.size, e.config) for e in found.entries) == [
        *[("of another process", (MIB,), {})] * 3, ("of another process", (2 * MIB,), {}),
        ("second", (MIB,), {"num_warps": 4}),
    ]  # fmt: skip
    assert "torch" in found.versions


@pytest.mark.parametrize("there", ["damaged", "a folder"])
def test_what_cannot_be_kept_serves_this_process(tmp_path, caplog, there):
    path = tmp_path / "cpu-4.json"
    path.write_text("{}") if there == "damaged" else path.mkdir()
    known = tables(tmp_path)
    caplog.clear()
    known.add([entry()], write=True)
    assert names(known.nearest(REQUEST)) == ["new"]
    (warning,) = caplog.messages
    assert warning.startswith("what was measured is not kept: ")
    assert str(path) in warning


# -- files ------------------------------------------------------------------------------------------------------------
def test_what_is_written_can_be_read(tmp_path, monkeypatch):
    rows = [
        Entry("all_gather_matmul", "tf32", (8, 16, 32), "push", 3e-6, gather_dim=1),
        Entry("all_reduce", "*", (4096,), "slow", 1.5e-6, place="input"),
        Entry("all_reduce", "*", (4096,), "slow", 2e-6),
        Entry("all_reduce", "*", (4096,), "fast", 1.23456e-6, config={"comm_sms": 4}),
    ]
    path = tmp_path / "deep" / "table.json"
    monkeypatch.setattr("iris_core.dispatch.tables.versions", lambda: {"triton": "3.6.0"})
    write_table(path, "cpu", 4, [replace(rows[1], algorithm="measured again"), rows[0]], rows[1:])
    found = read_table(path)
    assert (found.device, found.group_size, found.measured, found.versions) == ("cpu", 4, True, {"triton": "3.6.0"})
    wanted = [replace(each, source=str(path), group_size=4) for each in rows]
    wanted[3] = replace(wanted[3], seconds=1.235e-6)
    assert list(found.entries) == [wanted[0], wanted[3], wanted[2], wanted[1]]
    assert [each.name for each in path.parent.iterdir()] == ["table.json"]
    assert file_name("NVIDIA H200 (80 GB)", 8) == "nvidia-h200-80-gb-8.json"


ONE_SIZE = "a line has `nbytes`, or `m`, `n` and `k`"


@table(("head", "row", "text"), [
    ({"measured": None}, {}, "measured"), ({"measured": "yes"}, {}, "measured"),
    ({"measured": False}, {}, "note"),  # a model also says where its times come from
    *(({}, row, ONE_SIZE) for row in (
        {"nbytes": None}, {"m": 8}, {"nbytes": None, "m": 8, "n": 8}, {"gather_dim": 0})),
    *(({}, row, next(iter(row))) for row in (
        {"max_nbytes": 4096}, {"nbytes": 0}, {"nbytes": 1 << 61}, {"place": "x"})),
])  # fmt: skip
def test_what_a_table_cannot_say(tmp_path, head, row, text):
    path = table_file(tmp_path, row, **head)
    with pytest.raises(SettingsError, match=text):
        read_table(path)
