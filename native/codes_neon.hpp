// Sixteen bytes at a time. Included inside an unnamed namespace, behind simd_neon.hpp; with the dot product instructions
// where the file that includes it is compiled for them.

using Ints = int32x4_t;
using Codes = int8x16_t;
using Digits = int8x16_t;
constexpr int kCodes = 16;
constexpr int kDigitTokens = 4;
constexpr bool kBiased = false;

inline Ints no_sum() { return vdupq_n_s32(0); }
inline Ints times_128(Ints v) { return vshlq_n_s32(v, 7); }
inline Ints subtract(Ints a, Ints b) { return vsubq_s32(a, b); }
inline Ints add_bias(Ints sums, Codes) { return sums; }
inline Digits load_digits(const int8_t* at) { return vld1q_s8(at); }
inline Codes load_codes(const int8_t* at, int64_t given) {
    if (__builtin_expect(given >= kCodes, true)) return vld1q_s8(at);
    int8_t some[kCodes] = {};
    std::memcpy(some, at, given);
    return vld1q_s8(some);
}
inline Ints dot(Ints sums, Codes w, Digits x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, w, x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    return vpadalq_s16(sums, vmlal_high_s8(low, w, x));  // two products of ±127 fit into 16 bits
#endif
}
template <int R>
inline void add_up(const Ints* sums, int stride, int32_t* totals) {
    if constexpr (R % 4 == 0)
#pragma GCC unroll 2
        for (int r = 0; r < R; r += 4) {
            const Ints a = vpaddq_s32(sums[r * stride], sums[(r + 1) * stride]);
            const Ints b = vpaddq_s32(sums[(r + 2) * stride], sums[(r + 3) * stride]);
            vst1q_s32(totals + r, vpaddq_s32(a, b));
        }
    else
        for (int r = 0; r < R; ++r) totals[r] = vaddvq_s32(sums[r * stride]);
}

// 64 whole numbers within ±127
inline void store_bytes(int8_t* at, const Vec* v) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const int16x8_t a = vcombine_s16(vmovn_s32(vcvtq_s32_f32(v[i])), vmovn_s32(vcvtq_s32_f32(v[i + 1])));
        const int16x8_t b = vcombine_s16(vmovn_s32(vcvtq_s32_f32(v[i + 2])), vmovn_s32(vcvtq_s32_f32(v[i + 3])));
        vst1q_s8(at + 4 * i, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
    }
}

// A group of 32: the first 16, and the others; of int4 each element times 16
struct Nibbles {
    int8x16_t first, second;
};
constexpr int kStepGroups = 1;

inline Nibbles load_nibbles(const uint8_t* at, int64_t) {
    const uint8x16_t signed_ones = veorq_u8(vld1q_u8(at), vdupq_n_u8(0x88));  // codes + 8 to two's complement
    return {vreinterpretq_s8_u8(vshlq_n_u8(signed_ones, 4)),
            vreinterpretq_s8_u8(vandq_u8(signed_ones, vdupq_n_u8(0xf0)))};
}
inline Vec load_halves(const uint16_t* at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
using Scale = float;
inline Scale spread_scales(const float* at) { return *at; }
inline Vec add_scaled(Vec sums, Vec v, Scale scale) { return vfmaq_n_f32(sums, v, scale); }
inline Ints nibble_start(const Nibbles&) { return no_sum(); }
inline Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Vec to_floats(Ints v) { return vcvtq_f32_s32(v); }
using GroupDigits = Nibbles;
inline GroupDigits load_group(const int8_t* at) { return {vld1q_s8(at), vld1q_s8(at + 16)}; }
inline Ints dot_nibbles(Ints sums, const Nibbles& w, const GroupDigits& x) {
    return dot(dot(sums, w.first, x.first), w.second, x.second);
}
// Without high digits a sum is below 2^22: begun at the bits of 1.5·2^23 it is a float that needs no conversion, which is
// slow here.
inline Vec dot_low(Ints, const Nibbles& w, const GroupDigits& x) {
    const Vec base = splat(12582912.0f);
    return vreinterpretq_f32_s32(dot_nibbles(vreinterpretq_s32_f32(base), w, x)) - base;
}
