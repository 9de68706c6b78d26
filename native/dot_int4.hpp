// Products of int4 cells with digits of activations. Included once per level, inside an unnamed namespace, behind
// dot_int8.hpp.
//
// A group of 32 columns has a scale s of its own per row. Its sum of integers is not turned into a float by itself: sums run
// on over a span of groups, and with P = what has come together up to a group,
//
//     Σ s·(P - P before) = Σ (s - s of the next group)·P
//
// which is one multiplication per group, by differences that all tokens share. P is below 2^22 within a span: begun at the
// bits of 1.5·2^23 it is a float that needs no conversion, and what it was begun at comes to kBase·(first s), taken off at
// the start. Codes are unpacked to 16 times their value, which fits into a byte and saves moving the upper half down; the
// scale of the token takes the 16 off again. One order of sums, whatever the tile and the level.

constexpr int64_t kGroup = 32, kGroupCells = kGroup / 8, kGroupMarks = kGroup / kMarkColumns;
constexpr int64_t kSpan = 8;             // groups; 8·32·127·128 < 2^22
constexpr float kBase = 12582912.0f;
constexpr int64_t kUnpackTokens = 24;  // from here on a block of rows is unpacked once, for all of them

struct NibbleRows {  // a block of rows, or some vectors of them: in halves of bytes, and perhaps unpacked too
    const int8_t* cells;
    const uint16_t* scales;  // [groups][kCellRows]
    const int8_t* bytes;     // cells of int8, 16 times the codes
    const float* wide;       // [groups][kCellRows], the scales
    int64_t groups;

    NibbleRows from(int vec) const {
        return {cells + vec * kCodes, scales + vec * kWidth, bytes + vec * kCodes, wide + vec * kWidth, groups};
    }

    template <bool kUnpacked>
    [[gnu::always_inline]] Vec scale(int64_t group, int v) const {
        if constexpr (kUnpacked) return load(wide + group * kCellRows + v * kWidth);
        return load_halves(scales + group * kCellRows + v * kWidth);
    }
};

template <int V, int T, bool kUnpacked>
[[gnu::always_inline]] inline void dot_group(const NibbleRows& rows, int64_t group, const TokenDigits<T>& x,
                                             Ints (*sums)[T], Ints* surplus) {
    const int64_t column = group * kGroup;
    if constexpr (kUnpacked) {
        const int8_t* bytes = rows.bytes + group * 2 * kGroupCells * kCellBytes;
        dot_cells<V, T, Form::bytes>(bytes, x.low, column, sums, surplus);
        dot_cells<V, T, Form::bytes>(bytes + kGroupCells * kCellBytes, x.low, column + kGroup / 2, sums, surplus);
    } else {
        const int8_t* cells = rows.cells + group * kGroupCells * kCellBytes;
#pragma GCC unroll 4
        for (int line = 0; line < kGroupCells; ++line) __builtin_prefetch(cells + kAheadBytes + line * kCellBytes);
        dot_cells<V, T, Form::lower>(cells, x.low, column, sums, surplus);
        dot_cells<V, T, Form::upper>(cells, x.low, column + kGroup / 2, sums, surplus);
    }
}

// Groups [begin, end), at most kSpan. Inlined without fail: the sums must stay in registers.
template <int V, int T, bool kUnpacked>
[[gnu::always_inline]] inline void add_span(const NibbleRows& rows, int64_t begin, int64_t end, const TokenDigits<T>& x,
                                            Vec (*sums)[T]) {
    Ints running[V][T], surplus[1][V];
    Vec scales[V];
    clear_sums<1, V>(surplus);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
        scales[v] = rows.scale<kUnpacked>(begin, v);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            running[v][t] = as_ints(splat(kBase));
            sums[v][t] = fma(splat(-kBase), scales[v], sums[v][t]);
        }
    }
    for (int64_t group = begin; group < end; ++group) {
        dot_group<V, T, kUnpacked>(rows, group, x, running, *surplus);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            const Vec next = group + 1 < end ? rows.scale<kUnpacked>(group + 1, v) : splat(0.0f), step = scales[v] - next;
            scales[v] = next;
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) {
                const Ints total = kBiased ? subtract(running[v][t], surplus[0][v]) : running[v][t];
                sums[v][t] = fma(as_floats(total), step, sums[v][t]);
            }
        }
    }
}

// 128 times the high digits of one group, those that `marks` name
template <int V, int T>
[[gnu::always_inline]] inline void add_high_group(const NibbleRows& rows, int64_t group, uint64_t marks,
                                                  const TokenDigits<T>& x, Vec (*sums)[T]) {
    Ints high[V][T], surplus[1][V];
    clear_sums<1, V>(surplus);
    clear_sums<V, T>(high);
    for (; marks; marks &= marks - 1) {
        const int64_t four = __builtin_ctzll(marks), column = group * kGroup + four * kMarkColumns;
        const int8_t* cell = rows.cells + (group * kGroupCells + four % kGroupCells) * kCellBytes;
        if (four < kGroupCells)
            dot_high<V, T, Form::lower>(cell, x.high, column, high, *surplus);
        else
            dot_high<V, T, Form::upper>(cell, x.high, column, high, *surplus);
    }
    take_off<V, T>(high, *surplus);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
        const Vec scale = rows.scale<false>(group, v) * splat(128.0f);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = fma(to_floats(high[v][t]), scale, sums[v][t]);
    }
}

template <int V, int T>
[[gnu::always_inline]] inline void add_high_groups(const NibbleRows& rows, const TokenDigits<T>& x, Vec (*sums)[T]) {
    constexpr int64_t kWordGroups = 64 / kGroupMarks;
    constexpr uint64_t kMask = (uint64_t{1} << kGroupMarks) - 1;
    for (int64_t word = 0; word < x.shape.words; ++word)
        for (uint64_t marks = x.marks(word); marks;) {
            const int64_t in_word = __builtin_ctzll(marks) / kGroupMarks, shift = in_word * kGroupMarks;
            add_high_group<V, T>(rows, word * kWordGroups + in_word, marks >> shift & kMask, x, sums);
            marks &= ~(kMask << shift);
        }
}

// The V vectors of rows from `row` on by the tokens of `x`
template <int V, int T, bool kUnpacked>
inline void nibble_tile(const Product& p, const NibbleRows& rows, int64_t row, int64_t token, const TokenDigits<T>& x,
                        bool marked) {
    Vec sums[V][T];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = splat(0.0f);
    for (int64_t group = 0; group < rows.groups; group += kSpan) {
        const int64_t end = group + kSpan < rows.groups ? group + kSpan : rows.groups;
        add_span<V, T, kUnpacked>(rows, group, end, x, sums);
    }
    if (marked) add_high_groups<V, T>(rows, x, sums);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
            write_rows(p, row + v * kWidth, token + t, sums[v][t], splat(x.shape.scale(x.rows[t]) * (1.0f / 16.0f)));
}

inline int64_t groups_of(const Product& p) { return (p.weight->columns + kGroup - 1) / kGroup; }

inline NibbleRows nibble_rows(const Product& p, int64_t block) {
    const int64_t groups = groups_of(p);
    const int8_t* bytes = reinterpret_cast<const int8_t*>(p.scratch);
    return {static_cast<const int8_t*>(p.weight->data) + block * groups * kGroupCells * kCellBytes,
            static_cast<const uint16_t*>(p.weight->scales) + block * groups * kCellRows, bytes,
            reinterpret_cast<const float*>(bytes + groups * kGroup * kCellRows), groups};
}

template <bool kUnpacked>
struct NibbleTiles {
    static constexpr int kTokens = kUnpacked ? kUnpackedTokens : kNibbleTokens;

    template <int T>
    static void compute(const Product& p, int64_t block, int64_t token) {
        constexpr int V = vecs_for(T, kNibbleSums);
        const NibbleRows rows = nibble_rows(p, block);
        const TokenDigits<T> x(p, token);
        const bool marked = x.marked();
        for (int v = 0; v < kBlockVecs; v += V)
            nibble_tile<V, T, kUnpacked>(p, rows.from(v), block * kCellRows + v * kWidth, token, x, marked);
    }
};

// Codes and scales of a block of rows into the scratch, where nibble_rows looks for them
inline void unpack_rows(const Product& p, int64_t block) {
    const NibbleRows rows = nibble_rows(p, block);
    int8_t* bytes = reinterpret_cast<int8_t*>(p.scratch);
    float* wide = reinterpret_cast<float*>(bytes + rows.groups * kGroup * kCellRows);
    for (int64_t group = 0; group < rows.groups; ++group, bytes += 2 * kGroupCells * kCellBytes) {
        const int8_t* cells = rows.cells + group * kGroupCells * kCellBytes;
        for (int at = 0; at < kGroupCells * kCellBytes; at += kCodes) {
            write_codes(bytes + at, load_lower(cells + at));
            write_codes(bytes + kGroupCells * kCellBytes + at, load_upper(cells + at));
        }
        for (int v = 0; v < kBlockVecs; ++v)
            store(wide + group * kCellRows + v * kWidth, rows.scale<false>(group, v));
    }
}

void multiply_int4(const Product& p) {
    if (p.token_end - p.token_begin < kUnpackTokens)
        return walk_cells<NibbleTiles<false>>(p, groups_of(p) * kGroupCells * kCellBytes);
    using Tiles = NibbleTiles<true>;
    for (int64_t block = p.row_begin / kCellRows; block * kCellRows < p.row_end; ++block) {
        unpack_rows(p, block);
        for (int64_t token = p.token_begin; token < p.token_end; token += Tiles::kTokens) {
            const int64_t left = p.token_end - token;
            compute_tokens<Tiles>(p, block, token, left < Tiles::kTokens ? left : Tiles::kTokens);
        }
    }
}

[[maybe_unused]] void multiply_digits(const Product& p) {
    p.weight->type == DType::int4 ? multiply_int4(p) : multiply_int8(p);
}
