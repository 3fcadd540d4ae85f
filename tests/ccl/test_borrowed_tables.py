"""Measured tables where a number of ranks was not measured: those of other numbers, put together."""

from dataclasses import replace

from iris_core.dispatch.tables import Entry, Table, entries_for, joined
from iris_core.types import CollectiveRequest, DeviceTarget, DeviceType

REQUEST = CollectiveRequest(
    op="all_reduce",
    shape=(256,),
    dtype="float32",
    nbytes=1024,
    rank=0,
    group_size=6,
    target=DeviceTarget(DeviceType.CPU),
    members=tuple(range(6)),
)


def entry(algorithm, us, max_nbytes=4096):
    return Entry("all_reduce", "*", max_nbytes, algorithm, us * 1e-6, "file", {"comm_sms": 8})


def table(size, *entries):
    return [Table("GPU", size, True, tuple(entries), "file")]


def test_an_algorithm_that_the_nearest_number_does_not_know_comes_from_the_next():
    by_size = {
        8: table(8, entry("push", 10), entry("unfused", 12), entry("slow", 1, max_nbytes=64)),
        2: table(2, entry("hopper", 4), entry("push", 5), entry("slow", 3)),
    }
    found = entries_for(REQUEST, by_size)
    assert [each.algorithm for each in found] == ["hopper", "push", "unfused"]  # "slow" lost with 8 at this size
    assert [round(each.seconds * 1e6, 3) for each in found] == [8, 10, 12]
    assert [(each.borrowed_from, each.config) for each in found] == [(2, {}), (8, {}), (8, {})]


def test_what_was_measured_with_so_many_ranks_stands_alone():
    by_size = {6: table(6, entry("push", 10)), 2: table(2, entry("hopper", 1), entry("push", 5))}
    assert entries_for(REQUEST, by_size) == [entry("push", 10)]
    assert [each.algorithm for each in entries_for(replace(REQUEST, group_size=3), by_size)] == ["hopper", "push"]


def test_what_has_nothing_in_common_does_not_compare():
    here = [entry("push", 10)]
    assert joined(here, [entry("hopper", 1)], set()) == here
    assert joined([], here, set()) == here
    assert joined(here, [entry("push", 5)], {"push"}) is here
