// Attention over a cache of int8 by products of bytes (AArch64's dot product instructions). Included inside an unnamed
// namespace, behind attention_codes.hpp, which does the heads that are no multiple of sixteen.
//
// Queries and weights become numbers of 15 bits, low + 128·high, and the codes are multiplied as they lie: with the queries
// along the head, with the weights along four keys, whose bytes are interleaved for that. Sums are integers and exact.

constexpr float kMostNumber = 127.0f * 128.0f;

struct Numbers {
    const int8_t *low, *high;
    float scale;  // not a number if any of what they stand for is not finite
};

inline Numbers split_numbers(const float* x, int64_t count, int8_t* low, int8_t* high) {
    const float most = largest_magnitude(x, count);
    const float inverse = most > 1e-30f ? kMostNumber / most : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float number = __builtin_rintf(x[i] * inverse), upper = __builtin_rintf(number * (1.0f / 128.0f));
        high[i] = static_cast<int8_t>(upper);
        low[i] = static_cast<int8_t>(number - upper * 128.0f);
    }
    return {low, high, most / kMostNumber};
}

struct ByteRows {  // keys or values of a chunk, filled up to a multiple of four with one that exists
    const int8_t* at[kKeyChunk];
    float scales[kKeyChunk];
    int count;
};

// `others` of the keys `ahead` are needed next.
inline ByteRows list_rows(const Attend& a, const Keys& keys, const void* codes, const Keys& ahead, const void* others) {
    ByteRows rows;
    rows.count = (keys.count + 3) / 4 * 4;
    const int64_t bytes = cache_width(DType::int8, a.head_dim);
    for (int key = 0; key < rows.count; ++key) {
        rows.at[key] = static_cast<const int8_t*>(codes) + keys.at[key < keys.count ? key : 0];
        std::memcpy(rows.scales + key, rows.at[key] + a.head_dim, sizeof(float));
        if (key < ahead.count) fetch(static_cast<const int8_t*>(others) + ahead.at[key], bytes);
    }
    return rows;
}

inline int32x4_t sums_of(const int32x4_t* each) {
    return vpaddq_s32(vpaddq_s32(each[0], each[1]), vpaddq_s32(each[2], each[3]));
}

inline float32x4_t joined(int32x4_t low, int32x4_t high) {
    return vcvtq_f32_s32(vaddq_s32(low, vshlq_n_s32(high, 7)));
}

// Scores of four keys with T queries
template <int T>
inline void score_bytes(const ByteRows& rows, int key, const Numbers* q, int64_t d, float scale, float* scores) {
    int32x4_t low[T][4] = {}, high[T][4] = {};
    for (int64_t i = 0; i < d; i += 16)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
            const int8x16_t codes = vld1q_s8(rows.at[key + r] + i);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                low[t][r] = vdotq_s32(low[t][r], codes, vld1q_s8(q[t].low + i));
                high[t][r] = vdotq_s32(high[t][r], codes, vld1q_s8(q[t].high + i));
            }
        }
    const float32x4_t scales = vld1q_f32(rows.scales + key);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
        const float32x4_t sums = joined(sums_of(low[t]), sums_of(high[t]));
        vst1q_f32(scores + t * kKeyChunk + key, vmulq_f32(sums, vmulq_n_f32(scales, q[t].scale * scale)));
    }
}

// Sixteen columns of four rows, as bytes of one column side by side
inline void interleave(const ByteRows& rows, int key, int64_t i, int8x16_t* out) {
    const int8x16_t a = vld1q_s8(rows.at[key] + i), b = vld1q_s8(rows.at[key + 1] + i);
    const int8x16_t c = vld1q_s8(rows.at[key + 2] + i), d = vld1q_s8(rows.at[key + 3] + i);
    const int8x16_t even[2] = {vzip1q_s8(a, c), vzip2q_s8(a, c)}, odd[2] = {vzip1q_s8(b, d), vzip2q_s8(b, d)};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        out[2 * half] = vzip1q_s8(even[half], odd[half]);
        out[2 * half + 1] = vzip2q_s8(even[half], odd[half]);
    }
}

inline int8x16_t four_times(const int8_t* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof word);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

// sums = sums·shrink + weights·codes, for T queries and sixteen columns
template <int T>
inline void add_bytes(const ByteRows& rows, const Numbers* w, const float* shrink, int64_t d, int64_t i, float* sums) {
    int32x4_t low[T][4] = {}, high[T][4] = {};
    for (int key = 0; key < rows.count; key += 4) {
        int8x16_t codes[4];
        interleave(rows, key, i, codes);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const int8x16_t below = four_times(w[t].low + key), above = four_times(w[t].high + key);
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) {
                low[t][n] = vdotq_s32(low[t][n], codes[n], below);
                high[t][n] = vdotq_s32(high[t][n], codes[n], above);
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
            float* at = sums + t * d + i + n * 4;
            const float32x4_t added = vmulq_n_f32(joined(low[t][n], high[t][n]), w[t].scale);
            vst1q_f32(at, vaddq_f32(vmulq_n_f32(vld1q_f32(at), shrink[t]), added));
        }
}

inline void score_rows(const Attend& a, const ByteRows& rows, int8_t* room, const Running& run) {
    const int queries = a.tokens * a.heads, d = a.head_dim;
    Numbers q[kMaxQueries];
    for (int i = 0; i < queries; ++i, room += 2 * d)
        q[i] = split_numbers(run.q[i], d, room, room + d);
    for (int key = 0; key < rows.count; key += 4) {
        int i = 0;
        for (; i + 2 <= queries; i += 2) score_bytes<2>(rows, key, q + i, d, a.scale, run.scores + i * kKeyChunk);
        if (i < queries) score_bytes<1>(rows, key, q + i, d, a.scale, run.scores + i * kKeyChunk);
    }
}

inline void add_rows(const Attend& a, const ByteRows& rows, const float* shrink, int8_t* room, const Running& run) {
    const int queries = a.tokens * a.heads, d = a.head_dim;
    Numbers w[kMaxQueries];
    for (int i = 0; i < queries; ++i, room += 2 * kKeyChunk) {
        float* weights = run.scores + i * kKeyChunk;
        for (int key = 0; key < rows.count; ++key) weights[key] *= rows.scales[key];
        w[i] = split_numbers(weights, rows.count, room, room + kKeyChunk);
    }
    for (int64_t at = 0; at < d; at += 16) {
        int i = 0;
        for (; i + 3 <= queries; i += 3) add_bytes<3>(rows, w + i, shrink + i, d, at, run.sums + i * d);
        for (; i < queries; ++i) add_bytes<1>(rows, w + i, shrink + i, d, at, run.sums + i * d);
    }
}

inline void attend_codes(const Attend& a, const Keys& keys, const Keys& next, float* wide, const Running& run) {
    if (a.head_dim % 16) return attend_widened(a, keys, next, wide, run);
    float shrink[kMaxQueries];
    int8_t* room = reinterpret_cast<int8_t*>(wide);
    score_rows(a, list_rows(a, keys, a.cache.keys, keys, a.cache.values), room, run);
    weigh_chunk(a, keys, run, shrink);
    add_rows(a, list_rows(a, keys, a.cache.values, next, a.cache.keys), shrink, room, run);
}
