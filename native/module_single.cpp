// Single kernels as Python functions: for tests against a reference and for measurements, not for serving.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "kernels.hpp"
#include "memory.hpp"
#include "team.hpp"

namespace nb = nanobind;

namespace dovetail {

using Array = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;
using Floats = nb::ndarray<const float, nb::device::cpu, nb::c_contig>;
using Output = nb::ndarray<float, nb::device::cpu, nb::c_contig>;
using Integers = nb::ndarray<const int32_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;

const Kernels& kernels_of(const std::string& level);
Matrix matrix_of(const Array& array);
Matrix quantised_of(const Array& bytes, const std::string& layout, int64_t rows, int64_t columns);
DType cache_type_of(const Array& array);
Precision precision_of(const std::string& name);

namespace {

void need(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// out [tokens, rows] = x [tokens, columns] · matrix [rows, columns], as one phase of an iteration
void product(const Kernels& kernels, int threads, Precision precision, const Floats& x, const Matrix& matrix, Output& out) {
    const int64_t tokens = x.shape(0), columns = matrix.columns;
    need(static_cast<int64_t>(x.size()) == tokens * columns, "x is [tokens, columns]");
    need(static_cast<int64_t>(out.size()) == tokens * matrix.rows, "out is [tokens, rows]");
    const std::shared_ptr<Team> team = Team::shared(threads);
    const int64_t prepared_bytes = kernels.prepared_bytes(tokens, columns, precision);
    const int64_t scratch_floats = (product_scratch(columns) + 63) / 64 * 64;
    Buffer prepared, scratch;
    prepared.reserve(std::max<int64_t>(prepared_bytes, 64));
    float* own = reinterpret_cast<float*>(scratch.reserve(scratch_floats * 4 * team->size()));
    void* operand = prepared_bytes ? static_cast<void*>(prepared.reserve(1)) : const_cast<float*>(x.data());
    const int64_t block = std::max<int64_t>(512 * 1024 / (columns * (precision == Precision::f32 ? 4 : 2)) / 48 * 48, 48);
    const int64_t per_chunk =
        std::clamp<int64_t>(matrix.rows / (4 * team->size()) / 32 * 32, 16, tokens > 64 ? 64 : 256);
    const int64_t chunks = (matrix.rows + per_chunk - 1) / per_chunk, blocks = (tokens + block - 1) / block;
    nb::gil_scoped_release released;
    team->run([&](Team::Member& member) {
        if (prepared_bytes)
            member.loop((tokens + kTokenTile - 1) / kTokenTile, [&](int64_t tile) {
                kernels.prepare(x.data(), tile * kTokenTile, std::min((tile + 1) * kTokenTile, tokens), columns,
                                precision, operand);
            });
        member.loop(chunks * blocks, [&](int64_t task) {
            const int64_t row = task % chunks * per_chunk, begin = task / chunks * block;
            kernels.multiply({&matrix, row, std::min(row + per_chunk, matrix.rows), operand, begin,
                              std::min(begin + block, tokens), precision, nullptr, false,
                              out.data() + begin * matrix.rows + row, matrix.rows,
                              own + member.index * scratch_floats});
        });
    });
}

void linear(const std::string& level, int threads, const std::string& precision, Floats x, Array weight, Output out) {
    const Matrix matrix = matrix_of(weight);
    const Precision kind = precision_of(precision);
    need(kind != Precision::bf16 || matrix.type == DType::bf16, "a product of bf16 needs bf16 weights");
    need(kind != Precision::f16 || matrix.type == DType::f16, "a product of float16 needs float16 weights");
    product(kernels_of(level), threads, kind, x, matrix, out);
}

void linear_quantised(const std::string& level, int threads, Floats x, Array bytes, const std::string& layout,
                      Output out) {
    need(x.ndim() == 2 && out.ndim() == 2, "x is [tokens, columns], out is [tokens, rows]");
    const Matrix matrix = quantised_of(bytes, layout, out.shape(1), x.shape(1));
    const Precision precision = matrix.type == DType::int8 ? Precision::int8 : Precision::grouped;
    product(kernels_of(level), threads, precision, x, matrix, out);
}

// One query head group of one sequence over a paged cache [blocks, 2, block_size, width] with a single key head
void attend(const std::string& level, Floats q, Array cache, Integers blocks, int64_t position, int64_t window,
            float scale, float softcap, Output out) {
    need(q.ndim() == 3 && cache.ndim() == 4 && q.size() == out.size(), "q [tokens, heads, d], cache [blocks, 2, size, width]");
    const int tokens = q.shape(0), heads = q.shape(1), d = q.shape(2), size = cache.shape(2);
    need(tokens * heads <= kMaxQueries, "too many queries");
    need(static_cast<int64_t>(blocks.size()) * size >= position + tokens, "the block table covers the keys");
    const DType type = cache_type_of(cache);
    const int64_t width = cache_width(type, d);
    need(static_cast<int64_t>(cache.shape(3)) == width, "the cache is as wide as its type asks for");
    const char* base = static_cast<const char*>(cache.data());
    const CacheView view{base, base + size * width * size_of(type), type, 2 * size * width, width, size};
    Buffer scratch;
    float* own = reinterpret_cast<float*>(scratch.reserve(attend_scratch(d) * 4));
    kernels_of(level).attend({q.data(), heads * d, tokens, heads, position, d, view, blocks.data(), 0, position + tokens,
                              window, scale, softcap, out.data(), heads * d, nullptr, nullptr, nullptr, own});
}

// Rows as a cache of int8 keeps them: codes, then the scale
void store_codes(const std::string& level, Floats x, nb::ndarray<int8_t, nb::ndim<2>, nb::device::cpu, nb::c_contig> out) {
    const int64_t rows = out.shape(0), width = out.shape(1), count = width - static_cast<int64_t>(sizeof(float));
    need(count > 0 && static_cast<int64_t>(x.size()) == rows * count, "x is [rows, d], out [rows, d + 4]");
    for (int64_t i = 0; i < rows; ++i)
        kernels_of(level).store_row(x.data() + i * count, count, DType::int8, out.data() + i * width);
}

void norm(const std::string& level, Floats x, Floats weight, float eps, Output out) {
    need(x.size() == weight.size() && x.size() == out.size(), "all of one size");
    kernels_of(level).rms_norm(x.data(), weight.data(), eps, x.size(), out.data());
}

void gate(const std::string& level, int activation, Floats gate, Floats up, Output out) {
    need(gate.size() == up.size() && gate.size() == out.size(), "all of one size");
    need(activation >= 0 && activation <= 3, "unknown activation");
    kernels_of(level).gate(static_cast<Activation>(activation), gate.data(), up.data(), gate.size(), out.data());
}

int64_t argmax(const std::string& level, Floats x) { return kernels_of(level).argmax(x.data(), x.size()); }

// Bytes summed up, so that nothing can be left out: the read bandwidth that a product over weights can reach at best
float read_all(int threads, Array data) {
    const std::shared_ptr<Team> team = Team::shared(threads);
    const int64_t words = data.nbytes() / 8, chunk = 1 << 15;
    const uint64_t* at = static_cast<const uint64_t*>(data.data());
    std::atomic<uint64_t> total{0};
    nb::gil_scoped_release released;
    team->run([&](Team::Member& member) {
        member.loop((words + chunk - 1) / chunk, [&](int64_t i) {
            uint64_t sums[8] = {};
            const int64_t end = std::min((i + 1) * chunk, words) / 8 * 8;
            for (int64_t j = i * chunk; j < end; j += 8)
                for (int lane = 0; lane < 8; ++lane) sums[lane] ^= at[j + lane];
            uint64_t all = 0;
            for (const uint64_t sum : sums) all ^= sum;
            total.fetch_xor(all, std::memory_order_relaxed);
        });
    });
    return static_cast<float>(total.load() & 0xff);
}

// Barriers of a team of its own, one after the other: for a test that threads which sleep are woken
void pass_barriers(int threads, int64_t rounds, int spins) {
    need(threads > 0 && rounds >= 0 && spins >= 0, "threads, rounds and spins are counts");
    nb::gil_scoped_release released;
    Team team(threads, spins);
    team.run([&](Team::Member& member) {
        for (int64_t round = 0; round < rounds; ++round) member.loop(0, [](int64_t) {});
    });
    for (int64_t round = 0; round < rounds / 4; ++round) team.run([](Team::Member&) {});
}

}  // namespace
}  // namespace dovetail

void add_single_kernels(nb::module_& module) {
    using namespace dovetail;
    module.def("linear", &linear);
    module.def("linear_quantised", &linear_quantised);
    module.def("attend", &attend);
    module.def("store_codes", &store_codes);
    module.def("norm", &norm);
    module.def("gate", &gate);
    module.def("argmax", &argmax);
    module.def("read_all", &read_all);
    module.def("pass_barriers", &pass_barriers);
}
