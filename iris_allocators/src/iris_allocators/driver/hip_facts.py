"""Facts about AMD's devices, through hip-python.

Compiled, not run: no AMD GPU was at hand.  The calls are tested against a stand-in for the module `hip` only.
"""

from __future__ import annotations

from typing import Any

from hip import hip  # type: ignore[import-not-found]

from iris_allocators.driver.facts import DeviceFacts, PeerFacts
from iris_allocators.driver.hip import _call
from iris_core.errors import DriverError


def device_facts(index: int) -> DeviceFacts:
    """Return what the driver says of a device, by its index in torch; HIP has no attributes for kinds of handles."""
    name = "hipDeviceAttributeVirtualMemoryManagementSupported"
    answer = _answer(hip.hipDeviceGetAttribute, getattr(hip.hipDeviceAttribute_t, name, None), index)
    return DeviceFacts(virtual_memory=None if answer is None else bool(answer))


def peer_facts(index: int, peer: int) -> PeerFacts:
    """Return what the driver says of the way from one device to another one."""

    def ask(name: str) -> int | None:
        return _answer(hip.hipDeviceGetP2PAttribute, getattr(hip.hipDeviceP2PAttr, name, None), index, peer)

    access, atomics = ask("hipDevP2PAttrAccessSupported"), ask("hipDevP2PAttrNativeAtomicSupported")
    return PeerFacts(
        access=None if access is None else bool(access),
        native_atomics=None if atomics is None else bool(atomics),
        performance_rank=ask("hipDevP2PAttrPerformanceRank"),
    )


def _answer(function: Any, attribute: Any, *args: Any) -> int | None:
    if attribute is None:
        return None  # older bindings
    try:
        return int(_call(function, attribute, *args))
    except DriverError:
        return None  # an older driver than the bindings
