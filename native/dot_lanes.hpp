// Products of float rows on vectors of sixteen. Included inside an unnamed namespace, behind dot.hpp.
//
// One order of sums, whatever the tile: lane i of an output adds up the columns i, i + 16, …, and then the lanes are added
// as sum() does. Few tokens go over the rows as they lie. Many go over panels: eight rows by some hundred columns, copied
// side by side and widened once, which stay in the L1 together with as many columns of six tokens. Panels of the same
// columns follow each other, so that those columns of all tokens stay in the L2; sums go from one panel to the next as
// vectors, and lanes are added once per output, for sixteen outputs at a time.

constexpr int64_t kPanelRows = 8, kPanelColumns = 576, kPanelStride = kPanelColumns + 16;
constexpr int64_t kCarriedRows = 64, kCarriedTokens = 96;  // whose sums, 384 KiB of them, go from panel to panel
constexpr int64_t kPanelTokens = 2 * kTileTokens + 1;  // from here on rows are copied
static_assert(kPanelRows * kPanelStride + kCarriedRows * kCarriedTokens * kWidth <= product_scratch(0));

// R rows by T tokens; `ahead`, if there is one, is fetched line by line, as many bytes as are read here.
template <class W, int R, int T, bool kAhead>
[[gnu::always_inline]] inline void add_lanes(const W* const* rows, const float* const* x, int64_t count, const W* ahead,
                                             Vec (*sums)[T]) {
    constexpr int64_t kStepBytes = R * kWidth * sizeof(W);
    int64_t k = 0;
    for (; k + kWidth <= count; k += kWidth) {
        if constexpr (kAhead)
#pragma GCC unroll 8
            for (int64_t line = 0; line < kStepBytes; line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(ahead + R * k) + line);
        Vec w[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) w[r] = load(rows[r] + k);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const Vec v = load(x[t] + k);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][t] = fma(w[r], v, sums[r][t]);
        }
    }
    if (__builtin_expect(k == count, true)) return;
    Vec w[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) w[r] = load_some(rows[r] + k, count - k);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        const Vec v = load_some(x[t] + k, count - k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][t] = fma(w[r], v, sums[r][t]);
    }
}

// Of each its lanes i and i + 8 added up, one behind the other. Of two vectors one is moved, since only one unit moves lanes.
inline Vec halves_of(Vec a, Vec b) {
    return _mm512_mask_blend_ps(0xff00, a, b) + _mm512_shuffle_f32x4(a, b, 0x4e);
}
inline Vec quarters_of(Vec ab, Vec cd) {
    return _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
}

// Of four rows by up to four tokens: quarter t has the sums of token t, a lane per row.
template <int N, class At>
[[gnu::always_inline]] inline Vec sum_rows(At&& at) {
    Vec rows[4];  // quarter t: four lanes of token t
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
        const Vec first = halves_of(at(r, 0), at(r, 1 % N));
        rows[r] = quarters_of(first, N < 3 ? first : halves_of(at(r, 2 % N), at(r, 3 % N)));
    }
    const auto add_pairs = [](Vec a, Vec b) { return _mm512_mask_blend_ps(0xcccc, a, b) + _mm512_shuffle_ps(a, b, 0x4e); };
    const Vec low = add_pairs(rows[0], rows[1]), high = add_pairs(rows[2], rows[3]);
    return _mm512_shuffle_ps(low, high, 0x88) + _mm512_shuffle_ps(low, high, 0xdd);
}

inline void write_four(const Product& p, int64_t row, int64_t token, __m128 value) {
    float* at = p.out + (token - p.token_begin) * p.out_stride + (row - p.row_begin);
    if (p.bias) value = value + _mm_loadu_ps(p.bias + (row - p.row_begin));
    _mm_storeu_ps(at, p.add ? _mm_loadu_ps(at) + value : value);
}

// take(which, sums of four rows) for the first N quarters
template <int N, class Take>
[[gnu::always_inline]] inline void each_quarter(Vec sums, Take&& take) {
    take(0, _mm512_castps512_ps128(sums));
    if constexpr (N > 1) take(1, _mm512_extractf32x4_ps(sums, 1));
    if constexpr (N > 2) take(2, _mm512_extractf32x4_ps(sums, 2));
    if constexpr (N > 3) take(3, _mm512_extractf32x4_ps(sums, 3));
}

// take(token, sums of the four rows) for each token
template <int T, class Take>
[[gnu::always_inline]] inline void each_four(const Vec (*sums)[T], Take&& take) {
    constexpr int kFirst = T < 4 ? T : 4, kRest = T - kFirst;
    each_quarter<kFirst>(sum_rows<kFirst>([&](int r, int t) { return sums[r][t]; }), take);
    if constexpr (kRest > 0)
        each_quarter<kRest>(sum_rows<kRest>([&](int r, int t) { return sums[r][kFirst + t]; }),
                            [&](int t, __m128 four) { take(kFirst + t, four); });
}

template <int R, int T>
[[gnu::always_inline]] inline void write_lanes(const Product& p, int64_t row, int64_t token, const Vec (*sums)[T]) {
    if constexpr (R == 4)
        each_four<T>(sums, [&](int t, __m128 four) { write_four(p, row, token + t, four); });
    else if constexpr (R == 8 && T == 1)
        each_quarter<2>(sum_rows<2>([&](int r, int part) { return sums[4 * part + r][0]; }),
                        [&](int part, __m128 four) { write_four(p, row + 4 * part, token, four); });
    else
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) write_sum(p, row + r, token + t, sum(sums[r][t]));
}

template <int R, int T>
[[gnu::always_inline]] inline void clear_lanes(Vec (*sums)[T]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) sums[r][t] = splat(0.0f);
}

// Few tokens: rows as they lie, and those that follow them fetched meanwhile
template <class W, int R, int T, bool kAhead>
inline void few_tile(const Product& p, int64_t row, int64_t token) {
    const int64_t columns = p.weight->columns;
    const W *from = static_cast<const W*>(p.weight->data) + row * columns, *rows[R];
    const float* x[T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = from + r * columns;
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) x[t] = operand_of<Wide<float>>(p, token + t);
    Vec sums[R][T];
    clear_lanes<R, T>(sums);
    add_lanes<W, R, T, kAhead>(rows, x, columns, from + R * columns, sums);
    write_lanes<R, T>(p, row, token, sums);
}

template <class W, int R, bool kAhead, int T = kTileTokens>
inline void few_tokens(const Product& p, int64_t row, int64_t token, int64_t count) {
    if (count == T) return few_tile<W, R, T, kAhead>(p, row, token);
    if constexpr (T > 1) few_tokens<W, R, kAhead, T - 1>(p, row, token, count);
}

template <class W, int R>
inline void few_rows(const Product& p, int64_t row) {
    const int64_t tokens = p.token_end - p.token_begin, tiles = (tokens + kTileTokens - 1) / kTileTokens;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = tokens * tile / tiles, count = tokens * (tile + 1) / tiles - begin;
        tile == 0 ? few_tokens<W, R, true>(p, row, p.token_begin + begin, count)
                  : few_tokens<W, R, false>(p, row, p.token_begin + begin, count);
    }
}

template <class W>
inline void multiply_few(const Product& p) {
    int64_t row = p.row_begin;
    if (p.token_end - p.token_begin == 1)  // enough sums to keep the units busy
        for (; row + 8 <= p.row_end; row += 8) few_tile<W, 8, 1, true>(p, row, p.token_begin);
    for (; row + 4 <= p.row_end; row += 4) few_rows<W, 4>(p, row);
    for (; row < p.row_end; ++row) few_rows<W, 1>(p, row);
}

// Some rows by some tokens, as many columns at a time as stay in the L1
struct Panel {
    int64_t row, num_rows, first_token;
    int64_t begin, count;  // columns
    bool last;             // of them
    const float* rows;     // [kPanelRows][kPanelStride]
    float* carried;        // [tokens][kPanelRows] vectors of sums
    const char* next;      // rows that are copied after these, fetched meanwhile
    int64_t next_bytes, next_share, next_stride;  // of each of them; what a tile of tokens fetches of it: whole lines
};

// Of four of the rows that come next. Nothing is divided here: a tile takes a few hundred cycles, a division up to ninety.
inline void fetch_next(const Panel& panel, int64_t row, int64_t tile) {
    const int64_t begin = tile * panel.next_share, whole = begin + panel.next_share;
    const int64_t end = whole < panel.next_bytes ? whole : panel.next_bytes;
    const char* from = panel.next + row * panel.next_stride;
    for (int r = 0; r < 4; ++r, from += panel.next_stride)
        for (int64_t at = begin; at < end; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
}

template <int R, int T>
inline void panel_tile(const Product& p, const Panel& panel, int64_t row, int64_t token) {
    const float *rows[R], *x[T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = panel.rows + (row + r) * kPanelStride;
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) x[t] = operand_of<Wide<float>>(p, panel.first_token + token + t) + panel.begin;
    float* carried = panel.carried + (token * kPanelRows + row * T) * kWidth;
    Vec sums[R][T];
    if (panel.begin == 0)
        clear_lanes<R, T>(sums);
    else
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sums[r][t] = load(carried + (r * T + t) * kWidth);
    add_lanes<float, R, T, false>(rows, x, panel.count, nullptr, sums);
    if (panel.last) return write_lanes<R, T>(p, panel.row + row, panel.first_token + token, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) store(carried + (r * T + t) * kWidth, sums[r][t]);
}

template <int T = kTileTokens>
inline void panel_tokens(const Product& p, const Panel& panel, int64_t tile, int64_t token, int64_t count) {
    if (count != T) {
        if constexpr (T > 1) panel_tokens<T - 1>(p, panel, tile, token, count);
        return;
    }
    int64_t row = 0;
    for (; row + 4 <= panel.num_rows; row += 4) {
        fetch_next(panel, row, tile);
        panel_tile<4, T>(p, panel, row, token);
    }
    for (; row < panel.num_rows; ++row) panel_tile<1, T>(p, panel, row, token);
}

// As many rows and tokens as sums are carried of
template <class W>
inline void carry_panels(const Product& p, int64_t row_begin, int64_t row_end, int64_t first_token, int64_t num_tokens) {
    constexpr int64_t kBytes = sizeof(W);
    const int64_t columns = p.weight->columns, panels = (columns + kPanelColumns - 1) / kPanelColumns;
    const int64_t width = (columns / panels + kWidth - 1) / kWidth * kWidth;
    const int64_t tiles = (num_tokens + kTileTokens - 1) / kTileTokens;
    const int64_t least = num_tokens / tiles, wider = num_tokens % tiles;  // tiles of much the same size
    float *copies = p.scratch, *carried = p.scratch + kPanelRows * kPanelStride;
    for (int64_t begin = 0; begin < columns; begin += width)
        for (int64_t row = row_begin; row < row_end; row += kPanelRows) {
            const int64_t rows = row_end - row < kPanelRows ? row_end - row : kPanelRows;
            const int64_t count = columns - begin < width ? columns - begin : width;
            const W *data = static_cast<const W*>(p.weight->data), *from = data + row * columns + begin;
            for (int64_t r = 0; r < rows; ++r)
                load_row_as(from + r * columns, count, 1.0f, false, copies + r * kPanelStride);
            // The next rows; behind the last of them, their next columns; then the rows that follow all of these.
            int64_t next_row = row + kPanelRows, next_begin = begin;
            if (next_row >= row_end) next_begin += width, next_row = row_begin;
            if (next_begin >= columns) next_begin = 0, next_row = row_end;
            const int64_t next_count = columns - next_begin < width ? columns - next_begin : width;
            const int64_t next_bytes = next_row + kPanelRows <= p.weight->rows ? next_count * kBytes : 0;
            const Panel panel{row, rows, first_token, begin, count, begin + width >= columns, copies,
                              carried + (row - row_begin) * num_tokens * kWidth,
                              reinterpret_cast<const char*>(data + next_row * columns + next_begin),
                              next_bytes, (next_bytes / tiles + 63) / 64 * 64, columns * kBytes};
            for (int64_t tile = 0, token = 0; tile < tiles; ++tile) {
                const int64_t size = least + (tile < wider);
                panel_tokens(p, panel, tile, token, size);
                token += size;
            }
        }
}

template <class W>
inline void multiply_panels(const Product& p) {
    for (int64_t row = p.row_begin; row < p.row_end; row += kCarriedRows)
        for (int64_t token = p.token_begin; token < p.token_end; token += kCarriedTokens)
            carry_panels<W>(p, row, row + kCarriedRows < p.row_end ? row + kCarriedRows : p.row_end, token,
                            p.token_end - token < kCarriedTokens ? p.token_end - token : kCarriedTokens);
}

template <class W>
inline void multiply_lanes(const Product& p) {
    p.token_end - p.token_begin < kPanelTokens ? multiply_few<W>(p) : multiply_panels<W>(p);
}

void multiply_wide(const Product& p) {
    switch (p.weight->type) {
        case DType::f32: return multiply_lanes<float>(p);
        case DType::f16: return multiply_lanes<f16>(p);
        default: return multiply_lanes<bf16>(p);
    }
}
