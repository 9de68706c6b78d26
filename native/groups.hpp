// Weights as codes with a scale per row and group of columns: the forms that there are, and where their parts lie.
//
//     value = scale·code                   code: int8, or the half of a byte (-8 to 7)
//     value = scale·code + minimum         codes in halves of bytes: scale·(code + 8) + minimum
//
// Codes lie in cells (cells.hpp), columns filled up to 32. Scales of sixteen rows are one record, a lane per row; records
// follow each other:
//
//     flat     f16 scale [groups][16], then f16 minimum [groups][16] where there is one
//     floats   uint8 exponent [groups][16]: the scale is 2^(exponent - 127), and a code, half a byte, a float of four bits
//     nested   f16 scale [columns/256][16], f16 minimum [columns/256][16], int8 scale [groups][16], int8 minimum
//              [groups][16]; a scale is the product of both of its parts, a minimum minus the product
//
// These are GGUF's blocks in another order: q8_0, q5_0, q4_0 flat, q5_1, q4_1 with a minimum, q4_K, q5_K nested with one,
// q6_K and q3_K nested with groups of 16, MXFP4 floats.
#pragma once

#include <cstdint>

#include "number.hpp"

namespace dovetail {

struct Groups {
    uint8_t bits = 8;       // 8, or 4 with two codes in a byte
    uint8_t size = 32;      // columns that share a scale: 32, or 16 with 8 bits and without minimum
    bool nested = false;    // a scale has two parts
    bool minimum = false;
    bool floats = false;    // with 4 bits: codes stand for kFloatCodes, scales are exponents

    int code_offset() const { return bits == 4 && minimum ? 8 : 0; }
};

// Sixteen times the values of a sign, two bits of exponent and one of fraction. With scales of half the power of two, so
// that every one of them is a float, a code of fp4 counts eight times.
constexpr int8_t kFloatCodes[16] = {0, 8, 16, 24, 32, 48, 64, 96, 0, -8, -16, -24, -32, -48, -64, -96};
constexpr float kFloatCodeUnit = 8.0f;

constexpr int64_t kNestColumns = 256;  // share the float16 part of nested scales

static inline int64_t whole_groups(int64_t columns) { return (columns + 31) / 32; }  // of 32
static inline int64_t group_count(const Groups& groups, int64_t columns) { return whole_groups(columns) * 32 / groups.size; }
static inline int64_t nest_count(int64_t columns) { return (columns + kNestColumns - 1) / kNestColumns; }

// Bytes of a block of sixteen rows
static inline int64_t block_code_bytes(const Groups& groups, int64_t columns) {
    return 16 * whole_groups(columns) * 32 * groups.bits / 8;
}
static inline int64_t block_scale_bytes(const Groups& groups, int64_t columns) {
    if (groups.floats) return 16 * group_count(groups, columns);
    const int64_t each = groups.nested ? 2 * nest_count(columns) + group_count(groups, columns)
                                       : 2 * group_count(groups, columns);
    return 16 * each * (groups.minimum ? 2 : 1);
}

struct ScaleRecord {  // of a block of sixteen rows; what a form does not have is null
    const uint16_t *scales, *minimums;
    const int8_t *scale_steps, *minimum_steps;
    const uint8_t* exponents = nullptr;
};

static inline ScaleRecord scale_record(const Groups& groups, int64_t columns, const void* scales, int64_t block) {
    const char* at = static_cast<const char*>(scales) + block * block_scale_bytes(groups, columns);
    if (groups.floats) return {nullptr, nullptr, nullptr, nullptr, reinterpret_cast<const uint8_t*>(at)};
    const int64_t count = 16 * (groups.nested ? nest_count(columns) : group_count(groups, columns));
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
    const int64_t kinds = groups.minimum ? 2 : 1;
    const int8_t* steps = groups.nested ? reinterpret_cast<const int8_t*>(at + 2 * count * kinds) : nullptr;
    return {halves, groups.minimum ? halves + count : nullptr, steps,
            steps && groups.minimum ? steps + 16 * group_count(groups, columns) : nullptr};
}

// Half of 2^(exponent - 127); the two smallest are taken for 0.
static inline float half_power(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0u : static_cast<uint32_t>(exponent - 1) << 23;
    return __builtin_bit_cast(float, bits);
}

// One row's values, times `factor`, written or added. Not for speed: a table is looked up by few rows at a time.
static inline void unpack_row(const Groups& groups, const void* data, const void* scales, int64_t row, int64_t columns,
                              float factor, bool add, float* out) {
    const int64_t lane = row % 16, block = row / 16;
    const int8_t* codes = static_cast<const int8_t*>(data) + block * block_code_bytes(groups, columns) + lane * 4;
    const ScaleRecord record = scale_record(groups, columns, scales, block);
    for (int64_t k = 0; k < columns; ++k) {
        const int64_t byte = groups.bits == 8 ? k : k / 32 * 16 + k % 16;
        const int8_t whole = codes[byte / 4 * 64 + byte % 4];
        const int8_t low = static_cast<int8_t>(static_cast<uint8_t>(whole) << 4) >> 4;
        const int code = (groups.bits == 8 ? whole : k % 32 < 16 ? low : whole >> 4) + groups.code_offset();
        const int64_t group = k / groups.size * 16 + lane, nest = k / kNestColumns * 16 + lane;
        if (groups.floats) {
            const float value = kFloatCodes[code & 15] / kFloatCodeUnit * half_power(record.exponents[group]) * factor;
            out[k] = add ? out[k] + value : value;
            continue;
        }
        float scale = widen(f16{record.scales[groups.nested ? nest : group]});
        float minimum = groups.minimum ? widen(f16{record.minimums[groups.nested ? nest : group]}) : 0.0f;
        if (groups.nested) scale *= record.scale_steps[group];
        if (groups.nested && groups.minimum) minimum *= -record.minimum_steps[group];
        const float value = (scale * static_cast<float>(code) + minimum) * factor;
        out[k] = add ? out[k] + value : value;
    }
}

}  // namespace dovetail
