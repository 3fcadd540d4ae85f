"""iris_core.run and the pool: results, failures, and nothing left behind."""

import multiprocessing
import os

import forked
import jobs_launch as jobs
import pytest
from tables import raises, table

import iris_core
from iris_core.errors import ArgumentError, CollectiveTimeoutError, PeerLostError
from iris_core.testing import RankPool
from iris_core.world import launch
from iris_core.world.launch import RankError


def left_behind():
    return [p for p in multiprocessing.active_children() if p.name.startswith("iris rank")]


def test_results_come_back_in_the_order_of_ranks():
    """Variables reach the ranks and not us; a rank may start processes."""
    found = iris_core.run(jobs.all_of_it, 2, "hello", environ={"IRIS_X_TEST": "7"})
    assert found == [("hello", r, 2, str(r), str(r), "7", [1, 2]) for r in range(2)]
    assert "IRIS_X_TEST" not in os.environ
    assert left_behind() == []


def test_the_cause_is_shown_not_its_consequences():
    """Ranks whose job needs no torch have none."""
    with pytest.raises(RankError, match="deliberate, on 1, without torch") as caught:
        iris_core.run(jobs.raise_on, 2, 1)
    assert (caught.value.rank, left_behind()) == (1, [])
    with raises(ArgumentError, "any"):
        iris_core.run(jobs.raise_on, 2, 1, environ={"PORT": 1})


@table(("file", "num_ranks"), [
    *(("memory.max", each) for each in (0, -1, 2.5, "2", None, 3)), ("memory/memory.limit_in_bytes", 3),
])  # fmt: skip
def test_ranks_that_cannot_be_are_an_error(monkeypatch, tmp_path, file, num_ranks):
    """The container's memory holds two."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(f"{400 << 20}\n")
    monkeypatch.setattr(launch, "Path", lambda folder, name: tmp_path / name)
    with raises(ArgumentError, "world.ranks", ranks=repr(num_ranks)):
        iris_core.run(jobs.process_id, num_ranks)


def test_the_pool_survives_failures(monkeypatch):
    monkeypatch.setattr("iris_core.testing.pool._GRACE_S", 0.5)
    with RankPool(timeout_s=300) as pool:
        with pytest.raises(RankError, match="deliberate, on 0"):
            pool.run(jobs.raise_on, 2, 0)
        with raises(PeerLostError, "world.ended", code=7) as caught:
            pool.run(jobs.die_on, 2, 1)
        assert caught.value.ranks == (1,)
        with raises(PeerLostError, "world.ended", "names", code=-6, name="in die_on"):
            pool.run(jobs.die_on, 2, 1, True)
        with raises(PeerLostError, "world.ended", "world.needed", code=7):
            pool.run(jobs.end_slowly, 2, 1)
        pool.run(jobs.process_id, 2)  # the new worker has started
        late = {"job": "hang_on", "rank": 1, "size": 2, "name": "in hang_on"}
        with raises(CollectiveTimeoutError, "world.late", "names", **late) as caught:
            pool.run(jobs.hang_on, 2, 1, timeout_s=3.0)
        assert caught.value.missing_ranks == (1,)
        with pytest.raises(RankError):
            pool.run(jobs.unpicklable, 1)
        assert pool.run(jobs.describe, 2, "y") == [("y", r, 2, str(r), str(r)) for r in range(2)]


def test_a_forked_child_is_refused_and_disturbs_nothing(pool, device):
    assert pool.run(jobs.fork_and_use, 2, device) == [("[]", 3.0)] * 2


CELL = """
import functools
import torch, triton, triton.language as tl
import torch._inductor.config as inductor
import iris_core
import iris_triton as iris

@triton.jit
def shift(x, y, rank, world, heap_bases):
    tl.store(y, iris.load(x, rank, (rank + 1) % world, heap_bases))

def job(add):
    with iris.iris(1 << 22) as ctx:
        x, y = ctx.full((1,), float(ctx.cur_rank)), ctx.zeros(1)
        ctx.barrier()
        shift[(1,)](x, y, ctx.cur_rank, ctx.num_ranks, ctx.get_heap_bases())
        ctx.barrier()
        return y.item() + add

torch.randn(512, 512) @ torch.randn(512, 512)  # with threads, which a forked process has not
inductor.compile_threads = 4  # processes, likewise
print(iris_core.run(functools.partial(job, 10), 2))
with iris.iris(1 << 22) as alone:
    print(iris_core.run(lambda: job(10) * inductor.compile_threads + int(alone.num_ranks), 2))
torch.cuda.is_initialized = lambda: True
try:
    iris_core.run(functools.partial(job, 10), 2)
except iris_core.errors.UnsupportedError as error:
    print(error)
"""
SESSION = """
import linecache
linecache.cache["<cell 1>"] = len({0}), None, {0}.splitlines(True), "<cell 1>"  # as IPython does
exec(compile({0}, "<cell 1>", "exec"), __import__("__main__").__dict__)
"""


def test_functions_and_kernels_of_a_notebook():
    done = forked.fresh(SESSION.format(repr(CELL)), environ={**os.environ, "IRIS_DEVICE": "cpu"})
    first, second, third = done.stdout.splitlines() or [done.stderr, "", ""]
    assert (first, second) == ("[11.0, 10.0]", "[12.0, 11.0]")
    assert third.startswith("functools.partial(")
