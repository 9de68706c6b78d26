"""An ONNX file as a chain of layers: where its graph can be cut, what a cut hands on, and the files of its stages.

    file --> nodes in order --> a cut wherever one tensor alone is still needed --> layers between cuts --> stages

Nothing that comes with a file is run but ONNX's own operators: other domains, functions of the file, control flow and
weights in other files are refused. Needs the package `onnx` (dovetail[plan]).
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.machine import default_root
from dovetail.plan.chains import Chain, Layer

_DOMAINS = ("", "ai.onnx")
_MAX_BYTES = 2 << 30  # what protobuf holds
_FLOAT = 1  # TensorProto.FLOAT


def is_onnx(name: str) -> bool:
    return name.endswith(".onnx")


def digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


@functools.lru_cache(maxsize=4)
def read_chain(path: Path, digest: str) -> Chain:
    """`digest`: the file's, as it was profiled; another file is refused."""
    if digest_of(path) != digest:
        raise ConfigError(f"{path}: not the file that was profiled; run `dovetail plan profile {path}` again")
    graph = _Graph(_load(path), path)
    layers = tuple(graph.layers())
    return Chain(path.name.removesuffix(".onnx"), layers, graph.input_shape, str(path), digest, graph.any_batch)


def stage_file(chain: Chain, first: int, end: int) -> Path:
    """Layers [first, end) as a file of their own, made once."""
    folder = default_root() / "functions" / chain.digest
    target = folder / f"{first}-{end}.onnx"
    if first == 0 and end == len(chain.layers):
        return Path(chain.file)
    if not target.exists():
        graph = _Graph(_load(Path(chain.file)), Path(chain.file))
        folder.mkdir(parents=True, exist_ok=True)
        building = target.with_name(f".{target.name}-{os.getpid()}")
        building.write_bytes(graph.stage(first, end).SerializeToString())
        building.rename(target)
    return target


def _load(path: Path) -> Any:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError:
        raise ConfigError("models from ONNX files need onnx and onnxruntime; install dovetail[plan]") from None
    try:
        if path.stat().st_size >= _MAX_BYTES:
            raise ConfigError(
                f"{path}: {path.stat().st_size:,} bytes; a model of one file has less than {_MAX_BYTES:,}"
            )
        model = onnx.load_model(str(path), load_external_data=False)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except DecodeError as error:
        raise ConfigError(f"{path}: not an ONNX file: {error}") from error
    _check(model, path)
    try:
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise ConfigError(f"{path}: shapes do not follow from its graph: {error}") from error


def _check(model: Any, path: Path) -> None:
    from onnx import AttributeProto, TensorProto

    if model.functions:
        raise ConfigError(f"{path}: function {model.functions[0].name!r} of its own; export without functions")
    for node in model.graph.node:
        if node.domain not in _DOMAINS:
            raise ConfigError(f"{path}: operator {node.domain}.{node.op_type} is none of ONNX's own, and is not run")
        if any(one.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for one in node.attribute):
            raise ConfigError(f"{path}: operator {node.op_type} with a graph inside is not supported")
    tensors = [*model.graph.initializer, *(one.t for node in model.graph.node for one in node.attribute)]
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors):
        raise ConfigError(f"{path}: weights in other files; save the model with all of them in one")


class _Graph:
    def __init__(self, model: Any, path: Path) -> None:
        self._model = model
        self._path = path
        graph = model.graph
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        constants = [node for node in graph.node if node.op_type == "Constant"]
        self._constants = {name for node in constants for name in node.output}
        self._nodes = [node for node in graph.node if node.op_type != "Constant"]
        given = [value for value in graph.input if value.name not in self._weights]
        self._values = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
        if len(given) != 1 or len(graph.output) != 1:
            raise ConfigError(f"{path}: {len(given)} inputs and {len(graph.output)} outputs; one of each is supported")
        self._input, self._output = given[0].name, graph.output[0].name
        shapes = {name: self._shape(name) for name in (self._input, self._output)}
        wrong = next((name for name, shape in shapes.items() if shape is None), None)
        if wrong is not None:
            raise ConfigError(f"{path}: {wrong!r} must be float32 and its sizes known, but for the first, the batch")
        self.input_shape: tuple[int, ...] = shapes[self._input] or ()
        self.any_batch = not given[0].type.tensor_type.shape.dim[0].HasField("dim_value")
        self._cuts = list(self._found_cuts())

    def layers(self) -> Iterator[Layer]:
        borders = [-1, *(place for place, _ in self._cuts)]
        names = [self._input, *(name for _, name in self._cuts)]
        for first, end, before, after in zip(borders, borders[1:], names, names[1:], strict=False):
            nodes = self._nodes[first + 1 : end + 1]
            used = {name for node in nodes for name in node.input if name in self._weights}
            weights = sum(_tensor_bytes(self._weights[name]) for name in used)
            flops = sum(self._flops(node) for node in nodes)
            yield Layer(after, flops, weights, self._bytes(before), self._bytes(after))

    def stage(self, first: int, end: int) -> Any:
        from onnx.utils import Extractor

        names = [self._input, *(name for _, name in self._cuts)]
        return Extractor(self._model).extract_model([names[first]], [names[end]])

    def _found_cuts(self) -> Iterator[tuple[int, str]]:
        """(place of a node, the one tensor that is needed after it), the output last."""
        left = Counter(name for node in self._nodes for name in node.input)
        left[self._output] += 1
        live = {self._input}
        for place, node in enumerate(self._nodes):
            left.subtract(node.input)
            live |= {name for name in node.output if name}
            live = {name for name in live if left[name] > 0 and name not in self._constants}
            if len(live) == 1:
                (name,) = live
                if name != self._input and self._shape(name) is not None:
                    yield place, name

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Of one request, without the batch; None where it is not float32 or not known."""
        value = self._values.get(name)
        if value is None or value.type.tensor_type.elem_type != _FLOAT:
            return None
        dims = value.type.tensor_type.shape.dim
        if not dims or any(not dim.HasField("dim_value") or dim.dim_value < 1 for dim in dims[1:]):
            return None
        if dims[0].HasField("dim_value") and dims[0].dim_value != 1:
            return None
        return tuple(int(dim.dim_value) for dim in dims[1:])

    def _bytes(self, name: str) -> int:
        return 4 * math.prod(self._shape(name) or ())

    def _flops(self, node: Any) -> float:
        """Of the products, which are nearly all of it."""
        weights = [self._weights[name] for name in node.input if name in self._weights and self._weights[name].dims]
        if node.op_type not in ("Conv", "Gemm", "MatMul") or not weights:
            return 0.0
        if node.op_type == "Conv":
            return 2.0 * float(math.prod(weights[0].dims[1:])) * math.prod(self._shape(node.output[0]) or ())
        rows = math.prod((self._shape(node.output[0]) or (1,))[:-1])
        return 2.0 * rows * float(math.prod(weights[0].dims))


def _tensor_bytes(tensor: Any) -> int:
    return len(tensor.raw_data) or 4 * math.prod(tensor.dims)
