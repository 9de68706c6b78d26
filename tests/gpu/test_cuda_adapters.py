"""Rows with LoRA adapters on a GPU: the numbers of merged weights, many adapters in one iteration, through graphs that
know none of them, nobody's row changed by others, and memory that is given back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny import TINY_CONFIGS
from tiny_adapters import ATTENTION, merge, save_adapter

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from drive import Engine, make_request, make_row

from dovetail.engine.adapters import AdapterMatrices, Part, read_matrices
from dovetail.engine.devices import Adaptable
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.modelspec import FP8, ModelSpec
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import Catalogue, open_checkpoint
from dovetail.store.hf.adapter_parts import open_adapter
from dovetail.types import AdapterRef

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda.adapter_image import TILE, AdapterImage, adapted_matrix, group_rows
    from dovetail.engine.devices.cuda.adapters import CudaAdapter, grouped_rows
    from dovetail.engine.devices.cuda.arena import RECLAIMER
    from dovetail.engine.devices.cuda.device import CudaDevice

REFUSED = {"olmo2", "olmo3", "cohere", "cohere2", "gpt_oss", "deepseek_v2"}  # on GPUs, whatever they are adapted with
FAMILIES = sorted(TINY_CONFIGS.keys() - REFUSED)
PROMPTS = {"": 19, "a": 3, "b": 70, "c": 1}  # tokens, by adapter
BLOCK = 4
TinyFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def device() -> Any:
    return CudaDevice("cuda:0")


class Bound:
    """An executor and the adapters that it was given, closed in the right order."""

    def __init__(self, folder: Path, device: Any, **options: Any) -> None:
        options = {"kv_bytes": 1 << 24, "block_size": BLOCK, "dtype": "f32", "max_batch": 16} | options
        self.device = device
        self.executor = device.executor(open_checkpoint(folder), ExecutorConfig(**options))
        assert isinstance(self.executor, Adaptable)
        self.executor.resize(self.executor.max_blocks)
        self.adapters: dict[str, Any] = {}

    def bind(self, key: str, folder: Path) -> Any:
        weights = open_adapter(folder, self.executor.spec)
        packed = self.device.pack_adapter(read_matrices(weights), self.executor.spec, self.executor.dtype)
        weights.close()
        packed.place()
        self.executor.add_adapter(key, packed)
        self.adapters[key] = packed
        return packed

    def drop(self, key: str) -> None:
        self.executor.remove_adapter(key)
        self.adapters.pop(key).close()

    def close(self) -> None:
        self.executor.close()
        for packed in self.adapters.values():
            packed.close()

    def logits(self, order: Sequence[str]) -> dict[str, torch.Tensor]:
        found = self.executor.logits(Turn(rows_of(order)))
        return {key: found[index] for index, key in enumerate(order)}


@pytest.fixture
def make_bound(device: Any) -> Iterator[Callable[..., Bound]]:
    made: list[Bound] = []

    def make(folder: Path, **options: Any) -> Bound:
        made.append(Bound(folder, device, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def rows_of(order: Sequence[str]) -> tuple[TurnRow, ...]:
    rows, free = [], 0
    for index, key in enumerate(order):
        tokens = [(11 * i + 5 * len(key)) % 250 for i in range(PROMPTS[key])]
        blocks = list(range(free, free + -(-len(tokens) // BLOCK)))
        rows.append(make_row(index, tokens, 0, len(tokens), blocks, adapter=key))
        free += len(blocks)
    return tuple(rows)


def decode_rows(keys: Sequence[str]) -> Turn:
    """One token each, of sequences whose earlier tokens nobody computed: their keys are what the cache has."""
    rows = [make_row(at, [at + 1], 0, 1, [at], num_prompt=1, adapter=key) for at, key in enumerate(keys)]
    return Turn(tuple(rows))


# The two launches


def make_adapters(device: Any, spec: ModelSpec, ranks: Sequence[int], dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """Each with what it adds to the matrix of q, k and v of the second layer, in float64."""
    made = []
    for rank in ranks:
        parts, delta, row = [], torch.zeros(spec.qkv_size, spec.hidden_size, dtype=torch.float64), 0
        for size in (spec.q_size, spec.kv_size, spec.kv_size):
            first, second = (torch.randn(rank, count).to(dtype) for count in (spec.hidden_size, size))
            parts.append(Part("layers.1.qkv.weight", row, first, second))
            delta[row : row + size] = 0.3 * second.t().double() @ first.double()
            row += size
        image = AdapterImage(AdapterMatrices(0.3, tuple(parts)), spec, dtype)
        adapter = CudaAdapter(image, spec, device._streams)
        adapter.place()
        made.append((adapter, delta.cuda()))
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("hidden", [80, 1536, 4096])
def test_what_is_added_is_the_product_of_both_matrices_and_the_same_in_any_company(
    dtype: torch.dtype, tolerance: float, hidden: int, device: Any
) -> None:
    torch.manual_seed(hidden)
    spec = ModelSpec("llama", 100, hidden, 2, 8, 2, hidden // 8, 96, 64)
    matrix = adapted_matrix(spec, 1, "qkv", spec.qkv_size)
    made = make_adapters(device, spec, (3, 16, 64, 40), dtype)
    owners = [at % 6 - 1 for at in range(90)]  # -1: none, 4: the first again
    owners = [0 if owner == 4 else owner for owner in owners]
    addresses = [0 if owner < 0 else made[owner][0].address for owner in owners]
    x = torch.randn(len(owners), hidden, device="cuda").to(dtype)
    base = torch.randn(len(owners), spec.qkv_size, device="cuda").to(dtype)

    def added(which: list[int], capacity: int = 64) -> torch.Tensor:
        rows = grouped_rows([addresses[at] for at in which], [1] * len(which), capacity, torch.device("cuda:0"))
        out = base[which].clone()
        rows.expand(rows.shrink(x[which].contiguous(), matrix), out, matrix)
        return out

    together = added(list(range(len(owners))))
    wanted = base.double()
    for at, owner in enumerate(owners):
        if owner >= 0:
            wanted[at] += made[owner][1] @ x[at].double()
    assert torch.equal(together[owners.index(-1)], base[owners.index(-1)])
    error = (together.double() - wanted).norm() / (wanted - base.double()).norm()
    assert error < tolerance, f"off by {error:.1e}"
    for at in (1, 2, 3, 4, 88):
        for which, capacity in (([at], 64), ([at], 128), ([at, at, 5, 6], 64), ([at, *range(90)] * 12, 64)):
            assert torch.equal(added(which, capacity)[0], together[at]), (at, len(which), capacity)
    for adapter, _ in made:
        adapter.close()


# Whole models


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_several_adapters_have_the_logits_of_merged_models(
    family: str, make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder(family)
    bound = make_bound(base)
    targets = {"targets": ATTENTION} if bound.executor.spec.moe is not None else {}
    expected = bound.logits([""])
    for seed, (key, rank) in enumerate([("a", 4), ("b", 16), ("c", 1)]):
        adapter = save_adapter(tmp_path / key, base, rank=rank, seed=seed, **targets)
        bound.bind(key, adapter)
        merged = make_bound(merge(base, adapter, tmp_path / f"merged-{key}"))
        (row,) = rows_of([key])
        expected[key] = merged.executor.logits(Turn((make_row(0, row.tokens, 0, row.count, row.blocks),)))[0]
    for _ in range(3):  # kernel by kernel, captured, replayed
        found = bound.logits(["b", "", "c", "a"])
        for key, logits in expected.items():
            torch.testing.assert_close(found[key], logits, rtol=5e-4, atol=5e-4)
    for key in ("a", "b", "c"):  # a test that cannot fail would pass with adapters that do nothing
        assert not torch.allclose(expected[key][:50], expected[""][:50], atol=0.05)


def test_a_gpu_says_what_a_cpu_says(make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder("llama_bias")
    bound = make_bound(base)
    cpu = CpuExecutor(open_checkpoint(base), ExecutorConfig(kv_bytes=1 << 24, block_size=BLOCK, dtype="f32"))
    if cpu.level == "torch":
        pytest.skip("the native kernels were not built")
    cpu.resize(cpu.max_blocks)
    for seed, key in enumerate("abc"):
        folder = save_adapter(tmp_path / key, base, seed=seed, rank=3 + 8 * seed)
        bound.bind(key, folder)
        weights = open_adapter(folder, cpu.spec)
        cpu.add_adapter(key, read_matrices(weights))
    theirs = cpu.logits(Turn(rows_of(["c", "b", "", "a"])))
    for index, logits in enumerate(bound.logits(["c", "b", "", "a"]).values()):
        torch.testing.assert_close(logits, theirs[index], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["f32", "bf16", FP8])
def test_what_the_neighbours_are_computed_with_changes_no_row(
    dtype: str, make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Batches of one size, whose products with the base's weights are the same."""
    bound = make_bound(tiny_folder("llama"), dtype=dtype)
    for seed, key in enumerate("abc"):
        bound.bind(key, save_adapter(tmp_path / key, tiny_folder("llama"), seed=seed, rank=3 + 10 * seed))
    mine, found = ["a", "", "c", "b"], []
    for others in ([""] * 12, ["a"] * 12, ["a", "b", "c"] * 4):
        logits = bound.executor.logits(decode_rows([*mine, *others]))
        found.append(torch.stack([logits[at] for at in range(len(mine))]))
    plain = bound.executor.logits(decode_rows([""] * 16))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0][1], plain[1]), "one without an adapter is as if there were none"
    assert not torch.allclose(found[0][0], plain[0], atol=0.05)


def test_answers_are_those_of_merged_weights_in_one_batch(
    make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder("llama")
    bound = make_bound(base)
    requests: list[Any] = [make_request(list(range(40)), "base", max_tokens=40)]
    expected = Engine(make_bound(base).executor).run(requests[0])
    for seed in range(9):
        key = f"adapter-{seed}"
        adapter = save_adapter(tmp_path / key, base, seed=seed, rank=8)
        ref = AdapterRef(key, str(adapter), "1")
        bound.bind(ref.key, adapter)
        plain = make_request(list(range(40)), key, max_tokens=40)
        expected |= Engine(make_bound(merge(base, adapter, tmp_path / f"merged-{seed}")).executor).run(plain)
        requests.append(msgspec.structs.replace(plain, adapter=ref))
    engine = Engine(bound.executor)
    assert engine.run(*requests) == expected
    assert len(set(map(tuple, expected.values()))) > 6  # adapters differ
    assert engine.run(*requests) == expected  # with prefixes of the first time


def test_iterations_launched_ahead_go_on_with_their_adapters(
    make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    bound = make_bound(tiny_folder("llama"))
    bound.bind("a", save_adapter(tmp_path / "a", tiny_folder("llama")))
    keys, count = ["a", "", "a"], 12

    def turn(tokens: list[list[int]], ahead: int, which: Sequence[int]) -> Turn:
        blocks = [list(range(8 * at, 8 * at + 8)) for at in range(len(keys))]
        rows = [
            TurnRow(at, tokens[at], len(tokens[at]) - 1 + ahead, 1, blocks[at], 1, greedy, True, keys[at])
            for at in which
        ]
        return Turn(tuple(rows))

    greedy = make_request([1], max_tokens=100).sampling
    plain, ahead = ([[at + 1] for at in range(len(keys))] for _ in range(2))
    for _ in range(count):
        for row in bound.executor.run(turn(plain, 0, range(3))).rows:
            plain[row.sequence].append(row.token)
    bound.executor.launch(turn(ahead, 0, range(3)))
    for step in range(count):
        which = range(3) if step < count - 1 else (2, 0)  # others in other places
        assert bound.executor.launch_next(turn(ahead, 1, which))
        for row in bound.executor.collect().rows:
            ahead[row.sequence].append(row.token)
    bound.executor.discard()
    assert ahead == plain


def test_states_of_prompts_are_read_with_the_adapter(
    make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder("llama")
    adapter = save_adapter(tmp_path / "a", base)
    bound, merged = make_bound(base), make_bound(merge(base, adapter, tmp_path / "merged"))
    bound.bind("a", adapter)
    tokens = list(range(30))
    sampling = make_request(tokens, pooling="mean").sampling
    outcomes = [
        each.executor.run(Turn((make_row(0, tokens, 0, 30, list(range(8)), sampling=sampling, **named),))).rows[0]
        for each, named in ((bound, {"adapter": "a"}), (merged, {}))
    ]
    found, expected = (torch.frombuffer(bytearray(one.embedding or b""), dtype=torch.float32) for one in outcomes)
    torch.testing.assert_close(found, expected, rtol=5e-4, atol=5e-4)


def test_adapters_come_and_go_while_graphs_stay(
    make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base = tiny_folder("llama")
    folders = {key: save_adapter(tmp_path / key, base, seed=ord(key), rank=rank) for key, rank in
               (("a", 4), ("b", 9), ("c", 60))}  # fmt: skip
    wanted = {
        key: make_bound(merge(base, folder, tmp_path / f"merged-{key}")).executor.logits(decode_rows(["", ""]))[0]
        for key, folder in folders.items()
    }
    bound = make_bound(base)
    plain = bound.executor.logits(decode_rows(["", ""]))[1]
    num_graphs = []
    for key in "aabbacabc":  # the largest rank comes late
        if key not in bound.adapters:
            bound.bind(key, folders[key])
        for _ in range(3):
            found = bound.executor.logits(decode_rows([key, ""]))
            torch.testing.assert_close(found[0], wanted[key], rtol=5e-4, atol=5e-4)
            assert torch.equal(found[1], plain)
        bound.drop(key)
        num_graphs.append(len(bound.executor._steps))
    assert num_graphs == [1] * 5 + [2] * 4, "one for small ranks, one for all"
    with pytest.raises(KeyError):
        bound.executor.logits(decode_rows(["a"]))


def test_a_row_whose_adapter_cannot_be_had_fails_alone(
    make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    bound = make_bound(tiny_folder("llama"))
    bound.bind("a", save_adapter(tmp_path / "a", tiny_folder("llama")))
    bound.executor.add_adapter("gone", None, "its file is gone")
    tokens = [row.token for row in bound.executor.run(decode_rows(["a", ""])).rows]
    outcomes = {row.sequence: row for row in bound.executor.run(decode_rows(["a", "", "gone"])).rows}
    assert outcomes[2].error == "its file is gone"
    assert [outcomes[at].token for at in range(2)] == tokens
    (only,) = bound.executor.run(decode_rows(["gone"])).rows
    assert only.error == "its file is gone"
    assert [row.token for row in bound.executor.run(decode_rows(["a", ""])).rows] == tokens
    bound.executor.remove_adapter("gone")


@pytest.mark.parametrize("form", ["int8", "int4", FP8])
def test_what_is_added_is_the_same_whatever_the_base_is_stored_in(
    form: str, make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path, device: Any
) -> None:
    """Products with and without an adapter differ by what the adapter adds, for every matrix of a layer."""
    base = tiny_folder("llama")
    stored = {"layout": form} if form != FP8 else {}
    card = Catalogue(tmp_path / "store").pull(str(base), name="m", **stored)
    bound = make_bound(Path(card.path), dtype=FP8 if form == FP8 else "f32")
    packed = bound.bind("a", save_adapter(tmp_path / "a", base, rank=8))
    weights = open_adapter(tmp_path / "a", bound.executor.spec)
    layer = bound.executor._model.layers[1]
    products = {"qkv": layer._qkv, "out": layer._out, "gate_up": layer._mlp._up, "down": layer._mlp._down}
    assert type(layer._qkv.weight) is not torch.Tensor, "it is kept as a plain matrix"
    for name, project in products.items():
        delta = torch.zeros(project.weight.shape, dtype=torch.float64)
        for part in read_matrices(weights).parts:
            if part.tensor == f"layers.1.{name}.weight":
                rows = slice(part.row, part.row + part.second.shape[1])
                delta[rows] = weights.scaling * part.second.t().double() @ part.first.double()
        for count in (1, 7, 130):
            x = torch.randn(count, delta.shape[1], device="cuda").to(packed.dtype)
            rows = grouped_rows([packed.address] * count, [1] * count, packed.capacity, torch.device("cuda:0"))
            added = project(x, rows).double() - project(x, None).double()
            wanted = x.double() @ delta.cuda().T
            assert (added - wanted).norm() < (2e-2 if form == FP8 else 1e-4) * wanted.norm(), (name, count)


def test_its_memory_is_what_was_counted_and_is_given_back(
    make_bound: Callable[..., Bound], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """Free memory is the whole card's: another process may change it, so that the smallest difference counts."""
    bound = make_bound(tiny_folder("llama"))
    folder = save_adapter(tmp_path / "a", tiny_folder("llama"), rank=300)
    bound.bind("a", folder)
    bound.executor.logits(decode_rows(["a"]))
    arena = bound.adapters["a"]._arena
    assert arena.committed_bytes == bound.adapters["a"].num_bytes == arena.reserved_bytes
    bound.drop("a")
    assert arena.committed_bytes == 0
    taken = []
    for _ in range(5):
        before = torch.cuda.mem_get_info()[0]
        packed = bound.bind("a", folder)
        assert packed.num_bytes >= 2 << 20
        between = torch.cuda.mem_get_info()[0]
        bound.drop("a")
        RECLAIMER.wait()
        taken.append((before - between - packed.num_bytes, torch.cuda.mem_get_info()[0] - before))
    assert (0, 0) in taken, taken


def test_tiles_hold_rows_of_one_adapter() -> None:
    tiles, order = group_rows([7, 0, 9, 7], [TILE, 1, 3, 5])
    assert tiles[:, :3].tolist() == [[7, 0, TILE], [7, TILE, 5], [9, TILE + 5, 3]]
    assert order.tolist()[:3] == [0, 1, 2]
