// Attention of many queries on AMX, over a bf16 cache. Included inside an unnamed namespace, behind tiles.hpp.
//
// Scores are computed transposed, as keys times queries: sixteen keys of a head are a left operand as they lie in the
// cache, and the softmax runs along registers that hold sixteen queries each. The weights are transposed on their way to
// the second product, whose right operand, the values, only needs neighbouring keys interleaved.

constexpr int kStepKeys = 32;       // keys of one step of the second product
constexpr int kMaxTileDim = 256;
constexpr int kQueryTiles = kMaxQueries / 16;

struct alignas(64) TileAttention {
    bf16 queries[kQueryTiles][kMaxTileDim / 32][512];  // right operands of the scores
    bf16 keys[kStepKeys][kMaxTileDim];                 // a copy, where keys do not lie sixteen in a row
    bf16 values[kMaxTileDim / 16][512];                // right operands of the second product
    bf16 weights[512];                                 // left operand: [16 queries][32 keys]
    float scores[kStepKeys][16];
    float update[256];
    float sums[kMaxQueries][kMaxTileDim];
    float largest[kMaxQueries], total[kMaxQueries];
};

inline bool fits_tiles(const Attend& a) {
    return a.cache.type == DType::bf16 && a.head_dim % 32 == 0 && a.head_dim <= kMaxTileDim && a.out &&
           a.tokens * a.heads > 8;
}

// One query tile as [steps][16 pairs][16 queries][2]
inline void pack_queries(const Attend& a, int tile, TileAttention& state) {
    const int queries = a.tokens * a.heads;
    for (int d = 0; d < a.head_dim; d += 32) {
        __m512i rows[16];
        for (int i = 0; i < 16; ++i) {
            const int q = tile * 16 + i;
            const float* at = a.q + q / a.heads * a.q_stride + q % a.heads * a.head_dim + d;
            rows[i] = q < queries ? reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load(at + 16), load(at)))
                                  : _mm512_setzero_si512();
        }
        transpose16(rows);
        for (int pair = 0; pair < 16; ++pair) _mm512_store_si512(&state.queries[tile][d / 32][pair * 32], rows[pair]);
    }
}

// Keys 2i and 2i+1 interleaved; values of keys that nobody may see are zeros, whatever the memory holds
inline void pack_values(const Attend& a, const Keys& keys, TileAttention& state) {
    const bf16* values = static_cast<const bf16*>(a.cache.values);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int pair = 0; pair < 16; ++pair)
        for (int d = 0; d < a.head_dim; d += 32) {
            __m512i rows[2];
            for (int i = 0; i < 2; ++i)
                rows[i] = 2 * pair + i < keys.count ? _mm512_loadu_si512(values + keys.at[2 * pair + i] + d)
                                                    : _mm512_setzero_si512();
            _mm512_store_si512(&state.values[d / 16][pair * 32], _mm512_permutex2var_epi16(rows[0], low, rows[1]));
            _mm512_store_si512(&state.values[d / 16 + 1][pair * 32], _mm512_permutex2var_epi16(rows[0], high, rows[1]));
        }
}

// Scores of 32 keys with the sixteen queries of a tile
inline void score_tiles(const Attend& a, const Keys& keys, int tile, TileAttention& state) {
    const char* rows[2];
    int64_t stride[2];
    for (int half = 0; half < 2; ++half) {
        const int first = half * 16;
        const bool in_a_row = first + 16 <= keys.count && a.cache.block_size % 16 == 0 && keys.first % 16 == 0;
        rows[half] = in_a_row ? reinterpret_cast<const char*>(static_cast<const bf16*>(a.cache.keys) + keys.at[first])
                              : reinterpret_cast<const char*>(state.keys[first]);
        stride[half] = in_a_row ? a.cache.token_stride * 2 : kMaxTileDim * 2;
    }
    settle();
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < a.head_dim; d += 32) {
        _tile_loadd(4, rows[0] + d * 2, stride[0]);
        _tile_loadd(5, rows[1] + d * 2, stride[1]);
        _tile_loadd(6, state.queries[tile][d / 32], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, state.scores[0], 64);
    _tile_stored(1, state.scores[16], 64);
}

inline void copy_keys(const Attend& a, const Keys& keys, TileAttention& state) {
    for (int i = 0; i < kStepKeys; ++i)
        if (i < keys.count)
            std::memcpy(state.keys[i], static_cast<const bf16*>(a.cache.keys) + keys.at[i], a.head_dim * 2);
        else
            std::memset(state.keys[i], 0, a.head_dim * 2);
}

// Scores to weights, in place; returns what earlier sums shrink by, per query
inline __m512 weigh_tile(const Attend& a, const Keys& keys, int tile, TileAttention& state) {
    alignas(64) int32_t first[16], last[16];  // keys that each query sees, counted from this step's first
    for (int i = 0; i < 16; ++i) {
        const int64_t position = a.position + (tile * 16 + i) / a.heads;
        const int64_t begin = a.window && position >= a.window ? position - a.window + 1 - keys.first : 0;
        const int64_t end = position - keys.first < keys.count - 1 ? position - keys.first : keys.count - 1;
        first[i] = static_cast<int32_t>(begin < 0 ? 0 : begin > kStepKeys ? kStepKeys : begin);
        last[i] = static_cast<int32_t>(end < -1 ? -1 : end);
    }
    const __m512i begin = _mm512_load_si512(first), end = _mm512_load_si512(last);
    const Vec before = load(state.largest + tile * 16), scale = splat(a.scale);
    const Vec cap = splat(a.softcap), inverse = splat(a.softcap > 0.0f ? 1.0f / a.softcap : 0.0f);
    Vec best = before;
    for (int key = 0; key < kStepKeys; ++key) {
        const __m512i at = _mm512_set1_epi32(key);
        const __mmask16 seen = _mm512_cmple_epi32_mask(begin, at) & _mm512_cmple_epi32_mask(at, end);
        Vec score = load(state.scores[key]) * scale;
        if (a.softcap > 0.0f) score = cap * hyperbolic_tangent(score * inverse);
        score = _mm512_mask_blend_ps(seen, splat(-__builtin_inff()), score);
        best = larger(score, best);
        store(state.scores[key], score);
    }
    Vec sums = splat(0.0f);
    for (int key = 0; key < kStepKeys; ++key) {
        const Vec weight = exponential_below(load(state.scores[key]) - best);
        sums = sums + weight;
        store(state.scores[key], weight);
    }
    const Vec shrink = exponential_below(before - best);
    store(state.largest + tile * 16, best);
    store(state.total + tile * 16, fma(load(state.total + tile * 16), shrink, sums));
    return shrink;
}

// [32 keys][16 queries] floats to [16 queries][32 keys] bf16
inline void pack_weights(TileAttention& state) {
    __m512i near[16], far[16];
    for (int i = 0; i < 16; ++i) {
        near[i] = _mm512_load_si512(state.scores[i]);
        far[i] = _mm512_load_si512(state.scores[16 + i]);
    }
    transpose16(near);
    transpose16(far);
    for (int q = 0; q < 16; ++q) {
        const __m512bh row = _mm512_cvtne2ps_pbh(_mm512_castsi512_ps(far[q]), _mm512_castsi512_ps(near[q]));
        _mm512_store_si512(&state.weights[q * 32], reinterpret_cast<__m512i>(row));
    }
}

inline void add_tile_values(const Attend& a, int tile, Vec shrink, TileAttention& state) {
    alignas(64) float factors[16];
    store(factors, shrink);
    float (*sums)[kMaxTileDim] = state.sums + tile * 16;
    if (_mm512_cmp_ps_mask(shrink, splat(1.0f), _CMP_NEQ_UQ))
        for (int q = 0; q < 16; ++q)
            for (int d = 0; d < a.head_dim; d += 16) store(sums[q] + d, load(sums[q] + d) * splat(factors[q]));
    settle();
    _tile_loadd(4, state.weights, 64);
    for (int d = 0; d < a.head_dim; d += 16) {
        _tile_loadd(0, sums[0] + d, kMaxTileDim * 4);
        _tile_loadd(6, state.values[d / 16], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stored(0, sums[0] + d, kMaxTileDim * 4);
    }
}

void attend_tiles(const Attend& a) {
    const Tiles tiles;
    static thread_local TileAttention state;
    const int queries = a.tokens * a.heads, count = (queries + 15) / 16;
    for (int tile = 0; tile < count; ++tile) pack_queries(a, tile, state);
    for (int q = 0; q < count * 16; ++q) {
        state.largest[q] = kNothingSeen;
        state.total[q] = 0.0f;
        for (int d = 0; d < a.head_dim; ++d) state.sums[q][d] = 0.0f;
    }
    const int64_t seen = a.window && a.position >= a.window ? a.position - a.window + 1 : 0;
    const int64_t end = a.position + a.tokens < a.key_end ? a.position + a.tokens : a.key_end;
    for (int64_t key = seen / kStepKeys * kStepKeys; key < end; key += kStepKeys) {
        const Keys keys = list_keys(a, key, key + kStepKeys < end ? key + kStepKeys : end);
        pack_values(a, keys, state);
        if (keys.count < kStepKeys || a.cache.block_size % 16) copy_keys(a, keys, state);
        for (int tile = 0; tile < count; ++tile) {
            score_tiles(a, keys, tile, state);
            const Vec shrink = weigh_tile(a, keys, tile, state);
            pack_weights(state);
            add_tile_values(a, tile, shrink, state);
        }
    }
    for (int q = 0; q < queries; ++q) {
        float* out = a.out + q / a.heads * a.out_stride + q % a.heads * a.head_dim;
        const float sink = a.sinks ? __builtin_expf(a.sinks[q % a.heads] - state.largest[q]) : 0.0f;
        const Vec share = splat(1.0f / (state.total[q] + sink));
        for (int d = 0; d < a.head_dim; d += 16) store(out + d, load(state.sums[q] + d) * share);
    }
}
