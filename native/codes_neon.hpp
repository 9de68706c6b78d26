// Cells, four rows at a time. Included inside an unnamed namespace, behind simd_neon.hpp; with the dot product instructions
// where the file that includes it is compiled for them.

using Ints = int32x4_t;
using Codes = int8x16_t;   // 4 rows by 4 columns
using Digits = int8x16_t;  // 16 columns of a token
constexpr int kCodes = 16;
constexpr bool kPacksTiles = true;  // of tokens: a vector has four columns of four of them
constexpr int kByteTokens = 4, kByteSums = 16;
constexpr int kNibbleTokens = 8, kNibbleSums = 8, kUnpackedTokens = 8;
constexpr bool kBiased = false;

inline Ints no_sum() { return vdupq_n_s32(0); }
inline Ints times_128(Ints v) { return vshlq_n_s32(v, 7); }
inline Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Ints subtract(Ints a, Ints b) { return vsubq_s32(a, b); }
inline Codes add_bias(Codes w) { return w; }
inline Ints spread(int32_t value) { return vdupq_n_s32(value); }
inline Vec to_floats(Ints v) { return vcvtq_f32_s32(v); }
inline Vec as_floats(Ints v) { return vreinterpretq_f32_s32(v); }
inline Ints as_ints(Vec v) { return vreinterpretq_s32_f32(v); }
// The bits of floats, times a factor, and a sum. By hand: GCC 12 copies what is read as floats and goes on as integers.
[[gnu::always_inline]] inline Vec add_scaled(Ints bits, Vec factor, Vec sum) {
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(bits), "w"(factor));
    return sum;
}
inline Digits load_digits(const int8_t* at) { return vld1q_s8(at); }
inline Codes load_codes(const int8_t* at) { return vld1q_s8(at); }
// Of each row its four columns by those of x from 4·kQuad on
template <int kQuad>
[[gnu::always_inline]] inline Ints dot(Ints sums, Codes w, Digits x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sums, w, x, kQuad);
#else
    const int8x16_t quad = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), kQuad));
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(quad)), high = vmull_high_s8(w, quad);
    return vpadalq_s16(sums, vpaddq_s16(low, high));  // two products of ±127 fit into 16 bits
#endif
}
// The same of four columns of eight tokens, side by side
[[gnu::always_inline]] inline void dot_eight(Ints* sums, Codes w, const int8_t* x) {
    const Digits first = vld1q_s8(x), second = vld1q_s8(x + 16);
#if defined(__ARM_FEATURE_DOTPROD)
    // Written out: GCC 12 moves sums from register to register between them.
    asm("sdot %0.4s, %8.16b, %9.4b[0]\n\tsdot %1.4s, %8.16b, %9.4b[1]\n\t"
        "sdot %2.4s, %8.16b, %9.4b[2]\n\tsdot %3.4s, %8.16b, %9.4b[3]\n\t"
        "sdot %4.4s, %8.16b, %10.4b[0]\n\tsdot %5.4s, %8.16b, %10.4b[1]\n\t"
        "sdot %6.4s, %8.16b, %10.4b[2]\n\tsdot %7.4s, %8.16b, %10.4b[3]"
        : "+w"(sums[0]), "+w"(sums[1]), "+w"(sums[2]), "+w"(sums[3]), "+w"(sums[4]), "+w"(sums[5]), "+w"(sums[6]),
          "+w"(sums[7])
        : "w"(w), "w"(first), "w"(second));
#else
    sums[0] = dot<0>(sums[0], w, first), sums[1] = dot<1>(sums[1], w, first);
    sums[2] = dot<2>(sums[2], w, first), sums[3] = dot<3>(sums[3], w, first);
    sums[4] = dot<0>(sums[4], w, second), sums[5] = dot<1>(sums[5], w, second);
    sums[6] = dot<2>(sums[6], w, second), sums[7] = dot<3>(sums[7], w, second);
#endif
}
// Of two codes per byte the one or the other, as 16 times its value
inline Codes load_lower(const int8_t* at) { return vshlq_n_s8(vld1q_s8(at), 4); }
inline Codes load_upper(const int8_t* at) { return vandq_s8(vld1q_s8(at), vdupq_n_s8(-16)); }
// The same of halves that are floats, as sixteen times their value, and their scales
inline Codes load_lower_floats(const int8_t* at) {
    return vqtbl1q_s8(vld1q_s8(kFloatCodes), vandq_u8(vreinterpretq_u8_s8(vld1q_s8(at)), vdupq_n_u8(15)));
}
inline Codes load_upper_floats(const int8_t* at) {
    return vqtbl1q_s8(vld1q_s8(kFloatCodes), vshrq_n_u8(vreinterpretq_u8_s8(vld1q_s8(at)), 4));
}
inline Vec load_half_powers(const uint8_t* at) {
    uint32_t four;
    std::memcpy(&four, at, sizeof four);
    const uint8x8_t exponents = vqsub_u8(vreinterpret_u8_u32(vdup_n_u32(four)), vdup_n_u8(1));
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(vmovl_u8(exponents))), 23));
}
inline void write_codes(int8_t* at, Codes codes) { vst1q_s8(at, codes); }
inline Vec load_halves(const uint16_t* at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kMatrixPairs = true;
#else
constexpr bool kMatrixPairs = false;
#endif

// sums[v][t] = rows of vector v · x[t], tokens in pairs: an instruction multiplies eight columns of two rows by those of two
// tokens. Cells of four columns each are zipped to eight for it, and the sums, [2 rows][2 tokens], are put apart at the end.
template <int V, int T>
[[gnu::always_inline]] inline void dot_pairs([[maybe_unused]] const int8_t* cells, [[maybe_unused]] const int8_t* const* x,
                                             [[maybe_unused]] int64_t columns, [[maybe_unused]] Ints (*sums)[T]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    Ints upper[V][T / 2], lower[V][T / 2];  // rows 0, 1 and 2, 3 of each vector
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int pair = 0; pair < T / 2; ++pair) upper[v][pair] = lower[v][pair] = no_sum();
    for (int64_t k = 0; k < columns; k += 8, cells += 2 * kCellBytes) {
        __builtin_prefetch(cells + 512), __builtin_prefetch(cells + 512 + kCellBytes);
        int8x16_t both[T / 2];
#pragma GCC unroll 16
        for (int pair = 0; pair < T / 2; ++pair)
            both[pair] = vcombine_s8(vld1_s8(x[2 * pair] + k), vld1_s8(x[2 * pair + 1] + k));
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            const int32x4_t first = vreinterpretq_s32_s8(load_codes(cells + v * kCodes));
            const int32x4_t second = vreinterpretq_s32_s8(load_codes(cells + kCellBytes + v * kCodes));
            const int8x16_t top = vreinterpretq_s8_s32(vzip1q_s32(first, second));
            const int8x16_t bottom = vreinterpretq_s8_s32(vzip2q_s32(first, second));
#pragma GCC unroll 16
            for (int pair = 0; pair < T / 2; ++pair) {
                upper[v][pair] = vmmlaq_s32(upper[v][pair], top, both[pair]);
                lower[v][pair] = vmmlaq_s32(lower[v][pair], bottom, both[pair]);
            }
        }
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int pair = 0; pair < T / 2; ++pair) {
            sums[v][2 * pair] = vuzp1q_s32(upper[v][pair], lower[v][pair]);
            sums[v][2 * pair + 1] = vuzp2q_s32(upper[v][pair], lower[v][pair]);
        }
#endif
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
