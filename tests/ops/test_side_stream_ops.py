"""What is asked for on which stream, and who waits for whom: with stand-ins for streams, events and copies."""

from types import SimpleNamespace

import pytest
import torch

from iris_core.device.launch_order import SideStream
from iris_gluon.gemm.gather_product import beside_copies
from iris_triton.collectives.parts.side import Side
from iris_triton.gemm import copy_engine_product
from iris_triton.gemm.copy_engine_product import carry_products, multiply_shards
from iris_triton.gemm.parts.shards import Shards

RAW = 7
OTHERS = [(11, 101), (12, 102)]
"""Places of the rows and of the word at two others; addresses are numbers."""


class Streams:
    """A main stream, which is the current one, and a second one; what is asked for is written down."""

    def __init__(self, patch):
        self.log = []
        self.main, self.second = (SimpleNamespace(name=n, device="cuda:0", device_index=0) for n in ("main", "side"))
        real = copy_engine_product.multiply

        def multiply(left, *rest):
            self.log.append(("main", "multiplies", left.storage_offset() // 3))  # the first row
            real(left, *rest)

        patch.setattr(torch.cuda, "current_stream", lambda device: self.main)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: RAW + 1, raising=False)
        patch.setattr(torch.cuda, "Stream", lambda index, priority: self.second)
        patch.setattr(torch.cuda, "Event", lambda: self.event("ready"))
        patch.setattr(copy_engine_product, "multiply", multiply)
        self.side = Side(self.kernel("waits for all"), self._copy, self._write, int, SideStream(0), self.second, RAW)

    def event(self, name):
        does = lambda what: lambda stream: self.log.append((stream.name, what, name))
        return SimpleNamespace(name=name, record=does("records"), wait=does("waits for"))

    def kernel(self, what):
        """A kernel that writes down on which stream it is launched, and what with."""
        return lambda stream, *tensors: self.log.append(((stream or self.main).name, what, len(tensors)))

    def _copy(self, target, source, nbytes, stream):
        assert (nbytes, stream) == (80 if source < 10 else 48, RAW)
        self.log.append(("side", "copies", (target, source) if source < 10 else "own"))

    def _write(self, address, value, flags, stream):
        assert (value, flags, stream) == (1, 0, RAW)
        self.log.append(("side", "writes", address))

    def shards(self, matrix):
        return Shards(matrix, matrix[:4], torch.zeros(4, dtype=torch.int32), OTHERS, self.side)


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


BEGIN = [("main", "records", "ready"), ("side", "waits for", "ready"), ("side", "waits for all", 0)]
PUSHES = [
    *BEGIN, ("side", "copies", "own"), ("side", "writes", 101), ("side", "copies", "own"), ("side", "writes", 102)
]  # fmt: skip

JOIN = ("side", "records", "ready"), ("main", "waits for", "ready")


def test_products_begin_when_their_rows_are_there(streams):
    a, b, bias, others = torch.randn(4, 3), torch.randn(3, 5), torch.randn(12, 1), torch.randn(8, 3)
    matrix, out = torch.cat([torch.zeros(4, 3), others]), torch.zeros(12, 5)
    order = [(0, None), *((member, streams.kernel(f"waits for {member}")) for member in (1, 2))]
    multiply_shards(streams.shards(matrix), order, False)(None, out, a, b, bias)
    assert streams.log == [
        *PUSHES, ("main", "multiplies", 0), ("main", "waits for 1", 0), ("main", "multiplies", 4),
        ("main", "waits for 2", 0), ("main", "multiplies", 8), *JOIN,
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.cat([a, others]) @ b + bias)


def test_words_are_written_before_the_product_that_waits_for_them_is_launched(streams):
    run = beside_copies(streams.shards(torch.zeros(12, 3)), streams.kernel("multiplies"))
    run(None, torch.zeros(12, 5), torch.randn(4, 3), torch.randn(3, 5))
    assert streams.log == [*PUSHES, ("main", "multiplies", 3), *JOIN]


def test_products_are_carried_beside_the_next_one(streams):
    a, b = torch.randn(12, 3), torch.randn(3, 5)
    product, slots, out = torch.zeros(12, 5), torch.zeros(3, 4, 5), torch.zeros(4, 5)
    carried = [(4, 8, product[4:8], 11, 1), (8, 12, product[8:], 12, 2)]
    carry_products(streams.side, carried, (0, slots[0]), streams.kernel("adds"), True, False)(None, out, a, b)
    assert streams.log == [
        *BEGIN, ("main", "multiplies", 4), *BEGIN[:2], ("side", "copies", (11, 1)), ("main", "multiplies", 8),
        *BEGIN[:2], ("side", "copies", (12, 2)), ("main", "multiplies", 0), ("side", "waits for all", 0), *JOIN,
        ("main", "adds", 1),
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat([slots[0], product[4:]]), a @ b)
