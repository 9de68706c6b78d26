// Products of int8 matrices by AMX tiles. Included inside an unnamed namespace, behind tiles.hpp and digits.hpp.
//
// As with bf16 the weight is the left operand as it lies: sixteen rows by 64 columns. The digits of sixteen tokens become
// tiles of [16 quads of columns][16 tokens][4], low and high ones apart:
//
//     [low: steps tiles][high: steps tiles][marks: a bit per step][scales: 16 floats]
//
// A step is marked if one of the tokens has a high digit there; high tiles of other steps are neither written nor read.

struct DigitTile {
    int64_t steps, words, bytes;

    explicit DigitTile(int64_t columns)
        : steps((columns + kDigitBlock - 1) / kDigitBlock),
          words((steps + 63) / 64),
          bytes(2 * steps * kTileBytes + (8 * words + 63) / 64 * 64 + 64) {}

    const char* high(const char* tile) const { return tile + steps * kTileBytes; }
    const uint64_t* marks(const char* tile) const {
        return reinterpret_cast<const uint64_t*>(tile + 2 * steps * kTileBytes);
    }
    const float* scales(const char* tile) const { return reinterpret_cast<const float*>(tile + bytes - 64); }
};

int64_t prepared_digit_tiles_bytes(int64_t tokens, int64_t columns) {
    return (tokens + kTokenTile - 1) / kTokenTile * DigitTile(columns).bytes;
}

// Rows of 64 bytes, one per token, to quads of all tokens
inline void store_quads(const int8_t (*rows)[kDigitBlock], char* out) {
    __m512i words[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) words[t] = _mm512_loadu_si512(rows[t]);
    transpose16(words);
#pragma GCC unroll 16
    for (int quad = 0; quad < 16; ++quad) _mm512_storeu_si512(out + quad * 64, words[quad]);
}

void prepare_digit_tiles(const float* x, int64_t begin, int64_t end, int64_t columns, void* prepared) {
    const DigitTile shape(columns);
    for (int64_t first = begin; first < end; first += kTokenTile) {
        char* tile = static_cast<char*>(prepared) + first / kTokenTile * shape.bytes;
        const int tokens = static_cast<int>(end - first < kTokenTile ? end - first : kTokenTile);
        float* scales = const_cast<float*>(shape.scales(tile));
        uint64_t* marks = const_cast<uint64_t*>(shape.marks(tile));
        std::memset(marks, 0, 8 * shape.words);
        float inverse[kTokenTile];
        for (int t = 0; t < kTokenTile; ++t) {
            scales[t] = t < tokens ? digit_scale(x + (first + t) * columns, columns) : 0.0f;
            inverse[t] = scales[t] > 0.0f ? 1.0f / scales[t] : 0.0f;
        }
        alignas(64) int8_t low[kTokenTile][kDigitBlock] = {}, high[kTokenTile][kDigitBlock] = {};
        for (int64_t step = 0; step < shape.steps; ++step) {
            const int64_t k = step * kDigitBlock;
            bool marked = false;
            for (int t = 0; t < tokens; ++t)
                marked |= split_block(x + (first + t) * columns + k, columns - k, inverse[t], low[t], high[t]);
            store_quads(low, tile + step * kTileBytes);
            if (!marked) continue;
            store_quads(high, tile + (shape.steps + step) * kTileBytes);
            marks[step / 64] |= uint64_t{1} << (step % 64);
        }
    }
}

// High digits of token tile t onto tiles t (and 2 + t for a second row tile)
template <int R, int t>
inline bool add_high(const char* weight, int64_t stride, const DigitTile& shape, const char* tile) {
    bool any = false;
    for (int64_t word = 0; word < shape.words; ++word)
        for (uint64_t marks = shape.marks(tile)[word]; marks; marks &= marks - 1, any = true) {
            const int64_t step = word * 64 + __builtin_ctzll(marks);
            _tile_loadd(6, shape.high(tile) + step * kTileBytes, 64);
            _tile_loadd(4, weight + step * 64, stride);
            if constexpr (R > 1) _tile_loadd(5, weight + 16 * stride + step * 64, stride);
            if constexpr (t == 0) {  // tiles have names, not numbers
                _tile_dpbssd(0, 4, 6);
                if constexpr (R > 1) _tile_dpbssd(2, 5, 6);
            } else {
                _tile_dpbssd(1, 4, 6);
                if constexpr (R > 1) _tile_dpbssd(3, 5, 6);
            }
        }
    return any;
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

struct ByteDot {
    static void sum_0() { _tile_dpbssd(0, 4, 6); }
    static void sum_1() { _tile_dpbssd(1, 4, 7); }
    static void sum_2() { _tile_dpbssd(2, 5, 6); }
    static void sum_3() { _tile_dpbssd(3, 5, 7); }
};

// sums[2·r + t]: R·16 weight rows by T tiles of tokens; `ahead` is memory that is needed next
template <int R, int T>
inline void byte_block(const char* weight, int64_t stride, const DigitTile& shape, const char* x, const char* ahead,
                       int32_t* sums) {
    zero_sums<R, T>();
    bool any = add_high<R, 0>(weight, stride, shape, x);
    if constexpr (T > 1) any |= add_high<R, 1>(weight, stride, shape, x + shape.bytes);
    if (any) times_128_tiles<R, T>(sums);
    add_products<ByteDot, R, T>(weight, stride, x, shape.bytes, shape.steps, ahead);
    store_sums<R, T>(sums);
}

// One tile of sums [16 rows][16 tokens] to out[token][row], scaled as write_digits does
inline void write_byte_tile(const Product& p, const int32_t* sums, const float* token_scales, int64_t row, int64_t token) {
    const int64_t rows = p.row_end - row, tokens = p.token_end - token;
    const __mmask16 mask = rows >= 16 ? 0xffff : (1u << rows) - 1;
    const __m512 bias = p.bias ? _mm512_maskz_loadu_ps(mask, p.bias + (row - p.row_begin)) : splat(0.0f);
    const __m512 scales = _mm512_maskz_loadu_ps(mask, static_cast<const float*>(p.weight->scales) + row);
    float* out = p.out + (token - p.token_begin) * p.out_stride + (row - p.row_begin);
    __m512i columns[16];
    for (int r = 0; r < 16; ++r) columns[r] = _mm512_loadu_si512(sums + r * 16);
    transpose16(columns);
    for (int t = 0; t < 16 && t < tokens; ++t, out += p.out_stride) {
        const __m512 factor = _mm512_mul_ps(scales, splat(token_scales[t]));
        __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(columns[t]), factor, bias);
        if (p.add) value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), value);
        _mm512_mask_storeu_ps(out, mask, value);
    }
}

template <int R>
inline void byte_rows(const Product& p, const char* weight, int64_t stride, int64_t row, const char* ahead) {
    const DigitTile shape(p.weight->columns);
    const char* x = static_cast<const char*>(p.x) + p.token_begin / kTokenTile * shape.bytes;
    alignas(64) int32_t sums[4 * 256] = {};
    int64_t token = p.token_begin;
    for (; token + kTokenTile < p.token_end; token += 2 * kTokenTile, x += 2 * shape.bytes) {
        byte_block<R, 2>(weight, stride, shape, x, ahead, sums);
        ahead = nullptr;
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < 2; ++t)
                write_byte_tile(p, sums + (2 * r + t) * 256, shape.scales(x + t * shape.bytes), row + r * 16,
                                token + t * kTokenTile);
    }
    if (token < p.token_end) {
        byte_block<R, 1>(weight, stride, shape, x, ahead, sums);
        for (int r = 0; r < R; ++r) write_byte_tile(p, sums + 2 * r * 256, shape.scales(x), row + r * 16, token);
    }
}

// A copy of up to 16 rows, filled up with zeros to whole tiles
inline const char* pad_byte_rows(const Product& p, int64_t row) {
    const int64_t columns = p.weight->columns, padded = DigitTile(columns).steps * 64;
    const char* weight = static_cast<const char*>(p.weight->data);
    char* copy = reinterpret_cast<char*>(p.scratch);
    std::memset(copy, 0, 16 * padded);
    for (int64_t r = row; r < row + 16 && r < p.row_end; ++r)
        std::memcpy(copy + (r - row) * padded, weight + r * columns, columns);
    settle();
    return copy;
}

void multiply_byte_tiles(const Product& p) {
    const Tiles tiles;
    settle();
    const int64_t columns = p.weight->columns;
    const char* weight = static_cast<const char*>(p.weight->data);
    int64_t row = p.row_begin;
    if (columns % 64 == 0) {
        for (; row + 32 <= p.row_end; row += 32) {
            const char* ahead = row + 64 <= p.row_end ? weight + (row + 32) * columns : nullptr;
            byte_rows<2>(p, weight + row * columns, columns, row, ahead);
        }
        for (; row + 16 <= p.row_end; row += 16) byte_rows<1>(p, weight + row * columns, columns, row, nullptr);
    }
    for (; row < p.row_end; row += 16)
        byte_rows<1>(p, pad_byte_rows(p, row), DigitTile(columns).steps * 64, row, nullptr);
}
