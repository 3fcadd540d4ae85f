"""Text of the assembly of packets, for NVIDIA.

Each function returns the text for one inline block; `iris_triton.collectives.fast.packets` passes the operands.  An
element of a Triton tensor stands for one packet, so a thread does all for its own packets, and no layout matters.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_core import device_context as _layout

_POLLS_PER_CLOCK = tl.constexpr(64)
"""Polls between two looks at the clock, of those waits that are bounded."""


@triton.constexpr_function
def int32s(number):
    """The types of so many results."""
    return (tl.int32,) * number


@triton.constexpr_function
def constraints(results, longs, words):
    """Results first (written before the last operand is read), then 64-bit operands, then 32-bit ones."""
    return ",".join(["=&r"] * results + ["l"] * longs + ["r"] * words)


@triton.constexpr_function
def _vector(first):
    return f"{{${first},${first + 1},${first + 2},${first + 3}}}"


@triton.constexpr_function
def load_assembly(form):
    """Load up to 16 bytes; what is not loaded is 0.

    Operands: 0 to 3 the words; 4 address; 5 whether to load the first half; 6 the second.  Forms: "v4" in one access,
    5 counting for both halves; "v2" the halves by themselves; "first" never the second.
    """
    text = "{ .reg .pred p, q; setp.ne.b32 p, $5, 0; setp.ne.b32 q, $6, 0;\n"
    text += "".join(f"mov.b32 ${k}, 0; " for k in range(4))
    if form == "v4":
        return text + "\n@p ld.global.v4.b32 {$0,$1,$2,$3}, [$4]; }"
    text += "\n@p ld.global.v2.b32 {$0,$1}, [$4];"
    return text + ("\n@q ld.global.v2.b32 {$2,$3}, [$4+8]; }" if form == "v2" else " }")


@triton.constexpr_function
def store_assembly(form):
    """Store up to 16 bytes.  Operands: 0 a result to please the compiler; 1 address; 2 to 5 words; 6, 7 halves."""
    text = "{ .reg .pred p, q; setp.ne.b32 p, $6, 0; setp.ne.b32 q, $7, 0; mov.b32 $0, 0;\n"
    if form == "v4":
        return text + "@p st.global.v4.b32 [$1], {$2,$3,$4,$5}; }"
    text += "@p st.global.v2.b32 [$1], {$2,$3};"
    return text + ("\n@q st.global.v2.b32 [$1+8], {$4,$5}; }" if form == "v2" else " }")


@triton.constexpr_function
def push_assembly(encoding):
    """Store a packet where another rank polls.  Operands: 0 a result; 1 address; 2 to 5 words; 6 whether.

    Of an access of a vector, PTX promises that each element arrives at once: in "ll" it has to be a half of the packet.
    """
    text = "{ .reg .pred p; .reg .b64 x, y; setp.ne.b32 p, $6, 0; mov.b32 $0, 0;\n"
    if encoding == "ll":
        return text + "mov.b64 x, {$2,$3}; mov.b64 y, {$4,$5}; @p st.relaxed.sys.global.v2.b64 [$1], {x,y}; }"
    return text + "@p st.relaxed.sys.global.v4.b32 [$1], {$2,$3,$4,$5}; }"


@triton.constexpr_function
def clear_assembly(number, word):
    """Fill packets with a word.  Operands: 0 a result; 1 address; 2 bytes from one to the next; 3 whether."""
    text = f"{{ .reg .u64 a; .reg .pred p; .reg .b32 z; mov.b32 z, {word}; setp.ne.b32 p, $3, 0; mov.u64 a, $1;\n"
    for i in range(number):
        text += "@p st.global.v4.b32 [a], {z,z,z,z};" + (" add.u64 a, a, $2;\n" if i + 1 < number else "\n")
    return text + "mov.b32 $0, 0; }"


@triton.constexpr_function
def _missing_if(encoding):
    """The comparison that holds for a word of a packet that is missing."""
    return "eq" if encoding == "sentinel" else "ne"


@triton.constexpr_function
def _told_by(encoding, number):
    """Registers whose comparison tells whether packets are missing."""
    words = {"sentinel": [0, 1, 2, 3], "ll128": [2, 3], "ll": [1, 3]}[encoding]
    return [4 * packet + word for packet in range(number) for word in words]


@triton.constexpr_function
def poll_assembly(number, encoding, nap_ns, empty, sender=0, backwards=False):
    """Load packets until all are there, the time is over, or another wait of this rank has reported that it was.

    All loads of a look are under way at the same time, and one test is over all.  In "ll128", only the thread that
    has a line's flags knows, so the threads of a warp look together.

    Operands, after 4 * number words: address; bytes from one packet to the next; bound in nanoseconds, 0 for none;
    address of the status words, 0 for none; epoch; whether to look at all; whether this thread has flags; rank.

    A look costs two branches more than one without a bound; the clock and the status words are looked at every
    _POLLS_PER_CLOCK times.

    A report names the sender: packet i comes from member `sender` + i of the team, or, `backwards`, from the one that
    is `sender` + i + 1 places before this one.
    """
    base = 4 * number
    address, stride, timeout, status = f"${base}", f"${base + 1}", f"${base + 2}", f"${base + 3}"
    epoch, guard, flags, rank = f"${base + 4}", f"${base + 5}", f"${base + 6}", f"${base + 7}"
    field, names = _layout.Status, _layout.COMPARISONS
    registers = _told_by(encoding, number)
    missing = _missing_if(encoding)
    value = str(empty) if encoding == "sentinel" else epoch
    together = encoding == "ll128"
    anyone = "vote.sync.any.pred {0}, {0}, 0xffffffff;\n" if together else ""
    text = f"{{ .reg .u64 a<{number}>, now, end, x; .reg .pred q, f, m, p<4>; .reg .u32 n, k; .reg .b32 w, v;\n"
    text += f"setp.ne.b32 q, {guard}, 0; setp.ne.b32 f, {flags}, 0; mov.u64 a0, {address};\n"
    for i in range(1, number):
        text += f"add.u64 a{i}, a{i - 1}, {stride};\n"
    if encoding == "ll":  # see `push_assembly`
        text += f".reg .b64 h<{2 * number}>; " + "".join(f"mov.b64 h{k}, 0; " for k in range(2 * number))
        look = "".join(f"@q ld.relaxed.sys.global.v2.b64 {{h{2 * i},h{2 * i + 1}}}, [a{i}];\n" for i in range(number))
        look += "".join(f"mov.b64 {{${2 * k},${2 * k + 1}}}, h{k};\n" for k in range(2 * number))
    else:
        text += "".join(f"mov.b32 ${k}, 0; " for k in range(base))
        look = "".join(f"@q ld.relaxed.sys.global.v4.b32 {_vector(4 * i)}, [a{i}];\n" for i in range(number))
    text += f"\nmov.u32 n, 0; mov.u64 end, 0;\nAGAIN:\n{look}"
    for t in range(len(registers)):  # four chains that do not wait for each other
        if t > 3:
            text += f"setp.{missing}.or.b32 p{t % 4}, ${registers[t]}, {value}, p{t % 4};\n"
        else:
            text += f"setp.{missing}.b32 p{t}, ${registers[t]}, {value};\n"
    for t in range(1, min(4, len(registers))):
        text += f"or.pred p0, p0, p{t};\n"
    text += "and.pred m, p0, q;\n"
    if together:
        text += "and.pred m, m, f; vote.sync.any.pred p0, m, 0xffffffff;\n@!p0 bra DONE;\n"
    else:
        text += "@!m bra DONE;\n"
    if nap_ns > 0:
        text += f"nanosleep.u32 {nap_ns};\n"
    text += f"""add.u32 n, n, 1; and.b32 k, n, {_POLLS_PER_CLOCK.value - 1}; setp.ne.u32 p0, k, 0; @p0 bra AGAIN;
setp.eq.u64 p0, {timeout}, 0; @p0 bra AGAIN;
mov.u64 now, %globaltimer; setp.ne.u64 p0, end, 0; @p0 bra CLOCK;
add.u64 end, now, {timeout};
CLOCK:
setp.gt.u64 p0, now, end;
{anyone.format("p0")}@p0 bra LATE;
setp.eq.u64 p0, {status}, 0; @p0 bra AGAIN;
ld.relaxed.sys.global.u64 x, [{status}+{8 * field.CODE}]; setp.ne.u64 p0, x, 0;
{anyone.format("p0")}@!p0 bra AGAIN; bra DONE;
LATE:
@!m bra DONE; setp.eq.u64 p0, {status}, 0; @p0 bra DONE;
atom.relaxed.sys.global.cas.b64 x, [{status}+{8 * field.CODE}], 0, {_layout.STATUS_WAIT_TIMEOUT};
setp.ne.u64 p0, x, 0; @p0 bra DONE;
cvt.s64.s32 x, {rank}; st.global.b64 [{status}+{8 * field.RANK}], x;
mov.u32 k, %ctaid.x; cvt.u64.u32 x, k; st.global.b64 [{status}+{8 * field.PROGRAM}], x;
"""
    text += "mov.b32 k, 0; mov.b32 w, 0;\n"
    for register in registers:  # one that is missing; by number, as addresses would take registers from the loop
        text += f"setp.{missing}.b32 p0, ${register}, {value}; "
        text += f"@p0 mov.b32 k, {register // 4}; @p0 mov.b32 w, ${register};\n"
    text += f"cvt.u64.u32 x, k; mad.lo.u64 x, x, {stride}, {address};\n"
    text += f"add.u32 k, k, {sender + 1}; {'neg.s32 k, k; ' if backwards else ''}"
    text += f"st.global.b64 [{status}+{8 * field.ADDRESS}], x; cvt.s64.s32 x, k;\n"
    comparison = names.index("ne" if encoding == "sentinel" else "eq")
    return (
        text
        + f"""st.global.b64 [{status}+{8 * field.SENDER}], x;
mov.b32 v, {value}; cvt.s64.s32 x, v; st.global.b64 [{status}+{8 * field.EXPECTED}], x;
cvt.s64.s32 x, w; st.global.b64 [{status}+{8 * field.LAST}], x;
mov.b64 x, {comparison}; st.global.b64 [{status}+{8 * field.COMPARISON}], x;
DONE:
}}"""
    )
