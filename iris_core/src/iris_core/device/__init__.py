"""The context tensor, the status page and the device barrier: what host and kernels share."""
