"""The ranks of one group: who they are, how kernels reach their memory, and what algorithms prepare with.

A team is made by its members alone, the first time they call a collective together.
"""

from __future__ import annotations

import concurrent.futures
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iris_core.device.context_words import KIND_BITS, Mismatch, MismatchCode, Status, code_of
from iris_core.device.reports import KernelReports, Meaning, Report
from iris_core.dispatch.config import Config
from iris_core.errors import IrisError, UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.regions import Region
from iris_core.logs import logger
from iris_core.types import CollectiveRequest, ContextSpec
from iris_core.world import World

ELEMENT_TYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "uint16", "uint32",
    "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""torch's names of the types that kernels name by their place here; new ones come at the end."""

MAX_PROGRAMS = 160
"""Programs of one launch that can synchronise with those of the other members."""

_WORD = 8
_CONTROL, _MAIL, _OPS = "control", "mail", "ops"  # regions: two that are no workspaces, and that of fused operations
_OPS_STEP_NBYTES = 16 << 20  # of the latter's size, where a power of two does not fit
_LEAST_NBYTES = 4 << 10
_PART = 8  # of the limit and of the heap, a workspace for pieces whose size differs between members

Scratch = dict[tuple[tuple[int, ...], str], torch.Tensor]
"""Local memory that the plans of one team share, by members and use: their calls run one after the other.

A plan that was given a tensor keeps it, so memory that has become too small lives as long as such plans.
"""


class Step(enum.IntEnum):
    """The step of a member's host while the team makes plans."""

    PREPARED = 0
    FAILED = 1
    ASKS = 2  # for a region that is new


class StepsDifferError(IrisError):
    """A member asks for a region, and others do not; `steps` are the members', in the team's order."""

    def __init__(self, message: str, steps: list[int]) -> None:
        super().__init__(message)
        self.steps = steps


class Team:
    """The ranks of one group, as one member sees them.

    Collective: every member makes it, unless they are all ranks in their order, which have its memory already.

    Args:
        opened: the parts of the context.
        reserved: of the team of all ranks: memory for control words and mail.
    """

    def __init__(
        self, members: Sequence[int], world: World, context: torch.Tensor, opened: Any, limit_nbytes: int,
        reserved: tuple[Region, ...],
    ) -> None:  # fmt: skip
        spec: ContextSpec = opened.spec
        self.members = tuple(members)  #: world ranks, in the group's order
        self.size = len(self.members)  #: how many they are
        self.rank = self.members.index(spec.rank)  #: this rank's index among them
        self.world_rank = spec.rank  #: this rank in the world of the context
        self.world = world  #: for exchanges between their hosts
        #: whether they are on several nodes: then no memory of theirs is mapped by all, and they get none
        self.spans_nodes = world.spans_nodes
        self.device = spec.device  #: torch's name of this rank's device
        self.context = context  #: the context tensor
        #: address in this process of each member's heap, in the group's order
        self.base_ptrs = tuple(spec.heap_bases[member] for member in self.members)
        #: the same as int64[size] on the device
        self.bases = lasting(lambda: torch.tensor(self.base_ptrs, dtype=torch.int64, device=self.device))
        #: where the heaps of all ranks are reached at once (`iris_triton.language.multimem`); 0: nowhere
        self.multicast_base: int = opened.heap.multicast_base
        self.timeout_ns = spec.timeout_ns  #: bound of waits in kernels
        self.status_ptr = spec.status_ptr  #: where they report (`iris_core.device.context_words`)
        self.latest: Any = None  #: this rank's last call, for messages
        self.reports: KernelReports = opened.reports  #: of this rank's context
        self.exhausted: dict[str, int] = {}  #: smallest size of memory that could not be had, by name
        self._heap: SymmetricHeap = opened.heap
        self.limit_nbytes = limit_nbytes  #: of a workspace for what can go in pieces (IRIS_CCL_WORKSPACE)
        self._held: dict[int, torch.Tensor] = {}
        self._warned: set[str] = set()
        own: tuple[Region, ...] = reserved if self.members == tuple(range(len(spec.heap_bases))) else ()
        if not own and self.spans_nodes:
            own = (Region(0, torch.empty(0, dtype=torch.uint8, device=self.device)),)
        elif not own:
            nbytes = control_nbytes(self.size, self._heap.system_area.nbytes)
            own = (self._heap.take_region(world, self.members, nbytes, "a group's collectives"),)
        #: words by which the programs of portable kernels synchronise; zero at first
        self.control = own[0]
        self._regions = {name: [region] for name, region in zip((_CONTROL, _MAIL), own, strict=False)}
        #: how many programs can synchronise there
        self.max_programs = self.control.tensor.numel() // (control_words(self.size) * _WORD)

    @property
    def mail(self) -> Region:
        """Memory for messages between two ranks; UnsupportedError if this is not the team of the whole world."""
        if _MAIL not in self._regions:
            raise UnsupportedError("messages between two ranks go through the memory of the whole world's team")
        return self._regions[_MAIL][0]

    def tell_step(self, step: Step) -> list[int]:
        """Exchange the step of this member's host; return those of all.  Collective: every member calls it."""
        return [each for (each,) in self.world.all_gather_ints([step])]

    def ask(self, what: str) -> None:
        """Check that all members ask for the same while they make a plan, and none has failed.

        Collective: every member calls it; `what` is for the message.

        Raises:
            StepsDifferError: a member failed before it came here, or asks for nothing; on those that ask.
        """
        steps = self.tell_step(Step.ASKS)
        if any(step != Step.ASKS for step in steps):
            raise StepsDifferError(f"not every member asks for {what}", steps)

    def warn_once(self, what: str, reason: str) -> None:
        """Log a restriction of this group with its reason: once, on its first member."""
        if self.rank == 0 and what not in self._warned:
            self._warned.add(what)
            logger.warning("group of ranks %s: %s: %s", ", ".join(map(str, self.members)), what, reason)

    def region(self, name: str, nbytes: int, fill: int | None = 0) -> Region:
        """Return symmetric memory of at least this size: the smallest of this name that is large enough, or new one.

        Collective: every member calls it with the same arguments, in the same order with other regions.  Where the
        region is new, no member returns before all have it ready.  The smaller ones stay valid, and the same size
        always gets the same region: one member may make a plan again when there are larger regions, and the plans of
        the others know the first one.

        Args:
            name: what it is; each protocol has names of its own.
            nbytes: size in bytes.
            fill: value of every byte at first; None for anything.

        Raises:
            UnsupportedError: memory is exhausted; or the members are on several nodes.
            StepsDifferError: a member failed before it came here, or asks for nothing; on those that ask.
        """
        if self.spans_nodes:
            raise UnsupportedError(f"workspace {name!r} of {self._name}: they are on several nodes")
        known = self._regions.setdefault(name, [])  # each is larger than those before
        if (found := next((region for region in known if region.nbytes >= nbytes), None)) is not None:
            return found
        what = f"workspace {name!r} of a collective"
        self.ask(f"the {what}")
        region = self._heap.take_region(self.world, self.members, nbytes or _WORD, what, fill)
        known.append(region)
        return region

    def hold(self, memory: torch.Tensor) -> None:
        """Keep a plan's memory as long as the team: a captured graph uses it."""
        self._held[memory.data_ptr()] = memory

    def reset(self, more: Callable[[], None]) -> None:
        """Fill all regions again as they were at first, forget what was reported, and reset `more`.

        Collective: every member calls it, when none of their kernels runs and no peer's does.
        """
        self.world.barrier()
        self.reports.forget(self.members)
        more()
        for regions in self._regions.values():
            for region in regions:
                region.clear()
        self.world.barrier()

    def workspace(self, name: str, nbytes: int | None, minimum: int = _LEAST_NBYTES, fill: int | None = None) -> Region:
        """Return a region of up to this size, for what can go in pieces; see `region`.

        Collective, like `region`.  It is as large as IRIS_CCL_WORKSPACE and the memory allow.

        Args:
            name, fill: as for `region`.
            nbytes: size in bytes with which it would go in one piece; None if that differs between members, and is
                not worth an exchange.
            minimum: smallest size that is of any use; UnsupportedError if not even that is left.
        """
        limit = max(self.limit_nbytes, _power_of_2(minimum))
        if nbytes is None:
            nbytes = min(limit, self._heap.usable_nbytes) // _PART
        wanted = min(_power_of_2(max(nbytes, minimum)), limit)
        known = self._regions.get(name, [])
        while True:
            if (have := next((each for each in known if each.nbytes >= min(wanted, nbytes)), None)) is not None:
                return have
            if not known or wanted < self.exhausted.get(name, wanted + 1):
                try:
                    return self.region(name, wanted, fill)
                except UnsupportedError as error:
                    self.exhausted[name] = wanted
                    if wanted <= minimum:
                        raise
                    self.warn_once(f"the workspace {name!r} of collectives is smaller than it might be", str(error))
            elif wanted <= minimum:
                raise UnsupportedError(f"the heap has no {wanted} bytes left for workspace {name!r} of {self._name}")
            wanted = max(wanted // 2, minimum)

    def explain_report(self, report: Report, describe: Callable[[int], str]) -> Meaning | None:
        """Explain a report of a member's kernel; None if it is not about this team's memory.

        `describe` returns a text for the number of a request.
        """
        at = report.offset_bytes
        regions = [(name, region) for name, each in self._regions.items() for region in each]
        places = ((name, at - each.offset_bytes) for name, each in regions if 0 <= at - each.offset_bytes < each.nbytes)
        name, distance = next(places, ("", 0))
        if not name or report.rank not in self.members:
            return None
        if report.part == Mismatch.CODE:
            return self._mismatch(report.words, describe)
        peer, where = None, f"in the workspace {name!r}"
        if name == _CONTROL:
            program, word_of_row = divmod(distance // _WORD, control_words(self.size))
            where = f"word {word_of_row} of program {program}"
            if word_of_row < self.size:
                peer = self.members[word_of_row]
                where = f"where rank {peer} signals program {program} that it has arrived"
        elif sender := report.word(Status.SENDER):
            place_of = self.members.index(report.rank)
            peer = self.members[sender - 1 if sender > 0 else (place_of + sender) % self.size]
            where = f"where the data of rank {peer} arrives, {where}"
        members = self.members if name != _MAIL or peer is None else (report.rank, peer)
        op, call, latest = self._last_call()
        text = f"The word lies {where}, in {self._name}{latest}. "
        return Meaning(members, peer, op, call or "a collective", text)

    @property
    def _name(self) -> str:
        return f"the collectives of ranks {', '.join(map(str, self.members))}"

    def _last_call(self) -> tuple[str, str, str]:
        """Operation and description of this rank's last call, and a clause that names it; empty before the first."""
        if not self.latest:
            return "", "", ""
        call = self.latest.description
        return self.latest.op, call, f", whose last call on rank {self.world_rank} was {call}"

    def _mismatch(self, words: Sequence[int], describe: Callable[[int], str]) -> Meaning:
        """Explain the words of `Mismatch`, from the status words of a report."""
        rank, ours, theirs = (words[each] for each in (Mismatch.RANK, Mismatch.OURS, Mismatch.THEIRS))
        peer, code = self.members[words[Mismatch.PEER]], code_of(words[Mismatch.CODE])
        kinds = words[Mismatch.OUR_KIND], words[Mismatch.THEIR_KIND]
        members, (op, call, latest) = self.members, self._last_call()
        reset = "ctx.ccl.reset() on all members puts the group back to its beginning."
        if code == MismatchCode.MESSAGE:
            members, op, call, types = (rank, peer), "recv", "recv", dict(enumerate(ELEMENT_TYPES))
            own, other = (types.get(kind, f"an unknown type ({kind})") for kind in kinds)
            text = (
                f"rank {rank} received from rank {peer} and expected {ours} elements of {own}, but {theirs} elements "
                f"of {other} were sent. The output is as it was; later messages are not affected."
            )
        elif code == MismatchCode.SPLITS:
            op = call = "all_to_all"
            does = (
                f"takes {ours} elements from rank {peer} (output_split_sizes), which gives it {theirs} "
                "(input_split_sizes). The smaller number was copied; what the output has is not valid.",
                f"is to give rank {peer} {theirs} rows (input_split_sizes), but its input has {ours} left for it. They "
                "were sent; the result is not valid.",
                f"gets {theirs} rows from all members (their input_split_sizes), but its output has {ours}. The "
                "others were left out; the result is not valid.",
            )
            text = f"all_to_all in {self._name}: rank {rank} {does[kinds[0]]}"
        elif code == MismatchCode.OVERLAP:
            text = (
                f"two launches of {self._name}{latest}{latest and ','} ran at the same time on the device of rank "
                f"{rank}: two graphs, or a graph and a call, that no stream orders. Their results are not valid, on "
                "any member. Replay graphs and make calls of one group on one stream, or let one stream wait for the "
                f"other, or use a group of its own for each; {reset}"
            )
        else:
            parts = [divmod(kind, 1 << KIND_BITS) for kind in kinds]
            own, other = (describe(kind) + f", its output at byte {at} of the heap" * (at > 0) for at, kind in parts)
            text = (
                f"in {self._name}, rank {rank} and rank {peer} have called differently: on rank {rank}, "
                f"{own}; on rank {peer}, {other}. Their results are not valid. Let all "
                f"ranks make the same calls in the same order; {reset}"
            )
        return Meaning(members, peer, op, call, text)


def control_words(size: int) -> int:
    """Words of 64 bits by which one program synchronises with those of the other members, in a team of this size."""
    return 4 * size + 1


def control_nbytes(size: int, area_nbytes: int) -> int:
    """Bytes of the control region of a team of this size: at most an eighth of the system area."""
    row = control_words(size) * _WORD
    return min(MAX_PROGRAMS, max(1, area_nbytes // 8 // row)) * row


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass
class Host:
    """What `prepare` of a `FusedOperation` gets, and of what `composes`: the team, memory, and the collectives."""

    _serve: Callable[..., Any]
    team: Team  #: the members
    _scratch: Scratch
    processors: int  #: multiprocessors (SMs, CUs) of the device, of the smallest one of all ranks; on the CPU 1
    _together: bool = True
    #: the world of all that wait if one of them is lost: of the operation that this is a part of
    whole: World | None = None

    def collective(self, request: CollectiveRequest | None, config: Config | None = None) -> Any:
        """Return the `Bound` of a collective, whose `launch` runs it as a part of an operation.

        It may be one of some of the members: they have regions, flags and process groups for the parts of this team's
        operations.  A `config` may name the algorithm.

        Collective: every member calls it, each with the request of the group that it is in; None for none.  Where it
        fails in one group, the others learn that at the next step of the preparation.
        """
        is_part = request is None or request.members != self.team.members
        if is_part and self._together:
            self.team.ask("the collectives that are parts of another one")
        return None if request is None else self._serve(request, config, within=self.team)

    def symmetric(self, nbytes: int) -> Region | None:
        """Return memory of at least this size that peers can reach, at the same place on all; None if it is exhausted.

        The plans of one team share it: what a call left there is lost at the next one.

        There is none where the members are on several nodes.

        Collective: every member calls it with the same size, and gets the same answer.
        """
        if self.team.spans_nodes:
            return None
        exhausted = self.team.exhausted  # asking again would be an exchange that the others may not take part in
        for size in (rounded(nbytes), -(-nbytes // _OPS_STEP_NBYTES) * _OPS_STEP_NBYTES):
            if size < exhausted.get(_OPS, size + 1):
                try:
                    return self.team.region(_OPS, size, fill=None)
                except UnsupportedError:
                    exhausted[_OPS] = size
        reason = f"there is no memory for {nbytes} bytes; open the context with a larger heap_size"
        self.team.warn_once("fused operations do without memory that peers reach", reason)
        return None

    def scratch(self, nbytes: int, what: str = "") -> torch.Tensor:
        """Return local memory of at least this size (uint8), which the plans of one team share.

        It is the same as before if that is enough.  Two names, of `what` they are for, never share memory.
        """
        key = self.team.members, f"{self.team.world.name}:{what}"
        tensor = self._scratch.get(key)
        if tensor is None or tensor.numel() < nbytes:
            tensor = lasting(lambda: torch.empty(rounded(nbytes), dtype=torch.uint8, device=self.team.device))
            self._scratch[key] = tensor
        return tensor


def lasting(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor that outlives the call in which `make` makes it.

    A warm-up of `torch.compile(mode="reduce-overhead")` lets its thread allocate among the tensors of a graph, where
    nothing else may stay: `make` runs in another thread, on the same stream.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not is_used or torch.cuda.is_current_stream_capturing():
        return make()
    stream = torch.cuda.current_stream()

    def run() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def rounded(nbytes: int) -> int:
    """Return a power of two, at least 256: growing calls leave no more unused than they use at last."""
    return max(256, _power_of_2(nbytes))
