// Element types of weights and caches, and the conversions between them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace dovetail {

// The last two are codes with scales: int8 a row's (or, in a cache, a head's), grouped those of weights (grouped.hpp).
enum class DType : uint8_t { f32, bf16, f16, int8, grouped };

inline int64_t size_of(DType type) {  // not of grouped codes
    return type == DType::f32 ? 4 : type == DType::bf16 || type == DType::f16 ? 2 : 1;
}

inline bool is_quantised(DType type) { return type == DType::int8 || type == DType::grouped; }

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

static inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float widen(float value) { return value; }
static inline float widen(bf16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

static inline float widen(f16 value) {
    const uint32_t sign = (value.bits & 0x8000u) << 16, rest = (value.bits & 0x7fffu) << 13;
    if (rest >= 0x7c00u << 13) return float_of(sign | 0x7f800000u | rest);  // infinite, or not a number
    return float_of(sign | bits_of(float_of(rest) * 0x1p112f));             // also of those below the normal ones
}

// To the nearest, ties to even. A NaN stays one.
static inline bf16 narrow_bf16(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

static inline f16 narrow_f16(float value) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
    uint32_t narrowed;
    if (size > 0x7f800000u)
        narrowed = 0x7e00u;
    else if (size >= 0x477ff000u)  // rounds beyond the largest
        narrowed = 0x7c00u;
    else if (size < 0x38800000u)  // below the normal ones: 2^-24 is the last place of 0.5
        narrowed = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
    else
        narrowed = (size + 0xfffu + ((size >> 13) & 1u) - 0x38000000u) >> 13;
    return {static_cast<uint16_t>(narrowed | (bits >> 16 & 0x8000u))};
}

template <class T>
static inline T narrow(float value) {
    if constexpr (sizeof(T) == sizeof(float))
        return value;
    else if constexpr (std::is_same_v<T, bf16>)
        return narrow_bf16(value);
    else
        return narrow_f16(value);
}

}  // namespace dovetail
