"""Triton device backend of Iris."""

__version__ = "0.2.0"
