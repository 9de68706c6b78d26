"""Run by test_gpu_kernels with TRITON_INTERPRET=1: every Triton kernel against plain torch, on the CPU, in float32."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from random_codes import random_codes
from random_sampling import random_logits, random_row, random_sampling

from dovetail.codings import CODINGS, Quantised
from dovetail.engine.adapters import AdapterMatrices, Part
from dovetail.engine.devices.cuda import attention, coded, elementwise, in_place, products, splits
from dovetail.engine.devices.cuda.adapter_image import AdapterImage, adapted_matrix, group_rows, rank_capacity
from dovetail.engine.devices.cuda.greedy import fill_in, greedy
from dovetail.engine.devices.cuda.lora import AdaptedRows
from dovetail.engine.devices.cuda.sampling import DeviceSampler
from dovetail.engine.grammar import Grammars
from dovetail.engine.rope import Rope
from dovetail.engine.sampler import sample
from dovetail.layouts import coding_of, pack_codes, unpack
from dovetail.modelspec import ModelSpec, RopeSpec
from dovetail.native import torch_ops
from dovetail.sched.turn import TurnRow
from dovetail.types import SamplingParams

TOKENS, WIDTH, PAGE = 5, 72, 16
CPU = torch.device("cpu")
LIFTED = 3e-4  # of the largest: a lifted code keeps some 17 bits, sums of them less


def close(ours: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float = 2e-4) -> None:
    difference = (ours - wanted).abs().max().item()
    assert difference <= tolerance, f"{what}: {difference:.1e}"


def check_norms() -> None:
    residual, update = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    weight, other = torch.rand(WIDTH), torch.rand(WIDTH)
    kept = residual.clone()
    normed = elementwise.add_norm(kept, update, weight, None, None, 1e-6, False)
    close(kept, residual + update, "the sum")
    close(normed, torch_ops.rms_norm(kept, weight, 1e-6, False), "its norm")
    kept = residual.clone()
    normed = elementwise.add_norm(kept, update, weight, other, None, 1e-6, False)
    close(normed, torch_ops.layer_norm(kept, weight, other, 1e-6), "its layer norm")
    kept = residual.clone()
    elementwise.add_norm(kept, update, weight, None, other, 1e-6, True)
    close(kept, residual + torch_ops.rms_norm(update, other, 1e-6, True), "a sum with a normed update")
    rows, kept = torch.tensor([3, 1], dtype=torch.int32), residual.clone()
    normed = elementwise.add_norm(kept, update, weight, None, None, 1e-6, False, rows=rows)
    close(normed, torch_ops.rms_norm((residual + update)[[3, 1]], weight, 1e-6, False), "some rows")
    close(kept, residual, "the residual of some rows")


def check_activations() -> None:
    for name in elementwise.ACTIVATIONS:
        x = torch.randn(TOKENS, 2 * WIDTH)
        close(elementwise.activate(x, name, True), torch_ops.gated(x, name), f"gated {name}")
        close(elementwise.activate(x, name, False), torch_ops.activate(x, name), name)


def check_rotation(heads: int, kv_heads: int, size: int, norm: bool) -> None:
    # Half of a head stays as it is, and is not scaled either.
    half = {"rotary_dims": size // 2, "factors": (1.5,) * (size // 4), "attention_factor": 1.2}
    spec = RopeSpec() if norm else RopeSpec(kind="longrope", **half)
    rope, positions = Rope(spec, size, torch.float32), torch.tensor([0, 5, 9, 30, 31])
    qkv, cache = torch.randn(TOKENS, (heads + 2 * kv_heads) * size), torch.zeros(6, 3, 2, PAGE, kv_heads, size)
    slots, weights = torch.tensor([3, 20, 40, 95, -1]), (torch.rand(size), torch.rand(size))
    q, k, v = qkv.clone().view(TOKENS, -1, size).split((heads, kv_heads, kv_heads), dim=1)
    if norm:
        q, k = (torch_ops.rms_norm(x, w, 1e-6, False) for x, w in zip((q, k), weights, strict=True))
    q, k = (torch_ops.rotate(x, *rope.angles(positions)) for x in (q, k))
    layer, norms = cache[:, 1], weights if norm else None
    elementwise.rotate_and_write(qkv, positions, slots, layer, rope.frequencies, rope.scale, norms, 1e-6, False, heads)
    close(qkv[:, : heads * size], q.reshape(TOKENS, -1), "queries")
    places = layer.permute(1, 0, 2, 3, 4).reshape(2, -1, kv_heads, size)
    for at, slot in enumerate(slots.tolist()[:-1]):
        close(places[0, slot], k[at], "keys")
        close(places[1, slot], v[at], "values")
    assert int((places.abs().sum((0, 2, 3)) > 0).sum()) == 4, "what has no slot is not written"
    assert cache[:, 0].abs().sum() == 0, "other layers are not touched"


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, shape: attention.AttentionShape
) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    distance = positions[:, None] - torch.arange(len(k))
    seen = distance >= 0
    if shape.window:
        seen &= distance < shape.window
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def check_attention(shape: attention.AttentionShape) -> None:
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
    layer = torch.randn(40, 2, 2, PAGE, kv_heads, size)[:, 0]
    lengths, counts = [1, 17, 64, 150], [1, 10, 64, 140]
    table, free = torch.zeros(len(lengths), 10, dtype=torch.int32), torch.randperm(40).tolist()
    for row, length in enumerate(lengths):
        for at in range(-(-length // PAGE)):
            table[row, at] = free.pop()

    def keys_and_values(row: int) -> list[torch.Tensor]:
        blocks = layer[table[row, : -(-lengths[row] // PAGE)].long()]
        parts = (blocks[:, part].reshape(-1, kv_heads, size)[: lengths[row]] for part in (0, 1))
        return [part.repeat_interleave(heads // kv_heads, 1) for part in parts]

    q = torch.randn(len(lengths), heads * size)
    on_device = torch.tensor(lengths, dtype=torch.int32)
    for processors in (0, 2, 132):
        out = torch.full_like(q, math.nan)
        scratch = attention.DecodeScratch(16, shape, processors, CPU)
        plan = splits.plan(on_device, shape, processors) if processors else None
        attention.decode(q, layer, table, on_device, shape, plan, scratch, out)
        for row, length in enumerate(lengths):
            query, last = q[row].view(1, heads, size), torch.tensor([length - 1])
            wanted = attended(query, *keys_and_values(row), last, shape)[0]
            close(out[row], wanted, f"single query {row} of {processors} processors")
    starts = [sum(counts[:row]) for row in range(len(counts))]
    q = torch.randn(sum(counts), heads * size)
    out, tile = torch.full_like(q, math.nan), attention.prefill_tile(size)
    tiles = [(row, first) for row, count in enumerate(counts) for first in range(0, count, tile)]
    plan = attention.PrefillPlan(
        torch.tensor([row for row, _ in tiles], dtype=torch.int32),
        torch.tensor([first for _, first in tiles], dtype=torch.int32),
        torch.tensor(
            [(start, length - count, count) for start, length, count in zip(starts, lengths, counts, strict=True)],
            dtype=torch.int32,
        ),
        table,
    )
    attention.prefill(q, layer, plan, shape, out)
    for row, (start, length, count) in enumerate(zip(starts, lengths, counts, strict=True)):
        queries, positions = q[start : start + count].view(count, heads, size), torch.arange(length - count, length)
        wanted = attended(queries, *keys_and_values(row), positions, shape)
        close(out[start : start + count], wanted, f"chunk {row}")


def check_split_plans() -> None:
    """Every key of every row is in one item, and no item is much longer than the average."""
    chance = random.Random(3)
    for at in range(60):
        rows, kv_heads, size = chance.randrange(1, 70), chance.choice((1, 2, 8)), chance.choice((64, 128, 256))
        window = chance.choice((0, 0, 500))
        shape = attention.AttentionShape(kv_heads, kv_heads, size, 1.0, None, window)
        longest = chance.choice((1, 300, 5000, 120_000))
        lengths = [chance.randrange(-1, longest + 1 if chance.random() < 0.2 else 300) for _ in range(rows)]
        if at == 0:
            rows, shape, lengths = 32, attention.AttentionShape(32, 8, 128, 1.0, None, 0), [256] * 31 + [100_000]
        made = splits.plan(torch.tensor(lengths, dtype=torch.int32), shape, 132)
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for place, (row, begin, end, parts) in enumerate(made.items.tolist()):
            if parts:
                found.setdefault(row, []).append((begin, end, parts, place))
        wanted = {row: (max(one - window, 0) if window else 0, one) for row, one in enumerate(lengths) if one >= 0}
        assert sorted(found) == sorted(wanted)
        merged = {row: (first, count) for row, first, count, _ in made.merges.tolist() if count}
        for row, (first, last) in wanted.items():
            items = found[row]
            assert [one[0] for one in items] == [first, *(one[1] for one in items[:-1])]
            assert items[-1][1] == last
            assert {one[2] for one in items} == {len(items)}
            assert merged.get(row) == ((items[0][3], len(items)) if len(items) > 1 else None)
            assert [one[3] for one in items] == list(range(items[0][3], items[0][3] + len(items)))
            assert len(items) == 1 or all(begin < end for begin, end, _, _ in items)
        spans = [last - first for first, last in wanted.values()]
        average = sum(spans) * shape.num_kv_heads / splits.num_programs(rows, shape, 132)
        most = max((end - begin for items in found.values() for begin, end, _, _ in items), default=0)
        assert most <= 1.5 * average + 2.5 * shape.keys
        if splits.is_worth_it(np.array([one for one in lengths if one >= 0], np.int32), shape, 132):
            assert merged, "it splits something"
        if at == 0:
            assert len(found[31]) == 42, "with eight heads, nearly three programs per processor"
            assert found[31][0][3] == 0, "it comes first"


def check_products() -> None:
    for rows, columns in ((33, 100), (64, 1024), (70, 1500)):
        weight, bias = torch.randn(rows, columns), torch.randn(rows)
        for count in (1, 5):
            x = torch.randn(count, columns)
            close(products.linear(x, weight, bias), F.linear(x, weight, bias), f"{count} rows", 2e-3)
    x, weight = torch.randn(1, 1500) / 40, torch.randn(140, 1500)
    close(products.gated_linear(x, weight, "silu"), torch_ops.gated(F.linear(x, weight), "silu"), "a gated row", 2e-3)


def check_in_place() -> None:
    """Neither rows, tokens nor columns are multiples of a tile; α from nothing to all of the columns."""
    small = in_place.Tiles((16, 16, 32), (32, 16, 64), 4, 3)
    for count, rows, columns in ((20, 70, 100), (33, 48, 64), (129, 33, 200)):
        x, weight, bias = torch.randn(count, columns), torch.randn(rows, columns), torch.randn(rows)
        for share in (0.0, 0.4, 1.0):
            for own in (None, bias):
                close(in_place.hybrid(x, weight, own, share, small), F.linear(x, weight, own), f"α = {share}", 2e-3)
    host, x = in_place.HostMatrix(torch.randn(2, 34, 72)), torch.randn(5, 72)
    assert host.shape == (2, 34, 72)
    close(products.linear(x, host[1], None), F.linear(x, host.values[1]), "few rows in place", 2e-3)
    wanted = torch_ops.gated(F.linear(x[:1], host.values[0]), "silu")
    close(products.gated_linear(x[:1], host[0], "silu"), wanted, "a gated row in place", 2e-3)


def small_codes(layout: str, rows: int, columns: int) -> Quantised:
    """With scales that leave sums near one."""
    codes, scales = random_codes(layout, rows, columns)
    halves = [scale if scale.dtype.kind == "i" else scale * scale.dtype.type(0.001) for scale in scales]
    return Quantised(codes, tuple(halves))


def coded_rows(layout: str, rows: int, columns: int) -> tuple[coded.CodedRows, torch.Tensor]:
    """Random ones, laid out as the device does it, and what they stand for."""
    coding = coding_of(layout, columns)
    data = memoryview(pack_codes(layout, (rows, columns), small_codes(layout, rows, columns)))
    codes = torch.zeros(rows, coding.row_bytes, dtype=torch.int8)
    scales = [torch.zeros(rows, part.count, dtype=coded.NUMPY_TO_TORCH[part.dtype.name]) for part in coding.parts]
    coded.lay_out(torch.frombuffer(bytearray(data), dtype=torch.uint8), coding, codes, scales)
    values = torch.from_numpy(unpack(layout, "f32", (rows, columns), data))
    return coded.CodedRows(layout, columns, codes, tuple(scales)), values


def nearly(ours: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    close(ours, wanted, what, LIFTED * wanted.abs().max().item())


def check_coded(layout: str) -> None:
    bias = torch.randn(83)
    for rows, columns in ((83, 100), (32, 576)):
        piece, weight = coded_rows(layout, rows, columns)
        close(coded.widen(piece, torch.float32), weight, f"{layout} widened", 1e-6)
        matrix = coded.CodedMatrix((rows, columns), (piece,))
        which = torch.tensor([rows - 1, 0, 17])
        close(coded.look_up(which, matrix, torch.float32), weight[which], f"rows of {layout}", 1e-6)
        for count in (1, 5, 70):
            x = torch.randn(count, columns)
            nearly(products.linear(x, matrix, bias[:rows]), F.linear(x, weight, bias[:rows]), f"{count} rows, {layout}")
    x = torch.randn(1, columns)
    wanted = torch_ops.gated(F.linear(x, weight), "silu")
    nearly(products.gated_linear(x, matrix, "silu"), wanted, f"a gated row, {layout}")
    other, below = coded_rows("int8-k16", 20, columns)
    pieces = coded.CodedMatrix((rows + 20, columns), (piece, other))
    wanted = F.linear(x, torch.cat([weight, below]))
    nearly(products.linear(x, pieces, None), wanted, f"{layout} above another")
    stack = coded.CodedMatrix((4, (rows + 20) // 4, columns), (piece, other))
    wanted = F.linear(x, torch.cat([weight, below]).view(stack.shape)[2])
    nearly(products.linear(x, stack[2], None), wanted, f"one of a stack, {layout}")
    x, tile = torch.randn(9, columns), coded.FewRowsTile(16, 32, 64, 4, 3, swapped=True)
    wanted = F.linear(x, weight, bias[:rows])
    nearly(coded.few_rows(x, piece, bias[:rows], tile, splits=3), wanted, f"columns of {layout} in three parts")


def check_adapters(hidden: int, heads: int, kv_heads: int, ranks: tuple[int, ...]) -> None:
    """Rows of several adapters among rows of none, in one launch and alone; the second adapter has nothing for k."""
    spec = ModelSpec("llama", 100, hidden, 2, heads, kv_heads, hidden // heads, 24, 64)
    matrix = adapted_matrix(spec, 1, "qkv", spec.qkv_size)
    images, deltas = [], []
    for at, rank in enumerate(ranks):
        parts, delta, row = [], torch.zeros(spec.qkv_size, hidden), 0
        for piece, size in enumerate(matrix.sizes):
            first, second = torch.randn(rank, hidden) / hidden**0.5, torch.randn(rank, size)
            if (at, piece) != (1, 1):
                parts.append(Part("layers.1.qkv.weight", row, first, second))
                delta[row : row + size] = 0.5 * second.t() @ first
            row += size
        image = AdapterImage(AdapterMatrices(0.5, tuple(parts)), spec, torch.float32)
        images.append(image.relocated(image.data.data_ptr()))
        deltas.append(delta)
    owners = [0, 1, -1, 0, *[len(ranks) - 1] * 20, 1]
    addresses = [0 if owner < 0 else images[owner].data_ptr() for owner in owners]
    x, base = torch.randn(len(owners), hidden), torch.randn(len(owners), spec.qkv_size)
    capacity = rank_capacity(max(ranks))

    def added(which: list[int], capacity: int) -> torch.Tensor:
        tiles, order = group_rows([addresses[at] for at in which], [1] * len(which))
        rows = AdaptedRows(torch.from_numpy(tiles), torch.from_numpy(order), capacity)
        out = base[which].clone()
        rows.expand(rows.shrink(x[which].contiguous(), matrix), out, matrix)
        return out

    together = added(list(range(len(owners))), capacity)
    for at, owner in enumerate(owners):
        wanted = base[at] if owner < 0 else base[at] + deltas[owner] @ x[at]
        close(together[at], wanted, f"row {at} of adapter {owner}")
        if at in (0, 1, len(owners) - 2):
            assert torch.equal(added([at], 2 * capacity)[0], together[at]), "alone it is the same"


def check_greedy() -> None:
    logits = torch.randn(4, 10_001)
    logits[1, 77] = math.nan
    logits[2, [5000, 9000]] = 99.0
    chosen = greedy(logits)
    assert chosen.tolist() == [int(logits[0].argmax()), -1, 5000, int(logits[3].argmax())]
    tokens = torch.tensor([7, -3, -2, 0, -4], dtype=torch.int32)
    fill_in(tokens, chosen)
    assert tokens.tolist() == [7, 5000, 0, 0, chosen[3]], "given ones stay, and what is no token becomes 0"


def check_choose(vocab: int, seed: int) -> None:
    """Rows of random parameters together: each has the token that the host draws."""
    chance, grammars = random.Random(seed), Grammars(Path("none"), vocab, ())
    rows = [random_row(chance, vocab, at, random_sampling(chance, vocab)) for at in range(12)]
    logits = random_logits(chance, len(rows), vocab)
    wanted = [outcome.token for outcome in sample(logits.float(), rows, grammars)]
    sampler = DeviceSampler(vocab, len(rows) + 2, CPU, grammars)
    sampler.admit(rows)
    chosen = torch.full((len(rows) + 2,), -7, dtype=torch.int32)
    assert sampler.choose(rows, logits, chosen, None, lambda choose: choose()) == {}
    for row, ours, theirs in zip(rows, chosen.tolist(), wanted, strict=False):
        assert ours == theirs, f"{ours}, the host draws {theirs}: {row}"
    assert chosen.tolist()[len(rows) :] == [-7, -7]


def check_returned_sequence() -> None:
    """One that was forgotten and comes again, as after a preemption, has its parameters and counts anew."""
    vocab, grammars = 300, Grammars(Path("none"), 300, ())
    sampler, logits = DeviceSampler(vocab, 2, CPU, grammars), torch.randn(1, vocab)
    for seed in range(4):
        sampling = SamplingParams(9, seed, temperature=2.0, presence_penalty=0.1 + seed)
        row = TurnRow(0, [1, 2, 3, 4 + seed], 3, 1, [0], 2, sampling, samples=True)
        sampler.admit([row])
        wanted = sample(logits.clone(), [row], grammars)[0].token
        assert sampler.choose_first([row], logits)[0].tolist() == [wanted], "as the first time"
        sampler.forget(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_norms()
    check_activations()
    for heads in ((4, 2, 64), (3, 1, 80), (7, 1, 16)):
        for norm in (False, True):
            check_rotation(*heads, norm)
    for num_heads, kv_heads, head_dim, window, softcap in (
        (4, 2, 64, 0, None),
        (6, 1, 80, 20, None),
        (4, 4, 16, 0, 5.0),
        (8, 2, 32, 33, 3.0),
    ):
        shape = attention.AttentionShape(num_heads, kv_heads, head_dim, head_dim**-0.5, softcap, window)
        check_attention(shape)
    check_split_plans()
    check_products()
    check_in_place()
    for layout in filter(coded.can_keep, CODINGS):
        check_coded(layout)
    check_adapters(72, 4, 2, (3, 16, 40))
    check_adapters(1024, 2, 1, (8, 1))
    check_greedy()
    check_returned_sequence()
    for seed in range(2):
        check_choose(4200, seed)
