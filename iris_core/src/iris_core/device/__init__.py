"""The context tensor, the status page and the device barrier: how host and kernels know of each other."""
