"""ONNX networks of random weights, written by hand: residual blocks as image networks have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def save_residual(path: Path, channels: int = 8, blocks: int = 3, size: int = 16, batch: str | int = "batch") -> Path:
    """Stem, so many blocks of two convolutions and a shortcut, mean, and ten classes."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    chance = np.random.default_rng(0)
    weights: list[Any] = []
    nodes: list[Any] = []

    def weight(name: str, *shape: int) -> str:
        scale = np.sqrt(2 / np.prod(shape[1:]))
        array = (chance.standard_normal(shape) * scale).astype(np.float32)
        weights.append(numpy_helper.from_array(array, name))
        return name

    def add(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def conv(name: str, x: str, before: int) -> str:
        return add("Conv", [x, weight(f"{name}.weight", channels, before, 3, 3)], name, pads=[1, 1, 1, 1])

    x = add("Relu", [conv("stem", "image", 3)], "stem.out")
    for block in range(blocks):
        inner = add("Relu", [conv(f"block{block}.first", x, channels)], f"block{block}.inner")
        joined = add("Add", [conv(f"block{block}.second", inner, channels), x], f"block{block}.sum")
        x = add("Relu", [joined], f"block{block}.out")
    mean = add("GlobalAveragePool", [x], "mean")
    flat = add("Flatten", [mean], "flat")
    scores = add("Gemm", [flat, weight("head.weight", 10, channels)], "scores", transB=1)
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, size, size])],
        [helper.make_tensor_value_info(scores, TensorProto.FLOAT, [batch, 10])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save_model(model, str(path))
    return path
