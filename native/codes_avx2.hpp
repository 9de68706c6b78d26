// Cells, eight rows at a time. Included inside an unnamed namespace, after simd_avx2.hpp. With VNNI codes go in with 128
// added, as codes_avx512.hpp tells.

using Ints = __m256i;
using Codes = __m256i;          // 8 rows by 4 columns
using Digits = const int8_t*;   // 16 columns of a token: spread as they are used
constexpr int kCodes = 32;
constexpr int kByteTokens = 4, kByteSums = 8;
constexpr int kNibbleTokens = 4, kNibbleSums = 4, kUnpackedTokens = 4;
#if defined(__AVXVNNI__)
constexpr bool kBiased = true;
#else
constexpr bool kBiased = false;
#endif
constexpr bool kPacksTiles = false;
constexpr bool kMatrixPairs = false;  // no instruction multiplies rows by tokens, two of each
template <int V, int T>
inline void dot_pairs(const int8_t*, const int8_t* const*, int64_t, Ints (*)[T]) {}

inline Ints no_sum() { return _mm256_setzero_si256(); }
inline Ints times_128(Ints v) { return _mm256_slli_epi32(v, 7); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Vec to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Vec as_floats(Ints v) { return _mm256_castsi256_ps(v); }
inline Ints as_ints(Vec v) { return _mm256_castps_si256(v); }
// The bits of floats, times a factor, and a sum
inline Vec add_scaled(Ints bits, Vec factor, Vec sum) { return fma(as_floats(bits), factor, sum); }
inline Digits load_digits(const int8_t* at) { return at; }
inline Codes load_codes(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
// Of each row its four columns by those of x from 4·kQuad on. maddubs takes one operand without sign: the sign goes
// over to the digits, which have no -128 (codes of int4 do: 16·-8). Two products of 127·128 fit into 16 bits.
template <int kQuad>
[[gnu::always_inline]] inline Ints dot(Ints sums, Codes w, Digits x) {
    uint32_t four;
    std::memcpy(&four, x + 4 * kQuad, sizeof four);
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, w, _mm256_set1_epi32(static_cast<int>(four)));
#else
    const __m256i quad = _mm256_set1_epi32(static_cast<int>(four));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(quad, w));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
inline Codes add_bias(Codes w) { return _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80))); }
inline Ints spread(int32_t value) { return _mm256_set1_epi32(value); }
// Of two codes per byte the one or the other, as 16 times its value
inline Codes load_lower(const int8_t* at) {
    return _mm256_and_si256(_mm256_slli_epi16(load_codes(at), 4), _mm256_set1_epi8(-16));
}
inline Codes load_upper(const int8_t* at) { return _mm256_and_si256(load_codes(at), _mm256_set1_epi8(-16)); }
// The same of halves that are floats, as sixteen times their value, and their scales
inline Codes float_codes(__m256i halves) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFloatCodes)));
    return _mm256_shuffle_epi8(table, _mm256_and_si256(halves, _mm256_set1_epi8(15)));
}
inline Codes load_lower_floats(const int8_t* at) { return float_codes(load_codes(at)); }
inline Codes load_upper_floats(const int8_t* at) { return float_codes(_mm256_srli_epi16(load_codes(at), 4)); }
inline Vec load_half_powers(const uint8_t* at) {
    const __m128i exponents = _mm_subs_epu8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)), _mm_set1_epi8(1));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(exponents), 23));
}
inline void write_codes(int8_t* at, Codes codes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), codes); }
inline Vec load_halves(const uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
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
