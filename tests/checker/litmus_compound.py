"""Litmus tests of Litmus/PTX.lean in goens/lost-pop-lean, with its verdicts.

Goens, Chakraborty, Sarkar, Agarwal, Oswald, Nagarajan: Compound memory models, PLDI 2023.

There scopes are CTAs and the system; here they are GPUs and the system, which is the same tree.  Left out are one that
has an x86 thread, three without a verdict, and dependencies, which only occur where more is allowed.
"""

from litmus_programs import Litmus

W, R = "st.rlx.sys", "ld.rlx.sys"

_ROWS = (
    ("IRIW", 1, "0123", "Wx 1 || Rx 1; Ry 0 || Ry 1; Rx 0 || Wy 1"),
    ("IRIW_relacq", 1, "0123", "Wrel x 1 || Racq x 1; Racq y 0 || Racq y 1; Racq x 0 || Wrel y 1"),
    ("IRIW_3ctas", 0, "0112", "Wx 1 || Rx 1; fence.sc.gpu; Ry 0 || Ry 1; fence.sc.gpu; Rx 0 || Wy 1"),
    (
        "IRIW_4ctas", 1, "0123",
        "Wx 1 || ld.rlx.gpu x 1; fence.sc.sys; ld.rlx.gpu y 0 || ld.rlx.gpu y 1; fence.sc.sys; Rx 0 || Wy 1",
    ),
    (
        "IRIW_3ctas_1scoped_w", 1, "0112",
        "st.rlx.gpu x 1 || Rx 1; fence.sc.gpu; Ry 0 || Ry 1; fence.sc.gpu; Rx 0 || Wy 1",
    ),
    (
        "IRIW_3ctas_1scoped_r", 1, "0112",
        "Wx 1 || ld.rlx.gpu x 1; fence.sc.gpu; Ry 0 || Ry 1; fence.sc.gpu; Rx 0 || Wy 1",
    ),
    (
        "IRIW_3ctas_scoped_rs_after", 0, "0112",
        "Wx 1 || Rx 1; fence.sc.gpu; ld.rlx.gpu y 0 || Ry 1; fence.sc.gpu; ld.rlx.gpu x 0 || Wy 1",
    ),
    ("IRIW_2ctas", 1, "0101", "Wx 1 || Rx 1; fence.sc.gpu; Ry 0 || Ry 1; fence.sc.gpu; Rx 0 || Wy 1"),
    ("IRIW_fences", 0, "0123", "Wx 1 || Rx 1; fence.sc.sys; Ry 0 || Ry 1; fence.sc.sys; Rx 0 || Wy 1"),
    ("IRIW_acq_fences", 1, "0123", "Wx 1 || Rx 1; fence.acquire.sys; Ry 0 || Ry 1; fence.acquire.sys; Rx 0 || Wy 1"),
    ("IRIW_acqrel_fences", 1, "0123", "Wx 1 || Rx 1; fence.acq_rel.sys; Ry 0 || Ry 1; fence.acq_rel.sys; Rx 0 || Wy 1"),
    ("IRIW_sc_acqrel_fence", 1, "0123", "Wx 1 || Rx 1; fence.sc.sys; Ry 0 || Ry 1; fence.acq_rel.sys; Rx 0 || Wy 1"),
    ("simpleRF", 1, "01", "st.rlx.gpu x 1 || ld.rlx.gpu x 1"),
    ("MP", 1, "01", "Wx 1; Wy 1 || Ry 1; Rx 0"),
    ("MP_fence1", 1, "01", "Wx 1; fence.sc.sys; Wy 1 || Ry 1; Rx 0"),
    ("MP_fence2", 1, "01", "Wx 1; Wy 1 || Ry 1; fence.sc.sys; Rx 0"),
    ("MP_fence", 0, "01", "Wx 1; fence.sc.sys; Wy 1 || Ry 1; fence.sc.sys; Rx 0"),
    ("MP_fence_cta", 1, "01", "Wx 1; fence.sc.gpu; Wy 1 || Ry 1; fence.sc.gpu; Rx 0"),
    ("MP_fence_rel_acq", 0, "01", "Wx 1; fence.release.sys; Wy 1 || Ry 1; fence.acquire.sys; Rx 0"),
    ("MP_rel_acq", 0, "01", "Wx 1; Wrel y 1 || Racq y 1; Rx 0"),
    ("MP_rel_seq", 0, "01", "Wx 1; Wrel y 1; Wy 2 || Racq y 2; Rx 0"),
    ("MP_acq_seq", 0, "01", "Wx 1; Wrel y 1 || Ry 1; Racq y 2; Rx 0"),
    ("MP_fence_cta_1fence", 1, "01", "Wx 1; fence.sc.sys; Wy 1 || Ry 1; fence.sc.gpu; Rx 0"),
    ("N7", 1, "01", "Wx 1; Rx 1; Ry 0 || Wy 1; Ry 1; Rx 0"),
    ("dekkers", 1, "01", "Wx 1; Ry 0 || Wy 1; Rx 0"),
    ("dekkers_fence", 0, "01", "Wx 1; fence.sc.sys; Ry 0 || Wy 1; fence.sc.sys; Rx 0"),
    ("dekkers_acqrel", 1, "01", "Wrel x 1; Racq y 0 || Wrel y 1; Racq x 0"),
    ("dekkers_acqrelfence", 1, "01", "Wx 1; fence.acq_rel.sys; Ry 0 || Wy 1; fence.acq_rel.sys; Rx 0"),
    ("dekkers_relfence", 1, "01", "Wx 1; fence.release.sys; Ry 0 || Wy 1; fence.acq_rel.sys; Rx 0"),
    ("dekkers_acqfence", 1, "01", "Wx 1; fence.acquire.sys; Ry 0 || Wy 1; fence.acq_rel.sys; Rx 0"),
    ("WRC", 1, "012", "Wx 1 || Racq x 1; Wy 1 || Ry 1; Rx 0"),
    ("WRC_acqrel", 0, "012", "Wx 1 || Racq x 1; Wrel y 1 || Racq y 1; Racq x 0"),
    ("WRC_rel_first", 1, "012", "Wrel x 1 || Racq x 1; Wy 1 || Ry 1; Rx 0"),
    ("WRC_acq", 1, "012", "Wx 1 || Racq x 1; Wy 1 || Racq y 1; Rx 0"),
    ("WRC_sc_dep", 1, "012", "Wx 1 || Rx 1; fence.sc.sys; Wy 1 || Ry 1; Rx 0"),
    (
        "WRC_cta_1_2", 0, "011",
        "Wx 1 || Rx 1; fence.release.sys; st.rlx.gpu y 1 || ld.rlx.gpu y 1; fence.acquire.sys; Rx 0",
    ),
    (
        "WRC_cta_1_2_acqrel", 0, "011",
        "Wx 1 || Rx 1; fence.acq_rel.sys; st.rlx.gpu y 1 || ld.rlx.gpu y 1; fence.acq_rel.sys; Rx 0",
    ),
    (
        "WRC_cta_2_1", 1, "001",
        "Wx 1 || Rx 1; fence.release.sys; st.rlx.gpu y 1 || ld.rlx.gpu y 1; fence.acquire.sys; Rx 0",
    ),
    (
        "WRC_cta_2_1'", 0, "001",
        "st.rlx.gpu x 1 || ld.rlx.gpu x 1; fence.release.sys; Wy 1 || Ry 1; fence.acquire.sys; Rx 0",
    ),
    ("WRC_rel_mid", 0, "012", "Wx 1 || Rx 1; fence.release.sys; Wy 1 || Ry 1; fence.acquire.sys; Rx 0"),
    ("WRC_rel_mid_no_fence", 0, "012", "Wx 1 || Rx 1; Wrel y 1 || Ry 1; fence.acquire.sys; Rx 0"),
    ("WRC_acq_mid", 1, "012", "Wx 1 || Racq x 1; Wy 1 || Ry 1; fence.acquire.sys; Rx 0"),
    (
        "WRC_cta_2_1_acqrel", 0, "001",
        "st.rlx.gpu x 1 || ld.rlx.gpu x 1; fence.acq_rel.sys; Wy 1 || Ry 1; fence.acquire.sys; Rx 0",
    ),
    (
        "WRC_cta_1_1_1_cta_rf_right", 1, "012",
        "Wx 1 || Rx 1; fence.acq_rel.sys; st.rlx.gpu y 1 || ld.rlx.gpu y 1; fence.acquire.sys; Rx 0",
    ),
    (
        "WRC_cta_1_1_1_rf_cta_left", 1, "012",
        "Wx 1 || ld.rlx.gpu x 1; fence.acq_rel.sys; Wy 1 || Ry 1; fence.acquire.sys; Rx 0",
    ),
    (
        "WRC_cta_1_1_1_cta_rf_left", 1, "012",
        "st.rlx.gpu x 1 || Rx 1; fence.acq_rel.sys; Wy 1 || Ry 1; fence.acquire.sys; Rx 0",
    ),
    (
        "WRC_cta_1_1_1_cta_rf_left_sc_acq", 1, "012",
        "st.rlx.gpu x 1 || Rx 1; fence.sc.sys; Wy 1 || Ry 1; fence.acquire.sys; Rx 0",
    ),
    (
        "WRC_cta_1_1_1_cta_rf_left_sc", 1, "012",
        "st.rlx.gpu x 1 || Rx 1; fence.sc.sys; Wy 1 || Ry 1; fence.sc.sys; Rx 0",
    ),
    ("MP3", 1, "012", "Wx 1; Wy 1 || Ry 1; Wz 1 || Rz 1; Rx 0"),
    (
        "MP3_acqrel", 0, "000",
        "st.rel.gpu x 1; st.rel.gpu y 1 || ld.acq.gpu y 1; st.rel.gpu z 1 || ld.acq.gpu z 1; ld.acq.gpu x 0",
    ),
    (
        "MP3_fences", 1, "012",
        "Wx 1; fence.release.sys; Wy 1 || Ry 1; fence.acquire.sys; Wz 1 || Rz 1; fence.acquire.sys; Rx 0",
    ),
    (
        "MP3_fences_rel", 1, "012",
        "Wx 1; fence.release.sys; Wy 1 || Ry 1; fence.release.sys; Wz 1 || Rz 1; fence.acquire.sys; Rx 0",
    ),
    (
        "MP3_fences'", 0, "012",
        "Wx 1; fence.release.sys; Wy 1 || Ry 1; fence.acq_rel.sys; Wz 1 || Rz 1; fence.acquire.sys; Rx 0",
    ),
    (
        "MP3_scoped", 1, "011",
        "st.rel.gpu x 1; st.rel.gpu y 1 || ld.acq.gpu y 1; st.rel.gpu z 1 || ld.acq.gpu z 1; ld.acq.gpu x 0",
    ),
    (
        "three_vars_ws", 1, "012",
        "Wx 1; fence.acq_rel.sys; Wy 1 || Wy 2; fence.acq_rel.sys; Wz 1 || Rz 1; fence.acq_rel.sys; Rx 0",
    ),
    ("two_plus_two2", 1, "01", "Wrel x 1; Wrel y 2; Racq y 1 || Wrel y 1; Wrel x 2; Racq x 1"),
    ("two_plus_two2_rlx", 1, "01", "Wx 1; Wy 2; Ry 1 || Wy 1; Wx 2; Rx 1"),
    ("co_two_thread", 0, "01", "Wx 1; Rx 2 || Wx 2; Rx 1"),
    ("co_four_thread", 0, "0123", "Wx 1 || Rx 1; Rx 2 || Rx 2; Rx 1; Wx 2"),
    ("simple_write_serialization", 0, "01", "Wx 1; Wx 2 || Rx 2; Rx 1"),
    ("simple_write_serialization_extra_thread", 0, "012", "Wx 1; Wx 2 || Rx 2; Rx 1 || Wy 1; Ry 1"),
    (
        "write_serialization", 1, "001",
        "st.rlx.gpu x 1; st.rlx.gpu x 2 || ld.rlx.gpu x 1; ld.rlx.gpu x 2 || ld.rlx.gpu x 2; ld.rlx.gpu x 1",
    ),
    (
        "write_serialization_unscoped", 0, "000",
        "st.rlx.gpu x 1; st.rlx.gpu x 2 || ld.rlx.gpu x 1; ld.rlx.gpu x 2 || ld.rlx.gpu x 2; ld.rlx.gpu x 1",
    ),
)  # fmt: skip


def _spelled(text):
    for short, long in (("Wrel ", "st.rel.sys "), ("Racq ", "ld.acq.sys "), ("W", f"{W} "), ("R", f"{R} ")):
        text = text.replace(short, long)
    return text


COMPOUND = [
    Litmus(name, "goens/lost-pop-lean Litmus/PTX.lean", bool(allowed), tuple(map(int, gpus)), _spelled(text))
    for name, allowed, gpus, text in _ROWS
]
