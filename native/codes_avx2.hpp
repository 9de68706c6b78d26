// Thirty-two bytes at a time. Included inside an unnamed namespace, behind simd_avx2.hpp.

using Ints = __m256i;
using Codes = __m256i;
struct Digits {
    __m256i size, value;
};
constexpr int kCodes = 32;
constexpr int kDigitTokens = 2;  // 4 rows × 2 tokens of sums and their operands fill the 16 registers
constexpr bool kBiased = false;

inline Ints no_sum() { return _mm256_setzero_si256(); }
inline Ints times_128(Ints v) { return _mm256_slli_epi32(v, 7); }
inline Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints add_bias(Ints sums, Codes) { return sums; }
inline Digits load_digits(const int8_t* at) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return {_mm256_abs_epi8(value), value};
}
inline Codes load_codes(const int8_t* at, int64_t given) {
    if (__builtin_expect(given >= kCodes, true)) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    alignas(32) int8_t some[kCodes] = {};
    std::memcpy(some, at, given);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(some));
}
// The instruction takes one operand without sign: the sign goes over to the other. Two products of ±127 fit into 16 bits.
inline Ints dot(Ints sums, Codes w, const Digits& x) {
    const __m256i pairs = _mm256_maddubs_epi16(x.size, _mm256_sign_epi8(w, x.value));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline __m128i add_four(Ints a, Ints b, Ints c, Ints d) {
    const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
template <int R>
inline void add_up(const Ints* sums, int stride, int32_t* totals) {
    if constexpr (R % 4 == 0)
#pragma GCC unroll 2
        for (int r = 0; r < R; r += 4)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(totals + r),
                             add_four(sums[r * stride], sums[(r + 1) * stride], sums[(r + 2) * stride],
                                      sums[(r + 3) * stride]));
    else
        for (int r = 0; r < R; ++r)
            totals[r] = _mm_cvtsi128_si32(add_four(sums[r * stride], no_sum(), no_sum(), no_sum()));
}

// 64 whole numbers within ±127
inline void store_bytes(int8_t* at, const Vec* v) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work within halves
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        const __m256i a = _mm256_packs_epi32(_mm256_cvtps_epi32(v[i]), _mm256_cvtps_epi32(v[i + 1]));
        const __m256i b = _mm256_packs_epi32(_mm256_cvtps_epi32(v[i + 2]), _mm256_cvtps_epi32(v[i + 3]));
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + 8 * i), bytes);
    }
}

// A group of int4, each element times 16
using Nibbles = __m256i;
constexpr int kStepGroups = 1;

inline Nibbles load_nibbles(const uint8_t* at, int64_t) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    const __m128i upper = _mm_set1_epi8(static_cast<char>(0xf0));
    // codes + 8 to two's complement
    const __m128i signed_ones = _mm_xor_si128(packed, _mm_set1_epi8(static_cast<char>(0x88)));
    return _mm256_set_m128i(_mm_and_si128(signed_ones, upper), _mm_and_si128(_mm_slli_epi16(signed_ones, 4), upper));
}
inline Vec load_halves(const uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
using Scale = Vec;
inline Vec add_scaled(Vec sums, Vec v, Scale scale) { return fma(v, scale, sums); }
inline Scale spread_scales(const float* at) { return splat(*at); }
inline Ints nibble_start(const Nibbles&) { return no_sum(); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Vec to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
using GroupDigits = Digits;
inline GroupDigits load_group(const int8_t* at) { return load_digits(at); }
inline Ints dot_nibbles(Ints sums, const Nibbles& w, const GroupDigits& x) { return dot(sums, w, x); }
inline Vec dot_low(Ints start, const Nibbles& w, const GroupDigits& x) { return to_floats(dot_nibbles(start, w, x)); }
