"""CPU executor: runs unmodified Triton kernels on CPU tensors."""
