// Products of int8 cells with digits of activations, by instructions that multiply bytes and add four of them in 32 bits.
// Included once per level, inside an unnamed namespace, behind cells.hpp and the level's codes header.

// Of codes: a byte each, or one half of it, a whole number or a float; or as they are multiplied
enum class Form { bytes, lower, upper, lower_floats, upper_floats, ready };

template <Form kForm>
[[gnu::always_inline]] inline Codes load_signed(const int8_t* at) {
    if constexpr (kForm == Form::lower) return load_lower(at);
    if constexpr (kForm == Form::upper) return load_upper(at);
    if constexpr (kForm == Form::lower_floats) return load_lower_floats(at);
    if constexpr (kForm == Form::upper_floats) return load_upper_floats(at);
    return load_codes(at);
}

// As they are multiplied: on some levels with 128 added
template <Form kForm>
[[gnu::always_inline]] inline Codes load_form(const int8_t* at) {
    const Codes codes = load_signed<kForm>(at);
    return kBiased && kForm != Form::ready ? add_bias(codes) : codes;
}

// GCC would put products of one sum side by side, where each waits for the one before.
template <int V, int T>
[[gnu::always_inline]] inline void keep_apart([[maybe_unused]] Ints (*sums)[T]) {
#if defined(__aarch64__)
    if constexpr (V * T == 8) {
        Ints* s = &sums[0][0];
        asm("" : "+w"(s[0]), "+w"(s[1]), "+w"(s[2]), "+w"(s[3]), "+w"(s[4]), "+w"(s[5]), "+w"(s[6]), "+w"(s[7]));
    }
#endif
}

template <int kQuad, int V, int T, Form kForm>
[[gnu::always_inline]] inline void dot_cell(const int8_t* cell, const Digits* x, Ints (*sums)[T]) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
        const Codes w = load_form<kForm>(cell + v * kCodes);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = dot<kQuad>(sums[v][t], w, x[t]);
    }
    keep_apart<V, T>(sums);
}

// A cell by four columns of eight tokens, whose digits lie side by side
template <int V, Form kForm>
[[gnu::always_inline]] inline void dot_packed(const int8_t* cell, const int8_t* digits, Ints (*sums)[kPackedTokens]) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) dot_eight(sums[v], load_form<kForm>(cell + v * kCodes), digits);
}

// Sixteen columns, whose cells are the four from `cells` on
template <int V, int T, Form kForm>
[[gnu::always_inline]] inline void dot_cells(const int8_t* cells, const TokenDigits<T>& x, int64_t column, Ints (*sums)[T]) {
    Digits digits[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) digits[t] = load_digits(x.low[t] + column);
    dot_cell<0, V, T, kForm>(cells, digits, sums);
    dot_cell<1, V, T, kForm>(cells + kCellBytes, digits, sums);
    dot_cell<2, V, T, kForm>(cells + 2 * kCellBytes, digits, sums);
    dot_cell<3, V, T, kForm>(cells + 3 * kCellBytes, digits, sums);
}

template <int V, int T, Form kForm>
[[gnu::always_inline]] inline void dot_cells(const int8_t* cells, const PackedDigits&, const int8_t* low, Ints (*sums)[T]) {
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad)
        dot_packed<V, kForm>(cells + quad * kCellBytes, low + quad * kPackedTokens * kMarkColumns, sums);
}

// Four columns that somebody's marks name; `at`(token): its high digits
template <int V, int T, Form kForm, class At>
[[gnu::always_inline]] inline void dot_high(const int8_t* cell, At&& at, Ints (*sums)[T]) {
    Digits digits[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) digits[t] = load_digits(at(t));  // the last ones are followed by marks
    dot_cell<0, V, T, kForm>(cell, digits, sums);
}

// The same of a whole tile of tokens, side by side
template <int V, int T, Form kForm>
[[gnu::always_inline]] inline void dot_high(const int8_t* cell, const int8_t* digits, Ints (*sums)[T]) {
    dot_packed<V, kForm>(cell, digits, sums);
}

template <int V, int T>
[[gnu::always_inline]] inline void clear_sums(Ints (*sums)[T]) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = no_sum();
}

// What a level that adds something to the codes has too much
template <int V, int T>
[[gnu::always_inline]] inline void take_off(Ints (*sums)[T], const int32_t* surplus) {
    if constexpr (kBiased)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[v][t] = subtract(sums[v][t], spread(surplus[t]));
}

// sums[v][t] = rows of vector v · low digits of token t. Inlined without fail: the sums must stay in registers.
template <int V, int T>
[[gnu::always_inline]] inline void dot_low(const int8_t* weight, const TokenDigits<T>& x, Ints (*sums)[T]) {
    if constexpr (kMatrixPairs && T % 2 == 0) return dot_pairs<V, T>(weight, x.low, x.shape.stride, sums);
    int32_t surplus[T] = {};
    clear_sums<V, T>(sums);
    for (int64_t k = 0; k < x.shape.stride; k += 16) {
        const int8_t* cells = weight + k / 4 * kCellBytes;
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) __builtin_prefetch(cells + kAheadBytes + line * kCellBytes);
        dot_cells<V, T, Form::bytes>(cells, x, k, sums);
    }
    if constexpr (kBiased)
        for (int t = 0; t < T; ++t) surplus[t] = x.shape.low_surplus_of_all(x.rows[t]);
    take_off<V, T>(sums, surplus);
}

// 128 times the high digits, where there are any: behind the low ones, so that the weights are read as one stream
template <int V, int T>
[[gnu::always_inline]] inline void add_high(const int8_t* weight, const TokenDigits<T>& x, Ints (*sums)[T]) {
    Ints high[V][T];
    int32_t surplus[T] = {};
    clear_sums<V, T>(high);
    for (int64_t word = 0; word < x.shape.words; ++word)
        for (uint64_t marks = x.marks(word); marks; marks &= marks - 1) {
            const int64_t cell = word * 64 + __builtin_ctzll(marks);
            dot_high<V, T, Form::bytes>(weight + cell * kCellBytes, x.high_at(cell * kMarkColumns), high);
        }
    if constexpr (kBiased)
        for (int t = 0; t < T; ++t) surplus[t] = x.shape.high_surplus_of_all(x.rows[t]);
    take_off<V, T>(high, surplus);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = add(sums[v][t], times_128(high[v][t]));
}

// Rows [row, row + V·kWidth), whose first cell is at `weight`, by the tokens of `x`
template <int V, int T>
inline void byte_tile(const Product& p, const int8_t* weight, int64_t row, int64_t token, const TokenDigits<T>& x,
                      bool marked) {
    Ints sums[V][T];
    dot_low<V, T>(weight, x, sums);
    constexpr int H = vecs_for(T, kByteSums / 2) < V ? vecs_for(T, kByteSums / 2) : V;  // registers for as many more
    if (marked)
#pragma GCC unroll 4
        for (int v = 0; v < V; v += H) add_high<H, T>(weight + v * kCodes, x, sums + v);
    const float* scales = static_cast<const float*>(p.weight->scales) + row;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
            write_rows(p, row + v * kWidth, token + t, to_floats(sums[v][t]),
                       load(scales + v * kWidth) * splat(x.scales[t]));
}

struct ByteTile {  // sixteen rows
    static constexpr int kTokens = kByteTokens;

    const Product& p;
    const DigitRow& row;
    int64_t block;

    template <int T>
    void compute(int64_t token) const {
        constexpr int V = vecs_for(T, kByteSums);
        const TokenDigits<T> x(row, static_cast<const char*>(p.x) + token * row.bytes);
        const bool marked = x.marked();
        const int8_t* weight = static_cast<const int8_t*>(p.weight->data) + block * kCellRows * x.shape.stride;
        for (int v = 0; v < kBlockVecs; v += V)
            byte_tile<V, T>(p, weight + v * kCodes, block * kCellRows + v * kWidth, token, x, marked);
    }
};

[[maybe_unused]] void multiply_int8(const Product& p) {
    const DigitRow row(p.weight->columns);
    walk_cells(p, kCellRows * row.stride, [&](int64_t block) { return ByteTile{p, row, block}; });
}
