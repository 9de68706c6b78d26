// x86-64 with AVX2 and FMA: bf16 weights are widened as they are read.
#include <immintrin.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#include "simd_avx2.hpp"
#include "elementwise.hpp"
#include "dot.hpp"
#include "attention.hpp"
#include "attention_codes.hpp"
#include "codes_avx2.hpp"
#include "digits.hpp"
#include "cells.hpp"
#include "dot_int8.hpp"
#include "dot_int4.hpp"
#include "wide_products.hpp"

constexpr Kernels kKernels{"avx2", prepared_bytes, prepare, multiply, rms_norm, layer_norm, activate,
                           gate,   rotate,         attend,  load_row, store_row, argmax};

}  // namespace

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace dovetail
