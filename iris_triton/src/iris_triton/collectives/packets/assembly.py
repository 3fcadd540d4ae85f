"""The assembly of packets, for NVIDIA: functions return the text of an inline block for `run_assembly`.

An element of a Triton tensor stands for one packet, so a thread does all for its own packets, and no layout matters.
"""

import triton
import triton.language as tl

from iris_core.device import context_words as _layout
from iris_triton.language.flags import POLLS_PER_CLOCK, describe_assembly


@triton.constexpr_function
def _constraints(results, longs, words):
    """Results are written before the last operand is read."""
    return ",".join(["=&r"] * results + ["l"] * longs + ["r"] * words)


@triton.constexpr_function
def _int32s(number):
    return (tl.int32,) * number


@triton.jit
def run_assembly(TEXT: tl.constexpr, operands, RESULTS: tl.constexpr, LONGS: tl.constexpr, WORDS: tl.constexpr):
    """Run a block on LONGS operands of 64 bits and then WORDS of 32 bits; returns RESULTS blocks of int32."""
    form: tl.constexpr = _constraints(RESULTS, LONGS, WORDS)
    if RESULTS == 1:
        return tl.inline_asm_elementwise(TEXT, form, operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise(TEXT, form, operands, dtype=_int32s(RESULTS), is_pure=False, pack=1)


@triton.constexpr_function
def load_assembly(encoding):
    """Load the data of a packet as 32-bit words; what is not loaded is 0.

    Operands: 0 to 3 the words; 4 address; 5 whether to load the first half; 6 the second.  In "sentinel" 5 counts for
    both halves, and "ll" has no second one.
    """
    text = "{ .reg .pred p, q; setp.ne.b32 p, $5, 0; setp.ne.b32 q, $6, 0;\n"
    text += "".join(f"mov.b32 ${k}, 0; " for k in range(4))
    if encoding == "sentinel":
        return text + "\n@p ld.global.v4.b32 {$0,$1,$2,$3}, [$4]; }"
    text += "\n@p ld.global.v2.b32 {$0,$1}, [$4];"
    return text + ("\n@q ld.global.v2.b32 {$2,$3}, [$4+8]; }" if encoding == "ll128" else " }")


@triton.constexpr_function
def store_assembly(encoding):
    """Store the data of a packet.  Operands: 0 a result; 1 address; 2 to 5 words; 6, 7 halves."""
    text = "{ .reg .pred p, q; setp.ne.b32 p, $6, 0; setp.ne.b32 q, $7, 0; mov.b32 $0, 0;\n"
    if encoding == "sentinel":
        return text + "@p st.global.v4.b32 [$1], {$2,$3,$4,$5}; }"
    text += "@p st.global.v2.b32 [$1], {$2,$3};"
    return text + ("\n@q st.global.v2.b32 [$1+8], {$4,$5}; }" if encoding == "ll128" else " }")


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
    """Return the comparison that holds for a word of a missing packet."""
    return "eq" if encoding == "sentinel" else "ne"


@triton.constexpr_function
def _told_by(encoding, number):
    """Return the registers to compare for missing packets."""
    words = {"sentinel": [0, 1, 2, 3], "ll128": [2, 3], "ll": [1, 3]}[encoding]
    return [4 * packet + word for packet in range(number) for word in words]


@triton.constexpr_function
def poll_assembly(number, encoding, nap_ns, empty, sender=0, backwards=False):
    """Load packets until all have arrived, the wait times out, or another wait of this rank has reported a timeout.

    All loads of a look are under way at the same time, and one test is over all.  In "ll128", only the thread that
    has a line's flags knows, so the threads of a warp look together.

    Operands, after 4 * number words: address; bytes from one packet to the next; bound in nanoseconds, 0 for none;
    address of the status words, 0 for none; epoch; whether to look at all; whether this thread has flags; rank.

    A look costs two branches more than one without a bound; the clock and the status words are looked at every
    POLLS_PER_CLOCK times.  What follows is `_late_assembly`, and one look more; an `end` of 1 says that it was made.

    A report names the sender: packet i comes from member `sender` + i of the team, or, `backwards`, from the one that
    is `sender` + i + 1 places before this one.
    """
    base = 4 * number
    address, stride, timeout, status = f"${base}", f"${base + 1}", f"${base + 2}", f"${base + 3}"
    epoch, guard, flags, rank = f"${base + 4}", f"${base + 5}", f"${base + 6}", f"${base + 7}"
    field = _layout.Status
    registers = _told_by(encoding, number)
    missing = _missing_if(encoding)
    value = str(empty) if encoding == "sentinel" else epoch
    together = encoding == "ll128"
    anyone = "vote.sync.any.pred {0}, {0}, 0xffffffff;\n" if together else ""
    text = f"{{ .reg .u64 a<{number}>, now, end, x, row, at; .reg .pred q, f, m, p, p<4>;\n"
    text += ".reg .u32 n, k; .reg .b32 w, v;\n"
    text += f"setp.ne.b32 q, {guard}, 0; setp.ne.b32 f, {flags}, 0; mov.u64 a0, {address};\n"
    for i in range(1, number):
        text += f"add.u64 a{i}, a{i - 1}, {stride};\n"
    if encoding == "ll":  # see `push_assembly`
        text += f".reg .b64 h<{2 * number}>; " + "".join(f"mov.b64 h{k}, 0; " for k in range(2 * number))
        look = "".join(f"@q ld.relaxed.sys.global.v2.b64 {{h{2 * i},h{2 * i + 1}}}, [a{i}];\n" for i in range(number))
        look += "".join(f"mov.b64 {{${2 * k},${2 * k + 1}}}, h{k};\n" for k in range(2 * number))
    else:
        text += "".join(f"mov.b32 ${k}, 0; " for k in range(base))
        look = "".join(
            f"@q ld.relaxed.sys.global.v4.b32 {{${4 * i},${4 * i + 1},${4 * i + 2},${4 * i + 3}}}, [a{i}];\n"
            for i in range(number)
        )
    for t in range(len(registers)):  # four chains that do not wait for each other
        if t > 3:
            look += f"setp.{missing}.or.b32 p{t % 4}, ${registers[t]}, {value}, p{t % 4};\n"
        else:
            look += f"setp.{missing}.b32 p{t}, ${registers[t]}, {value};\n"
    for t in range(1, min(4, len(registers))):
        look += f"or.pred p0, p0, p{t};\n"
    look += "and.pred m, p0, q;\n"
    look += "and.pred m, m, f; vote.sync.any.pred p0, m, 0xffffffff;\n" if together else "mov.pred p0, m;\n"
    nap = f"nanosleep.u32 {nap_ns};\n" if nap_ns > 0 else ""
    # Nothing of a look before lives on in registers while a wait is long.
    first, last = "", "".join(f"mov.b32 ${k}, 0; " for k in range(base)) + look if together else look.replace("@q ", "")
    if encoding == "ll":  # loads into other registers than the loop's would keep both sets of them in use
        first = "setp.eq.u64 p0, end, 1; @p0 bra DONE;\n"
        last = f"mov.u64 end, 1; mov.u32 n, {POLLS_PER_CLOCK.value - 1}; bra AGAIN;\n"
    return f"""{text}
mov.u32 n, 0; mov.u64 end, 0;
AGAIN:
{look}@!p0 bra DONE;
{nap}add.u32 n, n, 1; and.b32 k, n, {POLLS_PER_CLOCK.value - 1}; setp.ne.u32 p0, k, 0; @p0 bra AGAIN;
setp.eq.u64 p0, {timeout}, 0; @p0 bra AGAIN;
mov.u64 now, %globaltimer; setp.ne.u64 p0, end, 0; @p0 bra CLOCK;
abs.s64 end, {timeout}; add.u64 end, now, end;
CLOCK:
setp.gt.u64 p0, now, end;
{anyone.format("p0")}@p0 bra LATE;
setp.eq.u64 p0, {status}, 0; @p0 bra AGAIN;
ld.relaxed.sys.global.u64 x, [{status}+{8 * field.CODE}]; setp.ne.u64 p0, x, 0;
{anyone.format("p0")}@!p0 bra AGAIN; setp.gt.s64 p, {timeout}, 0; @p bra DONE;
LATE:
{first}{_late_assembly(number, encoding, address, stride, timeout, status, value, rank, sender, backwards)}{last}DONE:
}}"""


@triton.constexpr_function
def _late_assembly(number, encoding, address, stride, timeout, status, value, rank, sender, backwards):
    """Describe the first packet that is missing, and if the wait has no bound, wait for one after the other.

    It takes fewer registers than the loop of `poll_assembly`, and is apart from it so that it does not change that one.
    """
    field, names, missing = _layout.Status, _layout.COMPARISONS, _missing_if(encoding)
    comparison = names.index("ne" if encoding == "sentinel" else "eq")
    words = (
        (field.PROGRAM, "mov.u32 n, %ctaid.x; cvt.u64.u32 x, n;"),
        (field.ADDRESS, "at"),
        (field.SENDER, f"add.u32 n, k, {sender + 1}; {'neg.s32 n, n; ' if backwards else ''}cvt.s64.s32 x, n;"),
        (field.EXPECTED, f"mov.b32 v, {value}; cvt.s64.s32 x, v;"),
        (field.LAST, "cvt.s64.s32 x, w;"),
        (field.COMPARISON, f"mov.b64 x, {comparison};"),
    )
    if encoding == "ll":
        look = "ld.relaxed.sys.global.v2.b64 {y,z}, [at]; mov.b64 {t0,t1}, y; mov.b64 {t2,t3}, z;\n"
    else:
        look = "ld.relaxed.sys.global.v4.b32 {t0,t1,t2,t3}, [at];\n"
    for place, register in enumerate(_told_by(encoding, 1)):
        keep = f"mov.b32 w, t{register};" if place == 0 else f"@p mov.b32 w, t{register};"
        look += f"setp.{missing}.b32 p, t{register}, {value}; {keep}"
        look += "mov.pred m, p;\n" if place == 0 else "or.pred m, m, p;\n"
    look += "and.pred m, m, q;\n"
    look += "and.pred m, m, f; vote.sync.any.pred p0, m, 0xffffffff;\n" if encoding == "ll128" else "mov.pred p0, m;\n"
    return f"""{{ .reg .b32 t<4>; .reg .b64 y, z;
mov.u32 k, 0; mov.u64 at, {address}; mov.u64 end, 0;
LOOK:
{look}@!p0 bra NEXT;
mov.u64 now, %globaltimer; setp.gt.u64 p, now, end; @!p bra LOOK;
sub.u64 end, now, {timeout}; @!m bra TAKEN; setp.eq.u64 p, {status}, 0; @p bra TAKEN;
{describe_assembly(status, timeout, rank, words, "TAKEN")}
TAKEN:
setp.lt.s64 p, {timeout}, 0; @p bra LOOK; bra OVER;
NEXT:
add.u32 k, k, 1; add.u64 at, at, {stride}; setp.lt.u32 p, k, {number}; @p bra LOOK;
OVER:
}}
"""


@triton.constexpr_function
def look_assembly(looks, ended, kinds, members):
    """Load the epoch, and whether the launches are as they should be, each thread of a launch its own share of it.

    A mailbox has `ended` programs, whose words of that name follow as many epochs.

    Operands: 0 the epoch; 1 what is not: 1 for a program of another launch that has not ended, 2 for a member that
    has called something else; address; epochs of the launch; this member.
    """
    quads = [[f"w{4 * look + k}" for k in range(4)] for look in range(looks)]
    loads = "".join(
        f"@p ld.volatile.global.v4.b32 {{{', '.join(quad)}}}, [a+{4 * ended + 16 * look}];\n"
        for look, quad in enumerate(quads)
    )
    late = "".join(
        f"sub.u32 k, {word}, $0; setp.gt.and.u32 q, k, $3, p; @q or.b32 $1, $1, 1;\n" for quad in quads for word in quad
    )
    return f"""{{ .reg .pred p, q; .reg .u64 a, x; .reg .u32 t, i, k, said, at, own, w<{4 * looks}>;
mov.u32 i, %ctaid.x; mul.wide.u32 a, i, 4; add.u64 a, a, $2; ld.volatile.global.b32 $0, [a];
{_thread_assembly()}setp.lt.u32 p, i, {ended // (4 * looks)}; mul.wide.u32 a, i, {16 * looks}; add.u64 a, a, $2;
{loads}setp.lt.u32 q, i, 16; and.b32 k, t, 7; setp.lt.and.u32 q, k, {members}, q; mov.u64 x, 0; mov.b32 own, 0;
mul.wide.u32 a, t, 8; add.u64 a, a, $2; @q ld.volatile.global.b64 x, [a+{4 * kinds}];
and.b32 k, t, 8; add.u32 k, k, $4;
mul.wide.u32 a, k, 8; add.u64 a, a, $2; @q ld.volatile.global.b32 own, [a+{4 * kinds}];
mov.b64 {{said, at}}, x; setp.eq.and.u32 q, at, $0, q; setp.ne.and.u32 q, said, own, q;
setp.ne.and.u32 q, said, 0, q; setp.ne.and.u32 q, own, 0, q; selp.b32 $1, 2, 0, q;
{late}}}"""


@triton.constexpr_function
def claim_assembly(claimed, kinds):
    """Claim the epoch in the first thread of the launch, and report if another member calls something else.

    Operands: 0 the epoch, or what is none if the launch is not alone; address; status words; what `look_assembly` has
    found; epoch; epochs of the launch; rank; this member.
    """
    words = (
        (_layout.Mismatch.PEER, "and.b32 k, t, 7; cvt.u64.u32 x, k;"),
        (_layout.Mismatch.ADDRESS, "$1"),
        (_layout.Mismatch.OUR_KIND, "cvt.u64.u32 x, own;"),
        (_layout.Mismatch.THEIR_KIND, "cvt.u64.u32 x, said;"),
    )
    return f"""{{ .reg .pred p, q, bad; .reg .u32 t, i, k, own, said; .reg .u64 x, row, now;
{_thread_assembly()}and.b32 k, $3, 1; setp.ne.u32 bad, k, 0; mov.b32 $0, $4; @bad not.b32 $0, $4;
setp.eq.u32 q, i, 0; @bad setp.ne.u32 q, t, t; @q atom.relaxed.gpu.global.add.u32 $0, [$1+{4 * claimed}], $5;
and.b32 k, $3, 2; setp.eq.u32 q, k, 0; @q bra DONE;
mul.wide.u32 x, t, 8; add.u64 x, x, $1; ld.volatile.global.b32 said, [x+{4 * kinds}];
and.b32 k, t, 8; add.u32 k, k, $7; mul.wide.u32 x, k, 8; add.u64 x, x, $1; ld.volatile.global.b32 own, [x+{4 * kinds}];
{_difference_assembly("$2", "$6", _layout.MismatchCode.KIND, words, "DONE")}DONE:
}}"""


@triton.constexpr_function
def confirm_assembly():
    """Report if a launch overlapped with another one.

    Operands: 0 a result; address; status words; what `claim_assembly` returned; epoch; rank; this member.
    """
    words = ((_layout.Mismatch.PEER, "cvt.s64.s32 x, $6;"), (_layout.Mismatch.ADDRESS, "$1"))
    return f"""{{ .reg .pred p; .reg .u64 x, row, now; mov.b32 $0, 0; setp.eq.u32 p, $3, $4; @p bra DONE;
{_difference_assembly("$2", "$5", _layout.MismatchCode.OVERLAP, words, "DONE")}DONE:
}}"""


@triton.constexpr_function
def _thread_assembly():
    """Return the number of the thread in its program as t, and in the launch as i."""
    return "mov.u32 t, %tid.x; mov.u32 i, %ctaid.x; mov.u32 k, %ntid.x; mad.lo.u32 i, i, k, t;\n"


@triton.constexpr_function
def _difference_assembly(status, rank, code, words, taken):
    """As `iris_triton.language.flags.report_difference`, by one thread; branches to `taken` if there is a report.

    The block declares the predicate p, and now, x and row of 64 bits.
    """
    begin = _layout.Mismatch.CODE
    stores = ""
    for field, word in words:
        text, operand = (word, "x") if ";" in word else ("", word)
        stores += f"{text} st.global.b64 [row+{8 * (field - begin)}], {operand};\n"
    return f"""setp.eq.u64 p, {status}, 0; @p bra {taken};
atom.relaxed.sys.global.cas.b64 x, [{status}+{8 * begin}], 0, {_layout.CLAIMED}; setp.ne.u64 p, x, 0; @p bra {taken};
ld.global.b64 row, [{status}+{8 * _layout.ROW}]; setp.eq.u64 p, row, 0; selp.b64 row, {status}, row, p;
add.u64 row, row, {8 * begin}; st.relaxed.sys.global.b64 [row], {_layout.CLAIMED}; fence.acq_rel.sys;
{stores}cvt.s64.s32 x, {rank}; st.global.b64 [row+{8 * (_layout.Mismatch.RANK - begin)}], x;
and.b64 x, x, 1023; shl.b64 x, x, {_layout.STAMP_RANK};
or.b64 x, x, {begin // _layout.PART_WORDS << _layout.STAMP_PART | code};
mov.u64 now, %globaltimer; shl.b64 now, now, {_layout.STAMP_CLOCK}; or.b64 x, x, now;
fence.acq_rel.sys; st.relaxed.sys.global.b64 [row], x; fence.acq_rel.sys;
ld.global.b64 row, [{status}+{8 * _layout.ALARM}]; setp.eq.u64 p, row, 0; @p bra {taken};
st.relaxed.sys.global.b64 [row], x;
"""
