"""Memory accesses of kernels: addresses, and which of them a kernel may read and write."""
