// Cells, sixteen rows at a time. Included inside an unnamed namespace, after simd_avx512.hpp.
//
// The instructions take one operand without sign. That of VNNI adds four products at once: codes go in with 128 added, and
// 128 times the sum of the digits, which all rows share and which comes with them, is taken off the sums again. So digits
// are the operand that is spread over the lanes as it is loaded. Without VNNI products are added in pairs of 16 bits, which
// such codes would overflow: there the codes' signs go over to the digits.

using Ints = __m512i;
using Codes = __m512i;          // 16 rows by 4 columns
using Digits = const int8_t*;   // 16 columns of a token: spread as they are used
constexpr int kCodes = 64;
constexpr int kByteTokens = 8, kByteSums = 8;
constexpr int kNibbleTokens = 8, kNibbleSums = 8, kUnpackedTokens = 8;
#if defined(__AVX512VNNI__)
constexpr bool kBiased = true;
#else
constexpr bool kBiased = false;
#endif
constexpr bool kPacksTiles = true;  // of tokens, so that one pointer reaches all of them
constexpr bool kMatrixPairs = false;  // no instruction multiplies rows by tokens, two of each
template <int V, int T>
inline void dot_pairs(const int8_t*, const int8_t* const*, int64_t, Ints (*)[T]) {}

inline Ints no_sum() { return _mm512_setzero_si512(); }
inline Ints times_128(Ints v) { return _mm512_slli_epi32(v, 7); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Vec to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Vec as_floats(Ints v) { return _mm512_castsi512_ps(v); }
inline Ints as_ints(Vec v) { return _mm512_castps_si512(v); }
// The bits of floats, times a factor, and a sum
inline Vec add_scaled(Ints bits, Vec factor, Vec sum) { return fma(as_floats(bits), factor, sum); }
inline Digits load_digits(const int8_t* at) { return at; }
inline Codes load_codes(const void* at) { return _mm512_loadu_si512(at); }
// Of each row its four columns by those of x from 4·kQuad on
template <int kQuad>
[[gnu::always_inline]] inline Ints dot(Ints sums, Codes w, Digits x) {
#if defined(__AVX512VNNI__)
    // GCC 12 would load and spread them by an instruction of its own, and copy sums besides.
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sums)
        : "v"(w), "m"(*reinterpret_cast<const int8_t(*)[4]>(x + 4 * kQuad)));
    return sums;
#else
    uint32_t four;
    std::memcpy(&four, x + 4 * kQuad, sizeof four);
    const __m512i quad = _mm512_set1_epi32(static_cast<int>(four));
    const __m512i flipped = _mm512_mask_sub_epi8(quad, _mm512_movepi8_mask(w), _mm512_setzero_si512(), quad);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), flipped);  // digits have no -128: see codes_avx2.hpp
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
// The same of four columns of eight tokens, side by side
[[gnu::always_inline]] inline void dot_eight(Ints* sums, Codes w, const int8_t* x) {
    sums[0] = dot<0>(sums[0], w, x), sums[1] = dot<1>(sums[1], w, x);
    sums[2] = dot<2>(sums[2], w, x), sums[3] = dot<3>(sums[3], w, x);
    sums[4] = dot<4>(sums[4], w, x), sums[5] = dot<5>(sums[5], w, x);
    sums[6] = dot<6>(sums[6], w, x), sums[7] = dot<7>(sums[7], w, x);
}
inline Codes add_bias(Codes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80))); }
inline Ints spread(int32_t value) { return _mm512_set1_epi32(value); }
// Of two codes per byte the one or the other, as 16 times its value
inline Codes load_lower(const int8_t* at) {
    return _mm512_and_si512(_mm512_slli_epi16(load_codes(at), 4), _mm512_set1_epi8(-16));
}
inline Codes load_upper(const int8_t* at) { return _mm512_and_si512(load_codes(at), _mm512_set1_epi8(-16)); }
// The same of halves that are floats, as sixteen times their value, and their scales
inline Codes float_codes(__m512i halves) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFloatCodes)));
    return _mm512_shuffle_epi8(table, _mm512_and_si512(halves, _mm512_set1_epi8(15)));
}
inline Codes load_lower_floats(const int8_t* at) { return float_codes(load_codes(at)); }
inline Codes load_upper_floats(const int8_t* at) { return float_codes(_mm512_srli_epi16(load_codes(at), 4)); }
inline Vec load_half_powers(const uint8_t* at) {
    const __m128i exponents = _mm_subs_epu8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)), _mm_set1_epi8(1));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(exponents), 23));
}
inline void write_codes(int8_t* at, Codes codes) { _mm512_storeu_si512(at, codes); }
inline Vec load_halves(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// 64 whole numbers within ±127
inline void store_bytes(int8_t* at, const Vec* v) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + 16 * i), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v[i])));
}
