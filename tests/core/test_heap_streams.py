"""Blocks and streams: what was freed is not used again before every stream is done with it.  Streams are pretended."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tables import table

from iris_core.errors import HeapError, NotOnHeapError, SymmetryError
from iris_core.heap.streams import StreamOrder
from iris_core.types import Capability

from .fakes import Cluster

if TYPE_CHECKING:
    from iris_core.heap.heap import SymmetricHeap

U8 = torch.uint8


class Event:
    """Complete when the stream has done what was launched before."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at = stream.launched

    def query(self) -> bool:
        return self.stream.done >= self.at


class Stream:
    """Counts kernels launched and done, and keeps what it has to wait for."""

    def __init__(self) -> None:
        self.launched = 0
        self.done = 0
        self.waits: list[Event] = []

    def launch(self) -> None:
        self.launched += 1

    def finish(self) -> None:
        self.done = self.launched

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)


class Device:
    """The streams of one rank; `main` is current at first."""

    def __init__(self) -> None:
        self.main, self.side, self.other = Stream(), Stream(), Stream()
        self.now = self.main
        self.capturing = False
        self.waited = 0

    def current(self) -> Stream:
        return self.now

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, stream: Stream | None = None) -> None:
        self.waited += 1
        for each in (self.main, self.side, self.other) if stream is None else (stream,):
            each.finish()


class Ranks(Cluster):
    """A cluster with a pretended device per rank."""

    def __init__(self, world_size: int, nbytes: int = 1 << 12, *provides: Capability) -> None:
        self.devices = [Device() for _ in range(world_size)]
        super().__init__(world_size, nbytes, *provides, options_of=lambda rank: {"streams": self.devices[rank]})

    def device(self, heap: SymmetricHeap) -> Device:
        return self.devices[heap.rank]

    def barrier(self, stream: str = "main") -> None:
        """What ctx.barrier(stream) does."""

        def one(heap: SymmetricHeap) -> None:
            getattr(self.device(heap), stream).finish()
            heap.barrier_agreement(wait=False)

        self.each(one)


def whole(heap: SymmetricHeap) -> torch.Tensor:
    return heap.allocate(4096, U8)


# -- one rank ---------------------------------------------------------------------------------------------------------
def test_the_same_stream_gets_a_block_back_at_once() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        for _ in range(3):
            t = whole(heap)
            device.main.launch()
            heap.free(t)
        assert device.main.waits == []
        assert device.waited == 0


def test_another_stream_waits_for_the_one_that_had_the_block() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        t = whole(heap)
        device.main.launch()
        heap.free(t)
        device.main.launch()  # later work of the stream is nobody's concern
        device.now = device.side
        t = whole(heap)
        (event,) = device.side.waits
        assert (event.stream, event.at) == (device.main, 1)
        device.side.launch()
        heap.free(t)
        device.now = device.main
        whole(heap)
        assert [(e.stream, e.at) for e in device.main.waits] == [(device.side, 1)]
        assert device.waited == 0, "the host waits for nothing"


def test_streams_of_allocation_of_free_and_recorded_ones_are_waited_for() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        t = whole(heap)
        heap.record_stream(t[5:], device.other)
        heap.record_stream(t, device.other)
        device.now = device.side
        heap.free(t)
        device.now = Stream()
        whole(heap)
        assert {e.stream for e in device.now.waits} == {device.main, device.side, device.other}
        assert len(device.now.waits) == 3


def test_a_dropped_block_is_handed_out_with_the_same_care() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        t = whole(heap)
        heap.record_stream(t, device.side)
        device.side.launch()
        del t
        whole(heap)
        assert [(e.stream, e.at) for e in device.main.waits] == [(device.side, 1)]


def test_only_who_gets_the_range_waits() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        tensors = [heap.allocate(1024, U8) for _ in range(4)]
        for index, t in enumerate(tensors):
            heap.record_stream(t, Stream() if index != 1 else device.side)
        heap.free(tensors[1])
        small = heap.allocate(256, U8)
        assert heap.offset_of(small) == 1024
        assert [e.stream for e in device.main.waits] == [device.side]
        rest = heap.allocate(768, U8)
        assert heap.offset_of(rest) == 1280
        assert [e.stream for e in device.main.waits] == [device.side] * 2
        heap.free(rest)
        again = heap.allocate(768, U8)
        assert heap.offset_of(again) == 1280
        assert len(device.main.waits) == 2, "the new user was the main stream alone"


def test_a_barrier_of_the_device_ends_all_waits() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        device.main.launch()
        heap.free(whole(heap))
        device.synchronize()
        heap.barrier_agreement()
        device.now = device.side
        whole(heap)
        assert device.side.waits == []


def test_memory_that_a_stream_still_uses_is_not_given_back() -> None:
    with Ranks(1, 1 << 14, Capability.DECOMMIT) as c:
        (heap,), (device,) = c.heaps, c.devices
        t = heap.allocate(1 << 13, U8)
        heap.record_stream(t, device.side)
        device.side.launch()
        heap.free(t)
        for _ in range(3):
            c.barrier()
        assert c.allocators[0].count("decommit") == 0
        device.side.finish()
        c.barrier()
        c.barrier()
        assert ("decommit", 0, 1 << 13) in c.allocators[0].calls


# -- several ranks ----------------------------------------------------------------------------------------------------
def test_a_block_stays_pending_while_a_stream_of_any_rank_uses_it() -> None:
    with Ranks(3) as c:
        tensors = c.each(lambda heap: heap.allocate(1024, U8))
        c.heaps[2].record_stream(tensors[2], c.devices[2].side)
        c.devices[2].side.launch()
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.barrier()
        assert [heap.stats().pending for heap in c.heaps] == [1024] * 3
        assert {heap.offset_of(t) for heap, t in zip(c.heaps, c.each(lambda h: h.allocate(1, U8)), strict=True)} == {
            1024
        }
        c.devices[2].side.finish()
        c.barrier()
        assert [heap.stats().pending for heap in c.heaps] == [0] * 3
        assert [device.waited for device in c.devices] == [0] * 3, "no host has waited for a device"


def test_blocks_become_free_in_the_order_of_their_frees() -> None:
    with Ranks(2) as c:
        blocks = [c.each(lambda heap: heap.allocate(256, U8)) for _ in range(3)]
        for rank, index in ((0, 2), (1, 1)):
            c.heaps[rank].record_stream(blocks[index][rank], c.devices[rank].side)
            c.devices[rank].side.launch()
        for block in blocks:
            c.each(lambda heap, block=block: heap.free(block[heap.rank]))
        c.barrier()
        assert [heap.stats().pending for heap in c.heaps] == [512] * 2, "the first; rank 1 still uses the second"
        c.devices[1].side.finish()
        c.barrier()
        assert [heap.stats().pending for heap in c.heaps] == [256] * 2
        c.devices[0].side.finish()
        c.barrier()
        assert [heap.stats().pending for heap in c.heaps] == [0] * 2


def test_a_dropped_block_is_spoken_of_when_it_is_no_longer_used() -> None:
    with Ranks(2) as c:
        tensors: list[Any] = c.each(lambda heap: heap.allocate(1024, U8))
        c.devices[0].main.launch()
        tensors.clear()
        c.barrier("side")
        assert [heap.stats().allocated + heap.stats().pending for heap in c.heaps] == [1024] * 2
        c.devices[0].main.launch()  # later than the drop was seen
        c.devices[0].main.done = 1
        c.barrier("side")
        assert [heap.stats().free for heap in c.heaps] == [4096] * 2


def test_a_barrier_of_the_device_frees_everything() -> None:
    with Ranks(2) as c:
        tensors = c.each(lambda heap: [heap.allocate(256, U8) for _ in range(3)])
        for device in c.devices:
            device.main.launch()
        c.each(lambda heap: heap.free(tensors[heap.rank][0]))
        tensors.clear()
        c.each(lambda heap: (c.device(heap).synchronize(), heap.barrier_agreement()))
        assert [heap.stats().free for heap in c.heaps] == [4096] * 2


def test_one_rank_may_wait_for_a_stream_and_another_for_its_device() -> None:
    with Ranks(2) as c:
        tensors = c.each(lambda heap: heap.allocate(256, U8))
        c.devices[0].side.launch()
        c.heaps[0].record_stream(tensors[0], c.devices[0].side)
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.each(lambda heap: heap.barrier_agreement(wait=heap.rank == 1))
        assert [heap.stats().pending for heap in c.heaps] == [256] * 2


def test_pressure_waits_for_the_device_and_takes_everything() -> None:
    with Ranks(2) as c:
        tensors = c.each(whole)
        for device in c.devices:
            device.main.launch()
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.barrier("side")
        again = c.each(whole)
        assert [device.waited for device in c.devices] == [1, 1]
        assert [heap.offset_of(t) for heap, t in zip(c.heaps, again, strict=True)] == [0, 0]


@table("seed", range(5))
def test_offsets_are_equal_whatever_the_streams_do(seed: int) -> None:
    """Programs of all ranks are the same; how fast their devices are is not."""
    with Ranks(3, 1 << 14) as c:

        def program(heap: SymmetricHeap) -> list[int]:
            device, same, own = c.device(heap), random.Random(seed), random.Random(100 * seed + heap.rank)
            held, offsets = [], []
            for _ in range(200):
                device.now = own.choice([device.main, device.side])
                device.now.launch()
                step = same.random()
                if step < 0.5:
                    t = heap.allocate(same.randrange(1, 2000), U8)
                    offsets.append(heap.offset_of(t))
                    held.append(t)
                elif step < 0.85 and held:
                    heap.free(held.pop(same.randrange(len(held))))
                elif step < 0.9 and held:
                    held.pop(same.randrange(len(held)))  # dropped
                else:
                    heap.barrier_agreement(wait=False)
                if own.random() < 0.3:
                    own.choice([device.main, device.side]).finish()
                while len(held) > 4:
                    heap.free(held.pop(0))
            return offsets

        one, *others = c.each(program)
        assert all(other == one for other in others)
        assert len(set(one)) > 3


# -- graphs, errors ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_allocated_or_freed_while_a_graph_is_captured(world_size: int) -> None:
    with Ranks(world_size) as c:
        tensors = c.each(lambda heap: heap.allocate(100, U8))
        for device in c.devices:
            device.capturing = True
        calls = {
            "zeros": lambda heap: heap.empty_strided((3,), (1,), U8, ("zeros", (3,))),
            "free": lambda heap: heap.free(tensors[heap.rank]),
            "mem_pool": lambda heap: heap.allocate_unscoped(100, ("mem_pool", 100), 512),
        }
        for name, call in calls.items():
            for error in c.attempt(call):
                assert type(error) is HeapError
                assert f"{name}: the current stream is being captured" in str(error)
        for device in c.devices:
            device.capturing = False
        assert [heap.stats().num_blocks for heap in c.heaps] == [1] * world_size
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.each(lambda heap: heap.barrier_agreement())


def test_a_scope_that_ends_in_a_capture_leaves_its_blocks_to_the_program() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        with pytest.raises(HeapError, match="being captured"), heap.scope(), heap.scope():  # noqa: PT012
            t = heap.allocate(100, U8)
            device.capturing = True
        device.capturing = False
        assert heap.stats().num_blocks == 1
        with heap.scope():
            u = heap.allocate(100, U8)
        assert heap.stats().num_blocks == 1
        with pytest.raises(HeapError, match="freed before"):
            heap.free(u)
        heap.free(t)


def test_record_stream_takes_streams_and_tensors_of_the_heap() -> None:
    with Ranks(1) as c:
        (heap,), (device,) = c.heaps, c.devices
        t = heap.allocate(100, U8)
        with pytest.raises(TypeError, match="must be a torch stream, not int"):
            heap.record_stream(t, 0)
        with pytest.raises(NotOnHeapError):
            heap.record_stream(torch.ones(3), device.side)
        heap.free(t)
        with pytest.raises(HeapError, match="freed before"):
            heap.record_stream(t, device.side)


def test_streams_are_no_business_of_the_cpu() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        t = heap.allocate(100, U8)
        heap.record_stream(t, Stream())
        heap.free(t)
        heap.barrier_agreement(wait=False)
        assert heap.stats().free == heap.nbytes


def test_a_divergence_is_still_found() -> None:
    with Ranks(2) as c:
        tensors = c.each(lambda heap: heap.allocate(100, U8))
        c.heaps[0].free(tensors[0])
        errors = c.attempt(lambda heap: heap.barrier_agreement(wait=False))
        assert [type(e) for e in errors] == [SymmetryError] * 2


# -- the ranges -------------------------------------------------------------------------------------------------------
class Freed:
    """A block that was freed, as far as the order of streams looks at it."""

    def __init__(self, stream: Stream) -> None:
        self.streams = [stream]
        self.uses = ((stream, Event(stream)),)


def test_fences_against_a_plain_model() -> None:
    """Random ranges; the model has an entry per unit."""
    source = random.Random(1)
    device, model = Device(), {}
    order = StreamOrder(device)
    streams = [Stream() for _ in range(5)]
    for number in range(3000):
        start = source.randrange(200)
        end = start + source.randrange(1, 40)
        if source.random() < 0.6:
            if any(i in model for i in range(start, end)):
                continue
            stream = source.choice(streams)
            stream.launch()
            freed = Freed(stream)
            order.fence(start, end, freed)
            model |= dict.fromkeys(range(start, end), freed.uses[0][1])
        elif source.random() < 0.8:
            device.main.waits.clear()
            order.hand_out(start, end)
            expected = {model.pop(i) for i in range(start, end) if i in model}
            assert set(device.main.waits) == expected, number
        else:
            source.choice(streams).finish()
            model = {i: event for i, event in model.items() if not event.query()}
            used = [i for i in range(250) if i not in model]
            assert [i for first, last in order.unfenced([(0, 250)]) for i in range(first, last)] == used, number
        used = {i for first, last in order.in_use() for i in range(first, last)}
        assert used == {i for i, event in model.items() if not event.query()}


def test_past_fences_do_not_pile_up() -> None:
    order, stream = StreamOrder(Device()), Stream()
    for i in range(10_000):
        order.fence(2 * i, 2 * i + 1, Freed(stream))
    assert len(order.fences) < 200
