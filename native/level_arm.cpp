// A level of AArch64, compiled once for each: `neon`, `dotprod` (dot products of bytes, arithmetic in float16) and `i8mm`
// (matrix products of bytes, dot products of bf16).
#include <arm_neon.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#include "simd_neon.hpp"
#include "elementwise.hpp"
#include "dot.hpp"
#include "attention.hpp"
#include "attention_codes.hpp"
#if defined(__ARM_FEATURE_DOTPROD)
#include "attention_bytes.hpp"
#endif
#include "codes_neon.hpp"
#include "digits.hpp"
#include "cells.hpp"
#include "dot_int8.hpp"
#include "dot_int4.hpp"
#include "products.hpp"

constexpr Kernels kKernels{LEVEL_NAME, prepared_bytes, prepare, multiply, rms_norm,  layer_norm, activate,
                           gate,       rotate,         attend,  merge,    load_row,  store_row,  add_ranks,
                           argmax};

}  // namespace

const Kernels* LEVEL_KERNELS() { return &kKernels; }

}  // namespace dovetail
