// Activations as 8-bit digits, for products with quantised weights. Included once per level, inside an unnamed namespace,
// behind elementwise.hpp.
//
// A token's activations become whole numbers of one scale: x ≈ scale·(low + 128·high), both digits within ±127. The scale
// is chosen by what is common in the token, not by its largest value: nearly all numbers fit into the low digit, and the
// few that do not (the same few channels in every token, as models have them) get a high digit. `marks` says which fours of
// columns have one; the others skip the second product. Sums of digits are integers, so they are exact in any order.
//
//     [low: stride bytes][high: stride bytes][marks: a bit per four columns][sums: float per 32 columns]
//     [surplus: int32 per 16 columns of low digits, then of high ones][scale]
//     stride: columns in whole blocks; a sum is that of low + 128·high, a whole number
//
// The surplus is what products have too much on levels that add 128 to the codes, and is there on those alone: 128 times the
// sum of the digits, of low ones from the beginning of the span on, whose sums run on.
//
// Grouped products take tokens by eights. On most levels a tile has what they multiply with once more, behind its rows, fours
// of columns of eight tokens side by side, so that one pointer reaches all that they have of a group; and behind that a list
// of the fours that are marked in any of them, where they were prepared in one go and the fours are not too many. Where
// there are AMX tiles, the rows of sixteen tokens come first, then what each eight of them have.

#if defined(__AMX_TILE__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif
constexpr int64_t kDigitBlock = 64;  // columns that are split together
constexpr int64_t kSumColumns = 32, kSurplusColumns = 16;
constexpr int64_t kSpanColumns = 256;  // 256·127·128 < 2^22
constexpr int64_t kMarkColumns = 4, kWordColumns = 64 * kMarkColumns;
constexpr float kLargestDigit = 127.0f, kLargestNumber = 127.0f * 128.0f;
// Times the mean magnitude: what the low digit reaches. Less is more exact, and marks more.
constexpr float kLowReach = 8.0f;

struct DigitRow {
    int64_t stride, words, bytes;

    explicit DigitRow(int64_t columns)
        : stride((columns + kDigitBlock - 1) / kDigitBlock * kDigitBlock),
          words((stride + kWordColumns - 1) / kWordColumns),
          bytes((scale_at() + 4 + 63) / 64 * 64) {}

    int64_t sums_at() const { return 2 * stride + 8 * words; }
    int64_t surplus_at() const { return sums_at() + 4 * (stride / kSumColumns); }
    int64_t surplus_bytes() const { return kBiased ? 4 * (stride / kSurplusColumns) : 0; }
    int64_t scale_at() const { return surplus_at() + 2 * surplus_bytes(); }

    static const int8_t* low(const char* row) { return reinterpret_cast<const int8_t*>(row); }
    const int8_t* high(const char* row) const { return reinterpret_cast<const int8_t*>(row) + stride; }
    const uint64_t* marks(const char* row) const { return reinterpret_cast<const uint64_t*>(row + 2 * stride); }
    const float* sums(const char* row) const { return reinterpret_cast<const float*>(row + sums_at()); }
    const int32_t* low_surplus(const char* row) const { return reinterpret_cast<const int32_t*>(row + surplus_at()); }
    const int32_t* high_surplus(const char* row) const {
        return reinterpret_cast<const int32_t*>(row + surplus_at() + surplus_bytes());
    }
    int32_t low_surplus_of_all(const char* row) const {
        constexpr int64_t kSpan = kSpanColumns / kSurplusColumns;
        const int64_t parts = stride / kSurplusColumns;
        int32_t total = 0;
        for (int64_t begin = 0; begin < parts; begin += kSpan)
            total += low_surplus(row)[(begin + kSpan < parts ? begin + kSpan : parts) - 1];
        return total;
    }
    int32_t high_surplus_of(const char* row, int64_t group, int64_t columns) const {
        const int32_t* parts = high_surplus(row) + group * columns / kSurplusColumns;
        return columns == kSurplusColumns ? parts[0] : parts[0] + parts[1];
    }
    int32_t high_surplus_of_all(const char* row) const {
        int32_t total = 0;
        for (int64_t part = 0; part < stride / kSurplusColumns; ++part) total += high_surplus(row)[part];
        return total;
    }
    float scale(const char* row) const {
        float value;
        std::memcpy(&value, row + scale_at(), sizeof value);
        return value;
    }
};

constexpr int64_t kPackedTokens = kWholeTokens;
constexpr int64_t kRowTokens = kHasTiles ? kTokenTile : kPackedTokens;  // whose rows lie one behind the other

struct PackedGroup {  // 32 columns of eight tokens
    int8_t low[kSumColumns / 4][kPackedTokens][4];
    int32_t surplus[kBiased ? kSumColumns / kSurplusColumns : 0][kPackedTokens];  // where there is one
    float sums[kPackedTokens];
};

struct HighFour {  // high digits of four columns
    int32_t four;  // within its group
    int8_t digits[kPackedTokens][4];
};

struct HighGroup {  // 32 columns with marks
    int32_t group, count;  // of fours
    int32_t start[kPackedTokens];  // of the sums: minus the surplus
};

struct HighList {
    static constexpr int32_t kNone = -1;

    int32_t num_groups;  // or kNone: the marks of the rows say it

    // Room for as many as a row has; behind them the fours, one after the other
    HighGroup* groups() { return reinterpret_cast<HighGroup*>(this + 1); }
    const HighGroup* groups() const { return reinterpret_cast<const HighGroup*>(this + 1); }
};

// Where the tokens of a grouped product lie
struct DigitTiles {
    DigitRow row;
    int64_t groups;

    explicit DigitTiles(int64_t columns) : row(columns), groups(row.stride / kSumColumns) {}

    static constexpr int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
    int64_t most_fours() const { return 2 * groups; }  // that a list has: a quarter of all
    int64_t packed_bytes() const { return whole_lines(groups * static_cast<int64_t>(sizeof(PackedGroup))); }
    int64_t list_bytes() const {
        return whole_lines(sizeof(HighList) + groups * sizeof(HighGroup) + most_fours() * sizeof(HighFour));
    }
    int64_t tile_bytes() const {
        return kRowTokens * row.bytes + kRowTokens / kPackedTokens * (packed_bytes() + list_bytes());
    }
    const HighFour* fours(const HighList* list) const { return reinterpret_cast<const HighFour*>(list->groups() + groups); }
    int64_t row_at(int64_t token) const {
        if (!kPacksTiles) return token * row.bytes;
        return token / kRowTokens * tile_bytes() + token % kRowTokens * row.bytes;
    }
    int64_t packed_at(int64_t token) const {
        const int64_t eight = token % kRowTokens / kPackedTokens;
        return token / kRowTokens * tile_bytes() + kRowTokens * row.bytes + eight * (packed_bytes() + list_bytes());
    }
    int64_t list_at(int64_t token) const { return packed_at(token) + packed_bytes(); }
    int64_t bytes(int64_t tokens) const {
        return row_at(kPacksTiles ? (tokens + kRowTokens - 1) / kRowTokens * kRowTokens : tokens);
    }
};

constexpr int kSumLanes = 16;  // numbers that are added up side by side, on every level, so that all find the same scale

inline float sum_lanes(const Vec* lanes) {
    float each[kSumLanes], total = 0.0f;
    for (int i = 0; i < kSumLanes / kWidth; ++i) store(each + i * kWidth, lanes[i]);
    for (const float value : each) total += value;
    return total;
}

// Not a number if any of them is not finite, so that every output of the token shows it; 0 if they are all next to nothing.
inline float digit_scale(const float* x, int64_t count) {
    constexpr int kVecs = kSumLanes / kWidth;
    Vec most = splat(0.0f), total[kVecs], poison = splat(0.0f);
    for (Vec& lanes : total) lanes = splat(0.0f);
    for (int64_t i = 0; i < count; i += kSumLanes)
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) {
            const Vec v = magnitude(load_some(x + i + j * kWidth, count - i - j * kWidth));
            most = larger(v, most);
            total[j] = total[j] + v;
            poison = poison + (v - v);
        }
    const float top = largest(most), mean = sum_lanes(total) / static_cast<float>(count), bad = sum(poison);
    const float common = __builtin_fmaxf(mean * (kLowReach / kLargestDigit), top / kLargestNumber);
    const float scale = __builtin_fminf(top / kLargestDigit, common);
    if (bad != 0.0f) return __builtin_nanf("");
    return scale < 1e-30f ? 0.0f : scale;
}

inline uint64_t marks_of(const int8_t* high) {
    uint64_t marks = 0;
    for (int i = 0; i < kDigitBlock / kMarkColumns; ++i) {
        uint32_t four;
        std::memcpy(&four, high + i * kMarkColumns, sizeof four);
        marks |= uint64_t{four != 0} << i;
    }
    return marks;
}

// Digits and sums of one block; returns the marks of its fours.
inline uint64_t split_block(const float* x, int64_t given, float inverse, int8_t* low, int8_t* high, float* sums) {
    constexpr int kVecs = kDigitBlock / kWidth, kSumVecs = kSumColumns / kWidth;
    Vec numbers[kVecs], most = splat(0.0f);
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) {
        const Vec v = round_even(load_some(x + i * kWidth, given - i * kWidth) * splat(inverse));
        numbers[i] = v;
        most = larger(magnitude(v), most);
    }
    const bool marked = largest(most) > kLargestDigit;
    const Vec limit = splat(kLargestNumber);
    if (marked)
#pragma GCC unroll 16
        for (Vec& v : numbers)
            v = where_less(limit, v, limit, where_less(v, splat(0.0f) - limit, splat(0.0f) - limit, v));
#pragma GCC unroll 2
    for (int part = 0; part < kDigitBlock / kSumColumns; ++part) {
        Vec total = numbers[part * kSumVecs];
#pragma GCC unroll 16
        for (int i = 1; i < kSumVecs; ++i) total = total + numbers[part * kSumVecs + i];
        sums[part] = sum(total);  // exact: whole numbers below 2^24
    }
    if (marked) {
        Vec upper[kVecs];
#pragma GCC unroll 16
        for (int i = 0; i < kVecs; ++i) {
            const Vec digit = round_even(numbers[i] * splat(1.0f / 128.0f));
            upper[i] = where_less(splat(kLargestDigit), magnitude(numbers[i]), digit, splat(0.0f));
            numbers[i] = numbers[i] - upper[i] * splat(128.0f);  // exact, fused or not
        }
        store_bytes(high, upper);
    } else {
        std::memset(high, 0, kDigitBlock);
    }
    store_bytes(low, numbers);
    return marked ? marks_of(high) : 0;
}

// 128 times the sum of sixteen digits
inline int32_t surplus_of(const int8_t* digits) {
    int32_t total = 0;
    for (int i = 0; i < kSurplusColumns; ++i) total += digits[i];
    return 128 * total;
}

inline void add_surplus(const DigitRow& row, int64_t begin, bool marked, char* out) {
    int32_t* low = const_cast<int32_t*>(row.low_surplus(out)) + begin / kSurplusColumns;
    int32_t* high = const_cast<int32_t*>(row.high_surplus(out)) + begin / kSurplusColumns;
    for (int64_t part = 0, k = begin; k < begin + kDigitBlock; ++part, k += kSurplusColumns) {
        low[part] = surplus_of(row.low(out) + k) + (k % kSpanColumns ? low[part - 1] : 0);
        high[part] = marked ? surplus_of(row.high(out) + k) : 0;
    }
}

void split_token(const float* x, int64_t columns, char* out) {
    const DigitRow row(columns);
    const float scale = digit_scale(x, columns), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int8_t* low = reinterpret_cast<int8_t*>(out);
    uint64_t* marks = reinterpret_cast<uint64_t*>(out + 2 * row.stride);
    float* sums = reinterpret_cast<float*>(out + row.sums_at());
    std::memset(marks, 0, 8 * row.words);
    for (int64_t k = 0; k < columns; k += kDigitBlock) {
        const uint64_t found =
            split_block(x + k, columns - k, inverse, low + k, low + row.stride + k, sums + k / kSumColumns);
        marks[k / kWordColumns] |= found << (k % kWordColumns / kMarkColumns);
        if constexpr (kBiased) add_surplus(row, k, found != 0, out);
    }
    std::memcpy(out + row.scale_at(), &scale, sizeof scale);
}

// What a tile has of a token, from the token's own row
inline void pack_token(const DigitTiles& tiles, const char* from, int64_t slot, PackedGroup* out) {
    const DigitRow& row = tiles.row;
    for (int64_t group = 0; group < tiles.groups; ++group) {
        const int8_t* low = row.low(from) + group * kSumColumns;
        for (int64_t four = 0; four < kSumColumns / 4; ++four)
            std::memcpy(out[group].low[four][slot], low + 4 * four, 4);
        if constexpr (kBiased)
            for (int64_t part = 0; part < 2; ++part)
                out[group].surplus[part][slot] = row.low_surplus(from)[2 * group + part];
        out[group].sums[slot] = row.sums(from)[group];
    }
}

// The marked fours of a group, behind those before them. False: there is no room.
inline bool list_fours(const DigitTiles& tiles, const char* rows, int64_t group, uint64_t marks, HighList* list,
                       HighFour*& next, const HighFour* end) {
    const DigitRow& row = tiles.row;
    HighGroup& out = list->groups()[list->num_groups++];
    out = {static_cast<int32_t>(group), static_cast<int32_t>(__builtin_popcountll(marks)), {}};
    if (out.count > end - next) return false;
    for (int64_t t = 0; kBiased && t < kPackedTokens; ++t)
        out.start[t] = -row.high_surplus_of(rows + t * row.bytes, group, kSumColumns);
    for (; marks; marks &= marks - 1, ++next) {
        next->four = __builtin_ctzll(marks);
        const int64_t column = group * kSumColumns + next->four * kMarkColumns;
        for (int64_t t = 0; t < kPackedTokens; ++t)
            std::memcpy(next->digits[t], row.high(rows + t * row.bytes) + column, kMarkColumns);
    }
    return true;
}

inline void list_high(const DigitTiles& tiles, const char* rows, HighList* list) {
    constexpr int64_t kGroupMarks = kSumColumns / kMarkColumns, kWordGroups = 64 / kGroupMarks;
    HighFour* next = const_cast<HighFour*>(tiles.fours(list));
    const HighFour* end = next + tiles.most_fours();
    list->num_groups = 0;
    for (int64_t word = 0; word < tiles.row.words; ++word) {
        uint64_t all = 0;
        for (int64_t t = 0; t < kPackedTokens; ++t) all |= tiles.row.marks(rows + t * tiles.row.bytes)[word];
        for (int64_t group = word * kWordGroups; all; ++group, all >>= kGroupMarks)
            if (const uint64_t marks = all & ((1u << kGroupMarks) - 1); marks)
                if (!list_fours(tiles, rows, group, marks, list, next, end)) {
                    list->num_groups = HighList::kNone;
                    return;
                }
    }
}

int64_t prepared_groups_bytes(int64_t tokens, int64_t columns) { return DigitTiles(columns).bytes(tokens); }

void prepare_groups(const float* x, int64_t begin, int64_t end, int64_t columns, void* prepared) {
    const DigitTiles tiles(columns);
    char* at = static_cast<char*>(prepared);
    for (int64_t token = begin; token < end; ++token) {
        char* row = at + tiles.row_at(token);
        split_token(x + token * columns, columns, row);
        if constexpr (kPacksTiles)
            pack_token(tiles, row, token % kPackedTokens, reinterpret_cast<PackedGroup*>(at + tiles.packed_at(token)));
    }
    if constexpr (kPacksTiles)  // of each tile, whoever has its first token
        for (int64_t token = (begin + kPackedTokens - 1) / kPackedTokens * kPackedTokens; token < end;
             token += kPackedTokens) {
            HighList* list = reinterpret_cast<HighList*>(at + tiles.list_at(token));
            list->num_groups = HighList::kNone;
            if (token + kPackedTokens <= end) list_high(tiles, at + tiles.row_at(token), list);
        }
}

int64_t prepared_digits_bytes(int64_t tokens, int64_t columns) { return tokens * DigitRow(columns).bytes; }

void prepare_digits(const float* x, int64_t begin, int64_t end, int64_t columns, void* prepared) {
    const int64_t bytes = DigitRow(columns).bytes;
    for (int64_t token = begin; token < end; ++token)
        split_token(x + token * columns, columns, static_cast<char*>(prepared) + token * bytes);
}
