// x86-64 with AMX: products of bf16 and of int8 on tiles, everything else as with AVX-512.
#include <immintrin.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#include "simd_avx512.hpp"
#include "elementwise.hpp"
#include "dot.hpp"
#include "attention.hpp"
#include "attention_codes.hpp"
#include "tiles.hpp"
#include "tile_attention.hpp"
#include "codes_avx512.hpp"
#include "digits.hpp"
#include "cells.hpp"
#include "dot_int8.hpp"
#include "dot_int4.hpp"
#include "tiles_int8.hpp"

int64_t prepared_bytes(int64_t tokens, int64_t columns, Precision precision) {
    switch (precision) {
        case Precision::bf16: return prepared_tiles_bytes(tokens, columns);
        case Precision::int8: return prepared_digit_tiles_bytes(tokens, columns);
        case Precision::int4: return prepared_digits_bytes(tokens, columns);
        default: return 0;
    }
}

void prepare(const float* x, int64_t begin, int64_t end, int64_t columns, Precision precision, void* prepared) {
    if (precision == Precision::bf16) prepare_tiles(x, begin, end, columns, prepared);
    if (is_digits(precision)) prepare_digits(x, begin, end, columns, prepared);
}

void multiply(const Product& p) {
    switch (p.precision) {
        case Precision::bf16: return multiply_tiles(p);
        case Precision::int8: return multiply_byte_tiles(p);
        case Precision::int4: return multiply_int4(p);
        default: return multiply_wide(p);
    }
}

void attend_best(const Attend& a) { fits_tiles(a) ? attend_tiles(a) : attend(a); }

constexpr Kernels kKernels{"amx", prepared_bytes, prepare, multiply, rms_norm, layer_norm, activate,
                           gate,  rotate,         attend_best, load_row, store_row, argmax};

}  // namespace

const Kernels* amx_kernels() { return &kKernels; }

}  // namespace dovetail
