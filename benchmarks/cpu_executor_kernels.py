"""Kernels of benchmarks/cpu_executor.py, in the subset that the stock interpreter runs."""

import triton
import triton.language as tl


@triton.jit
def empty(x):
    pass


@triton.jit
def add(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def softmax(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    row = tl.program_id(0) * n
    value = tl.load(x + row + i, mask=i < n, other=-float("inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row + i, value / tl.sum(value, axis=0), mask=i < n)


@triton.jit
def device_function(x):
    return x


@triton.jit
def calls(out):
    x = tl.load(out)
    for _ in tl.static_range(100):
        x = device_function(x)
    tl.store(out, x)


@triton.jit
def atomics(out):
    for _ in tl.static_range(100):
        tl.atomic_add(out, 1.0)


@triton.jit
def dot(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def gemm(
    a,
    b,
    c,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = a + m[:, None] * stride_am + k[None, :] * stride_ak
    right = b + k[:, None] * stride_bk + n[None, :] * stride_bn
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        x = tl.load(left, mask=(m[:, None] < M) & (k[None, :] < K - step * BK), other=0.0)
        y = tl.load(right, mask=(k[:, None] < K - step * BK) & (n[None, :] < N), other=0.0)
        total = tl.dot(x, y, total)
        left += BK * stride_ak
        right += BK * stride_bk
    out = c + m[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(out, total, mask=(m[:, None] < M) & (n[None, :] < N))
