"""torchrun, but its ranks are forked and not started anew: example 60, of which rank 3 dies once it has saved."""

import multiprocessing
import os
import signal
import sys

import jobs_examples
from torch.distributed import checkpoint
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

save = checkpoint.save


def save_and_die(*args, **named):
    """Save, which ends on no rank before it is complete; die in the first attempt."""
    save(*args, **named)
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("3", "0"):
        os.kill(os.getpid(), signal.SIGKILL)


def rank_main(steps, folder):
    checkpoint.save = save_and_die
    return jobs_examples.load(jobs_examples.EXAMPLES / "60_two_nodes.py").main(steps, folder)


if __name__ == "__main__":
    steps, folder, *options = sys.argv[1:]
    config, _, _ = config_from_args(parse_args([*options, __file__]))
    config.start_method = "forkserver"
    multiprocessing.set_forkserver_preload(["torch_training", "dies_once"])
    print("\n".join(elastic_launch(config, rank_main)(int(steps), folder).values()))
