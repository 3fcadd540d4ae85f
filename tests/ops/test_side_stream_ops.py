"""What is asked for on which stream, and who waits for whom: with stand-ins for streams, events and copies."""

import contextlib

import pytest
import torch

from iris_triton.ops import copy_engine
from iris_triton.ops.copy_engine import CopyEngineGather, _Copy, _Plan, _Product


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

    plan = _Plan(
        matrix=matrix,
        own=matrix[:4],
        meet=lambda _: log.append((torch.cuda.current_stream().name, "meets", "")),
        copy=copy,
        tf32=False,
        aux_buffer=matrix,
        copies=[_Copy(1, 1, 48, second), _Copy(2, 2, 48, third)],
        products=[_Product(0, 4, None), _Product(4, 8, second), _Product(8, 12, third)],
        side=side,
        ready=Event("ready", log),
    )
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
