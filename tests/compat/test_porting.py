"""What ported contexts do around a call: barriers, streams, configs that cannot be fulfilled."""

import sys
import types

import pytest
import torch
from jobs_common import environment
from tables import table

import iris_triton as iris
from iris_core.dispatch.bind import Launches
from iris_core.errors import UnsupportedError
from iris_core.types import DeviceTarget, DeviceType
from iris_triton.ccl import Config
from iris_triton.rocm_iris.collectives import PortedCollectives


class Binder:
    """Notes what is run, in which layout, and where barriers come; `members` are those of every group."""

    here = types.SimpleNamespace(heap=(0, 0))
    gpu, target = None, DeviceTarget(DeviceType.CPU)
    rank = 0

    def __init__(self, members=(0, 1)):
        self.members, self.log, self.bound = members, [], Launches()

    def members_of(self, group):
        return self.members

    def bind(self, question, key):
        said = [question.op, *(each for each in (question.first, question.second) if isinstance(each, str))]
        run = lambda *_, how="": self.log.append(" ".join(said) + how)
        return types.SimpleNamespace(run=run, run_async=lambda *_: run(how=" beside"))

    def barrier(self, group, async_op):
        self.log.append(f"barrier of {group}")


def ported(*members):
    """`ctx.ccl` of a script, and what it has done."""
    binder = Binder(members or (0, 1))
    return PortedCollectives(binder), binder


MATRIX = torch.zeros(4, 4)
SPLITS = {"input_split_sizes": [1, 3], "output_split_sizes": [1, 3]}
CALLS = [
    (lambda ccl: ccl.all_gather(torch.zeros(8, 4), MATRIX, "g"), ["all_gather", "barrier of g"]),
    (lambda ccl: ccl.all_gather(torch.zeros(8, 4), MATRIX, [0, 1]), ["all_gather", "barrier of [0, 1]"]),
    (lambda ccl: ccl.all_gather(torch.zeros(8, 4), MATRIX, [0, 1], async_op=True), ["all_gather"]),
    (lambda ccl: ccl.all_gather(torch.zeros(8, 4), MATRIX, async_op=True), ["all_gather"]),
    (lambda ccl: ccl.all_reduce(MATRIX, MATRIX), ["all_reduce", "barrier of None"]),
    (lambda ccl: ccl.all_reduce(MATRIX, MATRIX, async_op=True), ["all_reduce"]),
    (lambda ccl: ccl.reduce_scatter(MATRIX, MATRIX), ["reduce_scatter tiles", "barrier of None"]),
    (lambda ccl: ccl.reduce_scatter(MATRIX[:2], MATRIX), ["reduce_scatter torch", "barrier of None"]),
    (lambda ccl: ccl.all_to_all(MATRIX, MATRIX), ["all_to_all columns", "barrier of None"]),
    (lambda ccl: ccl.all_to_all(MATRIX, MATRIX, layout="torch"), ["all_to_all torch", "barrier of None"]),
    (lambda ccl: ccl.all_to_all(MATRIX[0], MATRIX[0]), ["all_to_all torch", "barrier of None"]),
    (lambda ccl: ccl.all_to_all(MATRIX, MATRIX, **SPLITS), ["all_to_all torch", "barrier of None"]),
    (lambda ccl: ccl.broadcast(MATRIX), ["broadcast"]), (lambda ccl: ccl.send(MATRIX, 1), ["send"]),
    (lambda ccl: ccl.send(MATRIX, 1, async_op=True), ["send beside"]),
]  # fmt: skip


@table(("call", "wanted"), CALLS)
def test_what_a_call_becomes(call, wanted):
    ccl, binder = ported()
    call(ccl)
    assert binder.log == wanted


def test_gluon_must_be_installed_and_a_member_alone_waits_for_nobody(monkeypatch):
    monkeypatch.setitem(sys.modules, "iris_gluon.backend", None)
    ccl, binder = ported()
    with pytest.raises(UnsupportedError, match=r"use_gluon=True.*pip install \./iris_gluon"):
        ccl.all_gather(torch.zeros(8, 4), MATRIX, config=Config(use_gluon=True))
    assert binder.log == []
    ccl, binder = ported(0)
    ccl.reduce_scatter(MATRIX, MATRIX)
    assert binder.log == ["reduce_scatter torch"]


@pytest.mark.parametrize(
    ("variable", "options", "wanted"), [("1", {}, 1), ("0", {}, 0), ("1", {"triton": {"allocation_barrier": False}}, 0)]
)
def test_what_allocates_ends_with_a_barrier(monkeypatch, variable, options, wanted):
    with (
        environment(IRIS_DEVICE="cpu", IRIS_TRITON__ALLOCATION_BARRIER=variable),
        iris.Iris(1 << 20, options=options) as ctx,
    ):
        calls = []
        monkeypatch.setattr(ctx, "barrier", lambda: calls.append("barrier"))
        x = ctx.zeros(3)
        ctx.ones(3, out=x)
        monkeypatch.setattr(ctx.heap.streams, "is_capturing", lambda: True)
        ctx.as_symmetric(x)
        assert len(calls) == wanted
