// Products of int8 cells with digits of activations, by instructions that multiply bytes and add four of them in 32 bits.
// Included once per level, inside an unnamed namespace, behind cells.hpp and the level's codes header.

inline int64_t byte_columns(int64_t columns) { return (columns + kDigitBlock - 1) / kDigitBlock * kDigitBlock; }

template <int kQuad, int V, int T>
[[gnu::always_inline]] inline void dot_cell(const int8_t* cell, const Digits* x, Ints (*sums)[T], Ints* surplus) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
        const Codes w = load_codes(cell + v * kCodes);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = dot<kQuad>(sums[v][t], w, x[t]);
        if constexpr (kBiased) surplus[v] = add_bias(surplus[v], w);
    }
}

// sums[v][t] += rows of vector v · digits of token t over columns [begin, end), whole blocks.
// Inlined without fail: the sums must stay in registers.
template <int V, int T>
[[gnu::always_inline]] inline void dot_span(const int8_t* weight, const int8_t* const* x, int64_t begin, int64_t end,
                                            Ints (*sums)[T]) {
    Ints surplus[V];  // of a level that adds something to the digits
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) surplus[v] = no_sum();
    for (int64_t k = begin; k < end; k += 16) {
        const int8_t* cells = weight + k / 4 * kCellBytes;
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) __builtin_prefetch(cells + kAheadBytes + line * kCellBytes);
        Digits digits[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) digits[t] = load_digits(x[t] + k);
        dot_cell<0, V, T>(cells, digits, sums, surplus);
        dot_cell<1, V, T>(cells + kCellBytes, digits, sums, surplus);
        dot_cell<2, V, T>(cells + 2 * kCellBytes, digits, sums, surplus);
        dot_cell<3, V, T>(cells + 3 * kCellBytes, digits, sums, surplus);
    }
    if constexpr (kBiased)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[v][t] = subtract(sums[v][t], surplus[v]);
}

// Rows [row, row + V·kWidth), whose first cell is at `weight`, by the tokens of `x`
template <int V, int T>
inline void byte_tile(const Product& p, const int8_t* weight, int64_t row, int64_t token, const TokenDigits<T>& x) {
    Ints sums[V][T];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = no_sum();
    bool marked = false;
    for (int64_t word = 0; word < x.shape.words; ++word)
        for (uint64_t marks = x.marks(word); marks; marks &= marks - 1, marked = true) {
            const int64_t begin = (word * 64 + __builtin_ctzll(marks)) * kDigitBlock;
            dot_span<V, T>(weight, x.high, begin, begin + kDigitBlock, sums);
        }
    if (marked)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[v][t] = times_128(sums[v][t]);
    dot_span<V, T>(weight, x.low, 0, x.shape.stride, sums);
    const float* scales = static_cast<const float*>(p.weight->scales) + row;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
            write_rows(p, row + v * kWidth, token + t, to_floats(sums[v][t]),
                       load(scales + v * kWidth) * splat(x.shape.scale(x.rows[t])));
}

struct ByteTiles {
    static constexpr int kTokens = kByteTokens;

    template <int T>
    static void compute(const Product& p, int64_t block, int64_t token) {
        constexpr int V = vecs_for(T, kByteSums);
        const TokenDigits<T> x(p, token);
        const int8_t* weight = static_cast<const int8_t*>(p.weight->data) + block * kCellRows * x.shape.stride;
        for (int v = 0; v < kBlockVecs; v += V)
            byte_tile<V, T>(p, weight + v * kCodes, block * kCellRows + v * kWidth, token, x);
    }
};

[[maybe_unused]] void multiply_int8(const Product& p) {
    walk_cells<ByteTiles>(p, kCellRows * byte_columns(p.weight->columns));
}
