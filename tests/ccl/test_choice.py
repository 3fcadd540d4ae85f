"""Measured tables, which algorithm is chosen, and what is said of it; what a config may be; reductions by name."""

import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from jobs_common import said_by
from table_files import table_file
from tables import raises, table

from iris_core.ccl import Config, ReduceOp
from iris_core.dispatch import COLLECTIVES
from iris_core.dispatch.choice import Chooser, Tables, place_of, size_of
from iris_core.dispatch.requests import reduce_op
from iris_core.dispatch.tables import Entry, read_table
from iris_core.errors import ArgumentError, SettingsError, UnsupportedError
from iris_core.ops import FusedConfig
from iris_core.types import Availability, CollectiveRequest, DeviceTarget, DeviceType
from iris_triton.collectives import TABLES, collectives

CPU = DeviceTarget(DeviceType.CPU)
REQUEST = CollectiveRequest("all_reduce", (512,), "bfloat16", nbytes=1024, rank=0, group_size=4, target=CPU)


MIB = 1 << 20
OF_MIB = replace(REQUEST, nbytes=MIB)


def tables(*folders):
    cache, *shipped = folders
    return Tables(cache, shipped, "cpu")


def names(found):
    return [entry.algorithm for entry in found.entries]


def one_point(folder, algorithm, **row):
    head = {name: row.pop(name) for name in ("device", "group_size") if name in row}
    row = {"nbytes": MIB, "algorithm": algorithm, "config": {"comm_sms": 4}} | row
    return table_file(folder, row, **head)


def test_the_order_of_what_is_near(tmp_path):
    """First the number of ranks, then the place; then whether the size is near, the type, and the distance."""
    order = [
        ("the same", {}), ("in size", {"nbytes": int(MIB * 1.3)}), ("as fast a type", {"dtype": "float16"}),
        ("any type", {"dtype": "*"}), ("its type, at twice the size", {"nbytes": 2 * MIB}),
        ("its type, at four times the size", {"nbytes": 4 * MIB}),
        ("any type, at twice the size", {"nbytes": 2 * MIB, "dtype": "*"}), ("another place", {"place": "ordinary"}),
        ("other ranks", {"group_size": 2}),
    ]  # fmt: skip
    for number, other in enumerate(({"dtype": "float32"}, {"op": "reduce"}, {"device": "a GPU"}, {"nbytes": 9 * MIB})):
        one_point(tmp_path, f"other {number}", **other)
    for name, point in reversed(order):
        one_point(tmp_path, name, **({"dtype": "bfloat16"} | point))
        found = tables(tmp_path).nearest(OF_MIB)
        assert names(found) == [name]
        assert found.is_near == (name in ("the same", "in size", "as fast a type", "any type"))
    assert names(tables(tmp_path).nearest(replace(OF_MIB, dtype="float32"))) == ["other 0"]
    assert names(tables(tmp_path).nearest(replace(OF_MIB, dtype="int8"))) == ["any type"]


@table(("op", "direct_in", "direct_out", "place"), [
    ("all_reduce", True, True, "heap"), ("all_reduce", False, False, "ordinary"),
    ("all_reduce", True, False, "input"), ("all_reduce", False, True, "output"),
    ("gather", False, True, "output"), ("gather", True, False, "heap"),  # not all have an output
    ("scatter", False, True, "heap"), ("scatter", True, False, "input"),
])  # fmt: skip
def test_places(op, direct_in, direct_out, place):
    assert place_of(replace(OF_MIB, op=op, direct_in=direct_in, direct_out=direct_out, options={"root": 0})) == place


def test_sizes_of_calls(tmp_path):
    """All members look the same one up; splits of each member have none."""
    root = replace(OF_MIB, op="scatter", nbytes=4 * MIB, options={"root": 0})
    assert size_of(root) == size_of(replace(root, nbytes=MIB, rank=1)) == (MIB,)
    assert size_of(replace(OF_MIB, op="broadcast", options={"root": 0})) == (MIB,)
    assert size_of(replace(OF_MIB, nbytes=1)) == size_of(replace(OF_MIB, nbytes=1024)) == (1024,)
    table_file(tmp_path, {"op": "all_to_all", "nbytes": MIB})
    uneven = replace(OF_MIB, op="all_to_all", options={"uneven": True})
    assert (size_of(uneven), tables(tmp_path).nearest(uneven).entries) == (None, ())


def entry(algorithm="new", seconds=1e-6, **more):
    return Entry("all_reduce", "bfloat16", (MIB,), algorithm, seconds, group_size=4, **more)


def test_what_was_measured_here_counts_before_all_files(tmp_path):
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    of_mib = {"nbytes": MIB, "dtype": "bfloat16", "algorithm": "shipped", "seconds": 1e-9}
    table_file(shipped, of_mib, {"algorithm": "small"})
    known = tables(own, shipped)
    assert names(known.nearest(OF_MIB)) == ["shipped"]
    known.add([entry("new", 2e-6), entry("newer", 1e-6)], write=False)
    assert names(known.nearest(OF_MIB)) == ["newer", "new"]
    assert not own.exists()
    known.add([entry("again")], write=True)
    assert names(known.nearest(OF_MIB)) == ["again"]
    assert names(tables(own, shipped).nearest(OF_MIB)) == ["again"]  # times of two files were not measured together
    assert names(tables(shipped, own).nearest(OF_MIB)) == ["shipped"]
    assert names(tables(own, shipped).nearest(replace(OF_MIB, nbytes=1024))) == ["small"]  # which `own` has not
    known.add([replace(entry("of two"), group_size=2)], write=False)  # which says nothing of four
    assert names(known.nearest(OF_MIB)) == ["again"]
    assert names(known.nearest(replace(OF_MIB, group_size=2))) == ["of two"]


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
    for _ in range(2):
        known.add([entry()], write=True)
    assert names(known.nearest(OF_MIB)) == ["new"]
    assert [str(path) in each for each in caplog.messages] == [True] * (there != "damaged")  # which is replaced


@table(("head", "row", "key"), [
    ({"measured": "yes"}, {}, "names"), ({"measured": False}, {}, "config.note"),  # of a model
    *(({}, row, "config.one size") for row in ({"m": 8}, {"nbytes": None, "m": 8, "n": 8}, {"gather_dim": 0})),
    *(({}, row, "names") for row in ({"max_nbytes": 4096}, {"nbytes": 0}, {"place": "x"})),
])  # fmt: skip
def test_what_a_table_cannot_say(tmp_path, head, row, key):
    path = table_file(tmp_path, row, **head)
    with raises(SettingsError, key, name=next(iter(row or head))):
        read_table(path)


class Algorithm:
    """Says what it is told to say."""

    op = "all_reduce"

    def __init__(self, name, seconds, problem="", plugin="triton", **more):
        self.name, self.seconds, self.problem = name, seconds, problem
        self.info = SimpleNamespace(name=plugin)
        vars(self).update(more)

    def supports(self, request):
        return Availability.no(self.problem) if self.problem else Availability.yes()

    def cost(self, request):
        return self.seconds


def chooser(*algorithms, folders=(), unusable=()):
    cache, *shipped = folders or [Path("there is no such folder")]
    return Chooser(algorithms, Tables(cache, shipped, "cpu"), unusable)


def fussy(request):
    config = request.options.get("config", {})
    return Availability.no("too many") if config.get("comm_sms", 0) > 8 else Availability.yes()


SLOW, FAST = Algorithm("slow", 2.0), Algorithm("fast", 1.0, supports=fussy)
BAD, LATE = Algorithm("two_shot", 0.5, "no luck"), Algorithm("late", 0.1, measured_only=True)
THREE, MEASURED = (SLOW, FAST, BAD), (SLOW, FAST, LATE)
LANGUAGES = Algorithm("two_shot", 1.0), Algorithm("slow", 3.0, plugin="gluon")


@table("algorithms, rows, changes, config, found", [
    (THREE, (), {}, {}, "fast"),
    (THREE, (), {}, {"algorithm": "slow"}, "slow"),
    (THREE, (), {}, {"all_gather_variant": "persistent"}, "fast"),
    (THREE, (), {}, {"all_reduce_variant": "two_shot"}, "UnsupportedError: .*'two_shot'.*: no luck"),
    (THREE, (), {}, {"algorithm": "magic"}, "ArgumentError: .*'magic'; .*slow, fast, two_shot\n.*odd"),
    (THREE, (), {}, {"algorithm": "slow", "all_reduce_variant": "ring"}, "ArgumentError: .*contradicts"),
    ((BAD,), (), {}, {}, "UnsupportedError: .*on 4 ranks:\n  two_shot: no luck\n  collective 'x': odd"),
    ((BAD,), (), {"op": "broadcast"}, {}, "UnsupportedError: .*broadcast"),
    (LANGUAGES, (), {}, {"use_gluon": True}, "slow"),
    (LANGUAGES, (), {}, {"all_reduce_variant": "two_shot"}, "two_shot"),
    *((LANGUAGES, (), {}, {"use_gluon": True, name: "two_shot"}, "UnsupportedError: .*Gluon")
      for name in ("all_reduce_variant", "algorithm")),
    (MEASURED, ({},), {}, {}, "slow"),
    (MEASURED, ({},), {"nbytes": 8193}, {}, "fast"),  # too far from what was measured
    (MEASURED, ({"algorithm": "fast", "config": {"comm_sms": 16}}, {"seconds": 2e-6}), {}, {}, "slow"),
    (MEASURED, (), {}, {}, "fast"),  # not the one that has to be measured
    ((LATE,), (), {}, {"algorithm": "late"}, "late"),
    ((LATE,), (), {}, {}, "UnsupportedError: .*late .*measured"),
])  # fmt: skip
def test_the_fastest_that_can_or_the_named_one(tmp_path, algorithms, rows, changes, config, found):
    if rows:
        table_file(tmp_path / "own", *rows)
    choice = chooser(*algorithms, folders=[tmp_path / "own"], unusable=[("collective 'x'", "odd")])
    asked = replace(REQUEST, **changes), Config(**config) if config else None
    if ": " in found:
        assert re.match(found, said_by(choice.choose, *asked), re.DOTALL)
    else:
        assert choice.choose(*asked).name == choice.explain(*asked).algorithm == found


def test_what_is_said_of_a_choice_and_the_config_that_is_used(tmp_path):
    text = str(chooser(*THREE).explain(REQUEST, None))
    words = r"all_reduce: fast, the cheapest .*\n.*slow \(triton\): 2000000.0 us, model\n.*two_shot .*: no, no luck"
    assert re.match(words, text, re.DOTALL)
    assert chooser(*THREE).explain(REQUEST, Config(algorithm="magic")).algorithm == ""
    path = table_file(tmp_path / "own", {"config": {"comm_sms": 4, "num_warps": 2}})
    choice = chooser(*MEASURED, folders=[tmp_path / "own", tmp_path / "absent"])
    assert choice.choose(REQUEST, None)[2] == f"measured as the fastest in {path}"
    assert "slow (triton): 1.0 us, measured, comm_sms=4, num_warps=2" in str(choice.explain(REQUEST, None))
    assert choice.of(choice.choose(REQUEST, None), REQUEST)[1].options["config"] == {"comm_sms": 4, "num_warps": 2}
    assert REQUEST.options == {}
    asked = replace(REQUEST, options={"config": {"num_warps": 8}})  # the caller's wish counts
    assert choice.of(choice.choose(asked, None), asked)[1].options["config"] == {"comm_sms": 4, "num_warps": 8}
    assert choice.choose(REQUEST, Config(algorithm="slow")).config == {}
    assert choice.of(choice.choose(REQUEST, Config(algorithm="late")), REQUEST) == (LATE, REQUEST)


def test_a_table_that_was_not_measured_is_called_a_model(tmp_path):
    path = table_file(tmp_path, measured=False, note="of prototypes")
    choice = chooser(Algorithm("slow", 2.0, measured_only=True), Algorithm("fast", 1.0), folders=[tmp_path])
    found = choice.explain(REQUEST, None)
    assert (found.algorithm, found.why) == ("slow", f"the fastest by the model in {path} (of prototypes)")
    assert not found.candidates[0].measured
    assert "measured" not in str(found)


ERRORS = RuntimeError("no"), SystemExit(3), GeneratorExit(), StopIteration()


@table(("question", "answer"), [
    *((question, error) for question in ("supports", "cost", "tunings") for error in ERRORS),
    ("supports", True), ("supports", None), ("cost", "1"), ("cost", None), ("tunings", 5),
    ("cost", -1.0), ("cost", float("nan")), ("tunings", ({},) * 7), ("tunings", ({}, {"foo": 1})), ("tunings", (5,)),
    ("tunings", ({"num_warps": 3},)), ("tunings", ({}, {"algorithm": "good"})),
])  # fmt: skip
def test_an_algorithm_that_raises_or_says_nonsense_is_left_out_with_one_warning(tmp_path, caplog, question, answer):
    caplog.clear()
    fails = isinstance(answer, BaseException)
    reason = f"its `{question}` " + (f"raised {type(answer).__name__}" if fails else "returned ")
    table_file(tmp_path, {"algorithm": "bad"})
    answers = mock.Mock(side_effect=answer if fails else None, return_value=answer)
    bad = Algorithm("bad", 0.1, plugin="third", **{question: answers})
    choice = chooser(bad, Algorithm("good", 1.0), folders=[tmp_path])
    for nbytes in (512, 1024):
        request = replace(REQUEST, nbytes=nbytes)
        chosen, found = choice.choose(request, None).name, choice.explain(request, None).candidates[0]
        if question in ("supports", "cost"):
            assert (chosen, found.ok) == ("good", False)
            assert found.reason.startswith(reason)
            with raises(UnsupportedError, name=f"its `{question}`"):
                choice.choose(request, Config(algorithm="bad"))
        else:  # what it is not needed for
            assert (chosen, found.ok, choice.tunings(request, "bad")) == ("bad", True, ({},))
    (warning,) = caplog.messages
    assert "'bad' of 'third'" in warning
    assert reason in warning
    with pytest.raises(KeyboardInterrupt):
        chooser(Algorithm("bad", 1.0, supports=mock.Mock(side_effect=KeyboardInterrupt))).choose(REQUEST, None)


def test_a_few_are_worth_measuring_or_all():
    algorithms = [Algorithm(f"{n / 10} s", n / 10) for n in (19, 12, 10, 16, 25, 11, 13, 14)]
    algorithms.append(Algorithm("bad", 0.1, "no"))
    algorithms.append(Algorithm("always", 9.0, always_measured=True, measured_only=True))
    few, every = ([n for n, _ in chooser(*algorithms).contenders(REQUEST, None, few=few)] for few in (True, False))
    assert few == ["1.0 s", "1.1 s", "1.2 s", "1.3 s", "1.4 s", "1.6 s", "always"]
    assert every == ["1.9 s", "1.2 s", "1.0 s", "1.6 s", "2.5 s", "1.1 s", "1.3 s", "1.4 s", "always"]
    choice = chooser(*algorithms, Algorithm("other", 50.0, plugin="gluon"))
    assert choice.contenders(REQUEST, Config(use_gluon=True), few=True) == [("other", {})]


NUMBERS = ("block_size_m", "block_size_n", "swizzle_size", "comm_sms", "num_xcds", "chunk_size", "num_stages",
           "num_warps", "chunks")  # fmt: skip


@table(("kind", "name", "value"), [
    *((Config, name, value) for name in NUMBERS for value in (0, 1 << 31, 1.5, True, "4")), (Config, "algorithm", ""),
    (Config, "all_reduce_variant", "three_shot"), (Config, "all_reduce_distribution", 2), (Config, "num_warps", 3),
    (Config, "num_warps", 64), (Config, "threads_per_warp", 16), (Config, "waves_per_eu", -1),
    *((FusedConfig, *each) for each in (
        ("block_size_k", True), ("num_sms", -1), ("cache_modifier_a", ".wb"), ("allow_tf32", 1))),
])  # fmt: skip
def test_configs_that_cannot_be(kind, name, value):
    with raises(ArgumentError, "config.must be", name=name, value=repr(value)):
        kind(**{name: value})


def test_a_config_is_a_value_and_what_is_given_counts_whatever_it_is():
    other = Config(comm_sms=8)
    object.__setattr__(other, "_hash", hash(other) + 1)  # as of a process with other hashes of strings
    assert len({pickle.loads(pickle.dumps(other)), Config(comm_sms=8), Config()}) == 2
    assert Config(comm_sms=8, all_reduce_distribution=1).given("all_gather") == {"comm_sms": 8}
    given = Config(waves_per_eu=0, all_reduce_distribution=0).given("reduce_scatter")
    assert given == {"waves_per_eu": 0, "all_reduce_distribution": 0}


def test_reductions():
    assert {reduce_op(op) for op in (None, 0, ReduceOp.SUM, "sum", "SUM", dist.ReduceOp.SUM)} == {ReduceOp.SUM}
    assert all(reduce_op(getattr(dist.ReduceOp, name)) is each for name, each in ReduceOp.__members__.items())
    for op in ("median", 8, -1, True, 1.0, dist.ReduceOp.PREMUL_SUM):
        with raises(ArgumentError, "known", near="SUM, PRODUCT"):
            reduce_op(op)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_name_algorithms_that_exist(path):
    found = read_table(path)
    known = {(each.op, each.name) for each in collectives()}
    known |= {("all_reduce", "torch_symm"), *((op, "nccl") for op in COLLECTIVES)}
    assert {(entry.op, entry.algorithm) for entry in found.entries} <= known
    assert path.stem.endswith(f"-{found.group_size}")
