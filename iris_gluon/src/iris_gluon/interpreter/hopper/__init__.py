"""Shared memory and asynchronous operations of Hopper: mbarriers, TMA, wgmma."""
