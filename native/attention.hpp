// Attention of a few queries that share a key head over a stretch of a paged cache. Included once per level, inside an
// unnamed namespace, behind dot.hpp.
//
// Keys are taken kKeyChunk at a time: scores, running maximum, exponentials, weighted values.

struct Keys {
    int count;
    int64_t first;  // position of the first
    int64_t at[kKeyChunk];  // offsets into the cache, in elements
};

inline Keys list_keys(const Attend& a, int64_t begin, int64_t end) {
    Keys keys{static_cast<int>(end - begin), begin, {}};
    for (int i = 0; i < keys.count; ++i) {
        const int64_t position = begin + i;
        keys.at[i] = a.blocks[position / a.cache.block_size] * a.cache.block_stride +
                     (position % a.cache.block_size) * a.cache.token_stride;
    }
    return keys;
}

template <int R, int T, class C>
inline void score_tile(const Attend& a, const C* const* rows, int key, int query, float* scores) {
    const float* q[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
        q[t] = a.q + (query + t) / a.heads * a.q_stride + (query + t) % a.heads * a.head_dim;
    float out[R][T];
    dot_tile<R, T, false>(rows, q, a.head_dim, out);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) scores[(query + t) * kKeyChunk + key + r] = out[r][t] * a.scale;
}

template <int R, class C>
inline void score_keys(const Attend& a, const Keys& keys, int key, float* scores) {
    const C* rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) rows[r] = static_cast<const C*>(a.cache.keys) + keys.at[key + r];
    const int queries = a.tokens * a.heads;
    int query = 0;
    for (; query + kTileTokens <= queries; query += kTileTokens)
        score_tile<R, kTileTokens>(a, rows, key, query, scores);
    switch (queries - query) {
        case 5: return score_tile<R, 5>(a, rows, key, query, scores);
        case 4: return score_tile<R, 4>(a, rows, key, query, scores);
        case 3: return score_tile<R, 3>(a, rows, key, query, scores);
        case 2: return score_tile<R, 2>(a, rows, key, query, scores);
        case 1: return score_tile<R, 1>(a, rows, key, query, scores);
        default: return;
    }
}

// Turns one query's scores into weights relative to its running maximum; returns what earlier sums shrink by.
inline float weigh(const Attend& a, const Keys& keys, int query, float* scores, float* largest_so_far, float* total) {
    const int64_t position = a.position + query / a.heads;
    const int64_t first = a.window && position >= a.window ? position - a.window + 1 : 0;
    int begin = first > keys.first ? static_cast<int>(first - keys.first < keys.count ? first - keys.first : keys.count) : 0;
    int end = position - keys.first + 1 < keys.count ? static_cast<int>(position - keys.first + 1) : keys.count;
    if (end <= begin) begin = end = 0;
    const float hidden = -__builtin_inff();
    for (int i = 0; i < begin; ++i) scores[i] = hidden;
    for (int i = end; i < kKeyChunk; ++i) scores[i] = hidden;
    if (end == begin) {
        for (int i = 0; i < kKeyChunk; ++i) scores[i] = 0.0f;
        return 1.0f;
    }
    if (a.softcap > 0.0f) {
        const float inverse = 1.0f / a.softcap;
        map(scores + begin, end - begin, scores + begin,
            [&](Vec v, int64_t) { return splat(a.softcap) * hyperbolic_tangent(v * splat(inverse)); });
    }
    Vec best = splat(*largest_so_far);
    for (int i = 0; i < kKeyChunk; i += kWidth) {
        const Vec v = load(scores + i);
        best = where_less(best, v, v, best);
    }
    const float now = largest(best);
    Vec sums = splat(0.0f);
    for (int i = 0; i < kKeyChunk; i += kWidth) {
        const Vec weight = exponential(load(scores + i) - splat(now));
        sums = sums + weight;
        store(scores + i, weight);
    }
    float shrink[kWidth];
    store(shrink, exponential(splat(*largest_so_far - now)));
    *total = *total * shrink[0] + sum(sums);
    *largest_so_far = now;
    return shrink[0];
}

// sums[q][d..] = sums·shrink + weights·values, for Q queries and N vectors of the head
template <int Q, int N, class C>
inline void add_values(const Attend& a, const Keys& keys, const float* weights, const float* shrink, float* sums, int d) {
    Vec acc[Q][N];
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[q][n] = load(sums + q * a.head_dim + d + n * kWidth) * splat(shrink[q]);
    const C* values = static_cast<const C*>(a.cache.values) + d;
    for (int key = 0; key < keys.count; ++key) {
        Vec v[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) v[n] = load(values + keys.at[key] + n * kWidth);
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) {
            const Vec weight = splat(weights[q * kKeyChunk + key]);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) acc[q][n] = fma(v[n], weight, acc[q][n]);
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) store(sums + q * a.head_dim + d + n * kWidth, acc[q][n]);
}

template <int Q, class C>
inline void add_queries(const Attend& a, const Keys& keys, const float* weights, const float* shrink, float* sums) {
    int d = 0;
    for (; d + 4 * kWidth <= a.head_dim; d += 4 * kWidth) add_values<Q, 4, C>(a, keys, weights, shrink, sums, d);
    for (; d + kWidth <= a.head_dim; d += kWidth) add_values<Q, 1, C>(a, keys, weights, shrink, sums, d);
    for (; d < a.head_dim; ++d)
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) {
            float total = sums[q * a.head_dim + d] * shrink[q];
            for (int key = 0; key < keys.count; ++key)
                total += weights[q * kKeyChunk + key] * widen(static_cast<const C*>(a.cache.values)[keys.at[key] + d]);
            sums[q * a.head_dim + d] = total;
        }
}

template <class C>
inline void attend_chunk(const Attend& a, const Keys& keys, float* scores, float* largest_so_far, float* total, float* sums) {
    int key = 0;
    for (; key + 4 <= keys.count; key += 4) score_keys<4, C>(a, keys, key, scores);
    for (; key < keys.count; ++key) score_keys<1, C>(a, keys, key, scores);
    const int queries = a.tokens * a.heads;
    float shrink[kMaxQueries];
    for (int q = 0; q < queries; ++q)
        shrink[q] = weigh(a, keys, q, scores + q * kKeyChunk, largest_so_far + q, total + q);
    int q = 0;
    for (; q + 4 <= queries; q += 4)
        add_queries<4, C>(a, keys, scores + q * kKeyChunk, shrink + q, sums + q * a.head_dim);
    for (; q < queries; ++q)
        add_queries<1, C>(a, keys, scores + q * kKeyChunk, shrink + q, sums + q * a.head_dim);
}

void attend(const Attend& a) {
    const int queries = a.tokens * a.heads;
    float* scores = a.scratch;  // [kMaxQueries][kKeyChunk]
    float* largest_so_far = a.out ? scores + kMaxQueries * kKeyChunk : a.largest;
    float* total = a.out ? scores + kMaxQueries * (kKeyChunk + 1) : a.total;
    float* sums = a.out ? scores + kMaxQueries * (kKeyChunk + 2) : a.sums;
    for (int q = 0; q < queries; ++q) largest_so_far[q] = kNothingSeen, total[q] = 0.0f;
    for (int i = 0; i < queries * a.head_dim; ++i) sums[i] = 0.0f;
    const int64_t seen = a.window && a.position >= a.window ? a.position - a.window + 1 : 0;
    const int64_t last = a.position + a.tokens < a.key_end ? a.position + a.tokens : a.key_end;
    // Chunks lie at fixed places, so that their sums do not depend on where a query's window begins.
    for (int64_t key = (seen > a.key_begin ? seen : a.key_begin) / kKeyChunk * kKeyChunk; key < last; key += kKeyChunk) {
        const Keys keys = list_keys(a, key < a.key_begin ? a.key_begin : key, key + kKeyChunk < last ? key + kKeyChunk : last);
        if (a.cache.type == DType::f32)
            attend_chunk<float>(a, keys, scores, largest_so_far, total, sums);
        else
            attend_chunk<bf16>(a, keys, scores, largest_so_far, total, sums);
    }
    if (!a.out) return;
    for (int q = 0; q < queries; ++q) {
        float* out = a.out + q / a.heads * a.out_stride + q % a.heads * a.head_dim;
        const Vec share = splat(1.0f / total[q]);
        map(sums + q * a.head_dim, a.head_dim, out, [&](Vec v, int64_t) { return v * share; });
    }
}
