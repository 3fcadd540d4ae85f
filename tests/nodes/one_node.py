"""One node of a world that spans hosts: a process of `test_networks`, which has everything imported.

It enters namespaces of its own and forks its ranks; each prints one line of JSON.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
from jobs_node_collectives import collectives_of_all

from iris_core import Iris
from iris_core.errors import IrisError

BOUND_S = 4.0
"""Of exchanges with a node that is lost."""
NEWNS, NEWUTS, NEWPID, NEWNET, MS_PRIVATE, PR_SET_PDEATHSIG = 1 << 17, 1 << 26, 1 << 29, 1 << 30, 1 << 18 | 1 << 14, 1


def rank_main(rank, size, address, port, last):
    """Open a context, use what goes between nodes, and say it; `last` is what is done when a node is lost."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
    said = {"wrong": [wrong for wrong, _ in collectives_of_all(9)]}
    try:
        with Iris("1MiB", device="cpu", barrier_timeout=60.0) as ctx:
            x = ctx.full((4,), float(rank))
            ctx.barrier()
            said |= {"node": ctx.node, "ranks": ctx.node_ranks, "offset": ctx.heap.offset_of(x)}
            said["peers"] = [ctx.as_remote(x, peer)[0].item() for peer in ctx.node_ranks]
            said["sent"] = ctx.broadcast({"from": rank}, src=size - 1)
            try:
                ctx.as_remote(x, next(peer for peer in range(size) if not ctx.is_reachable(peer)))
            except IrisError as error:
                said["refused"] = str(error)
            ctx.ccl.all_reduce(x, x)
            ctx.barrier()
            ctx._world.timeout_s = BOUND_S
            if last == "pause":
                say(said)
                signal.pause()
            while True:
                if last == "call":
                    ctx.ccl.all_reduce(x, x)
                ctx.barrier()
    except IrisError as error:
        said["lost"] = [type(error).__name__, str(error)]
    say(said)


def say(said):
    sys.stdout.write(json.dumps(said) + "\n")  # at once: ranks share the pipe
    sys.stdout.flush()


def main(network, output, name, interface, address, port, size, last, *ranks):
    """Do what `ip netns exec` and `unshare --pid --fork --kill-child --uts --mount-proc` do, then be the node."""
    libc = ctypes.CDLL(None)
    os.dup2(output.fileno(), 1)
    with open(f"/run/netns/{network}") as file:
        assert libc.setns(file.fileno(), NEWNET) == libc.unshare(NEWNS | NEWUTS | NEWPID) == 0
    if os.fork():
        os.wait()
        return
    assert libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == libc.mount(None, b"/", None, MS_PRIVATE, None) == 0
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
    socket.sethostname(name)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    for place, rank in enumerate(ranks):
        if not os.fork():
            os.environ.update(
                RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_RANK=f"{place}", LOCAL_WORLD_SIZE=f"{len(ranks)}"
            )
            os._exit(attempt(rank, size, address, port, last))
    for _ in ranks:
        os.wait()
    os._exit(0)


def attempt(*args):
    try:
        rank_main(*args)
    except BaseException as error:  # noqa: BLE001 - told to the test
        say({"failed": repr(error)})
        time.sleep(1)  # others may have to say more
    return 0
