"""Ranks on devices that do not fit together are told so on every rank, before anything is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from tables import table

from iris_core.errors import RankMismatchError
from iris_core.open_context import plan_facts
from iris_core.types import DeviceTarget, DeviceType
from iris_core.world.failures import check_agreement

from .fakes import Hub, ThreadWorld

CPU = DeviceTarget(DeviceType.CPU)
H100, B200 = (DeviceTarget(DeviceType.CUDA, index, arch) for index, arch in ((0, "sm_90"), (1, "sm_100")))
MI300 = DeviceTarget(DeviceType.HIP, 1, "gfx942")


def facts(target: DeviceTarget) -> dict[str, str]:
    """What a rank on this device was opened with."""

    def plugin(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, distribution="iris", version="1")

    allocator = "host" if target.type is DeviceType.CPU else "torch"
    return plan_facts(SimpleNamespace(target=target, allocator=plugin(allocator), backend=plugin("triton")), 1 << 20)


def compare(*targets: DeviceTarget) -> list[BaseException | None]:
    """What each rank gets."""
    hub = Hub(len(targets))
    with ThreadPoolExecutor(len(targets)) as threads:
        futures = [
            threads.submit(check_agreement, ThreadWorld(hub, rank), facts(target))
            for rank, target in enumerate(targets)
        ]
        return [future.exception() for future in futures]


@table(("targets", "lines"), [
    (
        (CPU, H100),
        [
            "device type: cpu on rank 0; cuda on rank 1", "device architecture: any on rank 0; sm_90 on rank 1",
            "allocator: host (iris 1) on rank 0; torch (iris 1) on rank 1",
        ],
    ),
    ((H100, B200, H100), ["device architecture: sm_90 on ranks 0, 2; sm_100 on rank 1"]),
    (
        (H100, MI300),
        ["device type: cuda on rank 0; hip on rank 1", "device architecture: sm_90 on rank 0; gfx942 on rank 1"],
    ),
])  # fmt: skip
def test_different_devices_are_the_same_error_everywhere(targets: tuple[DeviceTarget, ...], lines: list[str]) -> None:
    errors = compare(*targets)
    assert {type(e) for e in errors} == {RankMismatchError}
    (text,) = {str(e) for e in errors}
    assert [line.strip() for line in text.splitlines()[1:]] == lines


def test_devices_of_one_kind_fit_also_if_two_ranks_share_one() -> None:
    other = DeviceTarget(DeviceType.CUDA, 1, "sm_90")
    assert compare(H100, other, H100) == [None] * 3
