// Products of int8 cells with digits of activations, by instructions that multiply bytes and add four of them in 32 bits.
// Included once per level, inside an unnamed namespace, behind cells.hpp and the level's codes header.


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

// All low digits, and 128 times the high ones of marked blocks, in one pass: the weights stay one stream.
template <int V, int T>
[[gnu::always_inline]] inline void dot_marked(const int8_t* weight, const TokenDigits<T>& x, Ints (*sums)[T]) {
    Ints high[V][T];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) high[v][t] = no_sum();
    for (int64_t begin = 0; begin < x.shape.stride;) {
        const int64_t block = begin / kDigitBlock;
        const uint64_t marks = x.marks(block / 64) >> (block % 64);
        const int64_t next = marks ? block + __builtin_ctzll(marks) : (block / 64 + 1) * 64;  // marked, or not looked at
        const int64_t last = next * kDigitBlock < x.shape.stride ? next * kDigitBlock : x.shape.stride;
        const int64_t end = marks ? last + kDigitBlock : last;
        dot_span<V, T>(weight, x.low, begin, end, sums);
        if (marks) dot_span<V, T>(weight, x.high, last, end, high);
        begin = end;
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = add(sums[v][t], times_128(high[v][t]));
}

// Rows [row, row + V·kWidth), whose first cell is at `weight`, by the tokens of `x`
template <int V, int T, bool kMarked>
inline void byte_tile(const Product& p, const int8_t* weight, int64_t row, int64_t token, const TokenDigits<T>& x) {
    Ints sums[V][T];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = no_sum();
    if constexpr (kMarked)
        dot_marked<V, T>(weight, x, sums);
    else
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
        const TokenDigits<T> x(p, token);
        uint64_t marks = 0;
        for (int64_t word = 0; word < x.shape.words; ++word) marks |= x.marks(word);
        if (marks)
            compute_block<vecs_for(T, kByteSums / 2), T, true>(p, block, token, x);  // as many sums of high digits
        else
            compute_block<vecs_for(T, kByteSums), T, false>(p, block, token, x);
    }

    template <int V, int T, bool kMarked>
    static void compute_block(const Product& p, int64_t block, int64_t token, const TokenDigits<T>& x) {
        const int8_t* weight = static_cast<const int8_t*>(p.weight->data) + block * kCellRows * x.shape.stride;
        for (int v = 0; v < kBlockVecs; v += V)
            byte_tile<V, T, kMarked>(p, weight + v * kCodes, block * kCellRows + v * kWidth, token, x);
    }
};

[[maybe_unused]] void multiply_int8(const Product& p) {
    walk_cells<ByteTiles>(p, kCellRows * byte_columns(p.weight->columns));
}
