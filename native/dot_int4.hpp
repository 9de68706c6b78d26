// Products of int4 cells with digits of activations. Included once per level, inside an unnamed namespace, behind
// dot_int8.hpp.
//
// A group of 32 columns has a scale of its own per row: its integer sums become floats, are scaled and added up, group
// after group: one order, whatever the tile and the level. Codes are unpacked in registers to 16 times their value, which
// fits into a byte and saves moving the upper half down; the scale of the token takes the 16 off again.

constexpr int64_t kGroup = 32, kGroupCells = kGroup / 8, kBlockGroups = kDigitBlock / kGroup;

struct GroupCodes {  // 32 columns of a vector of rows, by fours
    Codes quads[8];
};

[[gnu::always_inline]] inline GroupCodes load_group(const uint8_t* cells) {
    GroupCodes w;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) split_codes(cells + i * kCellBytes, w.quads[i], w.quads[4 + i]);
    return w;
}

// What a level that adds something to the digits must take off the sums of a group
[[gnu::always_inline]] inline Ints group_start(const GroupCodes& w) {
    Ints surplus = no_sum();
    if constexpr (kBiased)
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) surplus = add_bias(surplus, w.quads[i]);
    return subtract(no_sum(), surplus);
}

[[gnu::always_inline]] inline Ints dot_group(Ints sums, const GroupCodes& w, const int8_t* x) {
    const Digits first = load_digits(x), second = load_digits(x + 16);
    sums = dot<0>(sums, w.quads[0], first);
    sums = dot<1>(sums, w.quads[1], first);
    sums = dot<2>(sums, w.quads[2], first);
    sums = dot<3>(sums, w.quads[3], first);
    sums = dot<0>(sums, w.quads[4], second);
    sums = dot<1>(sums, w.quads[5], second);
    sums = dot<2>(sums, w.quads[6], second);
    return dot<3>(sums, w.quads[7], second);
}

// Without high digits a sum is below 2^22: begun at the bits of 1.5·2^23 it is a float that needs no conversion.
[[gnu::always_inline]] inline Vec dot_low(Ints start, const GroupCodes& w, const int8_t* x) {
    if constexpr (kBiased) return to_floats(dot_group(start, w, x));
    const Vec base = splat(12582912.0f);
    return as_floats(dot_group(as_ints(base), w, x)) - base;
}

// One group; `marked` ones have high digits. Inlined without fail: the sums must stay in registers.
template <int V, int T, bool kMarked>
[[gnu::always_inline]] inline void add_group(const uint8_t* cells, const uint16_t* scales, int64_t column,
                                             const TokenDigits<T>& x, Vec (*sums)[T]) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        const GroupCodes w = load_group(cells + v * kCodes);
        const Vec scale = load_halves(scales + v * kWidth);
        const Ints start = group_start(w);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            Vec total;
            if constexpr (kMarked) {
                const Ints high_sum = times_128(dot_group(start, w, x.high[t] + column));
                total = to_floats(dot_group(add(high_sum, start), w, x.low[t] + column));
            } else {
                total = dot_low(start, w, x.low[t] + column);
            }
            sums[v][t] = fma(total, scale, sums[v][t]);
        }
    }
}

// Rows [row, row + V·kWidth), whose first cell is at `cells`, by the tokens of `x`
template <int V, int T>
inline void nibble_tile(const Product& p, const uint8_t* cells, const uint16_t* scales, int64_t row, int64_t token,
                        const TokenDigits<T>& x) {
    const int64_t groups = (p.weight->columns + kGroup - 1) / kGroup;
    Vec sums[V][T];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = splat(0.0f);
    uint64_t marks = 0;
    for (int64_t group = 0; group < groups; ++group, cells += kGroupCells * kCellBytes, scales += kCellRows) {
        if (group % (64 * kBlockGroups) == 0) marks = x.marks(group / (64 * kBlockGroups));
#pragma GCC unroll 4
        for (int line = 0; line < kGroupCells; ++line) __builtin_prefetch(cells + kAheadBytes + line * kCellBytes);
        if (marks >> (group / kBlockGroups % 64) & 1)
            add_group<V, T, true>(cells, scales, group * kGroup, x, sums);
        else
            add_group<V, T, false>(cells, scales, group * kGroup, x, sums);
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
            write_rows(p, row + v * kWidth, token + t, sums[v][t], splat(x.shape.scale(x.rows[t]) * (1.0f / 16.0f)));
}

struct NibbleTiles {
    static constexpr int kTokens = kNibbleTokens;

    template <int T>
    static void compute(const Product& p, int64_t block, int64_t token) {
        constexpr int V = vecs_for(T, kNibbleSums);
        const int64_t groups = (p.weight->columns + kGroup - 1) / kGroup;
        const TokenDigits<T> x(p, token);
        const uint8_t* cells = static_cast<const uint8_t*>(p.weight->data) + block * groups * kGroupCells * kCellBytes;
        const uint16_t* scales = static_cast<const uint16_t*>(p.weight->scales) + block * groups * kCellRows;
        for (int v = 0; v < kBlockVecs; v += V)
            nibble_tile<V, T>(p, cells + v * kCodes, scales + v * kWidth, block * kCellRows + v * kWidth, token, x);
    }
};

void multiply_int4(const Product& p) {
    walk_cells<NibbleTiles>(p, (p.weight->columns + kGroup - 1) / kGroup * kGroupCells * kCellBytes);
}

[[maybe_unused]] void multiply_digits(const Product& p) {
    p.weight->type == DType::int4 ? multiply_int4(p) : multiply_int8(p);
}
