// Products of weight rows with activation rows, both contiguous along the summed dimension, so neither is packed. Included
// once per level, inside an unnamed namespace, behind its simd header.
//
// Each output has one vector of partial sums that runs over the columns in order, whatever the size of the tile that it is
// computed in.

constexpr int kWidenTokens = 4 * kTileTokens;  // from here on bf16 rows are widened once, before the product

// kAhead: the rows that follow these in memory are fetched line by line while these are read.
template <int R, int T, bool kAhead, class W>
inline void dot_tile(const W* const* rows, const float* const* x, int64_t columns, float (*out)[T]) {
    Vec sums[R][T];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[r][t] = splat(0.0f);
    int64_t k = 0;
    for (; k + kWidth <= columns; k += kWidth) {
        if (kAhead)
#pragma GCC unroll 16
            for (int64_t line = 0; line < R * kWidth * static_cast<int64_t>(sizeof(W)); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(rows[0] + R * (columns + k)) + line);
        Vec w[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) w[r] = load(rows[r] + k);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            const Vec v = load(x[t] + k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r][t] = fma(w[r], v, sums[r][t]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            float total = sum(sums[r][t]);
            for (int64_t j = k; j < columns; ++j) total += widen(rows[r][j]) * x[t][j];
            out[r][t] = total;
        }
}

inline void write_sum(const Product& p, int64_t row, int64_t token, float value) {
    float* at = p.out + (token - p.token_begin) * p.out_stride + (row - p.row_begin);
    if (p.bias) value += p.bias[row - p.row_begin];
    *at = p.add ? *at + value : value;
}

template <int R, int T, bool kAhead, class W>
inline void dot_block(const Product& p, const W* const* rows, int64_t row, int64_t token) {
    const int64_t columns = p.weight->columns;
    const float* x[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) x[t] = static_cast<const float*>(p.x) + (token + t) * columns;
    float out[R][T];
    dot_tile<R, T, kAhead>(rows, x, columns, out);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) write_sum(p, row + r, token + t, out[r][t]);
}

template <int R, bool kAhead, class W>
inline void dot_rest(const Product& p, const W* const* rows, int64_t row, int64_t token) {
    switch (p.token_end - token) {
        case 5: return dot_block<R, 5, kAhead>(p, rows, row, token);
        case 4: return dot_block<R, 4, kAhead>(p, rows, row, token);
        case 3: return dot_block<R, 3, kAhead>(p, rows, row, token);
        case 2: return dot_block<R, 2, kAhead>(p, rows, row, token);
        case 1: return dot_block<R, 1, kAhead>(p, rows, row, token);
        default: return;
    }
}

template <int R, class W>
inline void dot_rows(const Product& p, const W* const* rows, int64_t row) {
    int64_t token = p.token_begin;
    if (p.token_end - token < kTileTokens) return dot_rest<R, true>(p, rows, row, token);
    if (p.token_end - token < kWidenTokens) {  // few enough that reading the weights is what takes the time
        dot_block<R, kTileTokens, true>(p, rows, row, token);
        token += kTileTokens;
    }
    for (; token + kTileTokens <= p.token_end; token += kTileTokens)
        dot_block<R, kTileTokens, false>(p, rows, row, token);
    dot_rest<R, false>(p, rows, row, token);
}

template <class W>
inline void multiply_as(const Product& p) {
    const int64_t columns = p.weight->columns;
    const W* weight = static_cast<const W*>(p.weight->data);
    const bool widens = sizeof(W) < sizeof(float) && p.token_end - p.token_begin >= kWidenTokens;
    int64_t row = p.row_begin;
    if (p.token_end - p.token_begin == 1)  // enough chains of additions to keep the units busy
        for (; row + 8 <= p.row_end; row += 8) {
            const W* rows[8];
#pragma GCC unroll 16
            for (int r = 0; r < 8; ++r) rows[r] = weight + (row + r) * columns;
            dot_block<8, 1, true>(p, rows, row, p.token_begin);
        }
    for (; row + 4 <= p.row_end; row += 4) {
        const W* rows[4];
#pragma GCC unroll 16
        for (int r = 0; r < 4; ++r) rows[r] = weight + (row + r) * columns;
        if (widens) {
            const float* wide[4];
#pragma GCC unroll 16
            for (int r = 0; r < 4; ++r) {
                load_row_as(rows[r], columns, 1.0f, false, p.scratch + r * columns);
                wide[r] = p.scratch + r * columns;
            }
            dot_rows<4>(p, wide, row);
        } else {
            dot_rows<4>(p, rows, row);
        }
    }
    for (; row < p.row_end; ++row) {
        const W* rows[1] = {weight + row * columns};
        dot_rows<1>(p, rows, row);
    }
}

void multiply_wide(const Product& p) {
    if (p.weight->type == DType::f32) return multiply_as<float>(p);
    multiply_as<bf16>(p);
}
