// Products of int8 rows with digits of activations, by instructions that multiply bytes and add in 32 bits. Included once
// per level, inside an unnamed namespace, behind digits.hpp and the level's codes header.

// sums[r][t] += weight row r · digits of token t over columns [begin, end)
// Inlined without fail: the sums must stay in registers.
template <int R, int T, bool kAhead>
[[gnu::always_inline]] inline void dot_span(const int8_t* weight, int64_t columns, const int8_t* const* x,
                                            int64_t begin, int64_t end, Ints (*sums)[T]) {
    Ints surplus[R];  // of a level that adds something to the digits
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) surplus[r] = no_sum();
    for (int64_t k = begin; k < end; k += kCodes) {
        if (kAhead)
#pragma GCC unroll 16
            for (int line = 0; line < R * kCodes; line += 64)
                __builtin_prefetch(weight + R * (columns + k) + line);
        Codes w[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) w[r] = load_codes(weight + r * columns + k, columns - k);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            const Digits v = load_digits(x[t] + k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r][t] = dot(sums[r][t], w[r], v);
        }
        if constexpr (kBiased)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) surplus[r] = add_bias(surplus[r], w[r]);
    }
    if constexpr (kBiased)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[r][t] = subtract(sums[r][t], surplus[r]);
}

template <int R, int T, bool kAhead>
inline void digit_block(const Product& p, int64_t row, int64_t token) {
    const int64_t columns = p.weight->columns;
    const DigitRow digits(columns);
    const int8_t* weight = static_cast<const int8_t*>(p.weight->data) + row * columns;
    const char* x[T];
    const int8_t *low[T], *high[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
        x[t] = static_cast<const char*>(p.x) + (token + t) * digits.bytes;
        low[t] = digits.low(x[t]), high[t] = digits.high(x[t]);
    }
    Ints sums[R][T];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[r][t] = no_sum();
    bool marked = false;
    for (int64_t word = 0; word < digits.words; ++word) {
        uint64_t marks = 0;
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) marks |= digits.marks(x[t])[word];
        for (; marks; marks &= marks - 1, marked = true) {
            const int64_t begin = (word * 64 + __builtin_ctzll(marks)) * kDigitBlock;
            const int64_t end = begin + kDigitBlock < columns ? begin + kDigitBlock : columns;
            dot_span<R, T, false>(weight, columns, high, begin, end, sums);
        }
    }
    if (marked)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[r][t] = times_128(sums[r][t]);
    dot_span<R, T, kAhead>(weight, columns, low, 0, columns, sums);
    const float* scales = static_cast<const float*>(p.weight->scales) + row;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
        int32_t totals[R];
        add_up<R>(&sums[0][t], T, totals);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            write_digits(p, row + r, token + t, static_cast<float>(totals[r]), scales[r] * digits.scale(x[t]));
    }
}

struct ByteBlocks {
    static constexpr int kSingleRows = 8;  // with one token: enough loads under way to keep the memory busy
    template <int R, int T, bool kAhead>
    static void compute(const Product& p, int64_t row, int64_t token) {
        digit_block<R, T, kAhead>(p, row, token);
    }
};

[[maybe_unused]] void multiply_int8(const Product& p) { walk_blocks<ByteBlocks>(p, p.weight->columns); }
