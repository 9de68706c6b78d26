// Vectors of sixteen floats. Included once per level, inside an unnamed namespace.

using Vec = __m512;
constexpr int kWidth = 16;
constexpr int kTileTokens = 6;  // 4 rows × 6 tokens of sums fill the 32 registers

inline Vec splat(float value) { return _mm512_set1_ps(value); }
inline Vec load(const float* at) { return _mm512_loadu_ps(at); }
inline Vec load(const bf16* at) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16));
}
inline Vec load(const f16* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }
// Of a vector the first `given` numbers, zeros behind them; none where `given` is not above zero
inline __mmask16 first_lanes(int64_t given) { return given >= kWidth ? 0xffffu : given > 0 ? (1u << given) - 1 : 0; }
inline Vec load_some(const float* at, int64_t given) { return _mm512_maskz_loadu_ps(first_lanes(given), at); }
inline Vec load_some(const bf16* at, int64_t given) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(given), at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load_some(const f16* at, int64_t given) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(given), at));
}
inline void store(float* at, Vec value) { _mm512_storeu_ps(at, value); }
inline void store(bf16* at, Vec value) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh(value);
    std::memcpy(at, &rounded, sizeof rounded);
#else
    const __m512i bits = _mm512_castps_si512(value), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i either = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i narrowed = _mm512_cvtepi32_epi16(_mm512_srli_epi32(either, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), narrowed);
#endif
}
inline void store(f16* at, Vec value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec magnitude(Vec v) { return _mm512_abs_ps(v); }
inline Vec larger(Vec v, Vec number) { return _mm512_max_ps(v, number); }  // of NaN and a number the number
inline Vec at_least(Vec v, Vec bound) { return _mm512_max_ps(bound, v); }  // these keep NaN
inline Vec at_most(Vec v, Vec bound) { return _mm512_min_ps(bound, v); }
inline Vec round_even(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
// 2 to the power of a whole number in [-126, 127]
inline Vec power_of_two(Vec n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
// a < b ? x : y; a comparison with NaN is false
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
