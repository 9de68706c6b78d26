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
    float scales[kKeyChunk];
    const auto widen = [&](const void* codes) {
        const bool are_keys = codes == a.cache.keys;  // then their values come next, else the next keys
        widen_chunk(a, keys, codes, are_keys ? keys : next, are_keys ? a.cache.values : a.cache.keys, wide, scales);
    };
    attend_floats(a, keys, wide, run, widen, [&] { scale_keys(a, keys, scales, run.scores); });
}

#if !defined(__ARM_FEATURE_DOTPROD)  // else in attention_bytes.hpp
inline void attend_codes(const Attend& a, const Keys& keys, const Keys& next, float* wide, const Running& run) {
    attend_widened(a, keys, next, wide, run);
}
#endif
