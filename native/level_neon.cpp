// AArch64 with NEON: bf16 weights are widened as they are read, which costs less than the bytes it saves. Compiled twice,
// the second time with the instructions for dot products of bytes and for arithmetic in float16.
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
#include "wide_products.hpp"

#if defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kName = "dotprod";
#else
constexpr const char* kName = "neon";
#endif

constexpr Kernels kKernels{kName, prepared_bytes, prepare, multiply, rms_norm, layer_norm, activate,
                           gate,  rotate,         attend,  load_row, store_row, argmax};

}  // namespace

#if defined(__ARM_FEATURE_DOTPROD)
const Kernels* dotprod_kernels() { return &kKernels; }
#else
const Kernels* neon_kernels() { return &kKernels; }
#endif

}  // namespace dovetail
