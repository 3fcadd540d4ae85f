"""How a collective is to run: the fields of the reference system, and the algorithm by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from iris_core.errors import ArgumentError

AUTO = "auto"

_VARIANTS = {
    "all_gather_variant": (AUTO, "persistent", "partitioned"),
    "all_reduce_variant": (AUTO, "atomic", "ring", "two_shot", "one_shot", "spinlock"),
    "reduce_scatter_variant": (AUTO, "two_shot"),
}
_SPEAKS_OF = {
    "all_reduce_distribution": ("all_reduce", "reduce_scatter"),
    "all_reduce_num_rings": ("all_reduce",),
    "all_reduce_ring_slice_n": ("all_reduce",),
}
"""Operations that a field speaks of, where that is not all of them."""

_DEFAULT_BLOCK_N = 64
_MOST_WARPS = 32

_POSITIVE = (
    "block_size_m",
    "block_size_n",
    "swizzle_size",
    "comm_sms",
    "num_xcds",
    "chunk_size",
    "all_reduce_num_rings",
    "all_reduce_ring_slice_n",
    "num_stages",
    "num_warps",
)


@dataclass(frozen=True)
class Config:
    """How a collective is to run.  Everything that is not given (None) is the algorithm's choice.

    A field that is given is a wish that must be fulfilled: an algorithm that has no use for it is not chosen, and is
    refused when it was named.  The fields are those of the reference system, and `algorithm`.

    Attributes:
        algorithm: name of an algorithm (`ctx.ccl.explain` lists them); None for the library's choice.
        block_size_m, block_size_n: rows and columns of a tile; their product is what a program handles at a time.
            Where only one is given, the other is 32 or 64, as in the reference system.
        swizzle_size: rows of tiles that are taken together, for locality.
        comm_sms: number of programs (SMs, CUs) that communicate.
        num_xcds: number of accelerator dies.
        chunk_size: programs in a row on one die.
        use_gluon: only algorithms written in Gluon.
        all_gather_variant: "persistent" or "partitioned"; "auto" for the library's choice.
        all_reduce_variant: "atomic", "ring", "two_shot", "one_shot" or "spinlock"; "auto" for the library's choice.
        all_reduce_distribution: which tiles a rank reduces: 0 every world_size-th, 1 a block of them.
        all_reduce_num_rings: number of rings that run side by side.
        all_reduce_ring_slice_n: columns of a slice of the ring, a power of two that divides block_size_n.
        reduce_scatter_variant: "two_shot", or "auto" for the library's choice.
        num_stages: stages of software pipelining.
        num_warps: warps of a program, a power of two up to 32.
        threads_per_warp: 32 or 64.
        waves_per_eu: hint for AMD's compiler; 0 for none.

    Raises:
        ArgumentError: (a ValueError) a field has a value that cannot be.
    """

    block_size_m: int | None = None
    block_size_n: int | None = None
    swizzle_size: int | None = None
    comm_sms: int | None = None
    num_xcds: int | None = None
    chunk_size: int | None = None
    use_gluon: bool = False
    all_gather_variant: str = AUTO
    all_reduce_variant: str = AUTO
    all_reduce_distribution: int | None = None
    all_reduce_num_rings: int | None = None
    all_reduce_ring_slice_n: int | None = None
    reduce_scatter_variant: str = AUTO
    num_stages: int | None = None
    num_warps: int | None = None
    threads_per_warp: int | None = None
    waves_per_eu: int | None = None
    algorithm: str | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(f"Config: {name} must be a positive integer, not {value!r}")
        warps = self.num_warps
        if warps is not None and (warps & (warps - 1) or warps > _MOST_WARPS):
            raise ArgumentError(f"Config: num_warps must be a power of two up to {_MOST_WARPS}, not {warps}")
        for name, known in _VARIANTS.items():
            if getattr(self, name) not in known:
                raise ArgumentError(f"Config: {name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.all_reduce_distribution not in (None, 0, 1):
            raise ArgumentError(
                "Config: all_reduce_distribution must be 0 (every world_size-th tile) or 1 (a block of tiles), "
                f"not {self.all_reduce_distribution!r}"
            )
        if self.threads_per_warp not in (None, 32, 64):
            raise ArgumentError(f"Config: threads_per_warp must be 32 or 64, not {self.threads_per_warp!r}")
        waves = self.waves_per_eu
        if waves is not None and (isinstance(waves, bool) or not isinstance(waves, int) or waves < 0):
            raise ArgumentError(f"Config: waves_per_eu must be 0 or more, not {waves!r}")
        part, columns = self.all_reduce_ring_slice_n, self.block_size_n or _DEFAULT_BLOCK_N
        if part is not None and (columns % part or part & (part - 1)):
            raise ArgumentError(
                f"Config: all_reduce_ring_slice_n must be a power of two that divides block_size_n={columns}, not "
                f"{part}"
            )
        if self.algorithm is not None and (not isinstance(self.algorithm, str) or not self.algorithm):
            raise ArgumentError(f"Config: algorithm must be a name or None, not {self.algorithm!r}")
        # a repeated call looks its config up: once is enough
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]  # set above, in a frozen object

    def named(self, op: str) -> tuple[str | None, str]:
        """Return the algorithm that this config names for an operation, and by which field; (None, "") if none.

        Raises:
            ArgumentError: `algorithm` and the operation's variant name different ones.
        """
        field = f"{op}_variant"
        variant = getattr(self, field, AUTO)
        if variant == AUTO:
            return self.algorithm, "algorithm" if self.algorithm else ""
        if self.algorithm not in (None, variant):
            raise ArgumentError(f"Config: algorithm={self.algorithm!r} contradicts {field}={variant!r}")
        return variant, field

    def given(self, op: str) -> dict[str, Any]:
        """Return the fields that were given, without those that name algorithms.

        Args:
            op: the operation; fields that speak of others only are left out.
        """
        skipped = {"algorithm", "use_gluon", *_VARIANTS}
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in skipped
            and getattr(self, field.name) != field.default
            and op in _SPEAKS_OF.get(field.name, (op,))
        }
