"""The machine: Python, CPUs, memory, and what processes need in order to share memory."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from pathlib import Path

from iris_core.diagnosis import Finding, Verdict

SMALL_SHM_NBYTES = 256 << 20
"""Below this, /dev/shm is as small as a container's default (64 MiB), and NCCL may fail."""

FEW_FILES = 1024
"""Open files that a rank may need: the allocator `vmem` exchanges up to 256 descriptors at a time."""


def examine_host(root: Path = Path("/")) -> list[Finding]:
    """Examine the machine.

    Args:
        root: where /proc, /dev and so on are; for tests.
    """
    return [*_machine(), *_memory(root), *_sharing(), *_limits(root), *_container(root)]


def _machine() -> list[Finding]:
    on = Finding("platform", Verdict.OK, platform.platform())
    if platform.system() != "Linux":
        on = Finding("platform", Verdict.BROKEN, f"{platform.platform()}: Iris needs Linux")
    count = os.cpu_count()
    usable = f"{len(os.sched_getaffinity(0))} usable of {count}" if hasattr(os, "sched_getaffinity") else str(count)
    return [
        Finding("python", Verdict.OK, f"{platform.python_version()} at {sys.executable}"),
        on,
        Finding("CPUs", Verdict.OK, usable),
    ]


def _memory(root: Path) -> list[Finding]:
    findings = []
    try:
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        findings.append(Finding("memory", Verdict.OK, _gib(nbytes), {"nbytes": nbytes}))
    except (OSError, ValueError) as error:
        findings.append(Finding("memory", Verdict.NOTE, f"unknown: {error}"))
    try:
        shm = os.statvfs(root / "dev/shm")
    except OSError as error:
        text = f"{error.strerror}: NCCL may want it; Iris does not"
        return [*findings, Finding("/dev/shm", Verdict.NOTE, text)]
    total, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    text, verdict = f"{_gib(total)}, {_gib(free)} free", Verdict.OK
    if free < SMALL_SHM_NBYTES:
        verdict = Verdict.NOTE
        text += "; NCCL may fail with so little: docker run --shm-size=1g, or --ipc=host.  Iris itself does not use it"
    return [*findings, Finding("/dev/shm", verdict, text, {"nbytes": total, "free_bytes": free})]


def _sharing() -> list[Finding]:
    """Try what ranks do with each other: memory files, and descriptors sent over a socket with an abstract name."""
    if not hasattr(os, "memfd_create"):
        return [Finding("memfd", Verdict.BROKEN, "this Python has no os.memfd_create: CPU ranks cannot share memory")]
    try:
        memory = os.memfd_create("iris-doctor")
    except OSError as error:
        why = f"memfd_create: {error.strerror}: CPU ranks cannot share memory"
        return [Finding("memfd", Verdict.BROKEN, f"{why}; a seccomp profile may forbid it")]
    findings = [Finding("memfd", Verdict.OK, "works")]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(b"\0iris-doctor-" + os.urandom(16).hex().encode())
            server.listen(1)
            client.connect(server.getsockname())
            accepted, _ = server.accept()
            with accepted:
                socket.send_fds(client, [b"x"], [memory])
                _, received, _, _ = socket.recv_fds(accepted, 1, 1)
        for fd in received:
            os.close(fd)
        if not received:
            raise OSError(0, "the descriptor did not arrive")
    except OSError as error:
        text = f"cannot be sent between processes ({error.strerror}): allocators 'host' and 'vmem' need it"
        findings.append(Finding("descriptors", Verdict.BROKEN, f"{text}; a security policy may forbid it"))
    else:
        findings.append(Finding("descriptors", Verdict.OK, "can be sent between processes"))
    finally:
        os.close(memory)
    return findings


def _limits(root: Path) -> list[Finding]:
    findings = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        text = f"only {soft}: allocator 'vmem' may run out of descriptors; ulimit -n {min(65536, hard)}"
        findings.append(Finding("open files", Verdict.NOTE, text))
    else:
        findings.append(Finding("open files", Verdict.OK, "unlimited" if soft == resource.RLIM_INFINITY else str(soft)))
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        text = f"limited to {_gib(addresses)}: a rank maps the heaps of all ranks; ulimit -v unlimited"
        findings.append(Finding("addresses", Verdict.NOTE, text))
    try:
        strict = (root / "proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        strict = False  # not Linux's /proc: nothing to warn of
    if strict:
        text = "vm.overcommit_memory=2: a sparse heap may be refused; choose a smaller heap_size, or set it to 0"
        findings.append(Finding("overcommit", Verdict.NOTE, text))
    return findings


def _container(root: Path) -> list[Finding]:
    kind = container_kind(root)
    if not kind:
        return []
    text = (
        f"{kind}: all ranks must be in this one.\n"
        "Handles and descriptors reach ranks in other containers of the host only if these share namespaces: "
        "docker run --ipc=host --pid=host --network=host"
    )
    return [Finding("container", Verdict.NOTE, text, {"kind": kind})]


def container_kind(root: Path = Path("/")) -> str:
    """Return what kind of container this process is in ("docker", "podman", ...); empty if it seems to be in none."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".singularity.d").exists():
        return "apptainer"
    try:
        groups = (root / "proc/1/cgroup").read_text()
    except OSError:
        return ""
    for word, kind in (("kubepods", "kubernetes"), ("docker", "docker"), ("containerd", "containerd"), ("lxc", "lxc")):
        if word in groups:
            return kind
    return ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
