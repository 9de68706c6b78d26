// Attention over a cache of int8 where no instruction multiplies bytes: a chunk of codes is widened to floats, and the
// scales go into the scores and into the weights. Included once per level, inside an unnamed namespace, behind attention.hpp.

// Codes of all keys (or values) of a chunk as floats [key][head_dim]; the others of the chunk are fetched meanwhile.
inline void widen_chunk(const Attend& a, const Keys& keys, const void* codes, const Keys& ahead, const void* others,
                        float* wide, float* scales) {
    const int64_t d = a.head_dim, bytes = cache_width(DType::int8, d);
    for (int key = 0; key < keys.count; ++key) {
        const int8_t* row = static_cast<const int8_t*>(codes) + keys.at[key];
        if (key < ahead.count) fetch(static_cast<const int8_t*>(others) + ahead.at[key], bytes);
        for (int64_t i = 0; i < d; ++i) wide[key * d + i] = static_cast<float>(row[i]);
        std::memcpy(scales + key, row + d, sizeof(float));
    }
}

inline void scale_keys(const Attend& a, const Keys& keys, const float* scales, float* rows) {
    for (int q = 0; q < a.tokens * a.heads; ++q, rows += kKeyChunk)
        for (int key = 0; key < keys.count; ++key) rows[key] *= scales[key];
}

inline void attend_widened(const Attend& a, const Keys& keys, const Keys& next, float* wide, const Running& run) {
    float shrink[kMaxQueries], scales[kKeyChunk];
    Attend widened = a;
    widened.cache.keys = widened.cache.values = wide;
    Keys rows{keys.count, keys.first, {}};
    for (int key = 0; key < keys.count; ++key) rows.at[key] = key * a.head_dim;
    widen_chunk(a, keys, a.cache.keys, keys, a.cache.values, wide, scales);
    score_chunk<float>(widened, rows, false, run.scores);
    scale_keys(a, keys, scales, run.scores);
    weigh_chunk(a, keys, run, shrink);
    widen_chunk(a, keys, a.cache.values, next, a.cache.keys, wide, scales);
    scale_keys(a, keys, scales, run.scores);
    add_chunk<float>(widened, rows, nullptr, run.scores, shrink, run.sums);
}

#if !defined(__ARM_FEATURE_DOTPROD)  // else in attention_bytes.hpp
inline void attend_codes(const Attend& a, const Keys& keys, const Keys& next, float* wide, const Running& run) {
    attend_widened(a, keys, next, wide, run);
}
#endif
