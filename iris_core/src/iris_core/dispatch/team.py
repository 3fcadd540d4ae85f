"""The ranks of one group: who they are, how kernels reach their memory, and the memory that they share.

A team is made by its members alone, the first time they call a collective together.  Its regions are symmetric memory
that stays where it is for ever: captured graphs know the addresses.
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from iris_core.device.context_words import Mismatch, MismatchCode, Status, code_of
from iris_core.device.reports import Meaning
from iris_core.errors import HeapExhaustedError, IrisError, UnsupportedError
from iris_core.heap.regions import ALIGNMENT
from iris_core.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.device.reports import KernelReports, Report
    from iris_core.heap.heap import SymmetricHeap
    from iris_core.heap.regions import SystemArea
    from iris_core.types import ContextSpec
    from iris_core.world import World

ELEMENT_TYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "uint16", "uint32",
    "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""torch's names of the types that kernels name by their place here; new ones come at the end."""

MAX_PROGRAMS = 160
"""Programs of one launch that can meet those of the other members."""

_WORD = 8

_SMALL = 32
"""What a group takes of the system area also when half of it is used: this part of it, or less."""

_CONTROL, _MAIL = "control", "mail"
"""Names of regions that are not workspaces."""

MIN_STAGING_NBYTES = 4 << 10
"""A team that cannot have that much workspace has no collectives for tensors off the heap."""


class Step(enum.IntEnum):
    """What a member's host says when those of its team meet while plans are made."""

    PREPARED = 0
    FAILED = 1
    ASKS = 2  # for a region that is new


class StepsDifferError(IrisError):
    """A member asks for a region, and others are not doing the same.

    Args:
        message: for people.
        steps: what each member does, in the team's order.
    """

    def __init__(self, message: str, steps: list[int]) -> None:
        super().__init__(message)
        self.steps = steps


@dataclass(frozen=True, slots=True)
class Region:
    """Symmetric memory of a team.

    Attributes:
        offset_bytes: where it begins, from the beginning of each member's heap.
        tensor: this rank's bytes (uint8).
    """

    offset_bytes: int
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes on each member."""
        return self.tensor.numel()


@dataclass(slots=True)
class Memory:
    """Where teams get memory from, and what else their context has.

    Attributes:
        heap: the heap, open.
        area: its system area.
        limit_nbytes: the largest region that is made without being asked for by size (IRIS_CCL_WORKSPACE).
        spec: what the context tensor says.
        reports: what kernels have reported.
        spare_nbytes: bytes of the heap that stay in one piece for users; HeapExhaustedError where they could not.
    """

    heap: SymmetricHeap
    area: SystemArea
    limit_nbytes: int
    spec: ContextSpec
    reports: KernelReports
    spare_nbytes: int = 0

    def take(self, world: World, members: Sequence[int], nbytes: int, what: str, fill: int | None = 0) -> Region:
        """Make a region for some ranks, filled on all of them: what kernels trust has no other source.

        Collective: every member calls it with the same arguments.  It comes from the system area as long as half of
        that stays for others, then from the heap: for the whole world from what users allocate, for a group from the
        heap's end, or what is left of the area.  UnsupportedError if there is no room.
        """
        region = self._find(world, members, nbytes, what)
        if fill is not None:
            _fill([region], fill)
            world.barrier()  # nobody stores there before it is filled
        return region

    def _find(self, world: World, members: Sequence[int], nbytes: int, what: str) -> Region:
        heap, area = self.heap, self.area
        is_group = len(members) < len(heap.heap_bases)
        of_area = partial(self._of_area, world, nbytes, what)
        has_half = area.used_nbytes(world) + nbytes <= area.nbytes // 2
        if has_half or (is_group and nbytes <= area.nbytes // _SMALL):  # the heap may have large granules
            with contextlib.suppress(UnsupportedError):
                return of_area()
        if self.spare_nbytes and (largest := heap.stats().largest_free) - nbytes < self.spare_nbytes:
            raise HeapExhaustedError(
                f"{what} would leave less than {self.spare_nbytes} bytes of the heap in one piece",
                requested_bytes=nbytes,
                free_bytes=largest,
                largest_free_bytes=largest,
            )
        try:
            if is_group:
                return Region(*heap.take_for_group(world, members, nbytes, what))
            tensor = heap.allocate_unscoped(nbytes, (what, nbytes), ALIGNMENT)
            return Region(heap.offset_of(tensor), tensor)
        except HeapExhaustedError as error:
            if is_group:
                with contextlib.suppress(UnsupportedError):
                    return of_area()
            raise UnsupportedError(f"{what} needs {nbytes} bytes: {error}") from error

    def _of_area(self, world: World, nbytes: int, what: str) -> Region:
        offset = self.area.reserve(world, nbytes, what)
        return Region(self.heap.usable_nbytes + offset, self.area.tensor(offset, nbytes))


class Team:
    """The ranks of one group, as one member sees them.

    Collective: every member makes it, unless `control` is given.

    Attributes:
        members: world ranks, in the group's order.
        rank: this rank's index among them.
        size: how many they are.
        world: for exchanges between their hosts.
        world_rank: this rank in the world of the context.
        base_ptrs: address in this process of each member's heap, in the group's order.
        bases: the same as int64[size] on the device.
        device: torch's name of this rank's device.
        context: the context tensor.
        timeout_ns, status_ptr: bound of waits in kernels, and where they report (`iris_core.device.context_words`).
        control: words by which the programs of portable kernels meet; zero at first.
        max_programs: how many programs can meet there.
        latest: this rank's last call, for messages.
        reports: of this rank's context.
        exhausted: smallest size of memory that could not be had, by name.

    Args:
        members, world, world_rank, context: see above.
        memory: where regions come from.
        control, mail: memory for these regions that all members have already.
    """

    def __init__(
        self,
        members: Sequence[int],
        world: World,
        world_rank: int,
        memory: Memory,
        context: torch.Tensor,
        control: Region | None = None,
        mail: Region | None = None,
    ) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(world_rank)
        self.size = len(self.members)
        self.world = world
        self.world_rank = world_rank
        spec = memory.spec
        self.base_ptrs = tuple(spec.heap_bases[member] for member in self.members)
        self.device = spec.device
        self.bases = torch.tensor(self.base_ptrs, dtype=torch.int64, device=self.device)
        self.context = context
        self.timeout_ns, self.status_ptr = spec.timeout_ns, spec.status_ptr
        self.latest: Any = None
        self.reports = memory.reports
        self._memory = memory
        self._regions: dict[str, list[Region]] = {}
        self._fills: dict[str, int | None] = {}
        self.exhausted: dict[str, int] = {}
        self._constants: dict[tuple[int, ...], torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._warned: set[str] = set()
        if control is None:
            nbytes = control_nbytes(self.size, memory.area.nbytes)
            control = memory.take(world, self.members, nbytes, "a group's collectives")
        self.control = control
        self._mail = mail
        self.max_programs = control.nbytes // (control_words(self.size) * _WORD)

    @property
    def mail(self) -> Region:
        """Memory for messages between two ranks.

        Raises:
            UnsupportedError: this is not the team of the whole world.
        """
        if self._mail is None:
            raise UnsupportedError("messages between two ranks go through the memory of the whole world's team")
        return self._mail

    def tell_step(self, step: Step) -> list[int]:
        """Say how far this member's host is; returns what all say.  Collective: every member calls it."""
        return [each for (each,) in self.world.all_gather_ints([step])]

    def ask(self, what: str) -> None:
        """Make sure that all members ask for the same while they make a plan, and none has failed.

        Collective: every member calls it; `what` is for the message.

        Raises:
            StepsDifferError: a member failed before it came here, or asks for nothing; on those that ask.
        """
        steps = self.tell_step(Step.ASKS)
        if any(step != Step.ASKS for step in steps):
            raise StepsDifferError(f"not every member asks for {what}", steps)

    def warn_once(self, what: str, reason: str) -> None:
        """Log what this group does without, and why; its first member does, once."""
        if self.rank == 0 and what not in self._warned:
            self._warned.add(what)
            logger.warning("group of ranks %s: %s: %s", ", ".join(map(str, self.members)), what, reason)

    def region(self, name: str, nbytes: int, fill: int | None = 0) -> Region:
        """Return symmetric memory of at least this size: the smallest of this name that is large enough, or new one.

        Collective: every member calls it with the same arguments, in the same order with other regions.  Where the
        region is new, no member returns before all have it ready.  The smaller ones stay valid, and the same size gets
        the same region for ever: one member may make a plan again when there are larger regions, and the plans of the
        others know the one of the first time.

        Args:
            name: what it is; each protocol has names of its own.
            nbytes: size in bytes.
            fill: value of every byte at first; None for anything.

        Raises:
            UnsupportedError: there is no room.
            StepsDifferError: a member failed before it came here, or asks for nothing; on those that ask.
        """
        known = self._regions.setdefault(name, [])  # each is larger than those before
        found = next((region for region in known if region.nbytes >= nbytes), None)
        if found is not None:
            return found
        self.ask(f"the workspace {name!r} of a collective")
        region = self._memory.take(self.world, self.members, nbytes, f"workspace {name!r} of a collective", fill)
        known.append(region)
        self._fills[name] = fill
        return region

    def constant(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return numbers as int64 on the device, the same tensor for the same numbers, for ever.

        For few different ones: they are never given back.
        """
        key = tuple(numbers)
        if key not in self._constants:
            self._constants[key] = torch.tensor(key, dtype=torch.int64, device=self.device)
        return self._constants[key]

    def hold(self, memory: torch.Tensor) -> None:
        """Let memory of a plan live as long as the team: a graph knows it."""
        self._held[memory.data_ptr()] = memory

    def failed(self, error: BaseException, *, is_certain: bool = False) -> None:
        """Let the members know that a call has failed on this host; see `KernelReports.host_failed`."""
        if self.size > 1:
            self.reports.host_failed(self.control.offset_bytes, error, is_certain=is_certain)

    def reset(self, more: Callable[[], None]) -> None:
        """Fill all regions again as they were at first, and forget what was reported.

        Collective: every member calls it, when none of their kernels runs and no peer's does.

        Args:
            more: what else is to be reset on each member while no other one goes on.
        """
        self.world.barrier()
        self.reports.forget(self.members, self.control.offset_bytes)
        more()
        _fill([self.control, *([self._mail] if self._mail else [])], 0)
        for name, regions in self._regions.items():
            _fill(regions, self._fills[name])
        self.world.barrier()

    def workspace(self, name: str, nbytes: int, minimum: int = MIN_STAGING_NBYTES, fill: int | None = None) -> Region:
        """Return a region of up to this size, for what can go in pieces; see `region`.

        Collective, like `region`.  It is as large as IRIS_CCL_WORKSPACE and the memory allow.

        Args:
            name, fill: as for `region`.
            nbytes: size in bytes with which it would go in one piece.
            minimum: smallest size that is of any use; a smaller region that is there already is returned if there is
                no room for more.

        Raises:
            UnsupportedError: there is no room for `minimum` bytes.
        """
        limit = max(self._memory.limit_nbytes, _power_of_2(minimum))
        wanted = min(_power_of_2(max(nbytes, minimum)), limit)
        known = self._regions.get(name, [])
        while True:
            have = next((region for region in known if region.nbytes >= min(wanted, nbytes)), None)
            if have is not None:
                return have
            if not known or wanted < self.exhausted.get(name, wanted + 1):
                try:
                    return self.region(name, wanted, fill)
                except UnsupportedError as error:
                    self.exhausted[name] = wanted
                    if not known and wanted // 2 < minimum:
                        raise
                    self.warn_once(f"the workspace {name!r} of collectives is smaller than it might be", str(error))
            wanted //= 2

    def explain_report(self, report: Report, describe: Callable[[int], str]) -> Meaning | None:
        """Say what a report of a member's kernel means, if it is about this team's memory; else None.

        `describe` says what call the number of a kind means.
        """
        place = self._place(report.offset_bytes) if report.rank in self.members else None
        if place is None:
            return None
        if report.part == Mismatch.CODE:
            return _mismatch_meaning(report.words, self, describe)
        name, word = place
        peer, where = None, f"in the workspace {name!r}"
        if name == _CONTROL:
            program, word_of_row = divmod(word, control_words(self.size))
            where = f"word {word_of_row} of program {program}"
            if word_of_row < self.size:
                peer = self.members[word_of_row]
                where = f"where rank {peer} tells program {program} that it has arrived"
        elif sender := report.word(Status.SENDER):
            place_of = self.members.index(report.rank)
            peer = self.members[sender - 1 if sender > 0 else (place_of + sender) % self.size]
            where = f"where the data of rank {peer} arrives, {where}"
        members = self.members if name != _MAIL or peer is None else (report.rank, peer)
        op, call = ("", "a collective") if self.latest is None else (self.latest.op, self.latest.description)
        latest = f", whose last call on rank {self.world_rank} was {call}" if self.latest else ""
        text = f"The word lies {where}, in the collectives of ranks {', '.join(map(str, self.members))}{latest}. "
        return Meaning(members, peer, op, call, text)

    def _place(self, offset_bytes: int) -> tuple[str, int] | None:
        """The region in which a place of the heap lies, and the number of its word there; None if in none."""
        own = {_CONTROL: [self.control], **self._regions, **({_MAIL: [self._mail]} if self._mail else {})}
        for name, regions in own.items():
            for region in regions:
                if 0 <= (distance := offset_bytes - region.offset_bytes) < region.nbytes:
                    return name, distance // _WORD
        return None


def _fill(regions: Sequence[Region], fill: int | None) -> None:
    """Fill a rank's own regions, and wait until that is done."""
    if fill is None:
        return
    for region in regions:
        region.tensor.fill_(fill)
        if region.tensor.device.type != "cpu":
            torch.cuda.current_stream(region.tensor.device).synchronize()


def control_words(size: int) -> int:
    """Words of 64 bits by which one program meets those of the other members, in a team of this size."""
    return 4 * size + 1


def mail_nbytes(area_nbytes: int) -> int:
    """Bytes of the memory for messages between two ranks: an eighth of the system area."""
    return area_nbytes // 8


def control_nbytes(size: int, area_nbytes: int) -> int:
    """Bytes of the control region of a team of this size: at most an eighth of the system area."""
    row = control_words(size) * _WORD
    return min(MAX_PROGRAMS, max(1, area_nbytes // 8 // row)) * row


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _mismatch_meaning(words: Sequence[int], team: Team, describe: Callable[[int], str]) -> Meaning:
    """Put the words of `Mismatch`, from the status words of a report, into words of ours."""
    rank, ours, theirs = (words[each] for each in (Mismatch.RANK, Mismatch.OURS, Mismatch.THEIRS))
    peer, code = team.members[words[Mismatch.PEER]], code_of(words[Mismatch.CODE])
    kinds = words[Mismatch.OUR_KIND], words[Mismatch.THEIR_KIND]
    op, call = (team.latest.op, team.latest.description) if team.latest else ("", "")
    of_ranks = f"the collectives of ranks {', '.join(map(str, team.members))}"
    reset = "ctx.ccl.reset() on all members puts the group back to its beginning."
    if code == MismatchCode.MESSAGE:
        own, other = (
            ELEMENT_TYPES[kind] if 0 <= kind < len(ELEMENT_TYPES) else f"an unknown type ({kind})" for kind in kinds
        )
        text = (
            f"rank {rank} received from rank {peer} and expected {ours} elements of {own}, but {theirs} elements of "
            f"{other} were sent. The output is as it was; later messages are not affected."
        )
        return Meaning((rank, peer), peer, "recv", "recv", text)
    if code == MismatchCode.OVERLAP:
        last_call = f", whose last call on rank {team.world_rank} was {call}," if call else ""
        text = (
            f"two launches of {of_ranks}{last_call} ran at the same time on the device of rank {rank}: two graphs, or "
            "a graph and a call, that no stream orders. Their results are not valid, on any member. Replay graphs and "
            "make calls of one group on one stream, or let one stream wait for the other, or use a group of its own "
            f"for each; {reset}"
        )
    elif code == MismatchCode.SPLITS:
        op = call = "all_to_all"
        text = (
            f"all_to_all in {of_ranks}: rank {rank} takes {ours} elements from rank {peer} (output_split_sizes), which "
            f"gives it {theirs} (input_split_sizes). The smaller number was copied; what the output has is not valid."
        )
    else:
        text = (
            f"in {of_ranks}, rank {rank} and rank {peer} have called differently: on rank {rank}, "
            f"{describe(kinds[0])}; on rank {peer}, {describe(kinds[1])}. Their results are not valid. Let all ranks "
            f"make the same calls in the same order; {reset}"
        )
    return Meaning(team.members, peer, op, call, text)
