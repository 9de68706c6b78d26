"""The chain of layers of a model that is planned: an ONNX file, or a Wide ResNet-50 by name."""

from __future__ import annotations

import re
from pathlib import Path

from dovetail.errors import ConfigError
from dovetail.plan.chains import Chain, even_cuts, wide_resnet50
from dovetail.plan.function_profile import FunctionProfile
from dovetail.plan.onnx_graph import digest_of, is_onnx, read_chain


def chain_named(name: str) -> Chain:
    """wrn50-K: ResNet-50, K times as wide."""
    found = re.fullmatch(r"wrn50-([1-9])", name)
    if found is None:
        raise ConfigError(f"{name}: unknown network; there are wrn50-1 to wrn50-9")
    return wide_resnet50(int(found[1]))


def open_chain(model: str) -> Chain:
    """A network of the package, or an ONNX file."""
    if not is_onnx(model):
        return chain_named(model)
    path = Path(model).expanduser().resolve()
    return read_chain(path, digest_of(path))


def even_stages(chain: Chain, count: int) -> tuple[tuple[int, int, int], ...]:
    """Of one worker each, cut by weights."""
    cuts = even_cuts([float(layer.weight_bytes) for layer in chain.layers], count)
    return tuple((first, end, 1) for first, end in cuts)


def chain_of(profile: FunctionProfile) -> Chain:
    """The model that a profile was measured with."""
    if profile.onnx is None:
        return chain_named(profile.model)
    return read_chain(Path(profile.onnx.file), profile.onnx.sha256)
