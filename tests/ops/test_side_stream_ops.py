"""What is asked for on which stream, and who waits for whom: with stand-ins for streams, events and copies."""

import contextlib

import pytest
import torch

from iris_gluon.ops.algorithms import HopperCopyEngine, _CopyPlan
from iris_triton.ops import copy_engine
from iris_triton.ops.copy_engine import CopyEngineGather, _Plan, _Product
from iris_triton.ops.shards import Shard, Shards


class Stream:
    """Writes down what happens on it."""

    device = "cuda:0"
    cuda_stream = 7

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_event(self, event):
        self._log.append((self.name, "waits for", event.name))

    def wait_stream(self, stream):
        self._log.append((self.name, "waits for", stream.name))


class Event:
    """Writes down where it is recorded."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def record(self, stream):
        self._log.append((stream.name, "records", self.name))


@pytest.fixture
def streams(monkeypatch):
    """(log, main stream, side stream); the current one is the main one, but within `torch.cuda.stream`."""
    log = []
    main, side = Stream("main", log), Stream("side", log)
    current = [main]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return log, main, side


def test_products_begin_when_their_rows_are_there(streams, monkeypatch):
    log, _, side = streams
    real = copy_engine.multiply

    def multiply(left, *rest):
        log.append((torch.cuda.current_stream().name, "multiplies", left.storage_offset() // 3))
        real(left, *rest)

    monkeypatch.setattr(copy_engine, "multiply", multiply)
    a, b, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(12, 1)
    others = {1: torch.randn(4, 3), 2: torch.randn(4, 3)}
    matrix, out = torch.zeros(12, 3), torch.zeros(12, 5)
    second, third = Event("of 1", log), Event("of 2", log)

    def copy(target, source, nbytes, stream):
        assert (nbytes, stream) == (48, Stream.cuda_stream)
        log.append(("side", "copies", source))
        matrix[4 * target : 4 * target + 4] = others[source]

    shards = Shards(
        matrix=matrix,
        own=matrix[:4],
        others=[Shard(1, 1, 1, 48), Shard(2, 2, 2, 48)],
        meet=lambda _: log.append((torch.cuda.current_stream().name, "meets", "")),
        copy=copy,
        memory=matrix,
        side=side,
        ready=Event("ready", log),
    )
    products = [_Product(0, 4, None), _Product(4, 8, 1), _Product(8, 12, 2)]
    plan = _Plan(shards, products, {1: second, 2: third}, tf32=False, aux_buffer=matrix)
    CopyEngineGather().launch(plan, out, a, b, bias)
    assert log == [
        ("main", "meets", ""),
        ("main", "records", "ready"),
        ("side", "waits for", "ready"),
        ("side", "copies", 1),
        ("side", "records", "of 1"),
        ("side", "copies", 2),
        ("side", "records", "of 2"),
        ("side", "meets", ""),
        ("main", "multiplies", 0),
        ("main", "waits for", "of 1"),
        ("main", "multiplies", 4),
        ("main", "waits for", "of 2"),
        ("main", "multiplies", 8),
        ("main", "waits for", "side"),
    ]
    torch.testing.assert_close(out, torch.cat([a, others[1], others[2]]) @ b + bias)


def test_words_are_written_behind_the_copies(streams):
    """And cleared before anybody may copy: a replayed graph writes the same value each time."""
    log, _, side = streams
    matrix, out, arrived = torch.zeros(12, 3), torch.zeros(12, 5), torch.ones(3, dtype=torch.int32)

    def meets(_):
        log.append((torch.cuda.current_stream().name, "meets", arrived.tolist()))

    def copy(target, source, nbytes, stream):
        assert stream == Stream.cuda_stream
        log.append(("side", "copies", source))

    def write(address, value, flags, stream):
        assert (flags, stream) == (0, Stream.cuda_stream)
        arrived[(address - arrived.data_ptr()) // 4] = value
        log.append(("side", "writes", arrived.tolist()))

    def product(stream, *tensors):
        assert [each is wanted for each, wanted in zip(tensors, (out, b), strict=True)] == [True, True]
        log.append((torch.cuda.current_stream().name, "multiplies", ""))

    a, b = torch.randn(4, 3), torch.randn(3, 5)
    others, ready = [Shard(1, 1, 1, 48), Shard(2, 2, 2, 48)], Event("ready", log)
    shards = Shards(matrix, matrix[:4], others, meets, copy, matrix, side, ready)
    plan = _CopyPlan(shards, product, arrived, write, matrix, arrived)
    HopperCopyEngine().launch(plan, out, a, b, None)
    assert log == [
        ("main", "meets", [0, 0, 0]),
        ("main", "records", "ready"),
        ("side", "waits for", "ready"),
        ("side", "copies", 1),
        ("side", "writes", [0, 1, 0]),
        ("side", "copies", 2),
        ("side", "writes", [0, 1, 1]),
        ("side", "meets", [0, 1, 1]),
        ("main", "multiplies", ""),
        ("main", "waits for", "side"),
    ]
    assert torch.equal(matrix[:4], a)
