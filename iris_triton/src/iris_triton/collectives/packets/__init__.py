"""Collectives for NVIDIA GPUs: packets that carry their own arrival flag, instead of barriers.

docs/collectives.md says what they are for, and on what they rely.
"""
