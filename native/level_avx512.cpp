// x86-64 with AVX-512 and its bf16 instructions (Cooper Lake, Sapphire Rapids, Zen 4 and later).
#include <immintrin.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#include "simd_avx512.hpp"
#include "elementwise.hpp"
#include "dot.hpp"
#include "attention.hpp"
#include "attention_codes.hpp"
#include "dot_bf16.hpp"
#include "codes_avx512.hpp"
#include "digits.hpp"
#include "cells.hpp"
#include "dot_int8.hpp"
#include "dot_int4.hpp"

int64_t prepared_bytes(int64_t tokens, int64_t columns, Precision precision) {
    switch (precision) {
        case Precision::bf16: return prepared_rows_bytes(tokens, columns);
        case Precision::f32:
        case Precision::f16: return 0;
        default: return prepared_digits_bytes(tokens, columns);
    }
}

void prepare(const float* x, int64_t begin, int64_t end, int64_t columns, Precision precision, void* prepared) {
    if (precision == Precision::bf16) prepare_rows(x, begin, end, columns, prepared);
    if (is_digits(precision)) prepare_digits(x, begin, end, columns, prepared);
}

void multiply(const Product& p) {
    switch (p.precision) {
        case Precision::bf16: return multiply_pairs(p);
        case Precision::f32:
        case Precision::f16: return multiply_wide(p);
        default: return multiply_digits(p);
    }
}

constexpr Kernels kKernels{"avx512", prepared_bytes, prepare, multiply, rms_norm, layer_norm, activate,
                           gate,     rotate,         attend,  load_row, store_row, argmax};

}  // namespace

const Kernels* avx512_kernels() { return &kKernels; }

}  // namespace dovetail
