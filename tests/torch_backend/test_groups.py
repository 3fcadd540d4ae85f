"""Groups of backend "iris" on CPU ranks: splits, meshes, several calls at a time, events and memory."""

import copy
import pickle

import jobs_groups as jobs
import pytest
import torch

from iris_core.torch_backend import Options
from iris_core.torch_backend.adapters import IS_BACKEND


@pytest.mark.parametrize("is_bound", [False, True], ids=["", "device_id"])
def test_groups_of_all_kinds(on_ranks, is_bound):
    assert on_ranks(jobs.groups_of_all_kinds, 4, is_bound) == [[]] * 4


def test_groups_that_torch_examines(on_ranks):
    assert on_ranks(jobs.debugged, 3) == [([3.0, 3.0], 3)] * 3


@pytest.mark.skipif(not IS_BACKEND, reason="before torch 2.14 a group in Python takes the place of a mixed one")
def test_groups_of_two_backends_and_with_hooks(on_ranks):
    assert on_ranks(jobs.beside_another_backend, 3) == [[]] * 3


def test_what_a_group_refuses(on_ranks):
    assert on_ranks(jobs.what_a_group_refuses, 3) == [[]] * 3


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",)], ids=["iris", "gloo"])
def test_several_at_a_time_are_as_gloos(on_ranks, devices):
    assert on_ranks(jobs.several_at_a_time, 3, devices) == [[]] * 3


@pytest.mark.parametrize("profiler", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_events_are_as_gloos(on_ranks, profiler):
    assert on_ranks(jobs.events, 2, profiler) == [[]] * 2


def test_memory_of_the_group(on_ranks):
    for is_equal, taken, is_right in on_ranks(jobs.memory_of_the_group, 4):
        assert is_equal
        assert is_right
        assert taken[1:] == [taken[1]] * 3  # what the first steps have made is used again
        assert taken[0][0] > 0
        assert all(is_on_heap for _, is_on_heap in taken)


def test_options_are_copied_with_all_that_they_say():
    options = Options(heap_size="8MiB", devices=("cpu",), deterministic=True)
    assert copy.deepcopy(options) == pickle.loads(pickle.dumps(options)) == options != Options()
