"""Writes a real network as an ONNX file to try the planner with: `python tools/onnx_network.py resnet50 resnet50.onnx`.

The graphs come with the package onnx, which has them for its own tests, without weights. They get random weights here,
so their answers mean nothing; time, memory and cuts are those of the network.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

GRAPHS = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = tuple(sorted(path.stem.removeprefix("light_") for path in GRAPHS.glob("light_*.onnx")))
MADE = "ConstantOfShape"  # stands for each large weight there


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: onnx_network.py NAME FILE; NAME is one of {', '.join(NAMES)}")
    onnx.save_model(with_random_weights(sys.argv[1]), sys.argv[2])
    print(f"{sys.argv[2]}: {Path(sys.argv[2]).stat().st_size / 1e6:.0f} MB")


def with_random_weights(name: str, seed: int = 0) -> Any:
    model = onnx.load(str(GRAPHS / f"light_{name}.onnx"))
    graph, chance = model.graph, np.random.default_rng(seed)
    given = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {node.output[0]: tuple(given[node.input[0]]) for node in graph.node if node.op_type == MADE}
    nodes = [node for node in graph.node if node.op_type != MADE]
    norms = {weight: place for node in nodes if node.op_type == "BatchNormalization"
             for place, weight in enumerate(node.input) if place}  # fmt: skip
    weights = []
    for weight in dict.fromkeys(each for node in nodes for each in node.input):
        if weight in norms:
            shape = made.get(weight) or given[weight].shape
            array = np.full(shape, 1.0 if norms[weight] in (1, 4) else 0.0, np.float32)  # scale and variance are 1
        elif weight in made:
            shape = made[weight]
            scale = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.0
            array = (chance.standard_normal(shape) * scale).astype(np.float32)
        elif weight in given:
            array = given[weight]
        else:
            continue  # what another node computes
        weights.append(numpy_helper.from_array(array, weight))
    inputs = [value for value in graph.input if value.name not in given]
    for field, kept in ((graph.node, nodes), (graph.initializer, weights), (graph.input, inputs)):
        held = list(kept)
        del field[:]
        field.extend(held)
    if model.ir_version < 4:  # before, weights had to be inputs as well
        model.ir_version = 4
    onnx.checker.check_model(model)
    return model


if __name__ == "__main__":
    main()
