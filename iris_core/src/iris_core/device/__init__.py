"""What kernels see and report: the context tensor, the status page, the device barrier."""
