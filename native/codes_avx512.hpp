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
