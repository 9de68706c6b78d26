// Attention of a few queries that share a key head over a stretch of a paged cache. Included once per level, inside an
// unnamed namespace, behind dot.hpp.
//
// Keys are taken kKeyChunk at a time: scores, running maximum, exponentials, weighted values. They lie apart by all heads
// of a token, which no processor foresees: values are fetched while keys are read, and the next keys while values are.

constexpr int kValueQueries = kWidth == 16 ? 6 : kWidth == 8 ? 2 : 4;  // times four vectors of sums that stay in registers
constexpr int kManyQueries = 10;  // from here on a cache of 16 bits is widened before it is used

struct Keys {
    int count;
    int64_t first;  // position of the first
    int64_t at[kKeyChunk];  // offsets into the cache, in elements
};

inline Keys list_keys(const Attend& a, int64_t begin, int64_t end) {
    Keys keys;
    keys.count = static_cast<int>(end - begin);
    keys.first = begin;
    int64_t block = begin / a.cache.block_size, offset = begin % a.cache.block_size;
    for (int i = 0; i < keys.count; ++i) {
        keys.at[i] = a.blocks[block] * a.cache.block_stride + offset * a.cache.token_stride;
        if (++offset == a.cache.block_size) offset = 0, ++block;
    }
    return keys;
}

constexpr int kKeysAhead = 8;

inline void fetch(const void* at, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(at) + line);
}

struct Running {  // what the queries have seen so far
    const float* const* q;  // where they lie
    float *scores, *largest, *total, *sums;
    float* turned;  // room for keys: attention_turned.hpp
};

#if defined(__AVX512F__)
#include "attention_turned.hpp"
#else
constexpr bool turns_keys(const Attend&) { return false; }
template <class C>
inline void score_turned_chunk(const Attend&, const Keys&, bool, const Running&) {}
#endif

// `queries`: where each of them lies; `at`: scores of the first with the first key
template <int R, int T, class C>
inline void score_tile(const Attend& a, const C* const* rows, const float* const* queries, float* at) {
    const float* q[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) q[t] = queries[t];
#if defined(__AVX512F__)
    Vec sums[R][T];
    clear_lanes<R, T>(sums);
    add_lanes<C, R, T, false>(rows, q, a.head_dim, nullptr, sums);
    if constexpr (R == 4)
        each_four<T>(sums, [&](int t, __m128 four) { _mm_storeu_ps(at + t * kKeyChunk, four * _mm_set1_ps(a.scale)); });
    else
        for (int t = 0; t < T; ++t) at[t * kKeyChunk] = sum(sums[0][t]) * a.scale;
#else
#if defined(__aarch64__)
    if (R == 4 && a.head_dim % kWidth == 0) {  // their sums in one vector, the same as one by one
        Vec sums[R][T];
        dot_chain<Wide<C>, R, T, false>(rows, q, 0, a.head_dim, nullptr, sums);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t)
            store(at + t * kKeyChunk, sums_of_four(sums[0][t], sums[1][t], sums[2][t], sums[3][t]) * splat(a.scale));
        return;
    }
#endif
    float out[R][T];
    dot_tile<Wide<C>, R, T, false>(rows, q, a.head_dim, nullptr, out);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) at[t * kKeyChunk + r] = out[r][t] * a.scale;
#endif
}

template <int R, class C>
inline void score_keys(const Attend& a, const Keys& keys, int key, const float* const* q, float* scores) {
    const C* rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) rows[r] = static_cast<const C*>(a.cache.keys) + keys.at[key + r];
    int left = a.tokens * a.heads;
    float* at = scores + key;
    for (; left >= kTileTokens; left -= kTileTokens, q += kTileTokens, at += kTileTokens * kKeyChunk)
        score_tile<R, kTileTokens>(a, rows, q, at);
    switch (left) {
        case 5: return score_tile<R, 5>(a, rows, q, at);
        case 4: return score_tile<R, 4>(a, rows, q, at);
        case 3: return score_tile<R, 3>(a, rows, q, at);
        case 2: return score_tile<R, 2>(a, rows, q, at);
        case 1: return score_tile<R, 1>(a, rows, q, at);
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
    const int seen = (end + kWidth - 1) / kWidth * kWidth;  // whole vectors: what follows weighs nothing
    for (int i = 0; i < begin; ++i) scores[i] = hidden;
    for (int i = end; i < seen; ++i) scores[i] = hidden;
    for (int i = seen; i < kKeyChunk; i += kWidth) store(scores + i, splat(0.0f));
    if (end == begin) return 1.0f;
    if (a.softcap > 0.0f) {
        const float inverse = 1.0f / a.softcap;
        map(scores + begin, end - begin, scores + begin,
            [&](Vec v, int64_t) { return splat(a.softcap) * hyperbolic_tangent(v * splat(inverse)); });
    }
    Vec best = splat(*largest_so_far);
    for (int i = 0; i < seen; i += kWidth) best = larger(load(scores + i), best);
    const float now = largest(best);
    Vec sums = splat(0.0f);
    for (int i = 0; i < seen; i += kWidth) {
        const Vec weight = exponential_below(load(scores + i) - splat(now));
        sums = sums + weight;
        store(scores + i, weight);
    }
    float shrink[kWidth];
    store(shrink, exponential_below(splat(*largest_so_far - now)));
    *total = *total * shrink[0] + sum(sums);
    *largest_so_far = now;
    return shrink[0];
}

// sums[q][d..] = sums·shrink + weights·values, for Q queries and N vectors of the head; `next` are fetched meanwhile
template <int Q, int N, class C>
inline void add_values(const Attend& a, const Keys& keys, const Keys* next, const float* weights, const float* shrink,
                       float* sums, int d) {
    Vec acc[Q][N];
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) acc[q][n] = load(sums + q * a.head_dim + d + n * kWidth) * splat(shrink[q]);
    const C* values = static_cast<const C*>(a.cache.values) + d;
    const C* ahead = static_cast<const C*>(a.cache.keys) + d;
    const int fetched = next ? next->count : 0;
    // add(query, value, sum): the sum with the value times its weight
    const auto add_key = [&](int key, auto&& add) __attribute__((always_inline)) {
        if (key < fetched) fetch(ahead + next->at[key], N * kWidth * sizeof(C));
        Vec v[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) v[n] = load(values + keys.at[key] + n * kWidth);
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q)
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) acc[q][n] = add(q, v[n], acc[q][n]);
    };
    int key = 0;
#if defined(__aarch64__)
    for (; key + 4 <= keys.count; key += 4) {  // weights of four keys are one load, each a lane of it
        Vec w[Q];
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) w[q] = load(weights + q * kKeyChunk + key);
        add_key(key, [&](int q, Vec v, Vec sum) { return fma_lane<0>(v, w[q], sum); });
        add_key(key + 1, [&](int q, Vec v, Vec sum) { return fma_lane<1>(v, w[q], sum); });
        add_key(key + 2, [&](int q, Vec v, Vec sum) { return fma_lane<2>(v, w[q], sum); });
        add_key(key + 3, [&](int q, Vec v, Vec sum) { return fma_lane<3>(v, w[q], sum); });
    }
#endif
    for (; key < keys.count; ++key)
        add_key(key, [&](int q, Vec v, Vec sum) { return fma(v, splat(weights[q * kKeyChunk + key]), sum); });
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) store(sums + q * a.head_dim + d + n * kWidth, acc[q][n]);
}

template <int Q, class C>
inline void add_queries(const Attend& a, const Keys& keys, const Keys* next, const float* weights, const float* shrink,
                        float* sums) {
    int d = 0;
    for (; d + 4 * kWidth <= a.head_dim; d += 4 * kWidth) add_values<Q, 4, C>(a, keys, next, weights, shrink, sums, d);
    for (; d + kWidth <= a.head_dim; d += kWidth) add_values<Q, 1, C>(a, keys, next, weights, shrink, sums, d);
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
inline void score_chunk(const Attend& a, const Keys& keys, bool fetches, const Running& run) {
    if (turns_keys(a)) return score_turned_chunk<C>(a, keys, fetches, run);
    const C *heads = static_cast<const C*>(a.cache.keys), *values = static_cast<const C*>(a.cache.values);
    const int64_t bytes = a.head_dim * sizeof(C);
    int key = 0;
    for (; key + 4 <= keys.count; key += 4) {
        for (int i = key; fetches && i < key + 4; ++i) {  // a few at a time: a core waits for what it cannot take in
            if (i + kKeysAhead < keys.count) fetch(heads + keys.at[i + kKeysAhead], bytes);
            fetch(values + keys.at[i], bytes);
        }
        score_keys<4, C>(a, keys, key, run.q, run.scores);
    }
    for (; key < keys.count; ++key) score_keys<1, C>(a, keys, key, run.q, run.scores);
}

// Fewer queries than go together
template <int Q, class C>
inline void add_rest(const Attend& a, const Keys& keys, const Keys* next, int count, const float* weights,
                     const float* shrink, float* sums) {
    if (count == Q) return add_queries<Q, C>(a, keys, next, weights, shrink, sums);
    if constexpr (Q > 1) add_rest<Q - 1, C>(a, keys, next, count, weights, shrink, sums);
}

template <class C>
inline void add_chunk(const Attend& a, const Keys& keys, const Keys* next, const float* weights, const float* shrink,
                      float* sums) {
    const int queries = a.tokens * a.heads;
    int q = 0;
    for (; q + kValueQueries <= queries; q += kValueQueries, next = nullptr)
        add_queries<kValueQueries, C>(a, keys, next, weights + q * kKeyChunk, shrink + q, sums + q * a.head_dim);
    add_rest<kValueQueries - 1, C>(a, keys, next, queries - q, weights + q * kKeyChunk, shrink + q, sums + q * a.head_dim);
}

inline void weigh_chunk(const Attend& a, const Keys& keys, const Running& run, float* shrink) {
    for (int q = 0; q < a.tokens * a.heads; ++q)
        shrink[q] = weigh(a, keys, q, run.scores + q * kKeyChunk, run.largest + q, run.total + q);
}

template <class C>
inline void attend_chunk(const Attend& a, const Keys& keys, const Keys& next, const Running& run) {
    float shrink[kMaxQueries];
    score_chunk<C>(a, keys, true, run);
    weigh_chunk(a, keys, run, shrink);
    add_chunk<C>(a, keys, &next, run.scores, shrink, run.sums);
}

// Over floats [key][head_dim] in `wide`: `widen`(keys or values) puts them there, `scale`() multiplies each key's scores,
// later its weights, by what was left out.
template <class Widen, class Scale>
inline void attend_floats(const Attend& a, const Keys& keys, float* wide, const Running& run, Widen&& widen,
                          Scale&& scale) {
    float shrink[kMaxQueries];
    Attend widened = a;
    widened.cache.keys = widened.cache.values = wide;
    Keys rows{keys.count, keys.first, {}};
    for (int key = 0; key < keys.count; ++key) rows.at[key] = key * a.head_dim;
    widen(a.cache.keys);
    score_chunk<float>(widened, rows, false, run);
    scale();
    weigh_chunk(a, keys, run, shrink);
    widen(a.cache.values);
    scale();
    add_chunk<float>(widened, rows, nullptr, run.scores, shrink, run.sums);
}

// Of a cache of 16 bits; for many queries it is widened once instead of by every few of them.
template <class C>
inline void attend_narrow(const Attend& a, const Keys& keys, const Keys& next, float* wide, const Running& run) {
    if (a.tokens * a.heads < kManyQueries) return attend_chunk<C>(a, keys, next, run);
    const auto widen = [&](const void* from) {
        for (int key = 0; key < keys.count; ++key)
            load_row_as(static_cast<const C*>(from) + keys.at[key], a.head_dim, 1.0f, false, wide + key * a.head_dim);
    };
    attend_floats(a, keys, wide, run, widen, [] {});
}

// Of a cache of int8; `wide`: room for kKeyChunk heads of floats. Follows in attention_codes.hpp or attention_bytes.hpp.
inline void attend_codes(const Attend& a, const Keys& keys, const Keys& next, float* wide, const Running& run);

// What a query has seen in parts: sums relative to the largest score so far.
struct Merged {
    float largest = kNothingSeen, total = 0.0f;
};

// Products are fused here by name: whoever merges, and however that is compiled, gets the same sums.
inline void add_part(Merged& seen, float largest, float total, const float* sums, int head_dim, float* out) {
    const float now = seen.largest < largest ? largest : seen.largest;
    const float kept = __builtin_expf(seen.largest - now), share = __builtin_expf(largest - now);
    seen = {now, __builtin_fmaf(total, share, seen.total * kept)};
    int d = 0;
    for (; d + kWidth <= head_dim; d += kWidth)
        store(out + d, fma(load(sums + d), splat(share), load(out + d) * splat(kept)));
    for (; d < head_dim; ++d) out[d] = __builtin_fmaf(sums[d], share, out[d] * kept);
}

inline void finish_parts(const Merged& seen, const float* sink, int head_dim, float* out) {
    const Vec share = splat(1.0f / (seen.total + (sink ? __builtin_expf(*sink - seen.largest) : 0.0f)));
    map(out, head_dim, out, [&](Vec v, int64_t) { return v * share; });
}

void merge(const AttendParts& parts) {
    Merged seen;
    for (int d = 0; d < parts.head_dim; ++d) parts.out[d] = 0.0f;
    for (int64_t i = 0; i < parts.count * parts.stride; i += parts.stride)
        add_part(seen, parts.largest[i], parts.total[i], parts.sums + i * parts.head_dim, parts.head_dim, parts.out);
    finish_parts(seen, parts.sink, parts.head_dim, parts.out);
}

void attend_stretch(const Attend& a) {
    const int queries = a.tokens * a.heads;
    float* own = a.scratch + kMaxQueries * kKeyChunk;  // behind the scores [kMaxQueries][kKeyChunk]
    float* wide = own + kMaxQueries * (a.head_dim + 4);
    const float* places[kMaxQueries];
    for (int token = 0, i = 0; token < a.tokens; ++token)
        for (int head = 0; head < a.heads; ++head) places[i++] = a.q + token * a.q_stride + head * a.head_dim;
    const Running run{places, a.scratch, a.out ? own : a.largest, a.out ? own + kMaxQueries : a.total,
                      a.out ? own + 2 * kMaxQueries : a.sums, wide + wide_keys(a.head_dim)};
    for (int q = 0; q < queries; ++q) run.largest[q] = kNothingSeen, run.total[q] = 0.0f;
    for (int i = 0; i < queries * a.head_dim; ++i) run.sums[i] = 0.0f;
    const int64_t seen = a.window && a.position >= a.window ? a.position - a.window + 1 : 0;
    const int64_t last = a.position + a.tokens < a.key_end ? a.position + a.tokens : a.key_end;
    // Chunks lie at fixed places, so that their sums do not depend on where a query's window begins.
    int64_t key = (seen > a.key_begin ? seen : a.key_begin) / kKeyChunk * kKeyChunk;
    const auto chunk_from = [&](int64_t from) {
        const int64_t begin = from < a.key_begin ? a.key_begin : from;
        const int64_t end = from + kKeyChunk < last ? from + kKeyChunk : last;
        return list_keys(a, begin, end > begin ? end : begin);
    };
    for (Keys keys = chunk_from(key); keys.count > 0;) {
        const Keys next = chunk_from(key += kKeyChunk);
        switch (a.cache.type) {
            case DType::f32: attend_chunk<float>(a, keys, next, run); break;
            case DType::bf16: attend_narrow<bf16>(a, keys, next, wide, run); break;
            case DType::f16: attend_narrow<f16>(a, keys, next, wide, run); break;
            default: attend_codes(a, keys, next, wide, run);
        }
        keys = next;
    }
    if (!a.out) return;
    for (int q = 0; q < queries; ++q) {
        float* out = a.out + q / a.heads * a.out_stride + q % a.heads * a.head_dim;
        const float sink = a.sinks ? __builtin_expf(a.sinks[q % a.heads] - run.largest[q]) : 0.0f;
        const Vec share = splat(1.0f / (run.total[q] + sink));
        map(run.sums + q * a.head_dim, a.head_dim, out, [&](Vec v, int64_t) { return v * share; });
    }
}

// A long context as one query alone has it: stretch by stretch, each put behind those before it.
void attend(const Attend& a) {
    if (!a.out || a.key_end - a.key_begin <= kSplitKeys) return attend_stretch(a);
    const int queries = a.tokens * a.heads;
    Merged seen[kMaxQueries];
    const auto out_of = [&](int q) { return a.out + q / a.heads * a.out_stride + q % a.heads * a.head_dim; };
    for (int q = 0; q < queries; ++q)
        for (int d = 0; d < a.head_dim; ++d) out_of(q)[d] = 0.0f;
    Attend part = a;
    part.out = nullptr;
    part.largest = a.scratch + kMaxQueries * kKeyChunk;  // where a stretch that is all there is has its own
    part.total = part.largest + kMaxQueries;
    part.sums = part.total + kMaxQueries;
    for (int64_t begin = a.key_begin; begin < a.key_end; begin += kSplitKeys) {
        part.key_begin = begin;
        part.key_end = begin + kSplitKeys < a.key_end ? begin + kSplitKeys : a.key_end;
        attend_stretch(part);
        for (int q = 0; q < queries; ++q)
            add_part(seen[q], part.largest[q], part.total[q], part.sums + q * a.head_dim, a.head_dim, out_of(q));
    }
    for (int q = 0; q < queries; ++q)
        finish_parts(seen[q], a.sinks ? a.sinks + q % a.heads : nullptr, a.head_dim, out_of(q));
}
