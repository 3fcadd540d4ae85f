"""Jobs of test_pool: a rank whose kernel does not end, and one whose GPU reports an error."""

import torch

HANG_CYCLES = 60_000_000_000  # about half a minute


def hang():
    torch.cuda._sleep(HANG_CYCLES)
    torch.cuda.synchronize()


def index_out_of_range():
    """An assertion fails inside a kernel; from then on the driver refuses every call of this process."""
    x = torch.zeros(4, device="cuda")
    x[torch.tensor([9], device="cuda")].sum().item()


def add_on_gpu():
    return torch.ones(1000, device="cuda").sum().item()
