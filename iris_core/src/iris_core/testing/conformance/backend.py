"""Conformance of device backends: what can be said without launching a kernel."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from iris_core.testing.conformance import plugin_jobs
from iris_core.testing.conformance.plugin import PluginConformance, Registered, needs, parameter_problems
from iris_core.testing.conformance.stack_jobs import OPERATIONS
from iris_core.types import Block, CompileCase, ContextSpec, DeviceTarget, DeviceType, PluginInfo, PluginKind

_MOVE = "mask other load_cache_modifier store_cache_modifier hint"

FUNCTIONS: Mapping[str, str] = {
    "load": "pointer to_rank from_rank heap_bases | mask other cache_modifier volatile hint",
    "store": "pointer value from_rank to_rank heap_bases | mask hint cache_modifier",
    "copy": f"src_ptr dst_ptr from_rank to_rank cur_rank heap_bases | {_MOVE}",
    "get": f"from_ptr to_ptr from_rank to_rank heap_bases | {_MOVE}",
    "put": f"from_ptr to_ptr from_rank to_rank heap_bases | {_MOVE}",
    **dict.fromkeys(OPERATIONS, "pointer val from_rank to_rank heap_bases | mask sem scope hint"),
    "atomic_cas": "pointer cmp val from_rank to_rank heap_bases | sem scope hint",
    "signal": "pointer value from_rank to_rank heap_bases | op",
    "put_signal": "from_ptr to_ptr signal_ptr value from_rank to_rank heap_bases | op",
    **dict.fromkeys(("wait", "wait_any", "test"), "pointer value | cmp"),
    "load_acquire": "pointer",
    "barrier": "flags rank world_size heap_bases | rank_start rank_stride group_size",
}
"""The device functions and their parameters in the order in which kernels pass them; those after | have defaults."""

_CALLERS = {"load": "to_rank", "get": "to_rank", "copy": "cur_rank"}  # of the others it is from_rank
METHODS: Mapping[str, str] = {
    name: re.sub(rf"\b({_CALLERS.get(name, 'from_rank')}|heap_bases|rank|world_size)( |$)", "", words)
    for name, words in FUNCTIONS.items()
} | {"store": "pointer value to_rank | mask cache_modifier hint"}
"""The methods of DeviceContext in the same form, without self: the caller and the heap bases are filled in."""

# Written by hand from the layout on the first page of iris_core.device.context_words, and not by its encode(): a
# backend may use encode, and then the two would be wrong together.
_NO_TRACE, _TRACE = [0] * 17, list(range(101, 118))
_MAGIC_AND_LAYOUT = 0x4952_4953_0001  # "IRIS", layout 1
_FOUR_BASES = (0x7000_0000_0000, 0x1000, 0x7A00_0000_2000, 0x7FFF_FFFF_F000)
_FOUR = ContextSpec(2, 4, _FOUR_BASES, 5_000_000_000, 0x30_0000, trace=tuple(_TRACE))
_CONTEXTS = {
    "alone": (ContextSpec(0, 1, (0x7F00_0000_0000,)), [0, 1, 0x7F00_0000_0000, _MAGIC_AND_LAYOUT, 0, 0, *_NO_TRACE]),
    "third-of-four": (_FOUR, [2, 4, *_FOUR_BASES, _MAGIC_AND_LAYOUT, 5_000_000_000, 0x30_0000, *_TRACE]),
}

TARGETS: Mapping[str, DeviceType] = {"sm_90": DeviceType.CUDA, "gfx942": DeviceType.HIP, "gfx950": DeviceType.HIP}
"""GPU targets for which every compile case must compile."""


class OneHeap:
    """A world of one rank for `attach`, whose heap has one live block: satisfies `iris_core.protocols.MemoryMap`."""

    rank, nodes, network, version, nbytes = 0, ((0,),), None, 1, 1 << 16

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.nbytes)
        self.heap_bases = (ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),)

    def live_blocks(self) -> Sequence[Block]:
        """One block, half of the heap."""
        return (Block(0, self.nbytes // 2, "conformance kit"),)

    def check_peers(self) -> None:
        """There are none to lose."""

    def stands_still(self, quiet: bool) -> bool:
        """Nothing is known of other threads."""
        return False

    def elsewhere(self) -> Sequence[int]:
        """There are no other ranks."""
        return ()


class BackendConformance(PluginConformance):
    """Tests of a device backend.

    The tests that compile ask the backend itself (`iris_core.protocols.SupportsCompileOnly`), or a fixture `compile`, a
    function (case, target) like its `compile_only`; without either they are skipped.  Kernels run in
    `StackConformance`.
    """

    kind = PluginKind.BACKEND
    case_step: ClassVar[int] = 1  #: 1 to compile all of `compile_cases()`, n for every n-th one

    @pytest.fixture
    def backend(self, created: Any) -> Iterator[Any]:
        """Return a backend for one rank, detached after the test."""
        yield created
        created.detach()

    @pytest.fixture
    def compile(self, backend: Any) -> Any:
        """Compiles one case for one target and returns the assembly."""
        needs(hasattr(backend, "compile_only"), "no `compile_only` and no fixture `compile`: it compiles nothing here")
        return backend.compile_only

    @pytest.fixture
    def cases(self, backend: Any) -> Sequence[CompileCase]:
        """Return the kernels to compile."""
        return list(backend.compile_cases())[:: self.case_step]

    def test_static_device_functions(self, backend: Any) -> None:
        """All are there, with these parameters in order; what a kernel may leave out has a default."""
        api = backend.device_api()
        assert FUNCTIONS.keys() - api.keys() == set()
        assert [line for name, words in FUNCTIONS.items() for line in parameter_problems(name, api[name], words)] == []

    def test_static_device_methods(self, backend: Any) -> None:
        """The same of DeviceContext's methods."""
        context = backend.device_api().get("DeviceContext")
        needs(context, "device_api() has no DeviceContext: this backend has the functional API only")
        methods = [(name, getattr(context, name), f"self {words}") for name, words in METHODS.items()]
        assert [line for each in methods for line in parameter_problems(*each)] == []

    @pytest.mark.parametrize("name", _CONTEXTS)
    def test_host_context_words(self, backend: Any, target: DeviceTarget, name: str) -> None:
        """The context tensor has the words that kernels decode."""
        spec, words = _CONTEXTS[name]
        tensor = backend.make_context(dataclasses.replace(spec, device=target.torch_device))
        assert (tensor.dtype, tensor.device) == (torch.int64, torch.device(target.torch_device))
        assert tensor.is_contiguous()
        assert tensor.tolist() == words

    def test_host_context_refuses_contradictions(self, backend: Any) -> None:
        """A spec that contradicts itself becomes no context."""
        for rank, bases in ((0, (4096,)), (2, (4096, 8192)), (-1, (4096, 8192))):
            with pytest.raises(ValueError, match="rank"):
                backend.make_context(ContextSpec(rank, 2, bases))

    def test_host_attach_and_detach(self, registered: Registered, target: DeviceTarget) -> None:
        """Detaching twice, or what was never attached, is harmless; contexts follow and overlap each other."""
        one, two, again, never = (plugin_jobs.create(*registered, target) for _ in range(4))
        first, second = OneHeap(), OneHeap()
        one.attach(first)
        two.attach(second)
        for each in (one, one, two, never):
            each.detach()
        again.attach(first)
        again.detach()

    def test_host_trace_is_set_in_place(self, backend: Any, target: DeviceTarget) -> None:
        """`set_trace` changes the context tensor's tracing words, and nothing else; without words it clears them."""
        needs(hasattr(backend, "set_trace"), "the backend has no set_trace")
        assert backend.ticks_per_second > 0
        spec, words = _CONTEXTS["alone"]
        context = backend.make_context(dataclasses.replace(spec, device=target.torch_device))
        place, rest = context.data_ptr(), words[: -len(_TRACE)]
        buffers = [torch.zeros(16, dtype=torch.int64, device=target.torch_device) for _ in range(2)]
        backend.set_trace(context, tuple(_TRACE), buffers)
        assert context.tolist() == [*rest, *_TRACE]
        backend.set_trace(context, (), ())
        assert context.tolist() == [*rest, *_NO_TRACE]
        assert context.data_ptr() == place

    def test_compile_cases_are_described(self, backend: Any, info: PluginInfo) -> None:
        """Unique names; expectations that are regular expressions, for every kind of GPU that the backend works on."""
        cases = backend.compile_cases()
        gpus = info.devices - {DeviceType.CPU}
        assert cases or not gpus, f"the backend works on {', '.join(gpus)} but has no compile cases"
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        for case in cases:
            assert isinstance(case, CompileCase)
            for device in gpus.union(case.expect):
                assert case.expect.get(device), f"{case.name} expects nothing for {device}"
                re.compile("|".join(case.expect[device]))

    @pytest.mark.parametrize("target_name", TARGETS)
    def test_compile_cases_compile(
        self, info: PluginInfo, compile: Callable[..., str], cases: Sequence[CompileCase], target_name: str
    ) -> None:
        """Every case compiles for the target, and the assembly has what the case expects."""
        device = TARGETS[target_name]
        needs(device in info.devices, f"{info.name!r} does not work on {device}")
        lacking = []
        for case in cases:
            assembly = compile(case, target_name)
            assert assembly.strip(), f"{case.name} for {target_name} compiles to nothing"
            lacking += [f"{case.name}: {each}" for each in case.expect[device] if not re.search(each, assembly)]
        assert lacking == [], f"assembly for {target_name} lacks what its cases expect"
