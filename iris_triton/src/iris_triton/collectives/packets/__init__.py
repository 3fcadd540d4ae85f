"""Collectives for NVIDIA GPUs: packets that carry the proof of their own arrival, instead of barriers.

docs/collectives.md says what they are for, and on what they rely.
"""
