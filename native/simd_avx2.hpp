// Vectors of eight floats. Included once per level, inside an unnamed namespace.

using Vec = __m256;
constexpr int kWidth = 8;
constexpr int kTileTokens = 3;  // 4 rows × 3 tokens of sums, the tokens and one row fill the 16 registers

inline Vec splat(float value) { return _mm256_set1_ps(value); }
inline Vec load(const float* at) { return _mm256_loadu_ps(at); }
inline Vec load(const bf16* at) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
}
inline Vec load(const f16* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
inline void store(float* at, Vec value) { _mm256_storeu_ps(at, value); }
inline void store(bf16* at, Vec value) {
    const __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);  // packs work within halves
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_castsi256_si128(packed));
}
inline void store(f16* at, Vec value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(Vec v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Vec v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec magnitude(Vec v) { return _mm256_andnot_ps(splat(-0.0f), v); }
inline Vec larger(Vec v, Vec number) { return _mm256_max_ps(v, number); }  // of NaN and a number the number
inline Vec at_least(Vec v, Vec bound) { return _mm256_max_ps(bound, v); }  // these keep NaN
inline Vec at_most(Vec v, Vec bound) { return _mm256_min_ps(bound, v); }
inline Vec round_even(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2 to the power of a whole number in [-126, 127]
inline Vec power_of_two(Vec n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
// a < b ? x : y; a comparison with NaN is false
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
