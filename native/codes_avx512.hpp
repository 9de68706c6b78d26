// Sixty-four bytes at a time, by VNNI. Included inside an unnamed namespace, behind simd_avx512.hpp.
//
// The instruction takes one operand without sign. Digits go in with 128 added, and 128 times the sum of the weights, which
// all tokens of a tile share, is taken off the sums again.

using Ints = __m512i;
using Codes = __m512i;
using Digits = __m512i;
constexpr int kCodes = 64;
constexpr int kDigitTokens = 4;
constexpr bool kBiased = true;

inline Ints no_sum() { return _mm512_setzero_si512(); }
inline Ints times_128(Ints v) { return _mm512_slli_epi32(v, 7); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Digits load_digits(const int8_t* at) {
    return _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_set1_epi8(static_cast<char>(0x80)));
}
inline Codes load_codes(const int8_t* at, int64_t given) {
    if (__builtin_expect(given >= kCodes, true)) return _mm512_loadu_si512(at);
    return _mm512_maskz_loadu_epi8((__mmask64{1} << given) - 1, at);
}
inline Ints dot(Ints sums, Codes w, Digits x) { return _mm512_dpbusd_epi32(sums, x, w); }
inline Ints add_bias(Ints sums, Codes w) {
    return _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(static_cast<char>(0x80)), w);
}
inline __m256i halved(Ints v) { return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)); }
template <int R>
inline void add_up(const Ints* sums, int stride, int32_t* totals) {
    if constexpr (R % 4 == 0)
#pragma GCC unroll 2
        for (int r = 0; r < R; r += 4) {
            const __m256i ab = _mm256_hadd_epi32(halved(sums[r * stride]), halved(sums[(r + 1) * stride]));
            const __m256i cd = _mm256_hadd_epi32(halved(sums[(r + 2) * stride]), halved(sums[(r + 3) * stride]));
            const __m256i all = _mm256_hadd_epi32(ab, cd);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(totals + r),
                             _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
        }
    else
        for (int r = 0; r < R; ++r) totals[r] = _mm512_reduce_add_epi32(sums[r * stride]);
}

// 64 whole numbers within ±127
inline void store_bytes(int8_t* at, const Vec* v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + 16 * i), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v[i])));
}

// Two groups of int4, each element times 16
using Nibbles = __m512i;
constexpr int kStepGroups = 2;

inline Nibbles load_nibbles(const uint8_t* at, int64_t groups) {
    const __mmask8 given = groups >= 2 ? 0xf : 0x3;
    const __m256i packed = _mm256_maskz_loadu_epi64(given, at);
    const __m256i upper = _mm256_set1_epi8(static_cast<char>(0xf0));
    // codes + 8 to two's complement
    const __m256i signed_ones = _mm256_xor_si256(packed, _mm256_set1_epi8(static_cast<char>(0x88)));
    const __m256i first = _mm256_and_si256(_mm256_slli_epi16(signed_ones, 4), upper);
    const __m256i second = _mm256_and_si256(signed_ones, upper);
    const __m512i order = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    return _mm512_permutex2var_epi64(_mm512_castsi256_si512(first), order, _mm512_castsi256_si512(second));
}
inline Vec load_halves(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
using Scale = Vec;
inline Vec add_scaled(Vec sums, Vec v, Scale scale) { return fma(v, scale, sums); }
inline Scale spread_scales(const float* at) {
    return _mm512_insertf32x8(splat(at[0]), _mm256_set1_ps(at[1]), 1);
}
inline Ints nibble_start(const Nibbles& w) { return subtract(no_sum(), add_bias(no_sum(), w)); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Vec to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
using GroupDigits = Digits;
inline GroupDigits load_group(const int8_t* at) { return load_digits(at); }
inline Ints dot_nibbles(Ints sums, const Nibbles& w, const GroupDigits& x) { return dot(sums, w, x); }
inline Vec dot_low(Ints start, const Nibbles& w, const GroupDigits& x) { return to_floats(dot_nibbles(start, w, x)); }
