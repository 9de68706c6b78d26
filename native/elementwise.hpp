// Norms, activations, rotation, conversions. Included once per level, inside an unnamed namespace, behind its simd header.

// Of numbers up to 88. Within 2 units in the last place; 0 below the smallest normal result, NaN stays NaN.
inline Vec exponential_below(Vec x) {
    const Vec low = splat(-87.0f), bounded = at_least(x, low);
    const Vec n = round_even(bounded * splat(1.44269504f));
    Vec r = fma(n, splat(-0.693359375f), bounded);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    const Vec result = fma(p, r * r, r + splat(1.0f)) * power_of_two(n);
    return where_less(x, low, splat(0.0f), result);
}

// Of any; what is infinite stays so.
inline Vec exponential(Vec x) { return where_less(x, splat(1e38f), exponential_below(at_most(x, splat(88.0f))), x); }

inline Vec hyperbolic_tangent(Vec x) {
    return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f));
}

// f over `count` floats, the last incomplete vector through a padded copy.
template <class F>
inline void map(const float* x, int64_t count, float* out, F&& f) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(out + i, f(load(x + i), i));
    if (i < count) {
        float rest[kWidth] = {};
        for (int64_t j = i; j < count; ++j) rest[j - i] = x[j];
        store(rest, f(load(rest), i));
        for (int64_t j = i; j < count; ++j) out[j] = rest[j - i];
    }
}

#if !defined(__AVX512F__)  // which loads under a mask
// A vector of numbers of which the first `given` exist, zeros behind them
template <class T>
inline Vec load_some(const T* at, int64_t given) {
    if (given >= kWidth) return load(at);
    T rest[kWidth] = {};
    for (int64_t j = 0; j < given; ++j) rest[j] = at[j];
    return load(rest);
}
#endif

void rms_norm(const float* x, const float* weight, float eps, int64_t count, float* out) {
    Vec squares = splat(0.0f);
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        const Vec v = load(x + i);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; i < count; ++i) total += x[i] * x[i];
    const Vec factor = splat(1.0f / __builtin_sqrtf(total / static_cast<float>(count) + eps));
    map(x, count, out, [&](Vec v, int64_t at) { return v * factor * load_some(weight + at, count - at); });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t count, float* out) {
    float total = 0.0f, squares = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += x[i];
    const float mean = total / static_cast<float>(count);
    for (int64_t i = 0; i < count; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / __builtin_sqrtf(squares / static_cast<float>(count) + eps);
    for (int64_t i = 0; i < count; ++i) out[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

inline Vec silu(Vec x) { return x / (splat(1.0f) + exponential(splat(0.0f) - x)); }

inline Vec gelu_tanh(Vec x) {
    const Vec inner = splat(0.7978845608f) * fma(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
}

inline Vec gelu(Vec x) {
    float each[kWidth];
    store(each, x);
    for (float& value : each) value = 0.5f * value * (1.0f + __builtin_erff(value * 0.70710678f));
    return load(each);
}

inline Vec relu(Vec x) { return where_less(x, splat(0.0f), splat(0.0f), x); }

void activate(Activation activation, const float* x, int64_t count, float* out) {
    switch (activation) {
        case Activation::silu: return map(x, count, out, [](Vec v, int64_t) { return silu(v); });
        case Activation::gelu: return map(x, count, out, [](Vec v, int64_t) { return gelu(v); });
        case Activation::gelu_tanh: return map(x, count, out, [](Vec v, int64_t) { return gelu_tanh(v); });
        case Activation::relu: return map(x, count, out, [](Vec v, int64_t) { return relu(v); });
    }
}

void gate(Activation activation, const float* gate, const float* up, int64_t count, float* out) {
    activate(activation, gate, count, out);
    map(out, count, out, [&](Vec v, int64_t at) { return v * load_some(up + at, count - at); });
}

// The two halves of a head are the pairs.
void rotate(float* head, const float* cosines, const float* sines, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    int64_t i = 0;
    for (; i + kWidth <= half; i += kWidth) {
        const Vec a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

template <class T>
inline void load_row_as(const T* row, int64_t count, float scale, bool add, float* out) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        const Vec value = load(row + i) * splat(scale);
        store(out + i, add ? load(out + i) + value : value);
    }
    for (; i < count; ++i) out[i] = (add ? out[i] : 0.0f) + widen(row[i]) * scale;
}

void load_row(const void* row, DType type, int64_t count, float scale, bool add, float* out) {
    switch (type) {
        case DType::f32: return load_row_as(static_cast<const float*>(row), count, scale, add, out);
        case DType::f16: return load_row_as(static_cast<const f16*>(row), count, scale, add, out);
        default: return load_row_as(static_cast<const bf16*>(row), count, scale, add, out);
    }
}

// kVectors of one token's outputs, kept in registers over all ranks
template <int kVectors, class T>
inline void add_ranks_to(const Ranks& r, const T* rows, const float* x, float* out) {
    Vec sums[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] = load(out + v * kWidth);
    for (int64_t rank = 0; rank < r.rank; ++rank, rows += r.row_stride) {
        const Vec factor = splat(x[rank]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] = fma(load(rows + v * kWidth), factor, sums[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + v * kWidth, sums[v]);
}

template <class T>
inline void add_ranks_as(const Ranks& r) {
    constexpr int kVectors = 8;
    const T* rows = static_cast<const T*>(r.rows);
    for (int64_t t = 0; t < r.tokens; ++t) {
        const float* x = r.x + t * r.x_stride;
        float* out = r.out + t * r.out_stride;
        int64_t i = 0;
        for (; i + kVectors * kWidth <= r.count; i += kVectors * kWidth) add_ranks_to<kVectors>(r, rows + i, x, out + i);
        for (; i + kWidth <= r.count; i += kWidth) add_ranks_to<1>(r, rows + i, x, out + i);
        for (; i < r.count; ++i)
            for (int64_t rank = 0; rank < r.rank; ++rank)
                out[i] = __builtin_fmaf(widen(rows[rank * r.row_stride + i]), x[rank], out[i]);
    }
}

void add_ranks(const Ranks& r) {
    switch (r.type) {
        case DType::f32: return add_ranks_as<float>(r);
        case DType::f16: return add_ranks_as<f16>(r);
        default: return add_ranks_as<bf16>(r);
    }
}

// Not a number if any of them is not finite
inline float largest_magnitude(const float* x, int64_t count) {
    Vec most = splat(0.0f), poison = splat(0.0f);
    for (int64_t i = 0; i < count; i += kWidth) {
        const Vec v = load_some(x + i, count - i);
        most = larger(magnitude(v), most);
        poison = poison + (v - v);
    }
    const float bad = sum(poison);
    return bad == 0.0f ? largest(most) : bad;
}

void store_codes(const float* x, int64_t count, int8_t* codes) {
    const float scale = largest_magnitude(x, count) / 127.0f;
    std::memcpy(codes + count, &scale, sizeof scale);
    if (!(scale > 1e-30f)) return void(std::memset(codes, 0, count));
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<int8_t>(__builtin_rintf(x[i] * inverse));
}

template <class T>
inline void store_row_as(const float* x, int64_t count, T* row) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(row + i, load(x + i));
    for (; i < count; ++i) row[i] = narrow<T>(x[i]);
}

void store_row(const float* x, int64_t count, DType type, void* row) {
    switch (type) {
        case DType::f32: return store_row_as(x, count, static_cast<float*>(row));
        case DType::f16: return store_row_as(x, count, static_cast<f16*>(row));
        case DType::bf16: return store_row_as(x, count, static_cast<bf16*>(row));
        default: return store_codes(x, count, static_cast<int8_t*>(row));
    }
}

int64_t argmax(const float* x, int64_t count) {
    Vec best = splat(-__builtin_inff()), poison = splat(0.0f);
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
        const Vec v = load(x + i);
        best = larger(v, best);
        poison = poison + (v - v) * splat(0.0f);  // NaN from NaN, and from infinities: sorted out below
    }
    float value = largest(best);
    bool suspect = !(sum(poison) == 0.0f);
    for (; i < count; ++i) {
        if (x[i] > value) value = x[i];
        if (x[i] != x[i]) return -1;
    }
    if (suspect)
        for (int64_t j = 0; j < count; ++j)
            if (x[j] != x[j]) return -1;
    for (int64_t j = 0; j < count; ++j)
        if (x[j] == value) return j;
    return 0;
}
