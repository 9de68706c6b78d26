// Products of int8 rows with digits of activations, by instructions that multiply bytes and add in 32 bits. Included once
// per level, inside an unnamed namespace, behind digits.hpp and the level's codes header.

constexpr int64_t kRowsBytes = 32 * 1024;  // weight rows that stay in the L1 while tokens go by

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

template <int R, bool kAhead>
inline void digit_tokens(const Product& p, int64_t row, int64_t token, int64_t count) {
    switch (count) {
        case 4:
            if constexpr (kDigitTokens >= 4) return digit_block<R, 4, kAhead>(p, row, token);
            return;
        case 3:
            if constexpr (kDigitTokens >= 3) return digit_block<R, 3, kAhead>(p, row, token);
            return;
        case 2: return digit_block<R, 2, kAhead>(p, row, token);
        case 1: return digit_block<R, 1, kAhead>(p, row, token);
        default: return;
    }
}

template <bool kAhead>
inline void digit_rows(const Product& p, int64_t row, int64_t row_end, int64_t token, int64_t count) {
    if (count == 1)  // enough loads under way to keep the memory busy
        for (; row + 8 <= row_end; row += 8) digit_block<8, 1, kAhead>(p, row, token);
    for (; row + 4 <= row_end; row += 4) digit_tokens<4, kAhead>(p, row, token, count);
    for (; row < row_end; ++row) digit_tokens<1, kAhead>(p, row, token, count);
}

[[maybe_unused]] void multiply_int8(const Product& p) {
    const int64_t most = kRowsBytes / p.weight->columns / 8 * 8, step = most < 8 ? 8 : most;
    for (int64_t row = p.row_begin; row < p.row_end; row += step) {
        const int64_t row_end = row + step < p.row_end ? row + step : p.row_end;
        for (int64_t token = p.token_begin; token < p.token_end; token += kDigitTokens) {
            const int64_t count = p.token_end - token < kDigitTokens ? p.token_end - token : kDigitTokens;
            if (token == p.token_begin)
                digit_rows<true>(p, row, row_end, token, count);
            else
                digit_rows<false>(p, row, row_end, token, count);
        }
    }
}
