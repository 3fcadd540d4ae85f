"""Rank jobs of the tests of examples."""

import importlib.util
import os
import pathlib
import socket
import sys

from jobs_common import environment

from iris_core.world.rendezvous import divide

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def load(path):
    """The module of an example, anew; its name is not one that can be imported."""
    path = pathlib.Path(path)
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))  # as python does for a script, for `import example_tools`
    sys.modules[spec.name] = module  # where the compiler looks for what it has read
    spec.loader.exec_module(module)
    if training := sys.modules.get("torch_training"):
        training.LAYERS = 4 if training.torch.cuda.is_available() else 2
    return module


def call(path, function, args, device):
    """Do what `iris_core.run` does in a rank: call a function of an example."""
    with environment(IRIS_DEVICE=device):
        return getattr(load(path), function)(*args)


def train(name, steps, port, nodes="", *more):
    """Do what torchrun does in a rank: run an example that trains; with `nodes`, as if the ranks were on several.

    Between these NCCL sends nothing over NVLink or PCIe then.
    """
    host = f"node {divide(nodes, int(os.environ['WORLD_SIZE']))[int(os.environ['RANK'])]}"
    with environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), IRIS_NODES=nodes, NCCL_HOSTID=host):
        return load(EXAMPLES / name).main(steps, *more)


_taken = []  # as long as this process lives, the system gives their ports to nobody who asks for any


def free_port():
    """A port that nobody listens on, and on which only those listen who ask for it."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # and torch does
    taken.bind(("127.0.0.1", 0))
    _taken.append(taken)
    return taken.getsockname()[1]
