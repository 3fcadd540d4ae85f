"""What is asked for on which stream, and who waits for whom: with stand-ins for streams, events and copies."""

import contextlib

import pytest
import torch

from iris_gluon.gemm.gather_product import beside_copies
from iris_triton.gemm import copy_engine_product
from iris_triton.gemm.copy_engine_product import carry_products, multiply_shards
from iris_triton.gemm.parts.shards import Shards, Side


class Stream:
    """Writes down for which event or stream it waits."""

    device, cuda_stream = "cuda:0", 7

    def __init__(self, name, log):
        self.name = name
        self.wait_event = self.wait_stream = lambda other: log.append((name, "waits for", other.name))


class Event:
    """Writes down where it is recorded."""

    def __init__(self, name, log):
        self.name = name
        self.record = lambda stream: log.append((stream.name, "records", name))


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


def kernel(log, what):
    """A kernel that writes down on which stream it is launched, and what with."""

    def launch(stream, *tensors):
        log.append(((stream or torch.cuda.current_stream()).name, what, len(tensors)))

    return launch


@pytest.fixture
def multiplied(streams, monkeypatch):
    """Products are written down with the first row that they multiply."""
    log, *_ = streams
    real = copy_engine_product.multiply

    def multiply(left, *rest):
        log.append((torch.cuda.current_stream().name, "multiplies", left.storage_offset() // 3))
        real(left, *rest)

    monkeypatch.setattr(copy_engine_product, "multiply", multiply)


RAW = Stream.cuda_stream
OTHERS = [(11, 101), (12, 102)]
"""Places of the rows and of the word at two others; addresses are numbers."""


def side_of(streams):
    """A second stream."""
    log, _, side = streams

    def copy(target, source, nbytes, stream):
        assert (nbytes, stream) == (80 if target in (11, 12) and source < 10 else 48, RAW)
        log.append(("side", "copies", (target, source) if target < 100 and source < 100 else "own"))

    def write(address, value, flags, stream):
        assert (value, flags, stream) == (1, 0, RAW)
        log.append(("side", "writes", address))

    return Side(kernel(log, "waits for all"), copy, write, int, side, RAW, Event("ready", log))


def shards_of(streams, matrix):
    words = torch.zeros(4, dtype=torch.int32)
    return Shards(matrix, matrix[:4], words, OTHERS, side_of(streams))


def operands():
    return torch.randn(4, 3), torch.randn(3, 5), torch.randn(12, 1)


BEGIN = [("main", "records", "ready"), ("side", "waits for", "ready")]
PUSHES = [
    ("side", "waits for all", 0), ("side", "copies", "own"), ("side", "writes", 101), ("side", "copies", "own"),
    ("side", "writes", 102),
]  # fmt: skip


def test_products_begin_when_their_rows_are_there(streams, multiplied):
    log, *_ = streams
    a, b, bias = operands()
    others = [torch.randn(4, 3), torch.randn(4, 3)]
    matrix, out = torch.cat([torch.zeros(4, 3), *others]), torch.zeros(12, 5)
    order = [(0, None), *((member, kernel(log, f"waits for {member}")) for member in (1, 2))]
    multiply_shards(shards_of(streams, matrix), order, False)(None, out, a, b, bias)
    assert log == [
        *BEGIN, *PUSHES, ("main", "multiplies", 0), ("main", "waits for 1", 0), ("main", "multiplies", 4),
        ("main", "waits for 2", 0), ("main", "multiplies", 8), ("main", "waits for", "side"),
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.cat([a, *others]) @ b + bias)


def test_words_are_written_before_the_product_that_waits_for_them_is_launched(streams):
    log, *_ = streams
    a, b, _ = operands()
    matrix, out = torch.zeros(12, 3), torch.zeros(12, 5)
    beside_copies(shards_of(streams, matrix), kernel(log, "multiplies"))(None, out, a, b)
    assert log == [*BEGIN, *PUSHES, ("main", "multiplies", 3), ("main", "waits for", "side")]


def test_rows_with_gaps_are_copied_before(streams):
    """In front of the event: the second stream takes them, the product multiplies them."""
    a = operands()[0]
    wide, matrix = torch.zeros(4, 6), torch.zeros(12, 3)
    wide[:, :3] = a
    own = shards_of(streams, matrix).move(wide[:, :3])
    assert own.data_ptr() == matrix.data_ptr()
    assert torch.equal(own, a)


def test_products_are_carried_beside_the_next_one(streams, multiplied):
    log, *_ = streams
    a, b = torch.randn(12, 3), torch.randn(3, 5)
    product, slots, out = torch.zeros(12, 5), torch.zeros(3, 4, 5), torch.zeros(4, 5)
    carried = [(4, 8, product[4:8], 11, 1, Event("of 1", log)), (8, 12, product[8:], 12, 2, Event("of 2", log))]
    side = side_of(streams)
    carry_products(side, carried, (0, slots[0]), kernel(log, "adds"), True, False)(None, out, a, b)
    assert log == [
        *BEGIN, ("side", "waits for all", 0), ("main", "multiplies", 4), ("main", "records", "of 1"),
        ("side", "waits for", "of 1"), ("side", "copies", (11, 1)), ("main", "multiplies", 8),
        ("main", "records", "of 2"), ("side", "waits for", "of 2"), ("side", "copies", (12, 2)),
        ("main", "multiplies", 0), ("side", "waits for all", 0), ("main", "waits for", "side"), ("main", "adds", 1),
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat([slots[0], product[4:]]), a @ b)
