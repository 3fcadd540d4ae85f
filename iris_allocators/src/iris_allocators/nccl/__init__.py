"""Allocator `nccl`: a heap that kernels reach on other nodes, too; on CPU ranks it is emulated."""
