"""Compile cases, compiling without a GPU, and the self-test of `iris doctor`."""
