"""Conformance of allocators: alone, with others in the same process, and with peers in other processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch

from iris_core.errors import DeviceError, HeapClosedError, HeapError, IrisError, UnsupportedError
from iris_core.testing.conformance import oracle, plugin_jobs
from iris_core.testing.conformance.plugin import PluginConformance, RankPool, Registered, needs, no_problems
from iris_core.types import Capability, DeviceTarget, PluginInfo, PluginKind, Segment

Open = Callable[..., Any]
Read = Callable[[int, int], bytes]
Write = Callable[[int, bytes], None]

_PAGE = 4096
_nothing = lambda: None  # a callback


class AllocatorConformance(PluginConformance):
    """Tests of an allocator.

    The plugin creates them with default settings, unless a fixture `make_allocator` does, a function (nbytes, rank=0,
    world_size=1).
    """

    kind = PluginKind.ALLOCATOR
    #: size of the heaps that are tested; room for several granules makes the tests stronger
    heap_nbytes: ClassVar[int] = 8 << 20
    #: whether a second allocator of the same process can map the first one's memory (IPC handles of some drivers
    #: cannot); if not, the tests between processes remain
    same_process_peers: ClassVar[bool] = True
    num_cycles: ClassVar[int] = 100  #: how often an allocator is opened and closed when looking for leaks

    @pytest.fixture(autouse=True)
    def _quick_collection(self) -> Iterator[None]:
        """Spare the garbage collector what was there before: the tests call it often."""
        gc.freeze()
        yield
        gc.unfreeze()

    @pytest.fixture
    def make_allocator(self, registered: Registered, target: DeviceTarget) -> Open:
        """Open an allocator: (nbytes, rank=0, world_size=1).  The caller closes it."""
        return functools.partial(plugin_jobs.create, *registered, target)

    @pytest.fixture
    def opened(self, make_allocator: Open) -> Iterator[Open]:
        """As `make_allocator`, but of `heap_nbytes` unless a size is given, and closed after the test."""
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            yield lambda nbytes=self.heap_nbytes, *rank: enter(contextlib.closing(make_allocator(nbytes, *rank)))

    @pytest.fixture
    def allocator(self, opened: Open) -> Any:
        """One allocator whose whole heap is committed."""
        allocator = opened()
        allocator.commit(0, allocator.nbytes)
        return allocator

    created = allocator  # the static tier's

    @pytest.fixture
    def make_importable(self, target: DeviceTarget) -> Open:
        """Make (allocator, nbytes) a 1-D uint8 tensor whose memory the allocator can put on the heap."""
        return lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8, device=target.torch_device)

    @pytest.fixture
    def growing(self, opened: Open) -> tuple[Any, Any]:
        """Ranks 0 and 1 of 16, so that one exchange may not hold all parts, of an allocator with growth."""
        owner, me = self._pair(opened, 16)
        self._needs(owner, Capability.GROWTH, 4)
        return owner, me

    def _pair(self, opened: Open, world_size: int) -> tuple[Any, Any]:
        needs(self.same_process_peers, "same_process_peers is False: only other processes can map this memory")
        return opened(self.heap_nbytes, 0, world_size), opened(self.heap_nbytes, 1, world_size)

    @pytest.fixture
    def read(self, target: DeviceTarget) -> Read:
        """Read (ptr, nbytes) from memory without the allocator; OSError if it cannot be read."""
        return functools.partial(oracle.read_bytes, device=target.torch_device)

    @pytest.fixture
    def write(self, target: DeviceTarget) -> Write:
        """Write (ptr, data) to memory without the allocator."""
        return functools.partial(oracle.write_bytes, device=target.torch_device)

    def _importable(self, allocator: Any, make: Open) -> tuple[torch.Tensor, int, int]:
        """Make a tensor that the allocator can import, with the first two of what its `import_extent` returns."""
        self._needs(allocator, Capability.IMPORT_TENSOR)
        tensor = make(allocator, 10_000)
        try:
            size, start, there = allocator.import_extent(tensor)
        except UnsupportedError as error:
            pytest.skip(f"make_importable gives tensors that cannot be imported here: {error}")
        assert there == -1, "it was not imported yet"
        assert size % allocator.granularity == 0, f"{size} is not a multiple of {allocator.granularity}"
        assert 0 <= start <= size - tensor.numel(), f"{tensor.numel()} bytes at {start} of {size}"
        self._needs(allocator, Capability.IMPORT_TENSOR, 2 * size // allocator.granularity)
        return tensor, size, start

    def _needs(self, allocator: Any, capability: Capability, granules: int = 0) -> None:
        needs(capability in allocator.info.provides, f"{allocator.info.name!r} does not provide {capability}")
        otherwise = f"a heap of {allocator.nbytes} bytes has no {granules} granules: set heap_nbytes"
        needs(allocator.nbytes >= granules * allocator.granularity, otherwise)

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 5000, (1 << 20) - 1, (1 << 20) + 1])
    def test_host_size_and_alignment(self, opened: Open, nbytes: int) -> None:
        """As large as asked for, aligned to a page, beside the other heaps; the granularity is a power of two."""
        one, two = sorted((opened(nbytes), opened(nbytes)), key=lambda each: each.base_ptr)
        assert one.nbytes >= nbytes
        assert one.base_ptr % _PAGE == 0 < one.base_ptr, f"base_ptr {one.base_ptr:#x} is not a multiple of {_PAGE}"
        assert one.granularity.bit_count() == 1, f"granularity {one.granularity} is not a power of two"
        assert one.base_ptr + one.nbytes <= two.base_ptr, "two allocators have memory in common"

    @pytest.mark.usefixtures("allocator")  # a driver opens its devices once in a process, and keeps them
    def test_host_impossible_size_is_an_error(self, make_allocator: Open) -> None:
        """An error of Iris that says so, and nothing is left open."""
        with _no_new_descriptors(), pytest.raises((HeapError, DeviceError)):
            make_allocator(1 << 62)

    def test_host_tensor_is_the_memory_asked_for(
        self, allocator: Any, target: DeviceTarget, read: Read, write: Write
    ) -> None:
        """1-D uint8 at base_ptr + offset, on the rank's device; it writes and reads its storage, both ends, no more."""
        last = allocator.nbytes - 1
        for offset, nbytes in ((0, 1), (1, 3), (_PAGE - 1, 2), (4097, 1000), (last, 1), (0, allocator.nbytes)):
            one, two = (allocator.tensor(offset, nbytes, _nothing) for _ in range(2))
            storage, place = one.untyped_storage(), allocator.base_ptr + offset
            assert (one.dtype, tuple(one.shape)) == (torch.uint8, (nbytes,))
            assert one.device == torch.device(target.torch_device)
            assert (one.data_ptr(), storage.data_ptr(), storage.nbytes()) == (place, place, nbytes)
            assert storage._cdata != two.untyped_storage()._cdata, "tensors over the same range share a storage"
            end, count = place + nbytes, min(nbytes, 300)
            one[-count:] = _pattern(count, seed=offset)
            assert read(end - count, count) == oracle.pattern(count, seed=offset)
            write(end - count, oracle.pattern(count, seed=offset + 1))
            assert one[-count:].cpu().equal(_pattern(count, seed=offset + 1))

    def test_host_release_is_told_once_after_the_last_view(self, allocator: Any) -> None:
        """Not when the tensor goes but a view stays; then once, and never again; also of two on the same range."""
        released = list[str]()
        alive = {name: allocator.tensor(0, 256, functools.partial(released.append, name)) for name in ("one", "two")}
        alive["a view of one"] = alive["one"].view(torch.float32)[3:5]
        for dropped, expected in (("one", []), ("a view of one", ["one"]), ("two", ["one", "two"])):
            del alive[dropped]
            gc.collect()
            assert released == expected, f"{', '.join(alive) or 'none'} is still alive"
        allocator.close()
        gc.collect()
        assert released == ["one", "two"], "released again by close()"

    def test_host_commit_is_idempotent(self, opened: Open, read: Read, write: Write) -> None:
        """Committing again, also a larger range, keeps the contents."""
        allocator = opened()
        end = allocator.base_ptr + allocator.nbytes
        allocator.commit(0, allocator.granularity)
        write(allocator.base_ptr, b"first")
        allocator.commit(0, allocator.granularity)
        allocator.commit(allocator.granularity // 2, 0)  # the block of a tensor without elements
        allocator.commit(0, allocator.nbytes)
        assert read(allocator.base_ptr, 5) == b"first"
        write(end - 4, b"last")
        allocator.commit(0, allocator.nbytes)
        assert (read(allocator.base_ptr, 5), read(end - 4, 4)) == (b"first", b"last")

    def test_host_decommit_gives_memory_back(self, allocator: Any) -> None:
        """Neighbours keep their contents, the figure falls, and the range can be committed and used again."""
        self._needs(allocator, Capability.DECOMMIT, 3)
        granule = allocator.granularity
        tensor = allocator.tensor(0, 3 * granule, _nothing)
        tensor.fill_(5)
        assert int(tensor[-1]) == 5  # waits: memory is given back when nothing uses it any more
        assert (before := allocator.committed_bytes) >= 3 * granule
        allocator.decommit(granule, granule)
        assert allocator.committed_bytes <= before - granule
        extremes = [(int(each.min()), int(each.max())) for each in (tensor[:granule], tensor[2 * granule :])]
        assert extremes == [(5, 5), (5, 5)], "the neighbours of the range were touched"
        allocator.commit(granule, granule)
        tensor[granule : 2 * granule].fill_(6)
        assert tensor[[granule - 1, granule, 2 * granule - 1, 2 * granule]].tolist() == [5, 6, 6, 5]

    def test_host_import_is_the_same_memory(self, opened: Open, make_importable: Open) -> None:
        """One memory, where `import_extent` returned; found again there, also by a part of it, until taken off."""
        allocator, released = opened(), list[int]()
        tensor, size, start = self._importable(allocator, make_importable)
        tensor.copy_(_pattern(tensor.numel(), seed=1))
        offset = allocator.nbytes // 2 // allocator.granularity * allocator.granularity
        out = allocator.import_tensor(offset, tensor.view(-1, 100), lambda: released.append(1))
        assert (out.shape, out.dtype, out.stride()) == (tensor.view(-1, 100).shape, tensor.dtype, (100, 1))
        assert out.data_ptr() == allocator.base_ptr + offset + start
        assert out.cpu().flatten().equal(_pattern(tensor.numel(), seed=1))
        out.fill_(3)
        assert set(tensor.tolist()) == {3}
        before = allocator.committed_bytes, allocator.generation
        assert before[0] >= tensor.numel()
        assert allocator.import_extent(tensor)[2] == offset + start
        assert allocator.import_extent(tensor[500:])[2] == offset + start + 500
        part = allocator.import_tensor(offset, tensor[500:], _nothing)
        assert (allocator.committed_bytes, allocator.generation) == before, "this memory was there already"
        assert part.data_ptr() == out.data_ptr() + 500
        part.fill_(4)
        del part
        gc.collect()
        assert released == [], "a release of the part was reported as one of the whole"
        del out
        gc.collect()
        assert released == [1], "its release was not reported, although the tensor itself lives"
        allocator.decommit(offset, size)
        assert allocator.import_extent(tensor)[2] == -1
        assert set(tensor[500:].tolist()) == {4}, "the tensor's own memory went with it"

    def test_host_import_refuses_other_memory(self, opened: Open) -> None:
        """Ordinary memory of the host cannot be on the heap: an error of Iris that says so, from both."""
        allocator, tensor = opened(), torch.zeros(4096, dtype=torch.uint8)
        self._needs(allocator, Capability.IMPORT_TENSOR)
        for name, arguments in (("import_extent", (tensor,)), ("import_tensor", (0, tensor, _nothing))):
            with pytest.raises(IrisError):
                getattr(allocator, name)(*arguments)

    @pytest.mark.parametrize("tensors", [0, 1])
    def test_host_close_is_final(self, make_allocator: Open, info: PluginInfo, tensors: int) -> None:
        """Twice is as good as once, with and without a live tensor; then HeapClosedError, no crash and no memory."""
        allocator = make_allocator(self.heap_nbytes)
        alive = [allocator.tensor(0, 16, _nothing) for _ in range(tensors)]
        allocator.close()
        allocator.close()
        calls = {"tensor": (0, 16, _nothing), "export": (), "import_peer": (1, ())}
        calls |= {"decommit": (0, allocator.granularity)} if Capability.DECOMMIT in info.provides else {}
        for name, arguments in calls.items():
            with pytest.raises(HeapClosedError):
                getattr(allocator, name)(*arguments)
        alive.clear()
        gc.collect()
        allocator.close()

    def test_host_tensors_outlive_close(self, pool: RankPool, info: PluginInfo, target: DeviceTarget) -> None:
        """A tensor's storage keeps its memory; tried in another process, which may crash."""
        pool.run(plugin_jobs.outlive_close, 1, info.name, target.torch_device, self.heap_nbytes)

    def test_host_nothing_leaks(self, make_allocator: Open) -> None:
        """Opening, using and closing again and again leaves neither descriptors nor mappings."""
        nbytes = 1 << 20

        def cycle() -> None:
            one, two = make_allocator(nbytes, 0, 2), make_allocator(nbytes, 1, 2)
            one.commit(0, one.nbytes)
            if self.same_process_peers:
                two.import_peer(0, plugin_jobs.received(one.export()))
            one.tensor(0, 64, _nothing).fill_(1)
            two.close()
            one.close()

        cycle()  # what is made once and kept is no leak
        gc.collect()
        mapped = oracle.mapped_bytes()
        with _no_new_descriptors():
            for _ in range(self.num_cycles):
                cycle()
        grown = oracle.mapped_bytes() - mapped
        assert grown < self.num_cycles * nbytes // 2, f"{grown} more bytes are mapped after {self.num_cycles} cycles"

    def test_peers_export_describes_the_whole_heap(self, allocator: Any) -> None:
        """To the last byte, twice the same, opening nothing; what kernels and the sub-allocator keep never changes."""
        before = allocator.base_ptr, allocator.nbytes, allocator.granularity, allocator.generation
        first = list(allocator.export())
        _check_described(first, 0, allocator.nbytes)
        assert sum(segment.nbytes for segment in first) == allocator.nbytes, "segments overlap"
        with _no_new_descriptors():
            assert list(allocator.export()) == first
            allocator.commit(0, allocator.nbytes)
        assert (allocator.base_ptr, allocator.nbytes, allocator.granularity, allocator.generation) == before
        assert all(os.fstat(segment.fd) for segment in first if segment.fd is not None), "closed by export()"

    def test_peers_in_other_processes(self, pool: RankPool, info: PluginInfo, target: DeviceTarget) -> None:
        """Three ranks, whose heaps map each other, see all bytes at the same offsets, and write to the right rank."""
        no_problems(*pool.run(plugin_jobs.see_peers, 3, info.name, target.torch_device.split(":")[0], self.heap_nbytes))

    def test_peers_in_this_process(self, opened: Open) -> None:
        """A second import changes nothing, and no received descriptor is left to the caller."""
        owner, me = self._pair(opened, 3)
        owner.commit(0, owner.nbytes)
        received = plugin_jobs.received(owner.export())
        mapping = me.import_peer(0, received)
        assert (mapping.rank, mapping.nbytes) == (0, owner.nbytes)
        with _no_new_descriptors():
            assert me.import_peer(0, plugin_jobs.received(owner.export())) == mapping
        me.close()
        still_open = {int(each.split()[0]) for each in oracle.open_descriptors()}
        assert not still_open & {segment.fd for segment in received}

    def test_peers_nonsense_is_refused(self, opened: Open) -> None:
        """Segments of another allocator are an error of Iris, and their descriptors are closed."""
        me = opened()
        with _no_new_descriptors():
            nonsense = [Segment(0, 16, b"nonsense", os.dup(0)), Segment(1 << 40, 16, b"", os.dup(0))]
            with pytest.raises(IrisError):
                me.import_peer(1, nonsense)

    def test_peers_growth(self, growing: tuple[Any, Any], read: Read, write: Write) -> None:
        """New memory appears at its offset of the mapping, which stays where it is, as does what was there before.

        `generation` grows with every commit that makes memory, and with nothing else.  `export` describes it, in parts
        until `has_more` is False, and until `exchanged` the same again: an exchange that failed is repeated.
        """
        owner, me = growing
        granule, before, mapping = owner.granularity, owner.generation, None
        offsets = (0, 2 * granule, granule)
        for turn, offset in enumerate(offsets):
            owner.commit(offset, granule)
            assert owner.generation > before, "no new generation for the new memory"
            before = owner.generation
            for _ in range(2):
                for earlier in offsets[: turn + 1] if turn < 2 else [offset]:
                    _check_described(owner.export(), earlier, granule)
                owner.commit(offset, granule)
                assert owner.generation == before, "nothing was added, so there is nothing new to export"
            write(owner.base_ptr + offset, oracle.pattern(8, seed=turn))
            if turn > 0:  # the first two are exchanged together
                again, described = _exchange(owner, me)
                assert owner.generation == before, "an exchange adds nothing"
                assert mapping in (None, again), "the mapping has moved"
                mapping = again
                _check_described(described, offset, granule)
                for earlier, where in enumerate(offsets[: turn + 1]):
                    assert read(again.base_ptr + where, 8) == oracle.pattern(8, earlier), f"{earlier} after {turn}"
        write(again.base_ptr + granule + 8, b"for you!")
        assert read(owner.base_ptr + granule + 8, 8) == b"for you!"
        owner.commit(0, owner.nbytes)
        _check_described(_exchange(owner, me)[1], 3 * granule, owner.nbytes - 3 * granule)
        assert not owner.has_more

    def test_peers_import_is_seen(self, growing: tuple[Any, Any], make_importable: Open, read: Read) -> None:
        """The memory of an imported tensor is announced, and peers see it where it is on the heap."""
        owner, me = growing
        tensor, _, start = self._importable(owner, make_importable)
        before = owner.generation
        out = owner.import_tensor(owner.granularity, tensor, _nothing)
        assert owner.generation > before, "no new generation for the imported memory"
        mapping, described = _exchange(owner, me)
        _check_described(described, owner.granularity + start, tensor.numel())
        tensor.copy_(_pattern(tensor.numel(), seed=5))
        assert tensor[:8].tolist() == out[:8].tolist()  # waits for the copy
        end = mapping.base_ptr + owner.granularity + start + tensor.numel()
        assert read(end - 8, 8) == oracle.pattern(tensor.numel(), seed=5)[-8:]


@contextlib.contextmanager
def _no_new_descriptors() -> Iterator[None]:
    """Fail unless the block leaves the descriptors of this process as they were."""
    before = oracle.open_descriptors()
    yield
    assert oracle.open_descriptors() == before


def _exchange(owner: Any, me: Any) -> tuple[Any, list[Segment]]:
    """Let a rank map what another one has, as the heap does it; the mapping, and what was described."""
    described: list[Segment] = []
    for _ in range(owner.nbytes // owner.granularity + 1):
        segments, more = owner.export(), owner.has_more
        described += segments
        mapping = me.import_peer(0, plugin_jobs.received(segments))
        owner.exchanged()
        if not more:
            return mapping, described
    pytest.fail(f"has_more is still True after {len(described)} segments of a heap of {owner.nbytes} bytes")


def _check_described(segments: Sequence[Segment], offset: int, nbytes: int) -> None:
    """Fail unless the segments have all of a range."""
    reached = offset
    for segment in sorted(segments, key=lambda each: each.offset_bytes):
        if segment.offset_bytes <= reached:
            reached = max(reached, segment.offset_bytes + segment.nbytes)
    assert reached >= offset + nbytes, f"no segment has byte {reached} of the heap"


def _pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(oracle.pattern(nbytes, seed)), dtype=torch.uint8)
