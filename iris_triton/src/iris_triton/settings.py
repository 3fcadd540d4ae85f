"""Settings of the Triton backend."""

from typing import Annotated, Literal

from pydantic import Field

from iris_core.settings import PluginSettings


class TritonSettings(PluginSettings):
    """Settings of the "triton" backend: IRIS_TRITON__..., or `options={"triton": {...}}`."""

    allocation_barrier: bool = True
    """Contexts of `iris_triton.iris()` end what allocates with a barrier; those of `iris_core.Iris` never do."""
    bounds_check: bool = True
    """On the CPU: check that every access of a kernel lies in a live block of the heap or in one of its arguments."""
    cpu_timeout: Annotated[float, Field(gt=0, le=1e9)] = 60.0
    """On the CPU: seconds that all programs of a launch may wait for memory that does not change (deadlock)."""
    hints: Literal["warn", "raise"] = "warn"
    """On the CPU: what becomes of tl.assume, tl.multiple_of, tl.max_contiguous and `hint` that are not true."""
