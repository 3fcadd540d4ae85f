"""The SHMEM cases of RMARaceBench as Triton kernels of ours: what each program does, and the published verdict.

(Schwitanski, Jenke, Klotz, Müller: RMARaceBench: A Microbenchmark Suite to Evaluate Race Detection Tools for RMA
Programs, SC-W 2023; https://github.com/RWTH-HPC/RMARaceBench, directory SHMEM, whose titles are kept.)

A line of `TABLE` is a title, which ends with the verdict, and what programs do: `0` is the only thread of PE 0, `0.1` a
second one.  `A` and `B` stand before the two operations that are in conflict.  Operations are at the variable `remote`
of PE 1 and the own variable `local`, unless they name others.

What OpenSHMEM may carry out later (a put, its non-blocking operations, atomics without a result) is done by a program
of its own here, as by a network; `quiet`, and for puts `fence`, wait for it.  `barrier` is shmem_barrier_all, `sync`
shmem_sync_all, which waits for no operation.  `post` and `await` stand for what orders OpenMP's threads; sleeps, which
make a schedule probable, are relaxed signals (`nudge`, `linger`), which order nothing.  Of `misc` the access of the
second program takes the way that the title names.
"""

import itertools
import re

import torch
import triton
import triton.language as tl
from corpus import kernel, launch
from kernel_text import kernel_of

TABLE = """
conflict/001-putnbi-load-local-no                | 0: putnbi; load local
conflict/002-putnbi-store-local-yes              | 0: A putnbi; B store local
conflict/003-putnbi-putnbi-local-no              | 0: putnbi; putnbi remote@0
conflict/004-getnbi-load-local-yes               | 0: A getnbi; B load local
conflict/005-getnbi-store-local-yes              | 0: A getnbi; B store local
conflict/006-getnbi-putnbi-local-yes             | 0: A getnbi; B putnbi remote2
conflict/007-getnbi-getnbi-local-yes             | 0: A getnbi; B getnbi
conflict/008-put_signal_nbi-store-local-yes      | 0: A put_signal_nbi; B store local
conflict/009-put_signal_nbi-load-local-no        | 0: put_signal_nbi; load local
conflict/010-atomicfetchnbi-store-local-yes      | 0: A fetchnbi; B store local
conflict/011-atomicfetchnbi-load-local-yes       | 0: A fetchnbi; B load local
conflict/012-atomicfetchincnbi-store-local-yes   | 0: A incnbi; B store local
conflict/013-atomicfetchincnbi-load-local-yes    | 0: A incnbi; B load local
conflict/014-atomiccompareswapnbi-load-local-yes | 0: A casnbi; B load local
conflict/015-atomiccompareswapnbi-store-local-yes| 0: A casnbi; B store local
conflict/016-get-load-remote-no                  | 0: get | 1: load remote
conflict/017-get-get-remote-no                   | 0: get | 2: get
conflict/018-get-store-remote-yes                | 0: A get | 1: B store remote
conflict/019-get-put-remote-yes                  | 0: A get | 2: B put
conflict/020-get-atomicfetch-remote-no           | 0: get | 2: fetch
conflict/021-get-atomicset-remote-yes            | 0: A get | 2: B set
conflict/022-put-load-remote-yes                 | 0: A put | 1: B load remote
conflict/023-put-store-remote-yes                | 0: A put | 1: B store remote
conflict/024-put-put-remote-yes                  | 0: A put | 2: B put
conflict/025-put-atomicfetch-remote-yes          | 0: A put | 2: B fetch
conflict/026-put-atomicset-remote-yes            | 0: A put | 2: B set
conflict/027-atomicset-load-remote-yes           | 0: A set | 1: B load remote
conflict/028-atomicset-store-remote-yes          | 0: A set | 1: B store remote
conflict/029-atomicset-atomicset-remote-no       | 0: set | 2: set
conflict/030-atomicset-atomicfetch-remote-no     | 0: set | 2: fetch
conflict/031-atomicfetch-atomicfetch-remote-no   | 0: fetch | 2: fetch
conflict/032-atomicfetch-load-remote-no          | 0: fetch | 1: load remote
conflict/033-atomicfetch-store-remote-yes        | 0: A fetch | 1: B store remote
conflict/034-put_signal-store-remote-yes         | 0: A put_signal | 1: B store remote
conflict/035-put_signal-put_signal-remote-yes    | 0: A put_signal | 2: B put_signal
conflict/036-g-store-remote-yes                  | 0: A g | 1: B store remote
conflict/037-g-put-remote-yes                    | 0: A g | 2: B put
conflict/038-p-load-remote-yes                   | 0: A p | 1: B load remote
conflict/039-p-get-remote-yes                    | 0: A p | 2: B get
conflict/040-iput-store-remote-yes               | 0: A iput | 1: B store remote
conflict/041-iput-put-remote-yes                 | 0: A iput | 2: B put
conflict/042-iget-store-remote-yes               | 0: A iget | 1: B store remote
conflict/043-iget-put-remote-yes                 | 0: A iget | 2: B put
conflict/044-atomicfetchnbi-atomicfetchnbi-remote-no       | 0: fetchnbi | 2: fetchnbi
conflict/045-atomicfetchnbi-load-remote-no       | 0: fetchnbi | 1: load remote
conflict/046-atomicfetchinc-atomicfetchinc-remote-no       | 0: inc | 2: inc
conflict/047-atomicfetchnbi-store-remote-yes     | 0: A fetchnbi | 1: B store remote
conflict/048-atomiccompareswapnbi-store-remote-yes         | 0: A casnbi | 1: B store remote
conflict/049-atomiccompareswapnbi-atomicfetchnbi-remote-no | 0: casnbi | 2: fetchnbi

sync/001-barrierall-local-yes       | 0: A getnbi; B load local; barrier | 1: barrier
sync/002-barrierall-local-no        | 0: getnbi; barrier; load local | 1: barrier
sync/003-barrierall-remote-yes      | 0: A put; B get; barrier | 1: barrier
sync/004-barrierall-remote-no       | 0: put; barrier; get | 1: barrier
sync/005-quiet-local-yes            | 0: A getnbi; B load local; quiet
sync/006-quiet-local-no             | 0: getnbi; quiet; load local
sync/007-quiet-sync-remote-no       | 0: put; quiet; sync | 1: quiet; sync; get
sync/008-quiet-sync-remote-yes      | 0: A put; quiet | 1: quiet; B get
sync/009-fence-put-put-remote-no    | 0: put; fence; put
sync/010-fence-getnbi-put-remote-yes| 0: A getnbi; fence; B p
sync/011-lock-remote-no             | 0: lock; put; quiet; unlock | 1: lock; put; quiet; unlock
sync/012-lock-remote-yes            | 0: linger; lock; A put; quiet; unlock | 1: lock; unlock; nudge; B put
sync/013-waituntil-remote-yes       | 0: A put; fence; flag | 1: B load remote; until
sync/014-waituntil-remote-no        | 0: put; fence; flag | 1: until; load remote
sync/015-putsignal-remote-no        | 0: put_signal | 1: until signal; load remote
sync/016-putsignal-remote-yes       | 0: A put_signal | 1: B poll; B load remote
sync/017-ctx-remote-no              | 0: put; quiet; put
sync/018-ctx-remote-yes             | 0: A put; B put; quiet
sync/019-collective-reduce-remote-no| 0: reduce; barrier; put | 1: reduce; barrier
    | 2: reduce; barrier | 3: reduce; barrier
sync/020-collective-reduce-remote-yes | 0: reduce; B put reduced | 1: A reduce | 2: reduce | 3: reduce
sync/021-team-sync-remote-yes       | 0: tell 2; hear 2 | 2: A put remote@3; quiet; tell 0; hear 0 | 3: B load remote
sync/022-team-sync-remote-no        | 0: put remote@2; quiet; tell 2; hear 2 | 2: tell 0; hear 0; load remote

atomic/001-different-ctx-remote-yes | 0: A add | 2: B addgpu
atomic/002-same-ctx-remote-no       | 0: add | 2: add
atomic/003-same-domain-remote-no    | 0: add | 2: add
atomic/004-int-int-remote-no        | 0: add | 2: add
atomic/005-int-int-sameorigin-remote-no | 0: add; add
atomic/006-double-long-remote-yes   | 0: A setdouble | 2: B setlong
atomic/007-int-long-remote-yes      | 0: A set | 2: B setlong
atomic/008-int-float-remote-yes     | 0: A set | 2: B setfloat
atomic/009-int-float-sameorigin-remote-yes | 0: A set; B setfloat

hybrid/001-for-local-yes            | 0: A getnbi; quiet; sync | 0.1: B load local | 1: sync; load remote
hybrid/002-for-ordered-local-no     | 0: getnbi; quiet; post; sync | 0.1: await; load local | 1: sync; load remote
hybrid/003-master-local-no          | 0: getnbi; quiet; post; await 1; load local; sync
    | 0.1: post 1; await; load local | 1: sync; load remote
hybrid/004-master-local-yes         | 0: A getnbi; quiet; load local; sync | 0.1: B load local | 1: sync; load remote
hybrid/005-single-local-no          | 0: post 1; await; load local; sync
    | 0.1: getnbi; quiet; post; await 1; load local | 1: sync; load remote
hybrid/006-single-local-yes         | 0: B load local; sync | 0.1: A getnbi; quiet; load local | 1: sync; load remote
hybrid/007-section-local-no         | 0: getnbi; quiet; post; await 1; sync
    | 0.1: await; load local; post 1 | 1: sync; load remote
hybrid/008-section-local-yes        | 0: A getnbi; quiet; await; sync | 0.1: B load local; post | 1: sync; load remote
hybrid/009-task-local-no            | 0: await 1; await; load local; sync
    | 0.1: post 1; getnbi; quiet; post | 1: sync; load remote
hybrid/010-task-local-yes           | 0: await 1; B load local; await; sync
    | 0.1: post 1; A getnbi; quiet; post | 1: sync; load remote
hybrid/011-for-ordered-remote-no    | 0: putnbi; quiet; sync | 1: sync; post | 1.1: await; load remote
hybrid/012-for-remote-yes           | 0: A putnbi; quiet; sync | 1: sync | 1.1: B load remote
hybrid/013-master-remote-no         | 0: putnbi; quiet; sync
    | 1: sync; post; await 1; load remote | 1.1: post 1; await; load remote
hybrid/014-master-remote-yes        | 0: A putnbi; quiet; sync | 1: sync; load remote | 1.1: B load remote
hybrid/015-single-remote-no         | 0: putnbi; quiet; sync
    | 1: post 1; await; load remote | 1.1: sync; post; await 1; load remote
hybrid/016-single-remote-yes        | 0: A putnbi; quiet; sync | 1: B load remote | 1.1: sync; load remote
hybrid/017-section-remote-no        | 0: putnbi; quiet; sync
    | 1: sync; post; await 1 | 1.1: await; load remote; post 1
hybrid/018-section-remote-yes       | 0: A putnbi; quiet; sync | 1: sync; await | 1.1: B load remote; post
hybrid/019-task-remote-no           | 0: putnbi; quiet; sync
    | 1: await 1; await; load remote | 1.1: post 1; sync; post
hybrid/020-task-remote-yes          | 0: A putnbi; quiet; sync
    | 1: await 1; B load remote; await | 1.1: post 1; sync; post
hybrid/021-lock-section-barrier-origin-remote-yes | 0: A put; quiet | 0.1: sync | 1: sync; B load remote
hybrid/022-lock-section-barrier-origin-signal-remote-yes | 0: A put; fence | 0.1: flag | 1: until; B load remote

misc/001-putnbi-load-deep-nesting-local-no  | 0: putnbi; load nested local
misc/002-putnbi-load-aliasing-local-no      | 0: putnbi; load aliased local
misc/003-putnbi-load-retval-local-no        | 0: putnbi; load returned local
misc/004-putnbi-load-memcpy-local-no        | 0: putnbi; load copied local
misc/005-getnbi-load-deep-nesting-local-yes | 0: A getnbi; B load nested local
misc/006-getnbi-load-aliasing-local-yes     | 0: A getnbi; B load aliased local
misc/007-getnbi-load-retval-local-yes       | 0: A getnbi; B load returned local
misc/008-getnbi-load-memcpy-local-yes       | 0: A getnbi; B load copied local
misc/009-get-load-deep-nesting-remote-no    | 0: get | 1: load nested remote
misc/010-get-load-funcpointer-remote-no     | 0: get | 1: load passed remote
misc/011-get-load-aliasing-remote-no        | 0: get | 1: load aliased remote
misc/012-get-load-retval-remote-no          | 0: get | 1: load returned remote
misc/013-get-load-memcpy-remote-no          | 0: get | 1: load copied remote
misc/014-get-store-deep-nesting-remote-yes  | 0: A get | 1: B store nested remote
misc/015-get-store-funcpointer-remote-yes   | 0: A get | 1: B store passed remote
misc/016-get-store-aliasing-remote-yes      | 0: A get | 1: B store aliased remote
misc/017-get-store-retval-remote-yes        | 0: A get | 1: B store returned remote
misc/018-get-store-memcpy-remote-yes        | 0: A get | 1: B store copied remote
"""

_ROWS = (row.partition("|") for row in re.sub(r"\n +\|", " |", TABLE).split("\n"))
CASES = {title.strip(): programs.split("|") for title, _, programs in _ROWS if programs}

PARAMETERS = (
    "local", "remote", "remote2", "reduced", "box", "start", "done", "threads", "team", "lock", "signal", "words"
)  # fmt: skip


@triton.jit
def load_of(pointer):
    x = tl.load(pointer)
    return x


@triton.jit
def store_to(pointer):
    tl.store(pointer, 42)
    return 0


FUNCTION = "pointer, FUNCTION: tl.constexpr"
deeper = kernel_of(triton.jit, FUNCTION, "FUNCTION(pointer)", tl=tl)
deep = kernel_of(triton.jit, FUNCTION, "deeper(pointer, FUNCTION)", tl=tl, deeper=deeper)
call = kernel_of(triton.jit, FUNCTION, "return FUNCTION(pointer)", tl=tl)
same = kernel_of(triton.jit, "pointer", "return pointer")

RELAXED = "sem='relaxed', scope='sys'"
AS = "{at}.to(tl.pointer_type(tl.%s), bitcast=True)"
LATER = {
    "put": "ctx.store({at}, 7, {pe})",
    "p": "ctx.store({at}, 7, {pe})",
    "iput": "ctx.store({at} + 2 * two, two, {pe})",
    "putnbi": "ctx.store({at}, tl.load(local), {pe})",
    "getnbi": "tl.store(local, ctx.load({at}, {pe}))",
    "put_signal": "ctx.store({at}, 7, {pe}){mark}\nctx.signal(sent, 1, {pe}, op='add'){mark}",
    "put_signal_nbi": "ctx.store({at}, tl.load(local), {pe}){mark}\nctx.signal(sent, 1, {pe}, op='add'){mark}",
    "set": f"ctx.atomic_xchg({{at}}, 1, {{pe}}, {RELAXED})",
    "add": f"ctx.atomic_add({{at}}, 1, {{pe}}, {RELAXED})",
    "addgpu": "ctx.atomic_add({at}, 1, {pe}, sem='relaxed', scope='gpu')",
    "setfloat": f"ctx.atomic_xchg({AS % 'float32'}, 2.0, {{pe}}, {RELAXED})",
    "setlong": f"ctx.atomic_xchg({AS % 'int64'}, tl.full((), 3, tl.int64), {{pe}}, {RELAXED})",
    "setdouble": f"ctx.atomic_xchg({AS % 'float64'}, tl.full((), 2, tl.float64), {{pe}}, {RELAXED})",
    "fetchnbi": f"tl.store(local, ctx.atomic_add({{at}}, 0, {{pe}}, {RELAXED}))",
    "incnbi": f"tl.store(local, ctx.atomic_add({{at}}, 1, {{pe}}, {RELAXED}))",
    "casnbi": f"tl.store(local, ctx.atomic_cas({{at}}, 0, 1, {{pe}}, {RELAXED}))",
}
"""What programs of their own do; the rest is done where it stands."""

NOW = {
    "get": "tl.store(local, ctx.load({at}, {pe}))",
    "iget": "tl.store(local + 2 * two, ctx.load({at} + 2 * two, {pe}))",
    "g": "x = ctx.load({at}, {pe})",
    "fetch": f"x = ctx.atomic_add({{at}}, 0, {{pe}}, {RELAXED})",
    "inc": f"x = ctx.atomic_add({{at}}, 1, {{pe}}, {RELAXED})",
    "load": "x = tl.load({own})",
    "store": "tl.store({own}, 42)",
    "poll": "while tl.load(sent) < 1:{mark}\n    pass",
    "flag": "ctx.signal(flag, 1, 1)",
    "until": "ctx.wait({word}, 1)",
    "lock": "while ctx.atomic_cas(lock_word, 0, 1, 0, sem='acquire', scope='sys') != 0:{mark}\n    pass",
    "unlock": "ctx.atomic_xchg(lock_word, 0, 0, sem='release', scope='sys')",
    "nudge": "ctx.signal(nudged, 1, 0, sem='relaxed')",
    "linger": "ctx.wait(nudged, 1, sem='relaxed')",
    "tell": "ctx.signal(team + RANK, 1, {number})",
    "hear": "ctx.wait(team + {number}, 1)",
    "post": "ctx.signal(threads + {number}, 1, RANK, scope='gpu')",
    "await": "ctx.wait(threads + {number}, 1, scope='gpu')",
    "sync": "ctx.barrier(words, program=0)",
    "reduce": "ctx.barrier(words, program=0)\ntl.store(reduced, ctx.load(remote, 0) + ctx.load(remote, 3)){mark}",
}

POINTERS = {
    "aliased": "alias = {own}",
    "returned": "alias = same({own})",
    "copied": "tl.store(box, {own}.to(tl.int64))\nalias = tl.load(box).to(tl.pointer_type(tl.int32))",
}
"""How a pointer comes to where it is used."""

WAYS = {"nested": "deep", "passed": "call"}
"""How a function comes to be called that uses one."""


def ranks_of(title):
    text = " ".join(CASES[title])
    return 1 + max(1, *(int(number) for number in re.findall(r"(?:^|\s|@)(\d)(?=[.:;\s]|$)", text)))


def text_of(title):
    """The statements of a case, with the marks `# A` and `# B`, and which device function has one of them."""
    programs, marks = {}, {}
    for part in CASES[title]:
        who, _, operations = part.partition(":")
        rank, _, thread = who.strip().partition(".")
        lines = programs[int(rank), int(thread or 0)] = []
        later, is_put = [], {}
        for operation in operations.split(";"):
            words = operation.split()
            letter = words.pop(0) if words[0] in ("A", "B") else ""
            mark = f"  # {letter}" if letter else ""
            name, *arguments = words
            if name in ("quiet", "barrier", "fence"):
                for number in [each for each in later if name != "fence" or is_put[each]]:
                    later.remove(number)
                    lines.append(f"ctx.wait(done + {number}, 1, scope='gpu')")
                if name == "barrier":
                    lines.append(NOW["sync"])
                continue
            how = arguments.pop(0) if len(arguments) > 1 else ""
            target = arguments[0] if arguments else "remote"
            at, _, pe = target.partition("@")
            said = {"at": at, "pe": pe or 1, "own": at, "mark": mark, "number": arguments[0] if arguments else 0}
            said["word"] = "sent" if arguments else "flag"
            if how in WAYS:
                function = "load_of" if name == "load" else "store_to"
                marks[function] = letter
                lines.append(f"{WAYS[how]}({at}, {function})")
                continue
            if how:
                lines += POINTERS[how].format(**said).split("\n")
                said["own"] = "alias"
            form = LATER.get(name) or NOW[name]
            text = (form if "{mark}" in form else f"{form}{{mark}}").format(**said).split("\n")
            if name not in LATER:
                lines += text
                continue
            if name in ("put", "iput"):
                lines.append(f"x = tl.load(local{' + 2 * two' if name == 'iput' else ''})")
            number = next(each for each in itertools.count(2) if (int(rank), each) not in programs)
            later.append(number)
            is_put[number] = name.startswith(("put", "p", "iput", "set", "add"))
            lines.append(f"ctx.signal(start + {number}, 1, RANK, scope='gpu')")
            programs[int(rank), number] = [
                f"ctx.wait(start + {number}, 1, scope='gpu')", *text,
                f"ctx.signal(done + {number}, 1, RANK, scope='gpu')",
            ]  # fmt: skip
    parts = ["two, lock_word, nudged, flag, sent = tl.arange(0, 2), lock, lock + 1, signal, signal + 1"]
    for (rank, program), lines in sorted(programs.items()):
        parts += [f"if RANK == {rank} and pid == {program}:", *(f"    {line}" for line in lines)]
    return "\n".join(parts), marks


def run(ctx, title):
    made = kernel(text_of(title)[0], *PARAMETERS, load_of=load_of, store_to=store_to, deep=deep, call=call, same=same)
    tensors = [ctx.zeros(16, dtype=torch.int64 if name == "box" else torch.int32) for name in PARAMETERS]
    ctx.barrier()
    launch(ctx, made, *tensors, programs=1 + max(map(int, re.findall(r"pid == (\d+)", made.src))))
    ctx.barrier()
