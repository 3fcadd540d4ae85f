"""What ported contexts do around a call: barriers, streams, configs that cannot be fulfilled."""

import types

import pytest
import torch
from jobs_common import environment
from tables import table

import iris_triton as iris
from iris_core.dispatch.bind import Launches
from iris_core.dispatch.config import Config as CoreConfig
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.types import DeviceTarget, DeviceType
from iris_triton.ccl import Config
from iris_triton.ops import FusedConfig
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

    def bind(self, question, key, holder):
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
OF_DEVICES = {name: torch.tensor(each) for name, each in SPLITS.items()}
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
    (lambda ccl: ccl.all_to_all(MATRIX, MATRIX, **OF_DEVICES), ["all_to_all torch", "barrier of None"]),
    (lambda ccl: ccl.broadcast(MATRIX), ["broadcast"]), (lambda ccl: ccl.send(MATRIX, 1), ["send"]),
    (lambda ccl: ccl.send(MATRIX, 1, async_op=True), ["send beside"]),
]  # fmt: skip


@table(("call", "wanted"), CALLS)
def test_what_a_call_becomes(call, wanted):
    ccl, binder = ported()
    call(ccl)
    assert binder.log == wanted


def test_a_member_alone_waits_for_nobody():
    ccl, binder = ported(0)
    ccl.reduce_scatter(MATRIX, MATRIX)
    assert binder.log == ["reduce_scatter torch"]


@table(("op", "shape"), [("all_to_all", (4, 4)), ("all_to_all", (4,)), ("reduce_scatter", (4, 4))])
def test_calls_that_are_bound_or_explained_have_the_layout_of_calls(op, shape):
    tensor = torch.zeros(shape)
    (ccl, binder), described = ported(), []
    getattr(ccl, op)(tensor, tensor)
    for what in ("bind", "explain"):
        described.append(ccl._described(what, op, (tensor, tensor), {})[0].second)
    assert described == [binder.log[0].split()[1]] * 2


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


# -- configs: what cannot be fulfilled of one, and what is left of its wishes -----------------------------------------
def refusing(names, seen, error=UnsupportedError):
    """A call that refuses configs with these fields, or with such a variant."""

    def call(config):
        given = config.given() if isinstance(config, FusedConfig) else config.given("all_reduce")
        given |= {"use_gluon": True} if config.use_gluon else {}
        if names & {*given, getattr(config, "all_reduce_variant", "")}:
            raise error(f"refused {sorted(given)}")
        seen.append(given)
        return "done"

    return call


@table(("config", "refused", "left"), [
    (Config(num_xcds=8, comm_sms=8), {"num_xcds"}, {"comm_sms": 8}),
    (Config(swizzle_size=2, comm_sms=8, block_size_m=16), {"comm_sms"}, {"swizzle_size": 2, "block_size_m": 16}),
    (Config(swizzle_size=2, comm_sms=8, num_warps=8), {"swizzle_size", "comm_sms"}, {"num_warps": 8}),
    (Config(use_gluon=True, comm_sms=8), {"comm_sms"}, {"use_gluon": True}),
    (Config(use_gluon=True, comm_sms=8), {"use_gluon"}, {"comm_sms": 8}),
    (Config(use_gluon=True, comm_sms=8), {"use_gluon", "comm_sms"}, {}),
    (FusedConfig(all_reduce_variant="ring", num_stages=2), {"ring"}, {"num_stages": 2}),
    (FusedConfig(block_size_m=16, all_reduce_variant="atomic"), {"block_size_m"}, {}),
])  # fmt: skip
def test_as_little_as_must_be_is_left_out(config, refused, left):
    seen, (ccl, _) = [], ported()
    for _ in range(2):
        assert ccl._oblige("all_reduce", config, refusing(refused, seen)) == "done"
    assert seen == [left, left]


def test_what_is_refused_all_the_same():
    """Tiles, where the result depends on them; the first refusal is raised.  The core's configs and none pass."""
    ccl, _ = ported()
    config = FusedConfig(block_size_m=16, num_stages=2)
    with pytest.raises(ArgumentError, match=r"refused \['block_size_m', 'num_stages'\]"):
        ccl._oblige("op", config, refusing({"block_size_m"}, [], ArgumentError), tiles=True)
    for config in (None, CoreConfig()):
        assert ccl._oblige("op", config, lambda config: config) is config
