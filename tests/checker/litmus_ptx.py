"""Litmus tests of PTX by NVIDIA (NVlabs/mixedproxy, tests/) and Dat3M (hernanponcedeleon/Dat3M, litmus/PTX/).

The verdicts are NVIDIA's `assert` and `permit`, and those of Dat3M's PTXv6_0-expected.csv.  Where the two differ
(Release-acquire-pattern), Dat3M's counts, which is that of the PTX ISA and of "MP_rel_seq" in the other table.

Left out is what cannot be said in Triton: proxies, barriers of CTAs, loops; and outcomes with values that are written
nowhere.
Threads of one CTA are programs of one GPU here, and where a test has scopes cta and gpu, these are gpu and sys, and its
CTAs are GPUs.
"""

from litmus_programs import Litmus

_NVIDIA = (
    ("CoMP_volatile", 1, "01", "st x 1; st.rlx.sys x 2 || ld x 2; ld.rlx.sys x 1"),
    ("CoWR", 0, "0", "st x 1; ld x 0"),
    ("ISA2", 0, "001", "st x 42; st.rel.gpu f 1 || ld.acq.gpu f 1; st.rel.sys g 1 || ld.acq.sys g 1; ld x 0"),
    ("MP_cta", 0, "00", "st x 2; st.rel.gpu f 1 || ld.acq.gpu f 1; ld x 0"),
    ("MP_gpu", 0, "00", "st x 2; st.rel.gpu f 1 || ld.acq.gpu f 1; ld x 0"),
    (
        "Release_acquire_pattern", 0, "01",
        "st y 1; st.rel.sys x 1; st.rlx.sys x 2 || ld.rlx.sys x 2; fence.acq_rel.sys; ld y 0",
    ),
    ("SB_cta", 0, "00", "st x 1; fence.sc.gpu; ld y 0 || st y 2; fence.sc.gpu; ld x 0"),
    ("SB_rmw", 0, "00", "add.acq_rel.gpu x 1; add.acq_rel.gpu y 1 0 || add.acq_rel.gpu y 1; add.acq_rel.gpu x 1 0"),
    ("SB_rmw_2", 1, "00", "add.acq_rel.gpu x 1; add.acq_rel.gpu y 1 0 || st.rlx.gpu y 1; ld.rlx.gpu x 0"),
    (
        "SC_per_location", 0, "012",
        "st.rel.sys x 1; st.rel.sys f 1 || st.rel.gpu x 2; ld.acq.sys x 0; st.rel.sys g 1 || "
        "ld.acq.sys g 1; ld.acq.sys g 1; ld.acq.sys x 2",
    ),
    ("Manual/Atom-plus-register", 1, "01", "add.acq_rel.gpu x 1 || add.acq_rel.gpu x 1; ld.acq.gpu x 1"),
    (
        "Manual/Cause-base-strong", 0, "000",
        "st.rel.gpu x 1; st.rel.sys f 1 || ld.acq.gpu x 1; st x 2; st.rel.sys g 1 || "
        "ld.acq.sys g 1; ld.acq.sys g 1; ld x 1",
    ),
    (
        "Manual/Cause-base-weak", 1, "000",
        "st x 1; st.rel.sys f 1 || ld.acq.gpu x 1; st x 2; st.rel.sys g 1 || ld.acq.sys g 1; ld.acq.sys g 1; ld x 1",
    ),
    (
        "Manual/Co-Total-3-threads-scope-same", 1, "000",
        "st x 1; st.rel.sys f 1 || st x 2; st.rel.sys g 1 || ld.acq.sys f 1; ld.acq.sys g 1; ld x 1; ld x 2",
    ),
    (
        "Manual/Co-Total-4-threads", 1, "0000",
        "st x 1; st.rel.sys f 1 || st x 2; st.rel.sys g 1 || ld.acq.sys f 1; ld.acq.sys g 1; ld x 1 || "
        "ld.acq.sys f 1; ld.acq.sys g 1; ld x 2",
    ),
    ("Manual/CoRR-acquire-weak", 0, "00", "st.rel.gpu x 1 || ld.acq.gpu x 1; ld x 0"),
    (
        "Manual/CoRR-relaxed-acquire-weak", 1, "00",
        "st.rel.gpu x 1; st.rel.gpu x 2 || ld.rlx.gpu x 2; ld.acq.gpu x; ld x",
    ),
    ("Manual/CoRR-weak-acquire-weak", 1, "00", "st.rel.gpu x 1; st x 2 || ld x; ld.acq.gpu x; ld x 1"),
    ("Manual/CoRR-weak-acquire", 1, "00", "st.rel.gpu x 1 || ld x 0; ld.acq.gpu x"),
    ("Manual/CoRW-R", 0, "00", "st.rel.sys x 1 || ld.acq.sys x 1; st x 2; ld x 1"),
    ("Manual/CoWR-R", 1, "00", "st.rel.gpu x 1 || st.rel.sys x 2; ld x 1; ld x 1"),
    ("Manual/CoWW-R", 0, "0", "st x 1; st x 2; ld.acq.sys x 1"),
    ("Manual/CoWW-RR", 1, "00", "st x 1; st x 2 || ld x 2; ld x 1"),
    (
        "Manual/Coherence", 0, "0000",
        "st.rlx.sys x 1 || st.rlx.sys x 2 || ld.acq.sys x 1; ld.acq.sys x 2 || ld.acq.sys x 2; ld.acq.sys x 1",
    ),
    (
        "Manual/Coherence-weak", 1, "0000",
        "st x 1 || st x 2 || ld.acq.sys x 1; ld.acq.sys x 2 || ld.acq.sys x 2; ld.acq.sys x 1",
    ),
    (
        "Manual/MP-3-transitive", 0, "001",
        "st x 1; st.rel.gpu y 1 || ld.acq.gpu y 1; st.rel.sys z 1 || ld.acq.sys z 1; ld x 0",
    ),
    ("Manual/MP-cta-gpu", 0, "00", "st x 1; st.rel.gpu y 1 || ld.acq.sys y 1; ld x 0"),
    ("Manual/MP-cta", 1, "01", "st x 1; st.rel.gpu y 1 || ld.acq.gpu y 1; ld x 0"),
    ("Manual/MP-gpu", 0, "00", "st x 1; st.rel.gpu y 1 || ld.acq.gpu y 1; ld x 0"),
    ("Manual/MP-relaxed", 1, "00", "st.rel.sys x 1; st.rel.sys y 1 || ld.rlx.sys y 1; ld.acq.gpu x 0"),
    ("Manual/MP-sys", 0, "00", "st x 1; st.rel.sys y 1 || ld.acq.sys y 1; ld x 0"),
    (
        "Manual/SB+acq_rel-cta", 1, "00",
        "st.rel.gpu x 1; fence.acq_rel.gpu; ld.acq.gpu y 1 || st.rel.gpu y 1; fence.acq_rel.gpu; ld.acq.gpu x 0",
    ),
    ("Manual/SB+sc-cta-outScope", 1, "01", "st x 1; fence.sc.gpu; ld y 1 || st y 1; fence.sc.gpu; ld x"),
    ("Manual/SB+sc-cta", 1, "00", "st x 1; fence.sc.gpu; ld y 1 || st y 1; fence.sc.gpu; ld x"),
    (
        "Manual/SB+sc-gpu-multipleFence-TotalOrder", 1, "00",
        "st x 1; fence.sc.gpu; st x 2; fence.sc.gpu; ld y 2 || st y 1; fence.sc.gpu; st y 2; fence.sc.gpu; ld x",
    ),
    (
        "Manual/SB+sc-gpu-multipleFence", 0, "00",
        "st x 1; fence.sc.gpu; st x 2; fence.sc.gpu; ld y 1 || st y 1; fence.sc.gpu; st y 2; fence.sc.gpu; ld x 1",
    ),
    ("Manual/SB+sc-gpu", 0, "00", "st x 1; fence.sc.gpu; ld y 0 || st y 1; fence.sc.gpu; ld x 0"),
    ("Manual/SB+sc-sys-gpu", 0, "00", "st x 1; fence.sc.sys; ld y 0 || st y 1; fence.sc.gpu; ld x 0"),
    ("Manual/SB+sc-sys", 0, "00", "st x 1; fence.sc.sys; ld y 0 || st y 1; fence.sc.sys; ld x 0"),
    ("Manual/SB-weak", 1, "00", "st x 1; ld y 0 || st y 1; ld x 0"),
)  # fmt: skip

_DAT3M = (
    ("Manual/Atom-minus-location_", 0, "00", "x=2 -| add.acq_rel.sys x -1 || add.acq_rel.sys x -1 |- x=1"),
    ("Manual/Atom-plus-location-weak_", 1, "01", "add.acq_rel.gpu x 1 || add.acq_rel.gpu x 1 |- x=1"),
    ("Manual/Atom-plus-location_", 0, "00", "add.acq_rel.sys x 1 || add.acq_rel.sys x 1 |- x=1"),
    ("Manual/Red-plus-location_", 0, "00", "add.acq_rel.sys x 1 || add.acq_rel.sys x 1 |- x=1"),
    (
        "Nvidia/Co-Total-3-threads-scope-diff", 1, "000",
        "st x 42; st.rel.gpu f 1 || ld.acq.sys f 1; st.rel.sys g 1 || ld.acq.sys g 1; ld x 42",
    ),
    ("Manual/CoRR-weak-weak", 1, "01", "st.rel.gpu x 1 || ld x 1; ld x 0"),
    ("Manual/CoWW_", 0, "0", "st x 1; st x 2 |- x=1"),
    (
        "Manual/MP-sys-fence", 0, "00",
        "st x 1; fence.acq_rel.sys; st.rlx.sys y 1 || ld.rlx.sys y 1; fence.acq_rel.sys; ld x 0",
    ),
    ("Manual/MP-dlb", 0, "00", "st.rlx.gpu d 1; fence.sc.gpu; st t 1 || ld t 1; fence.sc.gpu; ld.rlx.gpu d 0"),
    ("Manual/MP-dlb-no-fence-1", 1, "00", "st.rlx.gpu d 1; st t 1 || ld t 1; fence.sc.gpu; ld.rlx.gpu d 0"),
    ("Manual/MP-dlb-no-fence-2", 1, "00", "st.rlx.gpu d 1; fence.sc.gpu; st t 1 || ld t 1; ld.rlx.gpu d 0"),
    (
        "Manual/LB-dlb", 0, "00",
        "cas.rlx.gpu h 0 1 1; fence.sc.gpu; st t 1 || ld t 1; fence.sc.gpu; cas.rlx.gpu h 0 1",
    ),
    (
        "Manual/LB-dlb-no-fence-1", 1, "00",
        "cas.rlx.gpu h 0 1 1; st.rlx.gpu t 1 || ld.rlx.gpu t 1; fence.sc.gpu; cas.rlx.gpu h 0 1",
    ),
    (
        "Manual/LB-dlb-no-fence-2", 1, "00",
        "cas.rlx.gpu h 0 1 1; fence.sc.gpu; st.rlx.gpu t 1 || ld.rlx.gpu t 1; cas.rlx.gpu h 0 1",
    ),
    (
        "Manual/SL-cas-plus", 0, "00",
        "m=1 -| st.rlx.gpu x 1; fence.sc.gpu; xchg.rlx.gpu m 0 || cas.rlx.gpu m 0 1 0; fence.sc.gpu; ld.rlx.gpu x 0",
    ),
    ("Manual/SL-cas-minus", 1, "01", "m=1 -| st x 1; xchg.rlx.gpu m 0 || cas.rlx.gpu m 0 1 0; ld x 0"),
    (
        "Manual/SL-future-plus", 0, "00",
        "m=1 -| ld.rlx.gpu x 1; fence.sc.gpu; xchg.rlx.gpu m 0 || cas.rlx.gpu m 0 1 0; fence.sc.gpu; st.rlx.gpu x 1",
    ),
    (
        "Manual/SL-future-minus", 1, "00",
        "m=1 -| ld x 1; st m 0; fence.sc.gpu || cas.rlx.gpu m 0 1 0; if r1 == 0: st x 1",
    ),
    ("Nvidia/LB+NoThinAir-location_", 0, "00", "ld x a; st y a || ld y b; st x b |- x=42 y=42"),
    ("Memalloy/IRIW1", 1, "0111", "st x 1 || ld x 1; fence.sc.gpu; ld y 0 || st x 1 || ld x 1; fence.sc.sys; ld y 0"),
    ("Memalloy/IRIW2", 1, "0001", "st x 1 || ld x 1; fence.sc.gpu; ld y 0 || st x 1 || ld x 1; fence.sc.sys; ld y 0"),
    (
        "Memalloy/IRIW_gl_cta", 1, "0111",
        "st x 1 || ld x 1; fence.sc.sys; ld x 0 || st x 2 || ld x 1; fence.sc.gpu; ld x 0",
    ),
    (
        "Memalloy/IRIW_uniproc", 1, "0111",
        "st x 1 || ld x 1; fence.sc.gpu; ld x 0 || st x 2 || ld x 2; fence.sc.sys; ld x 2 |- x=1",
    ),
    (
        "Memalloy/IRRWIW1", 1, "0111",
        "st x 2 || ld x 2; fence.sc.gpu; ld y 0 || st x 1 || ld x 1; fence.sc.sys; st y 1 |- x=2",
    ),
    (
        "Memalloy/IRRWIW2", 1, "0111",
        "st x 2 || ld x 2; fence.sc.sys; ld y 0 || st x 1 || ld x 1; fence.sc.gpu; st y 1 |- x=2",
    ),
    (
        "Memalloy/IRRWIW3", 1, "0001",
        "st x 2 || ld x 2; fence.sc.sys; ld y 0 || st x 1 || ld x 1; fence.sc.gpu; st y 1 |- x=2",
    ),
    (
        "Memalloy/IRRWIW4", 1, "0001",
        "st x 2 || ld x 2; fence.sc.gpu; ld y 0 || st x 1 || ld x 1; fence.sc.sys; st y 1 |- x=2",
    ),
    (
        "Memalloy/IRRWIW_uniproc", 1, "0111",
        "st x 1 || ld x 1; fence.sc.gpu; ld x 0 || st x 2 || ld x 2; fence.sc.sys; st x 3 |- x=1",
    ),
    (
        "Memalloy/IRWIW_gl_cta", 1, "0111",
        "st x 2 || ld x 2; fence.sc.sys; st y 1 || st y 2 || ld y 2; fence.sc.gpu; st x 2 |- x=2 y=2",
    ),
    ("Memalloy/RWC1", 1, "011", "st x 1 || ld x 1; fence.sc.gpu; ld y 0 || st x 1; fence.sc.sys; ld y 0"),
    ("Memalloy/RWC2", 1, "011", "st x 1 || ld x 1; fence.sc.sys; ld y 0 || st x 1; fence.sc.gpu; ld y 0"),
    ("Memalloy/RWC_uniproc", 1, "011", "st x 1 || ld x 1; fence.sc.gpu; ld x 0 || st x 2; fence.sc.sys; ld x 2 |- x=1"),
    ("Memalloy/WRC1", 1, "011", "st x 1 || ld x 1; fence.sc.gpu; st y 1 || ld x 1; fence.sc.sys; ld y 0"),
    ("Memalloy/WRC2", 1, "011", "st x 1 || ld x 1; fence.sc.sys; st y 1 || ld x 1; fence.sc.gpu; ld y 0"),
    ("Memalloy/WRR+2W", 1, "011", "st x 1 || ld x 1; fence.sc.gpu; ld x 0 || st x 2; fence.sc.sys; st x 3 |- x=1"),
    ("Memalloy/WRR+2W1", 1, "011", "st x 1 || ld x 2; fence.sc.gpu; ld y 0 || st x 2; fence.sc.sys; st y 1 |- x=2"),
    ("Memalloy/WRR+2W2", 1, "011", "st x 1 || ld x 2; fence.sc.sys; ld y 0 || st x 2; fence.sc.gpu; st y 1 |- x=2"),
)  # fmt: skip

PTX = [
    Litmus(name, source, bool(allowed), tuple(map(int, gpus)), text)
    for source, rows in (("NVlabs/mixedproxy tests", _NVIDIA), ("hernanponcedeleon/Dat3M litmus/PTX", _DAT3M))
    for name, allowed, gpus, text in rows
]
