// Scores of many queries on vectors of sixteen. Included inside an unnamed namespace, by attention.hpp.
//
// Keys are turned once for all queries: a vector has one number of each of sixteen keys, so that no lanes are added up, which
// takes as long as the products do where a head has 64 numbers. The sums are those of dot_lanes.hpp to the bit: numbers 16
// apart one after the other, then what sum() does with lanes, pairs 8, 4, 2 and 1 apart.

constexpr int kTurnedQueries = 16;  // from here on it pays

inline bool turns_keys(const Attend& a) {
    return a.tokens * a.heads >= kTurnedQueries && (a.head_dim == 64 || a.head_dim == 128);
}

// Lane i of the n-th vector becomes lane n of the i-th.
inline void turn(Vec* rows) {
    const auto low = [](Vec a, Vec b) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    const auto high = [](Vec a, Vec b) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    Vec fours[16];  // within each quarter
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const Vec a = _mm512_unpacklo_ps(rows[i], rows[i + 1]), b = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
        const Vec c = _mm512_unpacklo_ps(rows[i + 2], rows[i + 3]), d = _mm512_unpackhi_ps(rows[i + 2], rows[i + 3]);
        fours[i] = low(a, c), fours[i + 1] = high(a, c), fours[i + 2] = low(b, d), fours[i + 3] = high(b, d);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Vec a = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x88);
        const Vec b = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x88);
        const Vec c = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xdd);
        const Vec d = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_f32x4(a, b, 0x88), rows[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
        rows[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88), rows[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
}

// turned: [head_dim][kKeyChunk], pairs of vectors filled up with zeros
template <class C>
inline void turn_keys(const Attend& a, const Keys& keys, bool fetches, float* turned) {
    const C *heads = static_cast<const C*>(a.cache.keys), *values = static_cast<const C*>(a.cache.values);
    for (int key = 0; key < (keys.count + 31) / 32 * 32; key += kWidth) {
        for (int i = key; fetches && i < key + kWidth && i < keys.count; ++i)
            fetch(values + keys.at[i], a.head_dim * sizeof(C));
        for (int d = 0; d < a.head_dim; d += kWidth) {
            Vec rows[kWidth];
            if (key + kWidth <= keys.count)
#pragma GCC unroll 16
                for (int i = 0; i < kWidth; ++i) rows[i] = load(heads + keys.at[key + i] + d);
            else
                for (int i = 0; i < kWidth; ++i)
                    rows[i] = key + i < keys.count ? load(heads + keys.at[key + i] + d) : splat(0.0f);
            turn(rows);
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; ++i) store(turned + (d + i) * kKeyChunk + key, rows[i]);
        }
    }
}

// Q queries by 32 keys, the numbers of head_dim D that are kLane modulo kStep: every other of them, and then the rest. What
// is empty asm keeps the compiler from loading keys once per query, and from adding up at the end what it then has to spill.
template <int Q, int D, int kLane = 0, int kStep = 1>
[[gnu::always_inline]] inline void sum_turned(const float* keys, const float* const* q, Vec (*out)[2]) {
    if constexpr (kStep == kWidth) {
#pragma GCC unroll 8
        for (int i = kLane; i < D; i += kWidth) {
            Vec k[2];
#pragma GCC unroll 2
            for (int n = 0; n < 2; ++n) {
                k[n] = load(keys + i * kKeyChunk + n * kWidth);
                asm("" : "+v"(k[n]));
            }
#pragma GCC unroll 2
            for (int t = 0; t < Q; ++t) {
                const Vec x = splat(q[t][i]);
#pragma GCC unroll 2
                for (int n = 0; n < 2; ++n) out[t][n] = i == kLane ? k[n] * x : fma(k[n], x, out[t][n]);
            }
        }
    } else {
        Vec rest[Q][2];
        sum_turned<Q, D, kLane, 2 * kStep>(keys, q, out);
        sum_turned<Q, D, kLane + kStep, 2 * kStep>(keys, q, rest);
#pragma GCC unroll 2
        for (int t = 0; t < Q; ++t)
#pragma GCC unroll 2
            for (int n = 0; n < 2; ++n) {
                out[t][n] = out[t][n] + rest[t][n];
                asm volatile("" : "+v"(out[t][n]));
            }
    }
}

template <int Q, int D>
inline void score_turned(const float* keys, int count, const float* const* queries, float scale, float* scores) {
    const float* q[Q];
#pragma GCC unroll 2
    for (int t = 0; t < Q; ++t) q[t] = queries[t];
    for (int key = 0; key < count; key += 2 * kWidth) {
        Vec sums[Q][2];
        sum_turned<Q, D>(keys + key, q, sums);
#pragma GCC unroll 2
        for (int t = 0; t < Q; ++t)
#pragma GCC unroll 2
            for (int n = 0; n < 2; ++n) store(scores + t * kKeyChunk + key + n * kWidth, sums[t][n] * splat(scale));
    }
}

template <int D>
inline void score_pairs(const Attend& a, int count, const Running& run) {
    const int queries = a.tokens * a.heads;
    int q = 0;
    for (; q + 2 <= queries; q += 2)
        score_turned<2, D>(run.turned, count, run.q + q, a.scale, run.scores + q * kKeyChunk);
    if (q < queries) score_turned<1, D>(run.turned, count, run.q + q, a.scale, run.scores + q * kKeyChunk);
}

template <class C>
inline void score_turned_chunk(const Attend& a, const Keys& keys, bool fetches, const Running& run) {
    turn_keys<C>(a, keys, fetches, run.turned);
    a.head_dim == 64 ? score_pairs<64>(a, keys.count, run) : score_pairs<128>(a, keys.count, run);
}
