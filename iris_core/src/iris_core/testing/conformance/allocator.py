"""Conformance of allocators: alone, with others in the same process, and with peers in other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from iris_core.errors import DeviceError, HeapClosedError, HeapError, IrisError, UnsupportedError
from iris_core.protocols import Allocator, SupportsDecommit, SupportsGrowth, SupportsImportTensor
from iris_core.testing.conformance import oracle, stack_jobs
from iris_core.testing.conformance.plugin import PluginConformance, member_problems
from iris_core.types import Capability, PluginInfo, PluginKind, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from iris_core.registry import PluginRecord
    from iris_core.testing.conformance.plugin import Registered
    from iris_core.testing.pool import RankPool
    from iris_core.types import DeviceTarget

    Open = Callable[..., Any]
    Read = Callable[[int, int], bytes]
    Write = Callable[[int, bytes], None]
    MakeImportable = Callable[[Any, int], torch.Tensor]
    Importable = Callable[[Any], tuple[torch.Tensor, int, int]]
    Pair = tuple[Any, Any]
    Neighbours = tuple[list[Any], Any]

_PAGE = 4096


class AllocatorConformance(PluginConformance):
    """Tests of an allocator.

    A subclass gives the plugin's name.  The plugin creates the allocators with default settings, unless a fixture
    `make_allocator` does, a function (nbytes, rank=0, world_size=1).

    Attributes:
        name: name of the allocator.
        heap_nbytes: size of the heaps that are tested; room for several granules makes the tests stronger.
        same_process_peers: whether a second allocator of the same process can map the first one's memory (IPC handles
            of some drivers cannot); if not, the tests between processes remain.
        num_cycles: how often an allocator is opened and closed when looking for leaks.

    Example:
        >>> class TestMine(AllocatorConformance):
        ...     name = "mine"
    """

    kind = PluginKind.ALLOCATOR
    heap_nbytes: ClassVar[int] = 8 << 20
    same_process_peers: ClassVar[bool] = True
    num_cycles: ClassVar[int] = 100

    # -- fixtures -----------------------------------------------------------------------------------------------------
    @pytest.fixture(autouse=True)
    def _quick_collection(self) -> Iterator[None]:
        """Spare the garbage collector what was there before: the tests call it often."""
        gc.freeze()
        yield
        gc.unfreeze()

    @pytest.fixture
    def make_allocator(self, registered: Registered, target: DeviceTarget) -> Open:
        """Opens an allocator: (nbytes, rank=0, world_size=1).  The caller closes it."""
        return functools.partial(self.create, registered, target)

    @pytest.fixture
    def opened(self, make_allocator: Open) -> Iterator[Open]:
        """As `make_allocator`, but closed after the test."""
        with contextlib.ExitStack() as stack:
            yield lambda *sizes: stack.enter_context(contextlib.closing(make_allocator(*sizes)))

    @pytest.fixture
    def allocator(self, opened: Open) -> Any:
        """One allocator whose whole heap is committed."""
        allocator = opened(self.heap_nbytes)
        allocator.commit(0, allocator.nbytes)
        return allocator

    @pytest.fixture
    def make_importable(self, target: DeviceTarget) -> MakeImportable:
        """Makes (allocator, nbytes) a 1-D uint8 tensor whose memory the allocator can put on the heap."""
        return lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8, device=target.torch_device)

    @pytest.fixture
    def importable(self, info: PluginInfo, make_importable: MakeImportable) -> Importable:
        """Makes a tensor that an allocator can import, with what its `import_extent` returns."""
        self._needs(info, Capability.IMPORT_TENSOR)

        def make(allocator: Any) -> tuple[torch.Tensor, int, int]:
            tensor = make_importable(allocator, 10_000)
            try:
                size, start = allocator.import_extent(tensor)
            except UnsupportedError as error:
                pytest.skip(f"make_importable gives tensors that cannot be imported here: {error}")
            assert size % allocator.granularity == 0, f"{size} is not a multiple of {allocator.granularity}"
            assert 0 <= start <= size - tensor.numel(), f"{tensor.numel()} bytes at {start} of {size}"
            if size > allocator.nbytes // 2:
                pytest.skip(f"this memory takes {size} bytes of a heap of {allocator.nbytes}: set heap_nbytes")
            return tensor, size, start

        return make

    @pytest.fixture
    def growing(self, opened: Open, info: PluginInfo) -> Pair:
        """Ranks 0 and 1 of 16, of an allocator with growth; nothing is committed."""
        self._needs(info, Capability.GROWTH)
        self._needs_peers()
        owner, me = (opened(self.heap_nbytes, rank, 16) for rank in range(2))
        if owner.nbytes < 4 * owner.granularity:
            pytest.skip(f"a heap of {owner.nbytes} bytes has no four granules: set heap_nbytes")
        return owner, me

    @pytest.fixture
    def neighbours(self, opened: Open) -> Neighbours:
        """Ranks 0 and 1 with committed heaps, and rank 2, which imports them."""
        self._needs_peers()
        owners = [opened(self.heap_nbytes, rank, 3) for rank in range(2)]
        for owner in owners:
            owner.commit(0, owner.nbytes)
        return owners, opened(self.heap_nbytes, 2, 3)

    def _needs(self, info: PluginInfo, capability: Capability) -> None:
        if capability not in info.provides:
            pytest.skip(f"{info.name!r} does not provide {capability}")

    def _needs_peers(self) -> None:
        if not self.same_process_peers:
            pytest.skip("same_process_peers is False: this allocator's memory can be mapped by other processes only")

    @pytest.fixture
    def read(self, target: DeviceTarget) -> Read:
        """Reads (ptr, nbytes) from memory without the allocator; OSError if it cannot be read."""

        def read(ptr: int, nbytes: int) -> bytes:
            if target.torch_device == "cpu":
                oracle.check_readable(ptr, nbytes)
            return oracle.read_bytes(ptr, nbytes, target.torch_device)

        return read

    @pytest.fixture
    def write(self, target: DeviceTarget) -> Write:
        """Writes (ptr, data) to memory without the allocator."""
        return lambda ptr, data: oracle.write_bytes(ptr, data, target.torch_device)

    # -- static tier --------------------------------------------------------------------------------------------------
    def test_static_protocol(self, allocator: Any, info: PluginInfo) -> None:
        """Every member of the protocol is there, called with the protocol's parameter names in their order."""
        assert member_problems(allocator, Allocator) == []
        assert allocator.info == info

    def test_static_optional_protocols_match_capabilities(self, allocator: Any, info: PluginInfo) -> None:
        """What `provides` promises is there in full, and what is there is promised."""
        optional = {
            Capability.GROWTH: SupportsGrowth,
            Capability.DECOMMIT: SupportsDecommit,
            Capability.IMPORT_TENSOR: SupportsImportTensor,
        }
        for capability, protocol in optional.items():
            problems, promised = member_problems(allocator, protocol), capability in info.provides
            assert (problems == []) == promised, (
                f"{capability} is promised: {promised}; its members: {problems or 'there'}"
            )

    # -- host tier: description ---------------------------------------------------------------------------------------
    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 5000, (1 << 20) - 1, (1 << 20) + 1])
    def test_host_size_and_alignment(self, opened: Open, nbytes: int) -> None:
        """At least as large as asked for; the base is aligned to a page; the granularity is a power of two."""
        allocator = opened(nbytes)
        assert allocator.nbytes >= nbytes
        assert allocator.base_ptr > 0
        assert allocator.base_ptr % _PAGE == 0, f"base_ptr {allocator.base_ptr:#x} is not a multiple of {_PAGE}"
        assert allocator.granularity.bit_count() == 1, f"granularity {allocator.granularity} is not a power of two"

    def test_host_description_never_changes(self, allocator: Any) -> None:
        """Kernels keep the base address, and the sub-allocator keeps the size."""
        before = allocator.base_ptr, allocator.nbytes, allocator.granularity, allocator.generation
        _tensor = allocator.tensor(0, 64, _nothing)
        allocator.commit(0, allocator.nbytes)
        allocator.export()
        assert (allocator.base_ptr, allocator.nbytes, allocator.granularity, allocator.generation) == before

    def test_host_heaps_do_not_overlap(self, opened: Open) -> None:
        """Two allocators of one process have memory of their own."""
        one, two = sorted((opened(self.heap_nbytes), opened(self.heap_nbytes)), key=lambda each: each.base_ptr)
        assert one.base_ptr + one.nbytes <= two.base_ptr

    def test_host_owns_is_exact(self, allocator: Any) -> None:
        """From the first byte to the last, and not one further."""
        begin, end = allocator.base_ptr, allocator.base_ptr + allocator.nbytes
        inside = begin, begin + 1, begin + allocator.nbytes // 2, end - 1
        for ptr in (*inside, 0, begin - 1, end, end + 1):
            assert allocator.owns(ptr) == (ptr in inside), f"offset {ptr - begin} of {allocator.nbytes}"

    def test_host_impossible_size_is_an_error(self, make_allocator: Open) -> None:
        """An error of Iris that says so, and nothing is left open."""
        before = oracle.open_descriptors()
        with pytest.raises((HeapError, DeviceError)):
            make_allocator(1 << 62)
        gc.collect()
        assert oracle.open_descriptors() == before

    # -- host tier: memory --------------------------------------------------------------------------------------------
    def test_host_tensor_lies_where_it_was_asked_for(self, allocator: Any, target: DeviceTarget) -> None:
        """1-D uint8 of the length, at base_ptr + offset, on the rank's device."""
        last = allocator.nbytes - 1
        for offset, nbytes in ((0, 1), (1, 3), (_PAGE - 1, 2), (256, 1000), (last, 1), (0, allocator.nbytes)):
            tensor = allocator.tensor(offset, nbytes, _nothing)
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (nbytes,))
            assert tensor.data_ptr() == allocator.base_ptr + offset
            assert tensor.device == torch.device(target.torch_device)

    def test_host_tensor_has_a_storage_of_its_own(self, allocator: Any) -> None:
        """The storage is the range and no more; tensors over the same range do not share one."""
        tensors = [allocator.tensor(256, 512, _nothing) for _ in range(2)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        assert [tensor.storage_offset() for tensor in tensors] == [0, 0]
        assert [(each.nbytes(), each.data_ptr()) for each in storages] == 2 * [(512, allocator.base_ptr + 256)]
        assert storages[0]._cdata != storages[1]._cdata

    def test_host_tensor_is_the_memory(self, allocator: Any, read: Read, write: Write) -> None:
        """What is written through the tensor is there, and what is there is read through it; both ends included."""
        for offset in (0, 4097, allocator.nbytes - 300):
            tensor, data = allocator.tensor(offset, 300, _nothing), oracle.pattern(300, seed=offset)
            tensor.copy_(_pattern(300, seed=offset))
            assert read(allocator.base_ptr + offset, 300) == data
            data = oracle.pattern(300, seed=offset + 1)
            write(allocator.base_ptr + offset, data)
            assert bytes(tensor.cpu().numpy().tobytes()) == data

    def test_host_disjoint_tensors_do_not_touch_each_other(self, allocator: Any) -> None:
        """Neighbours keep their contents when one is filled."""
        tensors = [allocator.tensor(256 * i, 256, _nothing) for i in range(4)]
        for value, tensor in enumerate(tensors, start=1):
            tensor.fill_(value)
        tensors[1].fill_(99)
        assert [sorted(set(tensor.tolist())) for tensor in tensors] == [[1], [99], [3], [4]]

    def test_host_release_is_told_once_after_the_last_view(self, allocator: Any) -> None:
        """Not when the tensor goes but a view stays; then once, and never again."""
        told: list[int] = []
        tensor = allocator.tensor(0, 256, lambda: told.append(1))
        view = tensor.view(torch.float32)[3:5]
        del tensor
        gc.collect()
        assert told == [], "a view of the tensor is still alive"
        del view
        gc.collect()
        assert told == [1]
        allocator.close()
        gc.collect()
        assert told == [1], "told again by close()"

    def test_host_release_is_told_for_each_tensor(self, allocator: Any) -> None:
        """Tensors on the same range are told apart."""
        told: list[int] = []
        tensors = [allocator.tensor(0, 128, functools.partial(told.append, number)) for number in range(2)]
        for number in range(2):
            del tensors[0]
            gc.collect()
            assert told == list(range(number + 1))

    def test_host_commit_is_idempotent(self, opened: Open, read: Read, write: Write) -> None:
        """Committing again, also a larger range, keeps the contents."""
        allocator = opened(self.heap_nbytes)
        allocator.commit(0, allocator.granularity)
        write(allocator.base_ptr, b"first")
        allocator.commit(0, allocator.granularity)
        allocator.commit(allocator.granularity // 2, 0)  # the block of a tensor without elements
        allocator.commit(0, allocator.nbytes)
        assert read(allocator.base_ptr, 5) == b"first"
        write(allocator.base_ptr + allocator.nbytes - 4, b"last")
        allocator.commit(0, allocator.nbytes)
        assert (read(allocator.base_ptr, 5), read(allocator.base_ptr + allocator.nbytes - 4, 4)) == (b"first", b"last")

    def test_host_decommit_gives_memory_back(self, neighbours: Neighbours, allocator: Any, info: PluginInfo) -> None:
        """Neighbours keep their contents, the figure falls, and the range can be committed and used again."""
        self._needs(info, Capability.DECOMMIT)
        granule = allocator.granularity
        if allocator.nbytes < 3 * granule:
            pytest.skip(f"a heap of {allocator.nbytes} bytes has no three granules of {granule}: set heap_nbytes")
        tensor = allocator.tensor(0, 3 * granule, _nothing)
        tensor.fill_(5)
        assert int(tensor[-1]) == 5  # waits: memory is given back when nobody uses it any more
        assert (before := allocator.committed_bytes) >= 3 * granule
        allocator.decommit(granule, granule)
        assert allocator.committed_bytes <= before - granule
        extremes = [(int(each.min()), int(each.max())) for each in (tensor[:granule], tensor[2 * granule :])]
        assert extremes == [(5, 5), (5, 5)], "the neighbours of the range were touched"
        allocator.commit(granule, granule)
        tensor[granule : 2 * granule].fill_(6)
        borders = tensor[[granule - 1, granule, 2 * granule - 1, 2 * granule]].tolist()
        assert borders == [5, 6, 6, 5]

    # -- host tier: existing tensors ----------------------------------------------------------------------------------
    def test_host_import_is_the_same_memory(self, opened: Open, importable: Importable) -> None:
        """What is written to the one tensor is read from the other, at the place that `import_extent` has foretold."""
        allocator = opened(self.heap_nbytes)
        tensor, _, start = importable(allocator)
        tensor.copy_(_pattern(tensor.numel(), seed=1))
        offset = allocator.nbytes // 2 // allocator.granularity * allocator.granularity
        out = allocator.import_tensor(offset, tensor.view(-1, 100), _nothing)
        assert (out.shape, out.dtype, out.stride()) == (tensor.view(-1, 100).shape, tensor.dtype, (100, 1))
        assert out.data_ptr() == allocator.base_ptr + offset + start
        assert out.cpu().flatten().equal(_pattern(tensor.numel(), seed=1))
        out.fill_(3)
        assert set(tensor.tolist()) == {3}
        tensor[7] = 9
        assert int(out[0, 7]) == 9
        assert allocator.committed_bytes >= tensor.numel()

    def test_host_import_is_found_again(self, opened: Open, importable: Importable) -> None:
        """Not before, then at its place, also by a part of it, which shares the memory; not when it was taken off."""
        allocator = opened(self.heap_nbytes)
        tensor, size, start = importable(allocator)
        assert allocator.imported_at(tensor) is None
        out = allocator.import_tensor(0, tensor, _nothing)
        assert allocator.imported_at(tensor) == start
        assert allocator.imported_at(tensor[500:]) == start + 500
        before = allocator.committed_bytes, allocator.generation
        part = allocator.import_tensor(0, tensor[500:], _nothing)
        assert (allocator.committed_bytes, allocator.generation) == before, "this memory was there already"
        assert part.data_ptr() == out.data_ptr() + 500
        tensor.fill_(4)
        assert set(part.tolist()) == {4}
        del out, part
        gc.collect()
        allocator.decommit(0, size)
        assert allocator.imported_at(tensor) is None
        assert set(tensor.tolist()) == {4}, "the tensor's own memory went with it"

    def test_host_import_release_is_told(self, opened: Open, importable: Importable) -> None:
        """Once, when the result is gone, although the tensor itself lives."""
        allocator = opened(self.heap_nbytes)
        tensor, _, _ = importable(allocator)
        told: list[int] = []
        out = allocator.import_tensor(0, tensor, lambda: told.append(1))
        view = out[3:]
        del out
        gc.collect()
        assert told == []
        del view
        gc.collect()
        assert told == [1]

    def test_host_import_refuses_other_memory(self, opened: Open, info: PluginInfo) -> None:
        """Ordinary memory of the host cannot be on the heap: an error of Iris that says so, from all three."""
        self._needs(info, Capability.IMPORT_TENSOR)
        allocator, tensor = opened(self.heap_nbytes), torch.zeros(4096, dtype=torch.uint8)
        calls = {"import_extent": (tensor,), "imported_at": (tensor,), "import_tensor": (0, tensor, _nothing)}
        for name, arguments in calls.items():
            with pytest.raises(IrisError):
                getattr(allocator, name)(*arguments)

    # -- host tier: the end -------------------------------------------------------------------------------------------
    def test_host_close_is_idempotent(self, make_allocator: Open) -> None:
        """Twice is as good as once, with and without a live tensor."""
        for tensors in ((), ((0, 16),)):
            allocator = make_allocator(self.heap_nbytes)
            alive = [allocator.tensor(*place, _nothing) for place in tensors]
            allocator.close()
            allocator.close()
            alive.clear()
            gc.collect()
            allocator.close()

    def test_host_use_after_close_is_an_error(self, make_allocator: Open, info: PluginInfo) -> None:
        """HeapClosedError, not a crash and not memory."""
        allocator = make_allocator(self.heap_nbytes)
        allocator.close()
        calls = {"tensor": (0, 16, _nothing), "export": (), "import_peer": (1, ())}
        if Capability.DECOMMIT in info.provides:
            calls["decommit"] = (0, allocator.granularity)
        for name, arguments in calls.items():
            with pytest.raises(HeapClosedError):
                getattr(allocator, name)(*arguments)

    def test_host_tensors_outlive_close(self, pool: RankPool, installed: PluginRecord, target: DeviceTarget) -> None:
        """A tensor's storage keeps its memory; tried in another process, which may crash."""
        what = installed.qualified_name, target.torch_device, self.heap_nbytes
        ((before, after, told),) = pool.run(stack_jobs.outlive_close, 1, *what)
        assert before == oracle.pattern(8192, seed=1)
        assert after == b"\x07" + before[1:]
        assert told == 0, "on_release was called although the tensor was alive"

    def test_host_nothing_leaks(self, make_allocator: Open) -> None:
        """Opening, using and closing again and again leaves neither descriptors nor mappings."""
        nbytes = 1 << 20

        def cycle() -> None:
            one, two = make_allocator(nbytes, 0, 2), make_allocator(nbytes, 1, 2)
            one.commit(0, one.nbytes)
            if self.same_process_peers:
                two.import_peer(0, _received(one.export()))
            one.tensor(0, 64, _nothing).fill_(1)
            two.close()
            one.close()

        cycle()  # what is made once and kept is no leak
        gc.collect()
        descriptors, mapped = oracle.open_descriptors(), oracle.mapped_bytes()
        for _ in range(self.num_cycles):
            cycle()
        gc.collect()
        assert oracle.open_descriptors() == descriptors
        grown = oracle.mapped_bytes() - mapped
        assert grown < self.num_cycles * nbytes // 2, f"{grown} more bytes are mapped after {self.num_cycles} cycles"

    # -- peers --------------------------------------------------------------------------------------------------------
    def test_peers_export_describes_the_whole_heap(self, allocator: Any) -> None:
        """Segments lie in the heap, do not overlap, and cover what is committed to the last byte."""
        segments = sorted(allocator.export(), key=lambda segment: segment.offset_bytes)
        reached = 0
        for segment in segments:
            assert isinstance(segment, Segment)
            assert segment.nbytes > 0
            assert segment.offset_bytes == reached, "segments overlap or leave a gap"
            reached += segment.nbytes
        assert reached == allocator.nbytes

    def test_peers_exported_descriptors_stay_the_allocators(self, allocator: Any) -> None:
        """Exporting twice gives the same and opens nothing."""
        first = list(allocator.export())
        before = oracle.open_descriptors()
        assert list(allocator.export()) == first
        assert oracle.open_descriptors() == before
        for segment in first:
            if segment.fd is not None:
                os.fstat(segment.fd)

    def test_peers_see_the_same_bytes(self, neighbours: Neighbours, read: Read, write: Write) -> None:
        """Each peer's bytes appear at the same offset of its mapping, and what is written there arrives."""
        owners, me = neighbours
        marks = stack_jobs.place_marks(self.heap_nbytes)
        for rank, owner in enumerate(owners):
            for index, offset in enumerate(marks):
                write(owner.base_ptr + offset, stack_jobs.mark(rank, index))
        mappings = [me.import_peer(rank, _received(owner.export())) for rank, owner in enumerate(owners)]
        for rank, (owner, mapping) in enumerate(zip(owners, mappings, strict=True)):
            assert (mapping.rank, mapping.nbytes) == (rank, owner.nbytes)
            seen = [read(mapping.base_ptr + offset, 8) for offset in marks]
            assert seen == [stack_jobs.mark(rank, index) for index in range(len(marks))], f"of rank {rank}"
            write(mapping.base_ptr + mapping.nbytes - 1, bytes([40 + rank]))
        for rank, owner in enumerate(owners):
            assert read(owner.base_ptr + owner.nbytes - 1, 1) == bytes([40 + rank])

    def test_peers_mapping_is_not_owned(self, neighbours: Neighbours) -> None:
        """owns() is about the own heap only."""
        (owner, _), me = neighbours
        mapping = me.import_peer(0, _received(owner.export()))
        assert not any(me.owns(mapping.base_ptr + offset) for offset in (0, mapping.nbytes // 2, mapping.nbytes - 1))
        assert me.owns(me.base_ptr)

    def test_peers_import_twice_is_harmless(self, neighbours: Neighbours) -> None:
        """The same mapping again, the base stays, and the second descriptors are closed as the first ones were."""
        (owner, _), me = neighbours
        first = me.import_peer(0, _received(owner.export()))
        before = oracle.open_descriptors()
        assert me.import_peer(0, _received(owner.export())) == first
        gc.collect()
        assert oracle.open_descriptors() == before

    def test_peers_descriptors_are_taken_over(self, neighbours: Neighbours) -> None:
        """import_peer leaves none of the received descriptors to its caller, whether it succeeds or raises."""
        (owner, _), me = neighbours
        received = _received(owner.export())
        me.import_peer(0, received)
        me.close()
        gc.collect()
        still_open = {int(each.split()[0]) for each in oracle.open_descriptors()}
        assert not still_open & {segment.fd for segment in received}

    def test_peers_nonsense_is_refused(self, opened: Open) -> None:
        """Segments of another allocator are an error of Iris, and their descriptors are closed."""
        me = opened(self.heap_nbytes)
        before = oracle.open_descriptors()
        nonsense = [Segment(0, 16, b"nonsense", os.dup(0)), Segment(1 << 40, 16, b"", os.dup(0))]
        with pytest.raises(IrisError):
            me.import_peer(1, nonsense)
        gc.collect()
        assert oracle.open_descriptors() == before

    # -- peers: memory that comes later -------------------------------------------------------------------------------
    def test_peers_growth_is_announced(self, growing: Pair) -> None:
        """`generation` grows with every commit that makes memory, and with no other; `export` describes that memory."""
        owner, _ = growing
        granule, before = owner.granularity, owner.generation
        for commit in range(2):
            owner.commit(2 * commit * granule, granule)
            assert owner.generation > before, "peers are not told of the new memory"
            before = owner.generation
            self._describes(owner.export(), 2 * commit * granule, granule)
            owner.commit(2 * commit * granule, granule)
            assert owner.generation == before, "nothing was added, so there is nothing new to export"
            owner.exchanged()
            assert owner.generation == before

    def test_peers_growth_is_described_until_all_have_it(self, growing: Pair) -> None:
        """An exchange that failed somewhere is repeated: before `exchanged`, `export` describes the same again."""
        owner, _ = growing
        owner.commit(0, owner.granularity)
        for _ in range(2):
            self._describes(owner.export(), 0, owner.granularity)
        owner.commit(owner.granularity, owner.granularity)
        self._describes(owner.export(), 0, 2 * owner.granularity)

    def test_peers_growth_is_seen(self, growing: Pair, read: Read, write: Write) -> None:
        """New memory appears at its offset of the mapping, which stays where it is, as does what was there before."""
        owner, me = growing
        granule = owner.granularity
        mapping = self._exchange(owner, me)[0]
        for turn, offset in enumerate((0, 2 * granule, granule)):
            owner.commit(offset, granule)
            write(owner.base_ptr + offset, stack_jobs.mark(0, turn))
            again, described = self._exchange(owner, me)
            assert again == mapping, "the mapping has moved"
            self._describes(described, offset, granule)
            for earlier, where in enumerate((0, 2 * granule, granule)[: turn + 1]):
                assert read(mapping.base_ptr + where, 8) == stack_jobs.mark(0, earlier), f"{earlier} after {turn}"
        write(mapping.base_ptr + granule + 8, b"for you!")
        assert read(owner.base_ptr + granule + 8, 8) == b"for you!"

    def test_peers_growth_in_parts(self, growing: Pair) -> None:
        """However much there is, the parts come to all of it, and `has_more` says when that is reached."""
        owner, me = growing
        owner.commit(0, owner.nbytes)
        _, described = self._exchange(owner, me)
        self._describes(described, 0, owner.nbytes)
        assert not owner.has_more

    def test_peers_import_is_seen(self, growing: Pair, importable: Importable, read: Read) -> None:
        """The memory of an imported tensor is announced, and peers see it where it is on the heap."""
        owner, me = growing
        tensor, _, start = importable(owner)
        before = owner.generation
        out = owner.import_tensor(owner.granularity, tensor, _nothing)
        assert owner.generation > before, "peers are not told of the imported memory"
        mapping, described = self._exchange(owner, me)
        self._describes(described, owner.granularity + start, tensor.numel())
        tensor.copy_(_pattern(tensor.numel(), seed=5))
        assert tensor[:8].tolist() == out[:8].tolist()  # waits for the copy
        expected = bytes(_pattern(tensor.numel(), seed=5)[-8:].tolist())
        assert read(mapping.base_ptr + owner.granularity + start + tensor.numel() - 8, 8) == expected

    def test_peers_in_other_processes(self, pool: RankPool, installed: PluginRecord, target: DeviceTarget) -> None:
        """Three ranks see each other's bytes at the same offsets, and what they write arrives at the right rank."""
        device = "cpu" if target.torch_device == "cpu" else "cuda"
        results = pool.run(stack_jobs.see_peers, 3, installed.qualified_name, device, self.heap_nbytes)
        num_marks = len(stack_jobs.place_marks(self.heap_nbytes))
        for rank, (reports, written) in enumerate(results):
            assert sorted(reports) == [peer for peer in range(3) if peer != rank]
            for peer, (is_whole, owned, seen) in reports.items():
                assert is_whole, f"rank {rank} maps less or more than the heap of rank {peer}"
                assert not owned
                assert seen == [stack_jobs.mark(peer, index) for index in range(num_marks)], f"rank {rank} of {peer}"
                assert written[peer] == stack_jobs.mark(peer, rank), f"what rank {peer} wrote to rank {rank}"

    def _exchange(self, owner: Any, me: Any) -> tuple[Any, list[Segment]]:
        """Let a rank map what another one has, as the heap does it; the mapping, and what was described."""
        described: list[Segment] = []
        for _ in range(owner.nbytes // owner.granularity + 1):
            segments, more = owner.export(), owner.has_more
            described += segments
            mapping = me.import_peer(0, _received(segments))
            owner.exchanged()
            if not more:
                return mapping, described
        pytest.fail(f"has_more is still True after {len(described)} segments of a heap of {owner.nbytes} bytes")

    def _describes(self, segments: Sequence[Segment], offset: int, nbytes: int) -> None:
        """Fail unless the segments have all of a range."""
        reached = offset
        for segment in sorted(segments, key=lambda each: each.offset_bytes):
            if segment.offset_bytes <= reached:
                reached = max(reached, segment.offset_bytes + segment.nbytes)
        assert reached >= offset + nbytes, f"no segment has byte {reached} of the heap"


def _received(segments: Sequence[Segment]) -> list[Segment]:
    """Segments as a peer receives them: with descriptors of its own."""
    return [dataclasses.replace(each, fd=None if each.fd is None else os.dup(each.fd)) for each in segments]


def _pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(oracle.pattern(nbytes, seed)), dtype=torch.uint8)


def _nothing() -> None:
    """A release that nobody waits for."""
