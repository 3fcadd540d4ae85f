"""Allocator `vmem`: address space reserved once, memory created, mapped and given back by granules."""
