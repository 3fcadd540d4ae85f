"""One node of a world that spans hosts: the program that `test_networks` starts in namespaces of its own.

It forks its ranks, with everything imported; each prints one line of JSON.
"""

import json
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

from iris_core import Iris
from iris_core.errors import IrisError


def rank_main(rank, size, address, port):
    """Open a context, use what goes between nodes, and say what the end of the store's process looks like."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
    with Iris("1MiB", device="cpu", barrier_timeout=60.0) as ctx:
        x = ctx.full((4,), float(rank))
        ctx.barrier()
        said = {"node": ctx.node, "ranks": ctx.node_ranks, "offset": ctx.heap.offset_of(x)}
        said["peers"] = [ctx.as_remote(x, peer)[0].item() for peer in ctx.node_ranks]
        said["sent"] = ctx.broadcast({"from": rank}, src=size - 1)
        dist.all_reduce(x)
        said["sum"] = x.tolist()
        try:
            ctx.as_remote(x, size - 1 if rank == 0 else 0)
        except IrisError as error:
            said["refused"] = str(error)
        if rank == 0:  # it has the store
            ctx.barrier()
            print(json.dumps(said), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ctx.barrier()  # rank 0 may be gone before it is over here
            ctx.barrier()
        except IrisError as error:
            said["lost"] = [type(error).__name__, str(error)]
    print(json.dumps(said), flush=True)


def main():
    name, interface, address, port, size, *ranks = sys.argv[1:]
    socket.sethostname(name)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    children = []
    for place, rank in enumerate(map(int, ranks)):
        if child := os.fork():
            children.append(child)
            continue
        os.environ.update(LOCAL_RANK=str(place), LOCAL_WORLD_SIZE=str(len(ranks)), RANK=str(rank), WORLD_SIZE=size)
        os._exit(attempt(rank, int(size), address, int(port)))
    for child in children:
        os.waitpid(child, 0)


def attempt(*args):
    try:
        rank_main(*args)
    except BaseException as error:  # noqa: BLE001 - told to the test
        print(json.dumps({"failed": repr(error)}), flush=True)
        time.sleep(1)  # others may have to say more
    return 0


if __name__ == "__main__":
    main()
