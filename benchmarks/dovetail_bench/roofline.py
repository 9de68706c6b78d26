"""What this machine can do at best: bytes that are read and products that are computed in a second, with torch's
threads.

A ceiling must not be beaten by what is held against it, so several loops compete and the fastest one counts: for
reading, one that only reads, torch's sums and matrix-vector products, and our own product by one token; for
multiplying, torch's and our own, in several sizes. 8-bit products have a peak of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.layouts import packed_bytes
from dovetail.native.dispatch import load_kernels
from dovetail_bench.roofline_figures import Roofline

READ_BYTES = (256 << 20, 1 << 30)
PRODUCTS = ((512, 2048, 2048), (1024, 2048, 4096), (1024, 4096, 4096))  # rows, in, out
ROUNDS = 3

Loop = Callable[[], object]


def measure_roofline(dtype: str, level: str, rounds: int = ROUNDS, scale: float = 1.0) -> Roofline:
    """`scale` makes everything smaller, to try it."""
    sizes = [max(int(size * scale) // 4096, 1) * 4096 for size in READ_BYTES]
    read, read_by = max((size / _best(loop, rounds), name) for size in sizes for name, loop in _reads(size, level))
    shapes = [tuple(max(int(side * scale**0.5) // 32, 1) * 32 for side in shape) for shape in PRODUCTS]
    products = [(2 * r * i * o, name, loop) for r, i, o in shapes for name, loop in _products(r, i, o, dtype, level)]
    flops, product_by = max((count / _best(loop, rounds), name) for count, name, loop in products)
    rows, columns, outputs = shapes[0]
    int8_s = min(_int8_s(rows, columns, outputs, rounds), _our_int8_s(rows, columns, outputs, rounds, level))
    int8 = 2 * rows * columns * outputs / int8_s
    return Roofline(read, flops, int8, read_by, product_by)


def _reads(size: int, level: str) -> Iterator[tuple[str, Loop]]:
    kernels, threads = load_kernels(), torch.get_num_threads()
    data = torch.ones(size // 4)
    yield "torch's sum", data.sum
    yield "torch's sum of integers", data.view(torch.int64).sum
    matrix, vector = data.view(-1, 1024), torch.ones(1024)
    yield "torch's matrix-vector product", partial(torch.mv, matrix, vector)
    if kernels is not None:
        yield "a loop that only reads", partial(kernels.read_all, threads, data)
        if level != "torch":
            row, out = torch.ones(1, 1024), torch.empty(1, len(matrix))
            yield "our product by one token", partial(kernels.linear, level, threads, "f32", row, matrix, out)


def _products(rows: int, columns: int, outputs: int, dtype: str, level: str) -> Iterator[tuple[str, Loop]]:
    kernels, threads = load_kernels(), torch.get_num_threads()
    x, weight = torch.randn(rows, columns), torch.randn(outputs, columns).to(TORCH_DTYPES[dtype])
    if dtype != "f16":  # which torch multiplies one number at a time
        yield "torch's product", partial(torch.nn.functional.linear, x.to(TORCH_DTYPES[dtype]), weight)
    if kernels is not None and level != "torch":
        out = torch.empty(rows, outputs)
        yield "our product", partial(kernels.linear, level, threads, dtype, x, weight, out)


def _int8_s(rows: int, columns: int, outputs: int, rounds: int) -> float:
    """Infinite where torch cannot, or where it is so slow that once is enough to know."""
    x = torch.ones(rows, columns, dtype=torch.int8)
    weight = torch.ones(outputs, columns, dtype=torch.int8).t()
    product = partial(torch._int_mm, x, weight)
    try:
        first = timed(product)
    except RuntimeError:
        return float("inf")
    return first if first > 1.0 else _best(product, rounds)


def _our_int8_s(rows: int, columns: int, outputs: int, rounds: int, level: str) -> float:
    kernels, threads = load_kernels(), torch.get_num_threads()
    if kernels is None or level == "torch":
        return float("inf")
    layout = "int8-cells"  # of all layouts the one with the fewest scales
    data = torch.full((packed_bytes(layout, "f32", (outputs, columns)),), 0x25, dtype=torch.uint8)
    x, out = torch.randn(rows, columns), torch.empty(rows, outputs)
    return _best(partial(kernels.linear_quantised, level, threads, x, data, layout, out), rounds)


def _best(call: Loop, rounds: int) -> float:
    return min(timed(call) for _ in range(rounds + 1))


def timed(call: Loop) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
