// How quantised matrices lie, and the order in which products go over them. Included once per level, inside an unnamed
// namespace, behind digits.hpp.
//
// A cell is 16 rows by 4 columns: 64 bytes, row after row. Cells of 16 rows follow each other along the columns, then come
// the next 16 rows. So whatever a vector holds, its 32-bit lanes are rows: digits of four columns are spread over all of
// them, sums need no adding up, and scales multiply as they lie. An AMX tile is 16 cells.
//
//     bytes   [rows/16][columns/4][16 rows][4 columns]
//     halves  bytes lie as those, each with two codes: in a group of 32 columns byte k has the code of column k in its
//             lower and that of column 16 + k in its upper half
//
// Of type int8 columns are filled up to 64 and scales are float [rows/16][16]; of grouped codes see groups.hpp.

constexpr int kBlockVecs = kCellRows / kWidth;  // vectors that have a lane for each row of a cell
constexpr int64_t kBlockBytes = 32 * 1024;  // of weights that stay in the L1 while tokens go by
constexpr int64_t kAheadBytes = 512;        // weights are one stream: fetched this far ahead

// Vectors of rows that T tokens are multiplied with at a time, so that their sums stay in registers
constexpr int vecs_for(int tokens, int sums) {
    int vecs = kBlockVecs;
    while (vecs > 1 && vecs * tokens > sums) vecs /= 2;
    return vecs;
}

// Rows [row, row + kWidth), of which the product may want only some. One way of scaling for all kernels, so that a number
// does not depend on which of them made it.
[[gnu::always_inline]] inline void write_rows(const Product& p, int64_t row, int64_t token, Vec totals, Vec scales) {
    float* at = p.out + (token - p.token_begin) * p.out_stride + (row - p.row_begin);
    const float* bias = p.bias ? p.bias + (row - p.row_begin) : nullptr;
    if (__builtin_expect(row >= p.row_begin && row + kWidth <= p.row_end, true)) {
        const Vec value = fma(totals, scales, bias ? load(bias) : splat(0.0f));
        store(at, p.add ? load(at) + value : value);
        return;
    }
    float total[kWidth], scale[kWidth];
    store(total, totals), store(scale, scales);
    for (int64_t i = 0; i < kWidth; ++i) {
        if (row + i < p.row_begin || row + i >= p.row_end) continue;
        const float value = __builtin_fmaf(total[i], scale[i], bias ? bias[i] : 0.0f);
        at[i] = p.add ? at[i] + value : value;
    }
}

// V vectors of rows of T tokens, each with a scale of its own. The same numbers, asked once what is wanted.
template <int V, int T>
[[gnu::always_inline]] inline void write_tile(const Product& p, int64_t row, int64_t token, const Vec (*totals)[T],
                                              const float* scales) {
    const bool is_plain = row >= p.row_begin && row + V * kWidth <= p.row_end && !p.bias && !p.add;
    float* at = p.out + (token - p.token_begin) * p.out_stride + (row - p.row_begin);
    const int64_t stride = p.out_stride;
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
            if (__builtin_expect(is_plain, true))
                store(at + t * stride + v * kWidth, fma(totals[v][t], splat(scales[t]), splat(0.0f)));
            else
                write_rows(p, row + v * kWidth, token + t, totals[v][t], splat(scales[t]));
}

// The digits of T tokens
template <int T>
struct TokenDigits {
    const DigitRow& shape;
    const char* rows[T];
    const int8_t *low[T], *high[T];
    float scales[T];

    [[gnu::always_inline]] TokenDigits(const DigitTiles& tiles, const char* first) : TokenDigits(tiles.row, first) {}
    [[gnu::always_inline]] TokenDigits(const DigitRow& row, const char* first) : shape(row) {
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            rows[t] = first + t * shape.bytes;
            low[t] = shape.low(rows[t]), high[t] = shape.high(rows[t]);
            scales[t] = shape.scale(rows[t]);
        }
    }

    // Where the low digits of a group's columns from `column` on are found
    template <int kGroup>
    [[gnu::always_inline]] int64_t place(int64_t group, int column) const { return group * kGroup + column; }
    [[gnu::always_inline]] auto high_at(int64_t column) const {
        return [this, column](int t) { return high[t] + column; };
    }
    [[gnu::always_inline]] int32_t low_surplus(int t, int64_t part) const { return shape.low_surplus(rows[t])[part]; }
    [[gnu::always_inline]] float sum(int t, int64_t group) const { return shape.sums(rows[t])[group]; }
    int32_t high_surplus(int t, int64_t group, int64_t columns) const {
        return shape.high_surplus_of(rows[t], group, columns);
    }

    // Fours of columns in which at least one of them has a high digit
    uint64_t marks(int64_t word) const {
        uint64_t all = 0;
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) all |= shape.marks(rows[t])[word];
        return all;
    }

    bool marked() const {
        uint64_t all = 0;
        for (int64_t word = 0; word < shape.words; ++word) all |= marks(word);
        return all != 0;
    }
};

// Those of a whole tile of them
struct PackedDigits : TokenDigits<kPackedTokens> {
    const PackedGroup* groups;
    const HighList* list;
    const HighFour* fours;

    // From `token` on. `own`: a list of the same, made where these digits are multiplied
    [[gnu::always_inline]] PackedDigits(const DigitTiles& tiles, const char* prepared, int64_t token,
                                        const HighList* own = nullptr)
        : TokenDigits(tiles, prepared + tiles.row_at(token)),
          groups(reinterpret_cast<const PackedGroup*>(prepared + tiles.packed_at(token))),
          list(own ? own : reinterpret_cast<const HighList*>(prepared + tiles.list_at(token))),
          fours(tiles.fours(list)) {}

    bool listed() const { return list->num_groups != HighList::kNone; }
    bool marked() const { return listed() ? list->num_groups > 0 : TokenDigits::marked(); }

    template <int kGroup>
    [[gnu::always_inline]] const int8_t* place(int64_t group, int column) const {
        constexpr int64_t kParts = kSumColumns / kGroup;
        const int64_t first = kParts == 1 ? 0 : group % kParts * kGroup;  // of its columns among those that are packed
        return groups[group / kParts].low[(first + column) / kMarkColumns][0];
    }
    [[gnu::always_inline]] int32_t low_surplus(int t, int64_t part) const { return groups[part / 2].surplus[part % 2][t]; }
    [[gnu::always_inline]] float sum(int t, int64_t group) const { return groups[group].sums[t]; }
};

// tile.compute<T>(first token) for `count` tokens
template <class Tile, int T = Tile::kTokens>
inline void compute_tokens(const Tile& tile, int64_t token, int64_t count) {
    if (count == T) return tile.template compute<T>(token);
    if constexpr (T > 1) compute_tokens<Tile, T - 1>(tile, token, count);
}

// tile_of(block of rows), from token to token
template <class TileOf>
void walk_cells(const Product& p, int64_t block_bytes, TileOf&& tile_of) {
    constexpr int64_t kTokens = decltype(tile_of(int64_t{}))::kTokens;
    const int64_t end = (p.row_end + kCellRows - 1) / kCellRows;
    const int64_t fitting = kBlockBytes / block_bytes, step = fitting < 1 ? 1 : fitting;
    for (int64_t first = p.row_begin / kCellRows; first < end; first += step) {
        const int64_t last = first + step < end ? first + step : end;
        for (int64_t token = p.token_begin; token < p.token_end; token += kTokens) {
            const int64_t left = p.token_end - token, count = left < kTokens ? left : kTokens;
            for (int64_t block = first; block < last; ++block) compute_tokens(tile_of(block), token, count);
        }
    }
}
