"""Allocators for the symmetric heap of Iris; found through the entry-point group `iris.allocators`."""

__version__ = "0.2.0"
