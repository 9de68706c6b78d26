// Products of grouped codes by AMX tiles, for many tokens. Included inside an unnamed namespace, behind tiles.hpp and
// dot_int4.hpp.
//
// A tile multiplies a group of columns: the low digits of sixteen tokens, as they lie, by the codes of sixteen rows, a byte
// each, as they lie. Its sums of integers run on over a span, begun at the bits of kBase, and are stored behind every group.
// What was stored is a float, for vectors to multiply by the group's step: the same numbers in the same order as without
// tiles. Minimums, and high digits, of which there are few, are the vectors' matter altogether.

// Sums of so many groups are stored before they are multiplied: of four tiles 16 KiB, which leave room in the L1.
constexpr int64_t kStoredGroups = 4;
static_assert(span_groups(32) % kStoredGroups == 0 && span_groups(16) % kStoredGroups == 0);

constexpr int kTileNumbers = kTokenTile * kCellRows;

struct alignas(64) BaseTile {
    int32_t bits[kTileNumbers];

    constexpr BaseTile() : bits() {
        for (int32_t& each : bits) each = __builtin_bit_cast(int32_t, kBase);
    }
};
constexpr BaseTile kBaseTile;

// Of up to two blocks of rows by two tiles of tokens; 2·r + t has those of r and t.
struct alignas(64) GroupSums {
    float running[4][kStoredGroups][kTileNumbers];  // [token][row]
    float sums[4][kTileNumbers];
};

// Tiles 4 and 5 are codes, 6 and 7 digits.
template <int kGroup>
constexpr TileConfig group_config() {
    TileConfig config;
    config.rows[4] = config.rows[5] = kGroup / 4;
    config.column_bytes[6] = config.column_bytes[7] = kGroup;
    return config;
}

template <int R, int T>
inline void begin_tiles() {
    _tile_loadd(0, kBaseTile.bits, 64);
    if constexpr (T > 1) _tile_loadd(1, kBaseTile.bits, 64);
    if constexpr (R > 1) _tile_loadd(2, kBaseTile.bits, 64);
    if constexpr (R > 1 && T > 1) _tile_loadd(3, kBaseTile.bits, 64);
}

template <int R, int T, class Rows>
inline void load_operands(const Rows* rows, int64_t group, const char* x, const DigitTiles& tiles) {
    const int64_t codes = group * Rows::kGroup * kCellRows;
    const char* digits = x + group * Rows::kGroup;
    _tile_loadd(4, rows[0].cells + codes, kCellBytes);
    _tile_loadd(6, digits, tiles.row.bytes);
    if constexpr (T > 1) _tile_loadd(7, digits + tiles.tile_bytes(), tiles.row.bytes);
    if constexpr (R > 1) _tile_loadd(5, rows[1].cells + codes, kCellBytes);
}

template <int R, int T>
inline void multiply_operands() {
    _tile_dpbssd(0, 6, 4);
    if constexpr (T > 1) _tile_dpbssd(1, 7, 4);
    if constexpr (R > 1) _tile_dpbssd(2, 6, 5);
    if constexpr (R > 1 && T > 1) _tile_dpbssd(3, 7, 5);
}

// Into slot `at`
template <int R, int T>
inline void store_running(int64_t at, GroupSums& out) {
    _tile_stored(0, out.running[0][at], 64);
    if constexpr (T > 1) _tile_stored(1, out.running[1][at], 64);
    if constexpr (R > 1) _tile_stored(2, out.running[2][at], 64);
    if constexpr (R > 1 && T > 1) _tile_stored(3, out.running[3][at], 64);
}

// Groups [begin, begin + count) of one tile, from their slots into its sums
template <class Rows>
inline void scale_groups(const Rows& rows, int64_t begin, int64_t count, const float (*running)[kTileNumbers], float* sums) {
    Vec each[kTokenTile];
#pragma GCC unroll 16
    for (int t = 0; t < kTokenTile; ++t) each[t] = load(sums + t * kCellRows);
    if (begin % span_groups(Rows::kGroup) == 0)
#pragma GCC unroll 16
        for (Vec& sum : each) sum = fma(splat(-kBase), rows.scale(begin, 0), sum);
    for (int64_t i = 0; i < count; ++i) {
        const Vec step = rows.step(begin + i, 0);
#pragma GCC unroll 16
        for (int t = 0; t < kTokenTile; ++t) each[t] = fma(load(running[i] + t * kCellRows), step, each[t]);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokenTile; ++t) store(sums + t * kCellRows, each[t]);
}

// The next group's operands are loaded before sums are stored: four tiles of sums cover all offsets of a page, and a load
// waits for stores before it that share its offset.
template <int R, int T, class Rows>
void add_groups(const Rows* rows, const char* x, const DigitTiles& tiles, GroupSums& out) {
    load_operands<R, T>(rows, 0, x, tiles);
    for (int64_t begin = 0; begin < rows->groups; begin += kStoredGroups) {
        const int64_t left = rows->groups - begin, count = left < kStoredGroups ? left : kStoredGroups;
        if (begin % span_groups(Rows::kGroup) == 0) begin_tiles<R, T>();
        for (int64_t i = 0; i < count; ++i) {
            multiply_operands<R, T>();
            if (const int64_t next = begin + i + 1; next < rows->groups) load_operands<R, T>(rows, next, x, tiles);
            store_running<R, T>(i, out);
        }
        settle();
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t)
                scale_groups(rows[r], begin, count, out.running[2 * r + t], out.sums[2 * r + t]);
    }
}

// R blocks of rows by up to two tiles of tokens, of which `count` are there, a multiple of eight
template <int R, class Rows>
void multiply_tiles(const Product& p, const DigitTiles& tiles, const Rows* rows, int64_t block, int64_t token, int64_t count) {
    const char* digits = static_cast<const char*>(p.x);
    GroupSums out;
    std::memset(out.sums, 0, sizeof out.sums);
    const auto for_each = [&](auto&& use) {
        for (int r = 0; r < R; ++r)
            for (int64_t t = 0; t < count; t += kPackedTokens) {
                float* sums = out.sums[2 * r + t / kTokenTile] + t % kTokenTile * kCellRows;
                use(r, token + t, PackedDigits(tiles, digits, token + t), sums);
            }
    };
    if constexpr (Rows::kHasMinimum)
        for_each([&](int r, int64_t, const PackedDigits& x, float* sums) {
            Vec each[1][kPackedTokens];
            begin_sums<1, kPackedTokens>(rows[r], x, each);
            for (int t = 0; t < kPackedTokens; ++t) store(sums + t * kCellRows, each[0][t]);
        });
    const char* first = digits + tiles.row_at(token);
    count > kTokenTile ? add_groups<R, 2>(rows, first, tiles, out) : add_groups<R, 1>(rows, first, tiles, out);
    for_each([&](int r, int64_t at, const PackedDigits& x, const float* sums) {
        Vec each[1][kPackedTokens];
        for (int t = 0; t < kPackedTokens; ++t) each[0][t] = load(sums + t * kCellRows);
        end_sums<1, kPackedTokens>(p, rows[r], (block + r) * kCellRows, at, x, x.marked(), each);
    });
}

template <int R, class Rows>
void multiply_blocks(const Product& p, const DigitTiles& tiles, int64_t block) {
    Rows rows[R];
    for (int r = 0; r < R; ++r) rows[r] = Rows::unpack(p, block + r, r);
    settle();
    int64_t token = p.token_begin;
    while (token + kPackedTokens <= p.token_end) {
        const int64_t whole = (p.token_end - token) / kPackedTokens * kPackedTokens;
        const int64_t count = whole < 2 * kTokenTile ? whole : 2 * kTokenTile;
        multiply_tiles<R>(p, tiles, rows, block, token, count);
        token += count;
    }
    if (token < p.token_end)
        for (int r = 0; r < R; ++r)
            compute_tokens(ManyTile<Rows>{p, tiles, block + r, nullptr, rows[r]}, token, p.token_end - token);
}

template <class Rows>
void multiply_many(const Product& p, const DigitTiles& tiles) {
    const Tiles held(group_config<Rows::kGroup>());
    const int64_t end = (p.row_end + kCellRows - 1) / kCellRows;
    const int64_t room = 2 * Rows::room(group_count(p.weight->groups, p.weight->columns));
    int64_t block = p.row_begin / kCellRows;
    if (room <= product_scratch(p.weight->columns) * static_cast<int64_t>(sizeof(float)))
        for (; block + 2 <= end; block += 2) multiply_blocks<2, Rows>(p, tiles, block);
    for (; block < end; ++block) multiply_blocks<1, Rows>(p, tiles, block);
}
