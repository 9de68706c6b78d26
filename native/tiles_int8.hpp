// Products of int8 cells by AMX tiles. Included inside an unnamed namespace, behind tiles.hpp and cells.hpp.
//
// The weight is the right operand as it lies: sixteen cells, 64 columns of sixteen rows, are a tile of 1024 bytes in one
// piece. The left one is the low or high digits of 64 columns of sixteen tokens, as prepare_digits wrote them. A tile of
// sums is [16 tokens][16 rows], which is the order of the output.

// A tile reads sixteen tokens, whatever was written of the last ones.
int64_t prepared_bytes_bytes(int64_t tokens, int64_t columns) {
    return prepared_digits_bytes((tokens + kTokenTile - 1) / kTokenTile * kTokenTile, columns);
}

constexpr int64_t kStepMarks = kDigitBlock / kMarkColumns;  // marks of what a tile multiplies at once

struct DigitTile {  // up to sixteen tokens
    DigitRow shape;
    const char* rows;
    int tokens;

    DigitTile(const Product& p, int64_t token)
        : shape(p.weight->columns),
          rows(static_cast<const char*>(p.x) + token * shape.bytes),
          tokens(static_cast<int>(p.token_end - token < kTokenTile ? p.token_end - token : kTokenTile)) {}

    uint64_t marks(int64_t word) const {
        uint64_t all = 0;
        for (int t = 0; t < tokens; ++t) all |= shape.marks(rows + t * shape.bytes)[word];
        return all;
    }
};

// 64 columns: tile 2·r + t += tokens (tile 6 + t) by rows (tile 4 + r). Tiles have names, not numbers.
template <int R, int T>
inline void add_step(const char* weight, int64_t block_bytes, const char* x, int64_t x_stride) {
    _tile_stream_loadd(4, weight, 64);
    _tile_loadd(6, x, x_stride);
    _tile_dpbssd(0, 6, 4);
    if constexpr (T > 1) {
        _tile_loadd(7, x + kTokenTile * x_stride, x_stride);
        _tile_dpbssd(1, 7, 4);
    }
    if constexpr (R > 1) {
        _tile_stream_loadd(5, weight + block_bytes, 64);
        _tile_dpbssd(2, 6, 5);
    }
    if constexpr (R > 1 && T > 1) _tile_dpbssd(3, 7, 5);
}

template <int R, int T>
inline void store_sums(int32_t* sums) {
    _tile_stored(0, sums, 64);
    if constexpr (T > 1) _tile_stored(1, sums + 256, 64);
    if constexpr (R > 1) _tile_stored(2, sums + 512, 64);
    if constexpr (R > 1 && T > 1) _tile_stored(3, sums + 768, 64);
}

template <int R, int T>
inline void times_128_tiles(int32_t* sums) {
    store_sums<R, T>(sums);
    for (int i = 0; i < 4 * 256; i += 16)
        _mm512_storeu_si512(sums + i, _mm512_slli_epi32(_mm512_loadu_si512(sums + i), 7));
    settle();
    _tile_loadd(0, sums, 64);
    if constexpr (T > 1) _tile_loadd(1, sums + 256, 64);
    if constexpr (R > 1) _tile_loadd(2, sums + 512, 64);
    if constexpr (R > 1 && T > 1) _tile_loadd(3, sums + 768, 64);
}

// R blocks of sixteen rows by T tiles of tokens
template <int R, int T>
inline void byte_tiles(const Product& p, int64_t block, int64_t token) {
    const DigitTile x(p, token), last(p, token + (T - 1) * kTokenTile);
    const int64_t block_bytes = kCellRows * x.shape.stride;
    const char* weight = static_cast<const char*>(p.weight->data) + block * block_bytes;
    alignas(64) int32_t sums[4 * 256] = {};
    zero_sums<R, T>();
    bool marked = false;
    for (int64_t word = 0; word < x.shape.words; ++word)
        for (uint64_t marks = x.marks(word) | last.marks(word); marks; marked = true) {
            const int64_t in_word = __builtin_ctzll(marks) / kStepMarks, step = word * (64 / kStepMarks) + in_word;
            marks &= ~(((uint64_t{1} << kStepMarks) - 1) << (in_word * kStepMarks));
            add_step<R, T>(weight + step * kTileBytes, block_bytes, x.rows + x.shape.stride + step * kDigitBlock,
                           x.shape.bytes);
        }
    if (marked) times_128_tiles<R, T>(sums);
    for (int64_t k = 0; k < x.shape.stride; k += kDigitBlock) {
        const char* cells = weight + k * kCellRows;
        add_step<R, T>(cells, block_bytes, x.rows + k, x.shape.bytes);
        for (int line = 0; line < 16; ++line) _mm_prefetch(cells + R * block_bytes + line * 64, _MM_HINT_T1);
    }
    store_sums<R, T>(sums);
    settle();
    const float* scales = static_cast<const float*>(p.weight->scales) + block * kCellRows;
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T * kTokenTile && token + t < p.token_end; ++t) {
            const int32_t* at = sums + (2 * r + t / kTokenTile) * 256 + t % kTokenTile * 16;
            write_rows(p, (block + r) * kCellRows, token + t, to_floats(_mm512_loadu_si512(at)),
                       load(scales + r * kCellRows) * splat(x.shape.scale(x.rows + t * x.shape.bytes)));
        }
}

template <int R>
inline void byte_rows(const Product& p, int64_t block) {
    int64_t token = p.token_begin;
    for (; token + kTokenTile < p.token_end; token += 2 * kTokenTile) byte_tiles<R, 2>(p, block, token);
    if (token < p.token_end) byte_tiles<R, 1>(p, block, token);
}

void multiply_bytes(const Product& p) {
    const Tiles tiles;
    settle();
    const int64_t end = (p.row_end + kCellRows - 1) / kCellRows;
    int64_t block = p.row_begin / kCellRows;
    for (; block + 2 <= end; block += 2) byte_rows<2>(p, block);
    for (; block < end; ++block) byte_rows<1>(p, block);
}
