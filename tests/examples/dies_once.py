"""torchrun, but its ranks are forked and not started anew: example 60, of which rank 1 dies once it has saved."""

import os
import signal

import jobs_examples
import torch
from torch.distributed import checkpoint
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

save = checkpoint.save


def save_and_die(*args, **named):
    """Save, which ends on no rank before it is complete; die in the first attempt."""
    save(*args, **named)
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)


def rank_main(steps, folder, nodes):
    os.environ.update(IRIS_NODES=nodes, CUDA_VISIBLE_DEVICES="")  # the server that forks ranks has its own
    torch.set_num_threads(1)
    checkpoint.save = save_and_die
    example = jobs_examples.load(jobs_examples.EXAMPLES / "60_two_nodes.py")
    example.SAVED_EVERY = 1
    return example.main(steps, folder)


def run(steps, folder, nodes, *options):
    config, _, _ = config_from_args(parse_args([*options, __file__]))
    config.start_method = "forkserver"
    print("\n".join(elastic_launch(config, rank_main)(steps, folder, nodes).values()))
