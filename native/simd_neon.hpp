// Vectors of four floats. Included once per level, inside an unnamed namespace.

using Vec = float32x4_t;
constexpr int kWidth = 4;
constexpr int kTileTokens = 5;  // 4 rows × 6 tokens of sums fill the 32 registers

inline Vec splat(float value) { return vdupq_n_f32(value); }
inline Vec load(const float* at) { return vld1q_f32(at); }
inline Vec load(const bf16* at) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(at)), 16));
}
inline Vec load(const f16* at) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(at))));
}
inline void store(float* at, Vec value) { vst1q_f32(at, value); }
inline void store(bf16* at, Vec value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint32x4_t number = vceqq_f32(value, value);
    vst1_u16(reinterpret_cast<uint16_t*>(at), vshrn_n_u32(vbslq_u32(number, rounded, quiet), 16));
}
inline void store(f16* at, Vec value) {
    vst1_u16(reinterpret_cast<uint16_t*>(at), vreinterpret_u16_f16(vcvt_f16_f32(value)));
}
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
// The same by one lane of b
template <int kLane>
inline Vec fma_lane(Vec a, Vec b, Vec c) {
    return vfmaq_laneq_f32(c, a, b, kLane);
}
inline float sum(Vec v) { return vaddvq_f32(v); }
inline Vec sums_of_four(Vec a, Vec b, Vec c, Vec d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }
inline float largest(Vec v) { return vmaxvq_f32(v); }
inline Vec magnitude(Vec v) { return vabsq_f32(v); }
inline Vec larger(Vec v, Vec number) { return vmaxnmq_f32(v, number); }  // of NaN and a number the number
inline Vec at_least(Vec v, Vec bound) { return vmaxq_f32(v, bound); }    // these keep NaN
inline Vec at_most(Vec v, Vec bound) { return vminq_f32(v, bound); }
inline Vec round_even(Vec v) { return vrndnq_f32(v); }
// 2 to the power of a whole number in [-126, 127]
inline Vec power_of_two(Vec n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
// a < b ? x : y; a comparison with NaN is false
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
