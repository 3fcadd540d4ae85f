"""What ported contexts do around a call: barriers, handles, configs that cannot be fulfilled."""

import sys
import threading

import pytest
import torch
from jobs_common import environment
from tables import table

import iris_triton as iris
from iris_core.dispatch.config import Config as CoreConfig
from iris_core.errors import ArgumentError, UnsupportedError
from iris_triton.ccl import Config
from iris_triton.ops import FusedConfig
from iris_triton.rocm_iris.collectives import PortedCollectives


class Handle:
    """A handle that notes who waits for it."""

    def __init__(self, log, name, done=False):
        self.log, self.name, self.done = log, name, done

    def wait(self, timeout_s=None):
        self.log.append(f"wait {self.name}")

    def is_completed(self):
        return self.done


class Binder:
    """Notes what is run, in which layout, and where barriers come; `members` are those of every group."""

    own_heap = (0, 0)
    gpu = None
    rank = 0

    def __init__(self, members=(0, 1)):
        self.members, self.log, self.bound = members, [], {}

    def members_of(self, group):
        return self.members

    def bind(self, question, key):
        said = [question.op, *(each for each in (question.first, question.second) if isinstance(each, str))]
        binder = self

        class Bound:
            def run(self, out, inp):
                binder.log.append(" ".join(said))

            def run_async(self, out, inp):
                self.run(out, inp)
                return Handle(binder.log, question.op)

        return Bound()

    def barrier(self, group, async_op):
        self.log.append(f"barrier of {group}")


MATRIX = torch.zeros(4, 4)
CALLS = {
    "all_gather": (lambda ccl: ccl.all_gather(torch.zeros(8, 4), MATRIX, "g"), ["all_gather", "barrier of g"]),
    "all_reduce": (lambda ccl: ccl.all_reduce(MATRIX, MATRIX), ["all_reduce", "barrier of None"]),
    "tiles": (lambda ccl: ccl.reduce_scatter(MATRIX, MATRIX), ["reduce_scatter tiles", "barrier of None"]),
    "rows": (lambda ccl: ccl.reduce_scatter(MATRIX[:2], MATRIX), ["reduce_scatter torch", "barrier of None"]),
    "columns": (lambda ccl: ccl.all_to_all(MATRIX, MATRIX), ["all_to_all columns", "barrier of None"]),
    "said": (lambda ccl: ccl.all_to_all(MATRIX, MATRIX, layout="torch"), ["all_to_all torch", "barrier of None"]),
    "vectors": (lambda ccl: ccl.all_to_all(MATRIX[0], MATRIX[0]), ["all_to_all torch", "barrier of None"]),
    "splits": (
        lambda ccl: ccl.all_to_all(MATRIX, MATRIX, input_split_sizes=[1, 3], output_split_sizes=[1, 3]),
        ["all_to_all torch", "barrier of None"],
    ),
    "broadcast": (lambda ccl: ccl.broadcast(MATRIX), ["broadcast"]),
    "send": (lambda ccl: ccl.send(MATRIX, 1), ["send"]),
    "async": (lambda ccl: ccl.all_gather(torch.zeros(8, 4), MATRIX, async_op=True), ["all_gather"]),
}


@table("name", CALLS)
def test_what_a_call_becomes(name):
    binder = Binder()
    call, wanted = CALLS[name]
    call(PortedCollectives(binder))
    assert binder.log == wanted


def test_gluon_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "iris_gluon.backend", None)
    binder = Binder()
    with pytest.raises(UnsupportedError, match=r"use_gluon=True.*pip install \./iris_gluon"):
        PortedCollectives(binder).all_gather(torch.zeros(8, 4), MATRIX, config=Config(use_gluon=True))
    assert binder.log == []


def test_a_member_alone_waits_for_nobody():
    binder = Binder(members=(0,))
    PortedCollectives(binder).reduce_scatter(MATRIX, MATRIX)
    assert binder.log == ["reduce_scatter torch"]


def test_handles_are_joined_once():
    binder = Binder()
    ccl = PortedCollectives(binder)
    workspace = ccl.all_reduce(MATRIX, MATRIX, async_op=True)
    assert not workspace.is_completed()
    ccl._join()
    ccl._join()
    assert binder.log == ["all_reduce", "wait all_reduce"]


def test_a_thread_waits_for_its_own():
    log, ccl = [], PortedCollectives(Binder())
    ccl._begin(Handle(log, "done", done=True))
    ccl._begin(Handle(log, "mine"))
    other = threading.Thread(target=lambda: (ccl._join(), log.append("other"), ccl._begin(Handle(log, "theirs"))))
    other.start()
    other.join()
    ccl._join()
    assert log == ["other", "wait mine"]


# -- allocations ------------------------------------------------------------------------------------------------------
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


# -- configs ----------------------------------------------------------------------------------------------------------
WISHES = [
    (Config(num_xcds=8, comm_sms=8), {"num_xcds"}, {"comm_sms": 8}),
    (Config(swizzle_size=2, comm_sms=8, block_size_m=16), {"comm_sms"}, {"block_size_m": 16}),
    (Config(use_gluon=True, comm_sms=8), {"comm_sms"}, {"use_gluon": True}),
    (FusedConfig(all_reduce_variant="ring", num_stages=2), {"ring"}, {"num_stages": 2}),
    (FusedConfig(block_size_m=16, all_reduce_variant="atomic"), {"block_size_m"}, {}),
]
"""A config, what cannot be fulfilled of it, and what is left of the wishes."""


def refusing(names, seen):
    """A call that refuses configs with these fields, or with such a variant."""

    def call(config):
        given = config.given() if isinstance(config, FusedConfig) else config.given("all_reduce")
        given |= {"use_gluon": True} if config.use_gluon else {}
        if names & {*given, getattr(config, "all_reduce_variant", "")}:
            raise UnsupportedError("no")
        seen.append(given)
        return "done"

    return call


@pytest.mark.parametrize(("config", "refused", "left"), WISHES, ids=str)
def test_as_little_as_must_be_is_left_out(config, refused, left):
    seen, ccl = [], PortedCollectives(Binder())
    for _ in range(2):
        assert ccl._oblige("all_reduce", config, refusing(refused, seen)) == "done"
    assert seen == [left, left]


def test_tiles_are_kept_where_they_matter():
    with pytest.raises(UnsupportedError):
        PortedCollectives(Binder())._oblige(
            "op", FusedConfig(block_size_m=16), refusing({"block_size_m"}, []), tiles=True
        )


def test_the_first_refusal_is_raised():
    def call(config):
        raise ArgumentError(f"refused with {config.comm_sms}")

    with pytest.raises(ArgumentError, match="refused with 8"):
        PortedCollectives(Binder())._oblige("op", Config(comm_sms=8), call)


def test_configs_of_the_core_and_none_are_passed_on():
    assert PortedCollectives(Binder())._oblige("op", None, lambda config: config) is None
    config = CoreConfig()
    assert PortedCollectives(Binder())._oblige("op", config, lambda config: config) is config
