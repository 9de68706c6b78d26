// Cells, sixteen rows at a time, by VNNI. Included inside an unnamed namespace, behind simd_avx512.hpp.
//
// The instruction takes one operand without sign. Digits go in with 128 added, and 128 times the sum of the weights, which
// all tokens of a tile share, is taken off the sums again.

using Ints = __m512i;
using Codes = __m512i;          // 16 rows by 4 columns
using Digits = const int8_t*;   // 16 columns of a token: spread as they are used
constexpr int kCodes = 64;
constexpr int kByteTokens = 8, kByteSums = 8;
constexpr int kNibbleTokens = 8, kNibbleSums = 8, kUnpackedTokens = 8;
constexpr bool kBiased = true;

inline Ints no_sum() { return _mm512_setzero_si512(); }
inline Ints times_128(Ints v) { return _mm512_slli_epi32(v, 7); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Vec to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Vec as_floats(Ints v) { return _mm512_castsi512_ps(v); }
inline Ints as_ints(Vec v) { return _mm512_castps_si512(v); }
inline Digits load_digits(const int8_t* at) { return at; }
inline Codes load_codes(const void* at) { return _mm512_loadu_si512(at); }
// Of each row its four columns by those of x from 4·kQuad on
template <int kQuad>
[[gnu::always_inline]] inline Ints dot(Ints sums, Codes w, Digits x) {
    uint32_t four;
    std::memcpy(&four, x + 4 * kQuad, sizeof four);
    return _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(static_cast<int>(four ^ 0x80808080u)), w);
}
inline Ints add_bias(Ints sums, Codes w) {
    return _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(static_cast<char>(0x80)), w);
}
// Of two codes per byte the one or the other, as 16 times its value
inline Codes load_lower(const int8_t* at) {
    return _mm512_and_si512(_mm512_slli_epi16(load_codes(at), 4), _mm512_set1_epi8(-16));
}
inline Codes load_upper(const int8_t* at) { return _mm512_and_si512(load_codes(at), _mm512_set1_epi8(-16)); }
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
