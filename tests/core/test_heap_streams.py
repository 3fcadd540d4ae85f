"""Blocks and streams: what was freed is not used again before every stream is done with it.  Streams are pretended."""

import random
from types import SimpleNamespace

import pytest
import torch
from tables import raises, table

from iris_core.errors import HeapError, HeapExhaustedError, NotOnHeapError
from iris_core.heap.streams import StreamOrder
from iris_core.types import Capability

from .fakes import Cluster

U8 = torch.uint8


class Event:
    """Complete when the stream has done what was launched before."""

    def __init__(self, stream):
        self.stream, self.at = stream, stream.launched

    def query(self):
        return self.stream.done >= self.at


class Stream:
    """Counts kernels launched and done, and keeps what it has to wait for."""

    def __init__(self):
        self.launched, self.done, self.waits = 0, 0, []

    def launch(self):
        self.launched += 1

    def finish(self):
        self.done = self.launched

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        self.waits.append(event)


class Device:
    """The streams of one rank; `main` is current at first."""

    def __init__(self):
        self.main, self.side, self.other = Stream(), Stream(), Stream()
        self.now, self.capturing, self.waited = self.main, False, 0

    def current(self):
        return self.now

    def is_capturing(self):
        return self.capturing

    def synchronize(self, stream=None):
        self.waited += 1
        for each in (self.main, self.side, self.other) if stream is None else (stream,):
            each.finish()


class Ranks(Cluster):
    def __init__(self, world_size, nbytes=1 << 12, *provides):
        self.devices = [Device() for _ in range(world_size)]
        super().__init__(world_size, nbytes, *provides, options_of=lambda rank: {"streams": self.devices[rank]})

    def barrier(self, stream="main"):
        """What ctx.barrier(stream) does."""
        for device in self.devices:
            getattr(device, stream).finish()
        self.each(lambda heap: heap.barrier_agreement(wait=False))


def whole(heap):
    return heap.allocate(4096, U8)


@table("seed", range(3))
def test_who_gets_memory_waits_for_the_streams_that_had_it_and_for_no_others(seed):
    """A random program; the model has, for each unit, the streams and moments that its next user has to wait for."""
    with Ranks(1, 1 << 13) as c:
        heap, (device,), source = c.heap, c.devices, random.Random(seed)
        streams = (device.main, device.side, device.other)
        barriers, dropped = 0, set()
        held, sizes, uses, waits, waited = {}, {}, {}, {}, 0  # of blocks, by offset; of units, by offset
        for _ in range(400):
            device.now = source.choice(streams)
            device.now.launch()
            step = source.random()
            offset = source.choice([*held, None])
            if step < 0.4 and len(held) < 4:
                device.now.waits.clear()
                t = heap.allocate(source.randrange(1, 4 * 256), U8, alignment=source.choice((256, 1024)))
                start, count = heap.offset_of(t), -(-t.numel() // 256)
                held[start], uses[start], sizes[start], t = t, {device.now}, count, None
                ends = set().union(*(waits.pop(start + 256 * i, ()) for i in range(count)))
                expected = {(stream, at) for stream, at in ends if stream is not device.now}
                got = {(event.stream, event.at) for event in device.now.waits}
                assert {(stream, at) for stream, at in expected if stream.done < at} <= got <= expected
                waited += len(got)
            elif step < 0.55 and offset is not None:
                stream = source.choice(streams)
                heap.record_stream(held[offset][-1:], stream)
                uses[offset].add(stream)
            elif step < 0.9 and offset is not None:
                ends = {(stream, stream.launched) for stream in uses.pop(offset) | {device.now}}
                units = range(offset, offset + 256 * sizes[offset], 256)
                waits |= dict.fromkeys(units, ends)
                dropped.difference_update(units)
                if source.random() < 0.5:
                    heap.free(held.pop(offset))
                else:
                    dropped.update(units)
                    del held[offset]
                    heap.barrier_agreement(wait=False)
            elif step < 0.98:
                source.choice(streams).finish()
            else:
                heap.barrier_agreement()
                waits.clear()
                barriers += 1
            busy = {start for start, ends in waits.items() if any(stream.done < at for stream, at in ends)}
            seen = {i for start, end in heap._state.order.in_use() for i in range(start, end, 256)}
            assert busy - dropped <= seen <= busy
        assert waited > 20
        assert device.waited == barriers, "the host waits for nothing else"


def test_memory_that_a_stream_still_uses_is_not_given_back():
    with Ranks(1, 1 << 14, Capability.DECOMMIT) as c:
        (t,), (device,) = c.allocate(1 << 13), c.devices
        c.heap.record_stream(t, device.side)
        device.side.launch()
        c.free([t])
        for _ in range(3):
            c.barrier()
        assert c.allocators[0].count("decommit") == 0
        device.side.finish()
        c.barrier()
        c.barrier()
        assert ("decommit", 0, 1 << 13) in c.allocators[0].calls


def test_blocks_stay_pending_while_a_stream_of_any_rank_uses_them_and_become_free_in_the_order_of_their_frees():
    with Ranks(3) as c:
        blocks = [c.allocate(256) for _ in range(3)]
        for rank, index in ((0, 2), (2, 1)):
            c.heaps[rank].record_stream(blocks[index][rank], c.devices[rank].side)
            c.devices[rank].side.launch()
        for block in blocks:
            c.free(block)
        c.barrier()
        assert c.stats("pending") == [512] * 3, "the first is free; rank 2 still uses the second"
        kept = c.allocate(512)
        assert c.offsets(kept) == [768] * 3
        for rank, pending in ((2, 256), (0, 0)):
            c.devices[rank].side.finish()
            c.barrier()
            assert c.stats("pending") == [pending] * 3
        assert [device.waited for device in c.devices] == [0] * 3, "no host has waited for a device"


def test_pressure_waits_for_the_device_and_takes_everything():
    with Ranks(2) as c:
        tensors = c.each(whole)
        for device in c.devices:
            device.main.launch()
        c.free(tensors)
        c.barrier("side")
        tensors = c.each(whole)  # freed on all ranks, and in use
        c.free(tensors)
        tensors = c.each(whole)  # the ranks do not know yet that all have freed it
        assert c.offsets(tensors) == [0, 0]
        assert [device.waited for device in c.devices] == [2, 2]
        tensors[1] = None
        c.refused(HeapExhaustedError, "heap.dropped", lambda heap: heap.allocate(1, U8))


@table("seed", range(5))
def test_offsets_are_equal_whatever_the_streams_do(seed):
    """Programs of all ranks are the same; how fast their devices are is not."""
    with Ranks(3, 1 << 14) as c:

        def program(heap):
            device, same, own = c.devices[heap.rank], random.Random(seed), random.Random(100 * seed + heap.rank)
            held, offsets = [], []
            for _ in range(200):
                device.now = own.choice([device.main, device.side])
                device.now.launch()
                step = same.random()
                if step < 0.5:
                    held.append(heap.allocate(same.randrange(1, 2000), U8))
                    offsets.append(heap.offset_of(held[-1]))
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


@table("world_size", [1, 2])
def test_nothing_is_allocated_or_freed_while_a_graph_is_captured(world_size):
    with Ranks(world_size) as c:
        tensors = c.allocate(100)
        for device in c.devices:
            device.capturing = True
        for name, call in {
            "zeros": lambda heap: heap.empty_strided((3,), (1,), U8, ("zeros", (3,))),
            "free": lambda heap: heap.free(tensors[heap.rank]),
            "mem_pool": lambda heap: heap.allocate_unscoped(100, ("mem_pool", 100), 512),
        }.items():
            c.refused(HeapError, "heap.captured", call, name=name)
        for device in c.devices:
            device.capturing = False
        assert c.stats("num_blocks") == [1] * world_size
        c.free(tensors)
        c.barrier()


def test_record_stream_takes_streams_and_tensors_of_the_heap(heap):
    with Ranks(1) as c:
        t, side = c.heap.allocate(100, U8), c.devices[0].side
        with pytest.raises(TypeError):
            c.heap.record_stream(t, 0)
        with pytest.raises(NotOnHeapError):
            c.heap.record_stream(torch.ones(3), side)
        c.heap.free(t)
        with raises(HeapError, "heap.freed", offset=0):
            c.heap.record_stream(t, side)
    t = heap.allocate(100, U8)
    heap.record_stream(t, Stream())  # streams are no business of the CPU
    heap.free(t)
    heap.barrier_agreement(wait=False)
    assert heap.stats().free == heap.nbytes


def test_past_fences_do_not_pile_up():
    order, stream = StreamOrder(Device()), Stream()
    for i in range(10_000):
        order.fence(2 * i, 2 * i + 1, SimpleNamespace(uses=((stream, Event(stream)),)))
    assert len(order.fences) < 200
