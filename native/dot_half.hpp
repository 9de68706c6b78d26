// Products of float16 rows in float16 arithmetic, twice as many to an instruction as in float32. Included inside an unnamed
// namespace, behind dot.hpp.
//
// What keeps it exact enough: a token's activations are scaled by a power of two so that the largest is between 4 and 8,
// far from overflow and with 16 binary orders of magnitude below; and no more than 32 products go into one sum before it is
// added on in float32. With weights below 64 nothing can overflow, whatever the activations; beyond, a sum that does is
// infinite, and what comes of it not a number.
//
// Prepared activations: [columns of float16][1 / scale, a float32], in whole lines of memory.

struct Half {
    using Weight = f16;
    using Operand = f16;
    using Sums = float16x8_t;
    static constexpr int64_t kLanes = 8;
    static constexpr int kChains = 4;
    static constexpr int64_t kRun = 32 * kChains * kLanes;

    static Sums load_from(const f16* at) {
        return vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(at)));
    }
    static Sums zero() { return vdupq_n_f16(0); }
    static Sums add_product(Sums sums, Sums w, Sums x) { return vfmaq_f16(sums, w, x); }
    static float total(Sums sums) { return sum(vcvt_f32_f16(vget_low_f16(sums)) + vcvt_high_f32_f16(sums)); }
    static int64_t operand_stride(int64_t columns) { return (2 * columns + 4 + 63) / 64 * 32; }
    static float scale(const f16* row, int64_t columns) {
        float value;
        std::memcpy(&value, row + columns, sizeof value);
        return value;
    }
};

int64_t prepared_halves_bytes(int64_t tokens, int64_t columns) { return tokens * Half::operand_stride(columns) * 2; }

void prepare_halves(const float* x, int64_t begin, int64_t end, int64_t columns, void* prepared) {
    for (int64_t token = begin; token < end; ++token) {
        const float* from = x + token * columns;
        f16* row = static_cast<f16*>(prepared) + token * Half::operand_stride(columns);
        const float largest = largest_magnitude(from, columns);
        uint32_t exponent = bits_of(largest) >> 23 & 0xff;
        exponent = exponent < 3 ? 3 : exponent > 254 ? 254 : exponent;
        const Vec scale = splat(float_of((256 - exponent) << 23));
        int64_t k = 0;
        for (; k + kWidth <= columns; k += kWidth) store(row + k, load(from + k) * scale);
        for (; k < columns; ++k) row[k] = narrow<f16>(from[k] * float_of((256 - exponent) << 23));
        const float inverse = largest == largest ? float_of((exponent - 2) << 23) : largest;
        std::memcpy(row + columns, &inverse, sizeof inverse);
    }
}

void multiply_halves(const Product& p) { multiply_rows<Half, Half>(p); }
