// Every product of quantised weights against a sum in double: odd shapes, outputs poisoned, activations with outliers. The
// error may be what rounding the activations explains, and no token may depend on those beside it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "check_cells.hpp"
#include "kernels.hpp"
#include "memory.hpp"

using namespace dovetail;

namespace {

struct Case {
    int64_t rows, columns, tokens;
};

struct Weights {
    CellMatrix cells;
    std::vector<double> values;  // what they stand for
};

Weights draw_int8(int64_t rows, int64_t columns, std::mt19937& random) {
    std::uniform_int_distribution<int> draw(-127, 127);
    std::uniform_real_distribution<float> scale(0.001f, 0.01f);
    Weights weights{{rows, columns}, {}};
    for (int64_t r = 0; r < rows; ++r) {
        weights.cells.scales[r] = scale(random);
        for (int64_t k = 0; k < columns; ++k) {
            const int code = draw(random);
            weights.cells.set(r, k, code);
            weights.values.push_back(code * static_cast<double>(weights.cells.scales[r]));
        }
    }
    return weights;
}

Weights draw_groups(int64_t rows, int64_t columns, const Groups& groups, std::mt19937& random) {
    Weights weights{{rows, columns, groups}, std::vector<double>(rows * columns)};
    weights.cells.fill(random);
    const Matrix matrix = weights.cells.matrix();
    std::vector<float> row(columns);
    for (int64_t r = 0; r < rows; ++r) {
        unpack_row(groups, matrix.data, matrix.scales, r, columns, 1.0f, false, row.data());
        std::copy(row.begin(), row.end(), weights.values.begin() + r * columns);
    }
    return weights;
}

std::vector<float> draw_activations(const Case& shape, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> x(shape.tokens * shape.columns);
    for (size_t i = 0; i < x.size(); ++i) x[i] = normal(random) * (i % shape.columns % 29 == 5 ? 60.0f : 1.0f);
    x[0] *= 1000.0f;
    return x;
}

// `stretch`: tokens that are prepared in one go
std::vector<float> multiply(const Kernels& kernels, const Matrix& matrix, const float* x, int64_t tokens,
                            int64_t stretch = kTokenTile) {
    const int64_t columns = matrix.columns, half = matrix.rows / 2;  // within a block of rows, as halves of an MLP are
    const Precision precision = matrix.type == DType::int8 ? Precision::int8 : Precision::grouped;
    Buffer prepared, scratch;
    char* operand = prepared.reserve(kernels.prepared_bytes((tokens + 15) / 16 * 16, columns, precision));
    float* own = reinterpret_cast<float*>(scratch.reserve(product_scratch(columns) * 4));
    for (int64_t begin = 0; begin < tokens; begin += stretch)
        kernels.prepare(x, begin, std::min(begin + stretch, tokens), columns, precision, operand);
    std::vector<float> out(tokens * matrix.rows, NAN);
    for (const auto& [begin, end] : {std::pair{int64_t{0}, half}, std::pair{half, matrix.rows}})
        if (begin < end)
            kernels.multiply({&matrix, begin, end, operand, 0, tokens, precision, nullptr, false,
                              out.data() + begin, matrix.rows, own});
    return out;
}

// Half the distance between two numbers that the digits of this token can say
double rounding(const float* x, int64_t columns) {
    double most = 0.0, total = 0.0;
    for (int64_t k = 0; k < columns; ++k) most = std::max(most, std::abs(double{x[k]})), total += std::abs(double{x[k]});
    return std::min(most / 127, std::max(8 * total / columns / 127, most / (127 * 128))) / 2;
}

void fail(const Kernels& kernels, const Case& shape, const char* what) {
    std::printf("%s: %ld x %ld by %ld tokens: %s\n", kernels.level, static_cast<long>(shape.rows),
                static_cast<long>(shape.columns), static_cast<long>(shape.tokens), what);
    std::exit(1);
}

void check_product(const Kernels& kernels, const Case& shape, const Matrix& matrix, const std::vector<double>& values,
                   const std::vector<float>& x) {
    const std::vector<float> out = multiply(kernels, matrix, x.data(), shape.tokens);
    if (multiply(kernels, matrix, x.data(), shape.tokens, 3) != out) fail(kernels, shape, "not as prepared in one go");
    for (int64_t t = 0; t < shape.tokens; ++t) {
        const float* row = x.data() + t * shape.columns;
        const double step = rounding(row, shape.columns);
        for (int64_t r = 0; r < shape.rows; ++r) {
            double exact = 0.0, size = 0.0, weight = 0.0;
            for (int64_t k = 0; k < shape.columns; ++k) {
                const double value = values[r * shape.columns + k];
                exact += value * row[k], size += std::abs(value * row[k]), weight += std::abs(value);
            }
            const double error = std::abs(out[t * shape.rows + r] - exact);
            // Scales and minimums may cancel: sums are kept to a few units, of codes up to 63 times scales up to 2^-7.
            const double units = step * 63 / 128.0 * 4 * (shape.columns / 256 + 1);
            if (!(error <= step * weight * 1.001 + 1e-6 * size + units)) fail(kernels, shape, "wrong");
        }
        const std::vector<float> alone = multiply(kernels, matrix, row, 1);
        if (!std::equal(alone.begin(), alone.end(), out.begin() + t * shape.rows)) fail(kernels, shape, "not as alone");
    }
}

}  // namespace

void check_products(const Kernels& kernels) {
    std::mt19937 random{11};
    for (const auto& [rows, columns] : {std::pair{64, 64}, {48, 576}, {17, 96}, {100, 70}, {1, 33}, {259, 160}, {33, 1},
                                        {130, 1088}})
        for (const int tokens : {1, 2, 3, 4, 5, 15, 16, 17, 33, 50}) {
            const Case shape{rows, columns, tokens};
            const std::vector<float> x = draw_activations(shape, random);
            const Weights by_row = draw_int8(rows, columns, random);
            check_product(kernels, shape, by_row.cells.matrix(), by_row.values, x);
            for (const Groups& groups : kForms) {
                const Weights weights = draw_groups(rows, columns, groups, random);
                check_product(kernels, shape, weights.cells.matrix(), weights.values, x);
            }
        }
}
