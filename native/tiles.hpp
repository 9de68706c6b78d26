// Products of bf16 matrices by AMX tiles. Included inside an unnamed namespace, behind dot.hpp.
//
// The weight is the left operand: sixteen of its rows by 32 columns are a tile as they lie in a row-major matrix, so
// weights need no packing, and a file mapped as it is runs at full speed. The activations, small beside them, become the
// right operand: `prepare` lays them out as tiles of [16 pairs of columns][16 tokens][2]. A tile of results is
// [16 rows][16 tokens] and is transposed on its way out.

constexpr int64_t kTileBytes = 1024;

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles live while one Product is computed, so that threads carry no tile state while they wait or sleep.
class Tiles {
  public:
    explicit Tiles(const TileConfig& config = {}) {
        // GCC 12 declares that _tile_loadconfig reads 8 of these 64 bytes, and would drop the stores of the others.
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// A tile load is opaque to GCC and is not declared to read memory: what was just written must be there before it.
inline void settle() { asm volatile("" : : : "memory"); }

inline int64_t tile_steps(int64_t columns) { return (columns + 31) / 32; }

int64_t prepared_pairs_bytes(int64_t tokens, int64_t columns) {
    return (tokens + kTokenTile - 1) / kTokenTile * tile_steps(columns) * kTileBytes;
}

// 16 rows of 16 words to 16 columns
inline void transpose16(__m512i* rows) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // b[4·group + i], lane l: column 4·l + i of rows 4·group..4·group+3
        a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
        rows[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
        rows[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
        rows[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
    }
}

void prepare_pairs(const float* x, int64_t begin, int64_t end, int64_t columns, void* prepared) {
    const int64_t steps = tile_steps(columns);
    for (int64_t tile = begin; tile < end; tile += kTokenTile) {
        char* out = static_cast<char*>(prepared) + tile / kTokenTile * steps * kTileBytes;
        for (int64_t k = 0; k < columns; k += 32, out += kTileBytes) {
            __m512i rows[16];
            for (int t = 0; t < 16; ++t) {
                if (tile + t >= end) {
                    rows[t] = _mm512_setzero_si512();
                    continue;
                }
                const float* at = x + (tile + t) * columns + k;
                const __m512 low = load_some(at, columns - k);
                const __m512 high = columns - k > 16 ? load_some(at + 16, columns - k - 16) : splat(0.0f);
                rows[t] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
            }
            transpose16(rows);
            for (int pair = 0; pair < 16; ++pair) _mm512_storeu_si512(out + pair * 64, rows[pair]);
        }
    }
}

template <int R, int T>
inline void zero_sums() {
    _tile_zero(0);
    if constexpr (T > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && T > 1) _tile_zero(3);
}

// Tiles 0..3 += R·16 weight rows (tiles 4, 5) by T·16 tokens (6, 7), where tile 2·r + t has the sums of r and t. `ahead` is
// memory that is needed next.
template <int R, int T>
inline void add_products(const char* weight, int64_t stride, const char* x, int64_t x_stride, int64_t steps,
                         const char* ahead) {
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, x + step * kTileBytes, 64);
        _tile_stream_loadd(4, weight + step * 64, stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (T > 1) {
            _tile_loadd(7, x + x_stride + step * kTileBytes, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (R > 1) {
            _tile_stream_loadd(5, weight + 16 * stride + step * 64, stride);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (R > 1 && T > 1) _tile_dpbf16ps(3, 5, 7);
        if (ahead) {
#pragma GCC unroll 32
            for (int line = 0; line < R * 16; ++line) _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
            ahead += R * kTileBytes;
        }
    }
}

// sums[r][t] tiles of R·16 weight rows and T·16 tokens
template <int R, int T>
inline void tile_block(const char* weight, int64_t stride, const char* x, int64_t steps, const char* ahead, float* sums) {
    zero_sums<R, T>();
    add_products<R, T>(weight, stride, x, steps * kTileBytes, steps, ahead);
    _tile_stored(0, sums, 64);
    if constexpr (T > 1) _tile_stored(1, sums + 256, 64);
    if constexpr (R > 1) _tile_stored(2, sums + T * 256, 64);
    if constexpr (R > 1 && T > 1) _tile_stored(3, sums + 768, 64);
}

// One tile of results [16 rows][16 tokens] to out[token][row]
inline void write_tile(const Product& p, const float* sums, int64_t row, int64_t token) {
    const int64_t rows = p.row_end - row, tokens = p.token_end - token;
    const __mmask16 mask = first_lanes(rows);
    const __m512 bias = p.bias ? _mm512_maskz_loadu_ps(mask, p.bias + (row - p.row_begin)) : splat(0.0f);
    float* out = p.out + (token - p.token_begin) * p.out_stride + (row - p.row_begin);
    __m512i columns[16];
    if (tokens <= 2) {
        const __m512i at = _mm512_mullo_epi32(_mm512_set1_epi32(16), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                                                                       11, 12, 13, 14, 15));
        for (int t = 0; t < tokens; ++t) columns[t] = _mm512_i32gather_epi32(at, sums + t, 4);
    } else {
        for (int r = 0; r < 16; ++r) columns[r] = _mm512_loadu_si512(sums + r * 16);
        transpose16(columns);
    }
    for (int t = 0; t < 16 && t < tokens; ++t, out += p.out_stride) {
        __m512 value = _mm512_add_ps(_mm512_castsi512_ps(columns[t]), bias);
        if (p.add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, out));
        _mm512_mask_storeu_ps(out, mask, value);
    }
}

template <int R>
inline void tile_rows(const Product& p, const char* weight, int64_t stride, int64_t row, const char* ahead) {
    const int64_t steps = tile_steps(p.weight->columns);
    const char* x = static_cast<const char*>(p.x) + p.token_begin / kTokenTile * steps * kTileBytes;
    alignas(64) float sums[4 * 256];
    int64_t token = p.token_begin;
    for (; token + kTokenTile < p.token_end; token += 2 * kTokenTile, x += 2 * steps * kTileBytes) {
        tile_block<R, 2>(weight, stride, x, steps, ahead, sums);
        ahead = nullptr;
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < 2; ++t)
                write_tile(p, sums + (r * 2 + t) * 256, row + r * 16, token + t * kTokenTile);
    }
    if (token < p.token_end) {
        tile_block<R, 1>(weight, stride, x, steps, ahead, sums);
        for (int r = 0; r < R; ++r) write_tile(p, sums + r * 256, row + r * 16, token);
    }
}

// A copy of up to 16 rows, filled up with zeros to whole tiles
inline const char* pad_rows(const Product& p, int64_t row) {
    const int64_t columns = p.weight->columns, padded = tile_steps(columns) * 32;
    const bf16* weight = static_cast<const bf16*>(p.weight->data);
    bf16* copy = reinterpret_cast<bf16*>(p.scratch);
    std::memset(copy, 0, 16 * padded * sizeof(bf16));
    for (int64_t r = row; r < row + 16 && r < p.row_end; ++r)
        std::memcpy(copy + (r - row) * padded, weight + r * columns, columns * sizeof(bf16));
    settle();
    return reinterpret_cast<const char*>(copy);
}

void multiply_pairs(const Product& p) {
    const Tiles tiles;
    settle();
    const int64_t columns = p.weight->columns, stride = columns * 2;
    const char* weight = static_cast<const char*>(p.weight->data);
    int64_t row = p.row_begin;
    if (columns % 32 == 0) {
        for (; row + 32 <= p.row_end; row += 32) {
            const char* ahead = row + 64 <= p.row_end ? weight + (row + 32) * stride : nullptr;
            tile_rows<2>(p, weight + row * stride, stride, row, ahead);
        }
        for (; row + 16 <= p.row_end; row += 16) tile_rows<1>(p, weight + row * stride, stride, row, nullptr);
    }
    for (; row < p.row_end; row += 16) {
        const char* padded = pad_rows(p, row);
        tile_rows<1>(p, padded, tile_steps(columns) * 64, row, nullptr);
    }
}
