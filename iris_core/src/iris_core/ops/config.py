"""How a fused operation is to run: the fields of the reference system, and the algorithm by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from iris_core.errors import ArgumentError

AUTO = "auto"
_VARIANTS = (AUTO, "atomic", "ring", "one_shot", "two_shot", "spinlock")
_CACHE_MODIFIERS = ("", ".ca", ".cg", ".cv")
_POSITIVE = (
    "block_size_m",
    "block_size_n",
    "block_size_k",
    "group_size_m",
    "num_sms",
    "num_xcds",
    "chunk_size",
    "all_reduce_num_rings",
    "num_warps",
    "num_stages",
    "num_fetch_sms",
    "num_pieces",
)
TILE_OF_THE_REFERENCE = {"block_size_m": 256, "block_size_n": 64, "group_size_m": 1}
"""What layout "tiles" means where the config does not say: the reference system's defaults."""

_NAMING = ("algorithm", "all_reduce_variant", "use_gluon")
_ANSWERED = (*_NAMING, "allow_tf32")


@dataclass(frozen=True)
class FusedConfig:
    """How an operation of `ctx.ops` is to run.  Everything that is not given (None) is the algorithm's choice.

    A field that is given is a wish that must be fulfilled: an algorithm that has no use for it is not chosen, and is
    refused when it was named.  The fields are those of the reference system, and some more.  Its defaults (tiles of
    256 x 64, steps of 64) have a meaning here only where they define the result, with layout "tiles".

    Attributes:
        block_size_m, block_size_n, block_size_k: rows and columns of a tile of the product, and the step of the inner
            dimension.  With layout "tiles", the first two also say what a tile is that a rank gets; 256 and 64 if they
            are not given.
        group_size_m: row tiles that are taken together, for locality; with layout "tiles" 1 if it is not given.
        num_sms: number of programs (SMs, CUs); None for the algorithm's choice.
        num_xcds: number of accelerator dies among which tiles are distributed.
        chunk_size: tiles in a row on one die; where Hopper's algorithms send tiles to owners, in a row to one of them.
        cache_modifier_a, cache_modifier_b: how A and B are loaded: "", ".ca", ".cg" or ".cv".
        allow_tf32: whether products of float32 may be of TF32 (10 bits of mantissa) on GPUs; None for what torch is
            set to (`torch.backends.cuda.matmul.fp32_precision`, `torch.set_float32_matmul_precision`), which is not.
        all_reduce_variant: algorithm of matmul_all_reduce, and of nothing else: "atomic", "ring", "one_shot",
            "two_shot" or "spinlock"; "auto" for the library's choice.
        all_reduce_num_rings: number of rings that run side by side.
        num_warps: warps of a program.
        num_stages: stages of software pipelining.
        num_fetch_sms: programs that fetch shards for the others, where an algorithm has such.
        num_pieces: pieces of the product, where an algorithm communicates one beside computing the next.
        use_gluon: only algorithms written in Gluon.
        algorithm: name of an algorithm (`ctx.ops.explain` lists them); None for the library's choice.

    Raises:
        ArgumentError: (a ValueError) a field has a value that cannot be.
    """

    block_size_m: int | None = None
    block_size_n: int | None = None
    block_size_k: int | None = None
    group_size_m: int | None = None
    num_sms: int | None = None
    num_xcds: int | None = None
    chunk_size: int | None = None
    cache_modifier_a: str | None = None
    cache_modifier_b: str | None = None
    allow_tf32: bool | None = None
    all_reduce_variant: str = AUTO
    all_reduce_num_rings: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    num_fetch_sms: int | None = None
    num_pieces: int | None = None
    use_gluon: bool = False
    algorithm: str | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(f"FusedConfig: {name} must be a positive integer, not {value!r}")
        for name in ("cache_modifier_a", "cache_modifier_b"):
            if getattr(self, name) not in (None, *_CACHE_MODIFIERS):
                known = ", ".join(map(repr, _CACHE_MODIFIERS))
                raise ArgumentError(f"FusedConfig: {name} must be one of {known}, not {getattr(self, name)!r}")
        if self.all_reduce_variant not in _VARIANTS:
            raise ArgumentError(
                f"FusedConfig: all_reduce_variant must be one of {', '.join(_VARIANTS)}, "
                f"not {self.all_reduce_variant!r}"
            )
        if self.allow_tf32 is not None and not isinstance(self.allow_tf32, bool):
            raise ArgumentError(f"FusedConfig: allow_tf32 must be True, False or None, not {self.allow_tf32!r}")
        if not isinstance(self.use_gluon, bool):
            raise ArgumentError(f"FusedConfig: use_gluon must be True or False, not {self.use_gluon!r}")
        if self.algorithm is not None and (not isinstance(self.algorithm, str) or not self.algorithm):
            raise ArgumentError(f"FusedConfig: algorithm must be a name or None, not {self.algorithm!r}")
        # a repeated call looks its config up: once is enough
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))

    def __hash__(self) -> int:
        return int(self.__dict__["_hash"])

    def validate(self, world_size: int | None = None) -> None:
        """Check the reference system's rule for rings; everything else was checked when the config was made.

        Calls need it not: rings of this library pass whole tiles on, among any number of ranks.

        Args:
            world_size: ranks that take part.

        Raises:
            ArgumentError: (a ValueError) a ring cannot divide its tiles among so many ranks.
        """
        if world_size is None:
            return
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ArgumentError(f"FusedConfig.validate: world_size must be a positive integer, not {world_size!r}")
        columns = TILE_OF_THE_REFERENCE["block_size_n"] if self.block_size_n is None else self.block_size_n
        if self.all_reduce_variant == "ring" and columns % world_size:
            raise ArgumentError(
                f"FusedConfig: all_reduce_variant='ring' needs a block_size_n that {world_size} ranks divide, "
                f"not {columns}"
            )

    def named(self, op: str) -> tuple[str | None, str]:
        """Return the algorithm that this config names for an operation, and by which field; (None, "") if none.

        Raises:
            ArgumentError: `algorithm` and `all_reduce_variant` name different ones, or the operation has no variants.
        """
        variant = self.all_reduce_variant
        if variant == AUTO:
            return self.algorithm, "algorithm" if self.algorithm else ""
        if op != "matmul_all_reduce":
            raise ArgumentError(
                f"{op}: all_reduce_variant={variant!r} names an algorithm of matmul_all_reduce; name one of {op} by "
                "algorithm="
            )
        if self.algorithm not in (None, variant):
            raise ArgumentError(f"FusedConfig: algorithm={self.algorithm!r} contradicts all_reduce_variant={variant!r}")
        return variant, "all_reduce_variant"

    def given(self) -> dict[str, Any]:
        """Return the fields that were given.

        Without those that name algorithms, and without `allow_tf32`: requests have the answer to that, "tf32".
        """
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in _ANSWERED and getattr(self, field.name) != field.default
        }
