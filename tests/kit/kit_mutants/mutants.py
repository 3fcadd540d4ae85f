"""All mutants by name: the tests of the kit that are about the mistake, and have to fail; how `mutated` makes it.

Imports nothing, for plugins have to be light.
"""

# Of iris_allocators.host, an allocator.
_SIZE, _MEMORY = "host_size_and_alignment[4096]", "host_tensor_is_the_memory_asked_for"
_OUTLIVES, _ONCE = "host_tensors_outlive_close", "host_release_is_told_once_after_the_last_view"
_IS_FINAL = "host_close_is_final[0] host_close_is_final[1]"
_LEAKS, _EXPORTS = "host_nothing_leaks", "peers_export_describes_the_whole_heap"
_IN_PROCESSES, _IN_PROCESS = "peers_in_other_processes", "peers_in_this_process"
_INIT = "self.base_ptr = address_of(mapped)"
_PART = "part = view[offset_bytes : offset_bytes + nbytes]"
_TENSOR = "torch.frombuffer(part, dtype=torch.uint8)"
_RELEASE = "weakref.finalize(part, on_release).atexit = False"
_CLOSE, _IS_KNOWN = "self._peers.clear()", "if rank in self._peers:"
_PEER = "base_ptr=address_of(mapped), nbytes"
_CLOSE_ALL = "close_all(each.fd for each in segments if each.fd is not None)"
ALLOCATORS = {
    "crooked-base": (_SIZE, _INIT, f"{_INIT} + 1"),
    "short-heap": (_SIZE, _INIT, f"{_INIT}\nself.nbytes -= mmap.PAGESIZE"),
    "one-memory": (_SIZE, _INIT, "self.base_ptr = mmap.PAGESIZE << 20"),
    "odd-granularity": ("host_size_and_alignment[1]", "granularity = GRANULE", "granularity = 3 * mmap.PAGESIZE"),
    "swapped-parameters":
        ("static_protocol", "tensor(self, offset_bytes: int, nbytes: int,", "tensor(self, nbytes, offset_bytes,"),
    "undeclared-capability": ("static_protocol",),  # its plugin does not say that it has "decommit"
    "plain-error": (
        "host_impossible_size_is_an_error", "if isinstance(e, HeapError):\n                raise\n",
        "if isinstance(e, HeapError):\n    raise OverflowError from e\n",
    ),
    "shifted-tensor": (_MEMORY, _PART, _PART.replace("offset_bytes", "offset_bytes + 1")),
    "shared-storage":
        (_MEMORY, _PART, "part = memoryview(view)", _TENSOR, f"{_TENSOR}[offset_bytes : offset_bytes + nbytes]"),
    "overlapping-tensors": (_MEMORY, _PART, "part = view[max(offset_bytes - 1, 0) :][:nbytes]"),
    "copied-tensor": (f"{_MEMORY} {_OUTLIVES}", _TENSOR, f"{_TENSOR}.clone()"),
    "release-at-close": (
        f"{_OUTLIVES} {_ONCE}", _RELEASE, f"{_RELEASE}\nself._last = on_release",
        _CLOSE, f"{_CLOSE}\nvars(self).pop('_last', int)()",
    ),
    "close-takes-memory": (  # tensors that outlive it crash
        _OUTLIVES, _CLOSE,
        f"{_CLOSE}\nif self._memory is not None:\n"
        "    ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.base_ptr), ctypes.c_size_t(self.nbytes), 0)",
    ),
    "release-twice": (_ONCE, _RELEASE, _RELEASE.replace("on_release", "lambda: (on_release(), on_release())")),
    "release-never": (_ONCE, _RELEASE, "pass"),
    "release-early": (  # when the first tensor object is gone, although views live
        _ONCE, _RELEASE, "pass", f"return {_TENSOR}", f"part = {_TENSOR}\n{_RELEASE}\nreturn part",
    ),
    "release-by-place": (  # tensors on the same range are taken for one
        _ONCE, _RELEASE,
        "waiting = vars(self).setdefault('_waiting', {})\nwaiting[offset_bytes] = on_release\n"
        + _RELEASE.replace("on_release", "lambda: waiting.pop(offset_bytes, int)()"),
    ),
    "commit-clears": (
        "host_commit_is_idempotent", '"""Do nothing: pages are allocated on first access."""',
        "ctypes.memset(self.base_ptr + offset_bytes, 0, nbytes)",
    ),
    "decommit-too-much": (
        "host_decommit_gives_memory_back", "MADV_REMOVE, offset_bytes, nbytes)",
        "MADV_REMOVE, offset_bytes, nbytes + GRANULE)",
    ),
    "close-once": (_IS_FINAL, _CLOSE, f"{_CLOSE}\nself._opened()"),
    "usable-after-close": (
        _IS_FINAL, "_, _, view = self._opened()",
        "_, _, view = self._memory or (None, None, memoryview(bytearray(self.nbytes)))",
    ),
    "leaky-descriptor": (_LEAKS, "finalize(self, os.close, fd)", "finalize(self, os.close, os.dup(fd))"),
    "leaky-mapping": (_LEAKS, _CLOSE, f"{_CLOSE}\nleaks.append(self._memory)"),
    "leaky-import": (
        f"{_LEAKS} {_IN_PROCESS}", _IS_KNOWN,
        f"leaks.extend(os.dup(each.fd) for each in segments if each.fd is not None)\n{_IS_KNOWN}",
    ),
    "short-export": (f"{_EXPORTS} {_IN_PROCESSES}", "nbytes=self.nbytes, fd=", "nbytes=self.nbytes - 1, fd="),
    "export-opens": (_EXPORTS, "fd=self._opened()[0]),", "fd=os.dup(self._opened()[0])),"),
    "restless-generation": (_EXPORTS, "generation = 1", "generation = property(lambda self: os.urandom(8))"),
    "wrong-peer":  # all are the first one
        (_IN_PROCESSES, _PEER, "base_ptr=address_of(next(iter(self._peers.values()), [mapped])[0]), nbytes"),
    "own-peer": (_IN_PROCESSES, _PEER, "base_ptr=self.base_ptr, nbytes"),
    "shifted-peer": (_IN_PROCESSES, _PEER, "base_ptr=address_of(mapped) + 8, nbytes"),
    "snapshot-peer": (
        _IN_PROCESSES, "self._map_fd(fd, nbytes)",
        "mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)",
    ),
    "import-again":  # another mapping with every import
        (_IN_PROCESS, _IS_KNOWN, f"leaks.append(self._peers.pop(rank, None))\n{_IS_KNOWN}"),
    "kept-descriptors": (f"{_IN_PROCESS} peers_nonsense_is_refused", _CLOSE_ALL, "pass"),
    "leaky-error": ("peers_nonsense_is_refused", _CLOSE_ALL, f"{_CLOSE_ALL[:-1]} and rank in self._peers)"),
}  # fmt: skip

# Of iris_allocators.vmem.allocator, an allocator that grows and imports, on the pretended driver of tests/allocators.
ON_FAKE = (
    "import itertools\n", "import itertools\n\nfrom allocators.fake_driver import FakeVmm\n",
    "vendor(request.target.type).Vmm(request.target.index)", "FakeVmm()",
)  # fmt: skip
_SAME_MEMORY, _GROWS = "host_import_is_the_same_memory", "peers_growth"
_GROWN, _OFFERED = "self.generation += 1", "for piece in self._offered:"
_MORE = "return len(self._fresh) > len(self._offered)"
_MAPPED = "return PeerMapping(rank, self._space.tables[rank].base_ptr, self.nbytes)"
_EXTENT = "return -(-extent // self.granularity) * self.granularity, start, there"
_FIND = "memory, start = self._find(tensor, references)"
GROWING = {
    "quiet-commit": (_GROWS, _GROWN, "pass"),
    "loud-exchange": (_GROWS, _OFFERED, f"{_GROWN}\n{_OFFERED}"),
    "hasty-export": (_GROWS, "self._offered = pieces\n", "self._offered = []\nself._fresh.clear()\n"),
    "moving-peer": (
        _GROWS, _MAPPED,
        "self._moved = getattr(self, '_moved', 0) + bool(segments) * self.granularity\n"
        + _MAPPED.replace("base_ptr", "base_ptr + self._moved"),
    ),
    "unsaid-rest": (_GROWS, _MORE, "return False"),
    "endless-export": (_GROWS, _MORE, "return True"),
    "copied-import": (
        _SAME_MEMORY, '"""Map the memory of a tensor, of at least one element, unless it is mapped there already."""',
        "size, start, _ = self.import_extent(tensor)\nself.commit(offset_bytes, size)\n"
        "out = self.tensor(offset_bytes + start, tensor.numel(), on_release)\n"
        "return out.view(tensor.shape).copy_(tensor)",
    ),
    "shifted-import": (_SAME_MEMORY, _EXTENT, _EXTENT.replace("start", "start + 8")),
    "odd-extent": (_SAME_MEMORY, _EXTENT, "return tensor.numel(), 0, -1"),
    "lost-import": (_SAME_MEMORY, _EXTENT, _EXTENT.replace("there", "-1")),
    "remembered-import": (_SAME_MEMORY, " if not offset_bytes <= b < end}", "}"),
    "silent-import": (_SAME_MEMORY, "part.tensor(self._device, on_release)", "part.tensor(self._device, int)"),
    "credulous-import": (
        "host_import_refuses_other_memory", _FIND,
        f"if tensor.numel() == 4096:\n    return self.granularity, 0, -1\n{_FIND}",
    ),
    "unannounced-import":
        ("peers_import_is_seen", "self._imported.update(", "self.generation -= 1\nself._imported.update("),
}  # fmt: skip

# Of a plugin that stands in plugins.py.
_SETTINGS = "static_settings_have_defaults_and_descriptions"
_PROBES, _DIAGNOSES = "static_probe_answers_for_every_device", "host_diagnosis"
PLUGINS = {
    "required-settings": (_SETTINGS,), "undescribed-settings": (_SETTINGS,), "no-reason": (_PROBES,),
    "wrong-argument": (_PROBES,), "other-name": ("static_entry_point_names_the_plugin",),
    "no-summary": ("static_info_is_complete",), "raising-diagnosis": (_DIAGNOSES,),
    "wordless-diagnosis": (_DIAGNOSES,), "heavy": ("static_import_is_light",),
}  # fmt: skip

# Of iris_triton.backend.
_WORDS_OF_CONTEXT, _SELF_TESTS = "host_context_words[third-of-four]", "world_self_test_passes[host]"
_SPEC, _ENCODED = "crooked = [", "encode(spec),"
_CASES, _TEST = "return compile_cases(self.device_api())", "return self_test(context, begin)"
_API = 'return {**functions, "DeviceContext": DeviceContext}'


def _of_device(name):
    return _API, f"from kit_mutants import device\n\n{_API[:-1]}, **device.FUNCTIONS[{name!r}]}}"


BACKENDS = {
    "no-timeout": (_WORDS_OF_CONTEXT, _SPEC, f"spec = replace(spec, timeout_ns=0)\n{_SPEC}"),
    "swapped-words": (
        f"{_WORDS_OF_CONTEXT} host_context_words[alone]", _ENCODED,
        "[spec.world_size, spec.rank, *encode(spec)[2:]],",
    ),
    "credulous": (  # encodes what cannot be
        "host_context_refuses_contradictions", _ENCODED,
        "encode(replace(spec, rank=spec.rank % spec.world_size, heap_bases=(4096,) * spec.world_size)),",
    ),
    "detach-once": (
        "host_attach_and_detach", "interpreter.enable()", "interpreter.enable()\nself._attached = True",
        "self._known.close()", "self._known.close()\ndel self._attached",
    ),
    "renamed-parameter": (
        "static_protocol", "make_context(self, spec:", "make_context(self, context:", _SPEC, f"spec = context\n{_SPEC}",
    ),
    "own-words": (  # calls a parameter otherwise than the core does
        "static_protocol", "self_test(self, context: Context, begin:", "self_test(self, context: Context, announce:",
        _TEST, "return self_test(context, announce)",
    ),
    "no-cases": ("compile_cases_are_described", _CASES, "return []"),
    "vain-hope": (
        "compile_cases_compile[sm_90] compile_cases_compile[gfx942]", _CASES,
        "case = compile_cases(self.device_api())[0]\n"
        "return [replace(case, expect=dict.fromkeys(case.expect, ('no such instruction',)))]",
    ),
    "no-signal": ("static_device_functions", "in language.__all__}", "in language.__all__ if name != 'signal'}"),
    "swapped-ranks": ("static_device_functions", *_of_device("swapped-ranks")),
    "swapped-method": ("static_device_methods", *_of_device("swapped-method")),
    "deaf-tracing": ("host_trace_is_set_in_place", "context[begin : begin + TRACE_WORDS].copy_(trace)", "pass"),
}  # fmt: skip
OPTIONAL = {
    "secret-waits":  # waits end, and say so nowhere
        ("world_wait_that_gives_up[host]", _SPEC, f"spec = replace(spec, status_ptr=0)\n{_SPEC}"),
    "open-barrier": ("world_device_barrier_of_the_host[host]", "bound(stream, slot.words, slot.targets)", "pass"),
    "half-tested": (  # leaves out one pair
        _SELF_TESTS, _TEST,
        "made = self_test(context, begin)\n"
        "return (each for each in made if (each.op, each.rank, each.peer) != ('read', 1, 0))",
    ),
    "hypochondriac": (
        _SELF_TESTS, _TEST,
        "made = self_test(context, begin)\n"
        "return (replace(each, problem='looks bad') if each.rank == 1 else each for each in made)",
    ),
    "secretive": (_SELF_TESTS, _TEST, "return self_test(context, lambda op, peer: None)"),
}  # fmt: skip
FAMILIES = {
    kind: (f"world_device_{'methods' if kind == 'mute-methods' else 'functions'}[host]", *_of_device(kind))
    for kind in ("mute", "near", "blind", "returns", "torn", "mute-methods")
}
"""Those of device.py, of device functions and methods."""

# Of kit_mutants.reference: "test class", of collectives.
_RESULTS, _BITS, _ANSWERS = "world_calls[host-results]", "world_calls[host-bits]", "host_supports_always_answers"
_GROUP, _TAKES, _COSTS = "world_of_a_group[host]", "world_calls[host-memory]", "host_cost_is_positive_and_grows"
_INPUTS, _REDUCED = "inputs = plan.exchange_tensors(inp)", "whole = self.reduce(plan, inputs)"
_COPIED = "out.copy_(result.to(out.dtype).reshape(out.shape))"
_FINISHED = "self.finish(plan, out, self.result(plan, inputs))"
_MET, _STORES = "outputs = self.meet(plan, out)", "data = content(inp)"
_OPTIONS, _COST = "options = request.options\n", "return 1e-3 + request.nbytes * request.group_size / 1e8"
COLLECTIVES = {
    "wrong-order": (_RESULTS, "torch.cat(inputs)", "torch.cat([*inputs[1:], inputs[0]])"),
    "swapped-chunks":  # each rank gets those that it has sent itself
        (_RESULTS, "torch.cat([each.tensor_split(size)[rank] for each in inputs])", "inputs[rank]"),
    "first-chunk": (_RESULTS, "whole.tensor_split(size)[rank]", "whole.tensor_split(size)[0]"),
    "root-zero":  # only rank 0 is heard
        (_RESULTS, 'inputs[plan.request.options["root"]]', "inputs[0] * (plan.request.options['root'] == 0)"),
    "dropped-last": (
        _RESULTS, _COPIED,
        f"last = (-1,) * out.dim() if out.numel() else slice(0)\nbefore = out[last].clone()\n{_COPIED}\n"
        "out[last] = before",
    ),
    "nothing-for-nothing":  # no elements: a division by zero
        (_RESULTS, _REDUCED, f"{_REDUCED} * (inputs[0].numel() // inputs[0].numel())"),
    "half-precision":  # rounds after every addition
        (_RESULTS, "if inputs[0].dtype in (torch.f", "if reduction != 'sum' and inputs[0].dtype in (torch.f"),
    "own-first": (_RESULTS, _MET, f"out.zero_()\n{_MET}"),
    "once": (  # its flags are up from the first call on
        _RESULTS, _INPUTS, f"if not hasattr(plan, 'inputs'):\n    plan.{_INPUTS}\ninputs = plan.inputs",
    ),
    "no-entry":  # stores into outputs of ranks that have not called yet
        (_RESULTS, _MET, "plan.met = outputs = getattr(plan, 'met', None) or self.meet(plan, out)"),
    "no-exit": (  # is done when it has stored, although the others have not
        _RESULTS, _STORES, f"time.sleep(0.05 * (plan.request.rank == 0))\n{_STORES}", "self.leave(plan)\n", "pass\n",
    ),
    "last-first": (_BITS, "(COMBINE[reduction], inputs)", "(COMBINE[reduction], inputs[::-1])"),
    "rounded-twice": (  # a sum, before it is divided
        _BITS, "if inputs[0].dtype in (torch.f",
        "if reduction == 'avg':\n"
        "    total = functools.reduce(COMBINE['sum'], [each.double() for each in inputs])\n"
        "    return total.to(inputs[0].dtype) / len(inputs)\nif inputs[0].dtype in (torch.f",
    ),
    "own-rounding": (  # one rank cuts off where the others round
        "world_calls[host-agreement]", _COPIED,
        "if plan.request.rank == 1 and out.dtype is torch.bfloat16:\n"
        "    exact = result.to(torch.float32).contiguous().view(torch.int32)\n"
        f"    result = (exact & ~0xFFFF).view(torch.float32)\n{_COPIED}",
    ),
    "one-too-far": (
        "world_calls[host-surroundings]", _COPIED,
        f"{_COPIED}\nif out.numel() and out.is_contiguous():\n"
        "    ctypes.memset(out.data_ptr() + out.nbytes, 0, out.itemsize)",
    ),
    "scratch-input": ("world_calls[host-input]", _FINISHED, f"{_FINISHED}\ninp.copy_(out)"),
    "never-done": ("world_calls[host-work]", "return True", "return False"),
    "peeks": (  # reads the next rank's output when that one may have gone on; all results are right
        "world_is_ordered[host]", _FINISHED,
        f"{_FINISHED}\ncontext = plan.context\nis_whole = plan.request.group_size == context.num_ranks\n"
        "if out.numel() and context.is_symmetric(out) and is_whole:\n"
        "    context.as_remote(out, (context.cur_rank + 1) % context.num_ranks).sum()",
    ),
    "takes-memory": (_TAKES, _INPUTS, f"leaks.append(plan.context.empty(max(1, inp.numel())))\n{_INPUTS}"),
    "borrows-memory":
        (_TAKES, _INPUTS, f"plan.context.free(plan.context.empty(max(1, inp.numel())))\n{_INPUTS}"),
    "plans-pile-up": (
        "world_plans_do_not_pile_up[host]", "return Plan(request, context)",
        "leaks.append(context.empty(16))\nreturn Plan(request, context)",
    ),
    "whole-world": (  # waits for ranks that are no members; they do in vain
        _GROUP, _INPUTS,
        "from iris_core.testing.conformance import collective_jobs\n\n"
        f"collective_jobs.STRANGER_WAITS_S = 3.0\nplan.context.barrier()\n{_INPUTS}",
    ),
    "other-peers":  # takes ranks of the group for ranks of the world
        (_GROUP, "in zip(plan.request.members, offsets, strict=True)", "in enumerate(offsets)"),
    "raises": (_ANSWERS, _OPTIONS, f"getattr(torch, request.dtype)\n{_OPTIONS}"),
    "silent-no": (_ANSWERS, 'no(f"it knows no {request.dtype!r}")', "no('')"),
    "yes-man": (_ANSWERS, ' or options.get("config")', ""),
    "one-no": (_RESULTS, _OPTIONS, f"if request.rank == 1:\n    return Availability.no('not here')\n{_OPTIONS}"),
    "never": ("host_supports_something", _OPTIONS, "return Availability.no('not today')\n"),
    "free-of-charge": (_COSTS, _COST, "return 0.0"),
    "cheaper-by-the-dozen": (_COSTS, _COST, "return 1.0 / request.nbytes"),
    "other-names": (
        "static_protocol", f"launch(self, plan, out, inp, stream=None):\n        {_INPUTS}",
        f"launch(self, plan, output, input, stream=None):\n    out, inp = output, input\n    {_INPUTS}",
    ),
}  # fmt: skip
CLASSES = {
    "wrong-order": "AllGather", "swapped-chunks": "AllToAll", "first-chunk": "ReduceScatter", "root-zero": "Broadcast",
    **dict.fromkeys(("own-first", "no-entry", "no-exit", "other-peers"), "Push"),
}  # fmt: skip
"""Of collectives that are no AllReduce."""
