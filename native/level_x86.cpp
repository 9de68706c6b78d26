// A level of x86-64, compiled once for each: `avx2` and `avxvnni` with vectors of eight floats, `avx512`, `avx512vnni` and
// `avx512bf16` with sixteen, `amx` with tiles besides. What differs is asked of the compiler's own macros.
#include <immintrin.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#if defined(__AVX512F__)
#include "simd_avx512.hpp"
#else
#include "simd_avx2.hpp"
#endif
#include "elementwise.hpp"
#include "dot.hpp"
#if defined(__AVX512F__)
#include "dot_lanes.hpp"
#endif
#include "attention.hpp"
#include "attention_codes.hpp"
#if defined(__AVX512F__)
#include "codes_avx512.hpp"
#else
#include "codes_avx2.hpp"
#endif
#include "digits.hpp"
#include "cells.hpp"
#include "dot_int8.hpp"
#include "dot_int4.hpp"
#include "products.hpp"

#if defined(__AMX_TILE__)
#include "tile_attention.hpp"
void attend_best(const Attend& a) { fits_tiles(a) ? attend_tiles(a) : attend(a); }
#else
constexpr auto attend_best = attend;
#endif

constexpr Kernels kKernels{LEVEL_NAME, prepared_bytes, prepare,     multiply, rms_norm,  layer_norm, activate,
                           gate,       rotate,         attend_best, merge,    load_row,  store_row,  add_ranks,
                           argmax};

}  // namespace

const Kernels* LEVEL_KERNELS() { return &kKernels; }

}  // namespace dovetail
