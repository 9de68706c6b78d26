// Element types of weights and caches, and the conversions between them.
#pragma once

#include <cstdint>
#include <cstring>

namespace dovetail {

enum class DType : uint8_t { f32, bf16, int8, int4 };  // the last two are codes, with scales beside them; int4: weights only

inline int64_t size_of(DType type) { return type == DType::f32 ? 4 : type == DType::bf16 ? 2 : 1; }  // not of int4

inline bool is_quantised(DType type) { return type == DType::int8 || type == DType::int4; }

struct bf16 {
    uint16_t bits;
};

static inline float widen(float value) { return value; }

static inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To the nearest, ties to even. A NaN stays one.
static inline bf16 narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace dovetail
