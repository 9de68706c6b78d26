// Every product of floats against a sum in double: short and wide rows, with and without a rest that fills no vector, outputs
// poisoned. No token's numbers may depend on those beside it, nor a row's on where the work was cut.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"

using namespace dovetail;

namespace {

struct FloatCase {
    const char* name;
    DType type;
    Precision precision;
    double tolerance;  // relative to the sum of magnitudes, that operands of the type explain
};

constexpr FloatCase kCases[] = {{"f32", DType::f32, Precision::f32, 2e-6},
                                {"bf16 widened", DType::bf16, Precision::f32, 2e-6},
                                {"f16 widened", DType::f16, Precision::f32, 2e-6},
                                {"bf16", DType::bf16, Precision::bf16, 6e-3},
                                {"f16", DType::f16, Precision::f16, 1.5e-3}};

struct FloatMatrix {
    std::vector<float> wide;        // what is meant
    std::vector<uint16_t> narrow_;  // of 16 bits, as it is stored
    Matrix matrix;

    FloatMatrix(const FloatCase& kind, int64_t rows, int64_t columns, std::mt19937& random) : wide(rows * columns) {
        std::normal_distribution<float> normal;
        for (float& value : wide) {
            value = normal(random);
            if (kind.type == DType::f32) continue;
            const uint16_t bits = kind.type == DType::bf16 ? narrow<bf16>(value).bits : narrow<f16>(value).bits;
            value = kind.type == DType::bf16 ? widen(bf16{bits}) : widen(f16{bits});
            narrow_.push_back(bits);
        }
        const void* data = kind.type == DType::f32 ? static_cast<const void*>(wide.data()) : narrow_.data();
        matrix = {data, kind.type, rows, columns};
    }
};

// Rows in two stretches: a number must not depend on where a stretch begins.
std::vector<float> multiply(const Kernels& kernels, const FloatCase& kind, const Matrix& matrix, const float* x,
                            int64_t tokens, int64_t cut) {
    const int64_t columns = matrix.columns;
    const int64_t bytes = kernels.prepared_bytes((tokens + 15) / 16 * 16, columns, kind.precision);
    Buffer prepared, scratch;
    const void* operand = x;
    if (bytes) {
        char* memory = prepared.reserve(bytes);
        operand = memory;
        for (int64_t begin = 0; begin < tokens; begin += kTokenTile)
            kernels.prepare(x, begin, std::min<int64_t>(begin + kTokenTile, tokens), columns, kind.precision, memory);
    }
    float* own = reinterpret_cast<float*>(scratch.reserve(product_scratch(columns) * 4));
    std::vector<float> out(tokens * matrix.rows, NAN);
    for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, matrix.rows}})
        if (begin < end)
            kernels.multiply({&matrix, begin, end, operand, 0, tokens, kind.precision, nullptr, false,
                              out.data() + begin, matrix.rows, own});
    return out;
}

[[noreturn]] void fail(const Kernels& kernels, const FloatCase& kind, const Matrix& m, int64_t tokens, const char* what) {
    std::printf("%s: %s, %ld x %ld by %ld tokens: %s\n", kernels.level, kind.name, static_cast<long>(m.rows),
                static_cast<long>(m.columns), static_cast<long>(tokens), what);
    std::exit(1);
}

bool is_right(const FloatCase& kind, const FloatMatrix& weights, const float* x, const float* out) {
    const int64_t columns = weights.matrix.columns;
    for (int64_t r = 0; r < weights.matrix.rows; ++r) {
        double exact = 0.0, squares = 0.0;
        for (int64_t k = 0; k < columns; ++k) {
            const double product = static_cast<double>(weights.wide[r * columns + k]) * x[k];
            exact += product, squares += product * product;
        }
        // Roundings are independent of each other: the error grows as the root of their squares does.
        if (!(std::abs(out[r] - exact) <= kind.tolerance * 4 * std::sqrt(squares))) return false;
    }
    return true;
}

void check_case(const Kernels& kernels, const FloatCase& kind, int64_t rows, int64_t columns, std::mt19937& random) {
    constexpr int64_t kMost = 103;
    const FloatMatrix weights(kind, rows, columns, random);
    std::normal_distribution<float> normal;
    std::vector<float> x(kMost * columns);
    for (float& value : x) value = normal(random);
    std::vector<std::vector<float>> alone;
    for (int64_t t = 0; t < kMost; ++t)
        alone.push_back(multiply(kernels, kind, weights.matrix, x.data() + t * columns, 1, 0));
    for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 24, 33, 50, 103}) {
        const std::vector<float> out = multiply(kernels, kind, weights.matrix, x.data(), tokens, rows / 2 / 16 * 16);
        for (int64_t t = 0; t < tokens; ++t) {
            const float* own = out.data() + t * rows;
            if (!is_right(kind, weights, x.data() + t * columns, own)) fail(kernels, kind, weights.matrix, tokens, "wrong");
            if (!std::equal(alone[t].begin(), alone[t].end(), own))
                fail(kernels, kind, weights.matrix, tokens, "not as alone");
        }
    }
}

// What ranks add to outputs, in one stretch and in two: bit for bit one multiply-add after another.
void check_ranks(const Kernels& kernels, const FloatCase& kind, int64_t rank, int64_t count, std::mt19937& random) {
    constexpr int64_t kTokens = 3;
    const FloatMatrix rows(kind, rank, count, random);
    std::normal_distribution<float> normal;
    std::vector<float> x(kTokens * rank), exact(kTokens * count);
    for (std::vector<float>* values : {&x, &exact})
        for (float& value : *values) value = normal(random);
    std::vector<float> out = exact;
    for (int64_t t = 0; t < kTokens; ++t)
        for (int64_t r = 0; r < rank; ++r)
            for (int64_t i = 0; i < count; ++i)
                exact[t * count + i] = std::fma(rows.wide[r * count + i], x[t * rank + r], exact[t * count + i]);
    const int64_t cut = count / 3;
    for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, count}})
        kernels.add_ranks({static_cast<const char*>(rows.matrix.data) + begin * size_of(kind.type), kind.type, rank, count,
                           end - begin, x.data(), rank, kTokens, out.data() + begin, count});
    if (out != exact) fail(kernels, kind, rows.matrix, kTokens, "ranks are added wrong");
}

}  // namespace

void check_floats(const Kernels& kernels) {
    std::mt19937 random{13};
    for (const FloatCase& kind : kCases)
        for (const auto& [rows, columns] :
             {std::pair{64, 64}, {17, 96}, {1, 33}, {33, 1}, {21, 70}, {19, 1100}, {9, 2111}, {150, 600}})
            check_case(kernels, kind, rows, columns, random);
    for (const FloatCase& kind : kCases)
        for (const auto& [rank, count] : {std::pair{1, 1}, {8, 64}, {16, 300}, {3, 129}})
            check_ranks(kernels, kind, rank, count, random);
}
