// x86-64 with AVX2 and FMA: bf16 weights are widened as they are read.
#include <immintrin.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#include "simd_avx2.hpp"
#include "elementwise.hpp"
#include "dot.hpp"
#include "attention.hpp"

int64_t prepared_bytes(int64_t, int64_t, Precision) { return 0; }
void prepare(const float*, int64_t, int64_t, int64_t, Precision, void*) {}

constexpr Kernels kKernels{"avx2", prepared_bytes, prepare, multiply_wide, rms_norm, layer_norm, activate,
                           gate,   rotate,         attend,  load_row,      store_row, argmax};

}  // namespace

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace dovetail
