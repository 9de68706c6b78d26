// AArch64 with NEON: bf16 weights are widened as they are read, which costs less than the bytes it saves.
#include <arm_neon.h>

#include "kernels.hpp"

namespace dovetail {
namespace {

#include "simd_neon.hpp"
#include "elementwise.hpp"
#include "dot.hpp"
#include "attention.hpp"

int64_t prepared_bytes(int64_t, int64_t, Precision) { return 0; }
void prepare(const float*, int64_t, int64_t, int64_t, Precision, void*) {}

constexpr Kernels kKernels{"neon",   prepared_bytes, prepare, multiply_wide, rms_norm, layer_norm, activate,
                           gate,     rotate,         attend,  load_row,      store_row, argmax};

}  // namespace

const Kernels* neon_kernels() { return &kKernels; }

}  // namespace dovetail
