// x86-64 with AVX2 and FMA: bf16 weights are widened as they are read.
#include <immintrin.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#include "simd_avx2.hpp"
#include "elementwise.hpp"
#include "dot.hpp"
#include "attention.hpp"
#include "codes_avx2.hpp"
#include "digits.hpp"
#include "dot_int8.hpp"
#include "dot_int4.hpp"

int64_t prepared_bytes(int64_t tokens, int64_t columns, Precision precision) {
    return is_digits(precision) ? prepared_digits_bytes(tokens, columns) : 0;
}

void prepare(const float* x, int64_t begin, int64_t end, int64_t columns, Precision precision, void* prepared) {
    if (is_digits(precision)) prepare_digits(x, begin, end, columns, prepared);
}

void multiply_digits(const Product& p) { p.weight->type == DType::int4 ? multiply_int4(p) : multiply_int8(p); }

void multiply(const Product& p) { is_digits(p.precision) ? multiply_digits(p) : multiply_wide(p); }

constexpr Kernels kKernels{"avx2", prepared_bytes, prepare, multiply, rms_norm, layer_norm, activate,
                           gate,   rotate,         attend,  load_row, store_row, argmax};

}  // namespace

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace dovetail
