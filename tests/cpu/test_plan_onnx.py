"""Functions of ONNX files: cut by the graph, computed by onnxruntime in processes, profiled, planned, applied."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from onnx_models import save_residual
from server_fixture import run_command

from dovetail.errors import ConfigError, EngineFailed
from dovetail.plan.chains import Chain
from dovetail.plan.endpoint import make_app
from dovetail.plan.instances import Instance, InstanceRun, StageRun, StageSize
from dovetail.plan.known_chains import even_stages, open_chain
from dovetail.plan.onnx_graph import stage_file
from dovetail.plan.plan_file import read_plan
from dovetail.plan.profiling import Sweep, profile_cpu
from dovetail.plan.runtime import PlanRuntime, check_runnable

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
sys.path.append(str(Path(__file__).parents[2] / "tools"))
import onnx_network  # noqa: E402


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_residual(tmp_path / "residual.onnx")


def whole_model(path: Path, x: Any) -> Any:
    """What onnxruntime says without us."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"image": x})[0]


def images(count: int, size: int = 16) -> Any:
    return np.random.default_rng(1).standard_normal((count, 3, size, size), dtype=np.float32)


def test_a_graph_is_cut_where_one_tensor_passes(model: Path) -> None:
    """Never inside of a block, whose shortcut would have to pass as well."""
    chain = open_chain(str(model))
    names = [layer.name for layer in chain.layers]
    assert chain.input_shape == (3, 16, 16)
    assert names[-1] == "scores"
    assert {"stem.out", "block0.out", "block1.out", "block2.out"} < set(names)
    assert not {name for name in names if name.endswith((".inner", ".first", ".second"))}
    passed = {layer.name: layer.out_bytes for layer in chain.layers}
    assert passed["block0.out"] == 8 * 16 * 16 * 4
    assert passed["mean"] == 8 * 4
    assert chain.weight_bytes == 4 * (8 * 3 * 9 + 6 * 8 * 8 * 9 + 10 * 8)
    assert chain.flops == 2 * 256 * (8 * 3 * 9 + 6 * 8 * 8 * 9) + 2 * 10 * 8
    assert [layer.in_bytes for layer in chain.layers[1:]] == [layer.out_bytes for layer in chain.layers[:-1]]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_in_processes_compute_what_the_whole_model_does(model: Path, stages: int) -> None:
    async def computed() -> Any:
        chain = open_chain(str(model))
        cuts = even_stages(chain, stages)
        instance = await Instance.start(chain, [StageSize(first, end, 1, 1.0) for first, end, _ in cuts])
        try:
            one, three = await instance.run(images(1)), await instance.run(images(3))
            instance.resize(2.0)
            again = await instance.run(images(3))
        finally:
            await instance.close()
        return one.output, three.output, again.output

    one, three, again = asyncio.run(computed())
    for found, count in ((one, 1), (three, 3), (again, 3)):
        np.testing.assert_allclose(found, whole_model(model, images(count)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["resnet50", "squeezenet"])
def test_real_networks_in_three_stages_compute_what_the_whole_does(name: str, tmp_path: Path) -> None:
    """Of ONNX's own test models, with random weights; squeezenet's blocks join by concatenation."""
    path = tmp_path / f"{name}.onnx"
    onnx.save_model(onnx_network.with_random_weights(name), str(path))
    image = np.random.default_rng(1).standard_normal((1, 3, 224, 224), dtype=np.float32)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (whole,) = session.run(None, {session.get_inputs()[0].name: image})

    async def computed() -> Any:
        chain = open_chain(str(path))
        stages = [StageSize(first, end, 1, 1.0) for first, end, _ in even_stages(chain, 3)]
        instance = await Instance.start(chain, stages)
        try:
            return (await instance.run(image)).output
        finally:
            await instance.close()

    np.testing.assert_allclose(asyncio.run(computed()), whole, rtol=1e-4, atol=1e-6)
    assert whole.max() > 1.5 * whole.min()


def test_a_stage_has_only_its_own_weights(model: Path) -> None:
    chain = open_chain(str(model))
    parts = [stage_file(chain, first, end) for first, end, _ in even_stages(chain, 3)]
    held = [{tensor.name for tensor in onnx.load(str(part)).graph.initializer} for part in parts]
    assert sum(map(len, held)) == len(set().union(*held)) == 8
    assert parts == [stage_file(chain, first, end) for first, end, _ in even_stages(chain, 3)]


class Reopening:
    """Stages that compute for 20 ms, pass on in 1 ms, and open their model for 300 ms for other threads."""

    start_s = 1.0

    def __init__(self, stages: int) -> None:
        self.functions = [SimpleNamespace(memory_bytes=10**8) for _ in range(stages)]
        self._threads = self._opened = 2

    @classmethod
    async def start(cls, chain: Chain, sizes: list[StageSize]) -> Reopening:
        return cls(len(sizes))

    def resize(self, vcpus: float) -> None:
        self._threads = math.ceil(vcpus)

    async def run(self, x: Any) -> InstanceRun:
        passing_s = 0.001 * (len(self.functions) - 1) + (0.3 if self._threads != self._opened else 0.0)
        self._opened = self._threads
        runs = tuple(StageRun((0.02,), 0.02) for _ in self.functions)
        return InstanceRun(x, 0.02 * len(runs) + passing_s, runs)

    async def close(self) -> None:
        pass


def test_opening_a_model_for_other_threads_is_not_passing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.plan.profiling.Instance", Reopening)
    chain = open_chain(str(model))
    sweep = Sweep((0.5, 0.75, 1.0, 1.2, 1.6, 2.0), (0.6, 1.4), (1,), 2, (even_stages(chain, 3),))
    profile, errors = asyncio.run(profile_cpu(chain, sweep, lambda what: None))
    assert profile.partitions[0].passing(1) == pytest.approx(0.001)
    assert errors[1].mean < 0.01


def test_a_model_is_profiled_planned_and_applied_over_http(model: Path, tmp_path: Path) -> None:
    profile, plan_file = tmp_path / "residual.yaml", tmp_path / "plan.yaml"
    sizes = ["--vcpus", "0.5,0.75,1", "--held-out", "0.6", "--runs", "1", "--batches", "1,2"]
    done = run_command("plan", "profile", model, "--stages", "3", *sizes, "--out", profile)
    assert done.returncode == 0, done.stderr
    assert "16 runs, 1 of each of 4 sizes, whole and in stages" in done.stderr
    apps = tmp_path / "apps.yaml"
    apps.write_text(
        "prices: own-machines\ncold_starts: false\n"
        "models: {residual: {onnx: residual.onnx, profile: residual.yaml}}\n"
        "apps: {label: {model: residual, rate: 0.2, slo: 20s}}\n"
    )
    done = run_command("plan", apps, "--out", plan_file)
    assert done.returncode == 0, done.stderr
    plan = read_plan(plan_file)
    assert len(plan.profiles["residual"].partitions[0].stages) == 3
    check_runnable(plan)

    async def answers() -> tuple[httpx.Response, httpx.Response]:
        runtime = PlanRuntime(plan, None)
        await runtime.start()
        transport = httpx.ASGITransport(make_app(runtime))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://plan") as client:
                right = await client.post("/apps/label", content=images(1).tobytes())
                return right, await client.post("/apps/label", content=b"123")
        finally:
            await runtime.close()

    right, wrong = asyncio.run(answers())
    assert right.status_code == 200, right.text
    found = np.frombuffer(right.content, np.float32)
    np.testing.assert_allclose(found, whole_model(model, images(1))[0], rtol=1e-5, atol=1e-5)
    assert wrong.status_code == 400
    assert "3 × 16 × 16: 3,072 bytes; got 3" in wrong.json()["error"]["message"]


def test_an_input_that_the_model_cannot_take_fails_and_the_function_lives_on(model: Path) -> None:
    async def computed() -> Any:
        chain = open_chain(str(model))
        instance = await Instance.start(chain, [StageSize(0, len(chain.layers), 1, 1.0)])
        try:
            with pytest.raises(EngineFailed, match=r"residual\.onnx: .*Got invalid dimensions"):
                await instance.run(np.zeros((1, 2, 16, 16), np.float32))
            return (await instance.run(images(1))).output
        finally:
            await instance.close()

    np.testing.assert_allclose(asyncio.run(computed()), whole_model(model, images(1)), rtol=1e-5, atol=1e-5)


def test_another_file_than_the_one_that_was_profiled_is_refused(model: Path, tmp_path: Path) -> None:
    chain = open_chain(str(model))
    save_residual(model, channels=4)
    from dovetail.plan.onnx_graph import read_chain

    with pytest.raises(ConfigError, match="not the file that was profiled"):
        read_chain.__wrapped__(model, chain.digest)


def altered(model: Path, change: Any) -> str:
    proto = onnx.load(str(model))
    change(proto)
    model.write_bytes(proto.SerializeToString())
    return str(model)


def _foreign(proto: Any) -> None:
    proto.graph.node[1].domain = "com.example"


def _external(proto: Any) -> None:
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")


def _with_function(proto: Any) -> None:
    proto.functions.append(onnx.helper.make_function("own", "Mine", ["x"], ["y"], [], []))


def _second_input(proto: Any) -> None:
    proto.graph.input.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.FLOAT, [1, 2]))


def _unknown_size(proto: Any) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_foreign, r"operator com\.example\.Relu is none of ONNX's own, and is not run"),
        (_external, "weights in other files; save the model with all of them in one"),
        (_with_function, "function 'Mine' of its own; export without functions"),
        (_second_input, "2 inputs and 1 outputs; one of each is supported"),
        (_unknown_size, "'image' must be float32 and its sizes known, but for the first"),
    ],
)
def test_what_is_not_supported_is_named(model: Path, change: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        open_chain(altered(model, change))


def test_what_is_no_onnx_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ConfigError, match=r"a\.onnx: not an ONNX file|a\.onnx: 0 inputs"):
        open_chain(str(tmp_path / "a.onnx"))
    with pytest.raises(ConfigError, match=r"none\.onnx: No such file"):
        open_chain(str(tmp_path / "none.onnx"))


def test_a_model_of_one_request_at_a_time_is_not_profiled_in_batches(tmp_path: Path) -> None:
    path = save_residual(tmp_path / "one.onnx", batch=1)
    chain: Chain = open_chain(str(path))
    assert not chain.any_batch
    done = run_command("plan", "profile", path, "--batches", "1,2")
    assert done.returncode != 0
    assert "made for one request at a time" in done.stderr
