"""Settings of the Gluon backend."""

from iris_triton.settings import TritonSettings


class GluonSettings(TritonSettings):
    """Settings of the "gluon" backend: IRIS_GLUON__..., or `options={"gluon": {...}}`; those of "triton"."""
