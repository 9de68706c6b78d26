// Products of grouped codes (groups.hpp) with digits of activations. Included once per level, inside an unnamed namespace,
// behind dot_int8.hpp.
//
// A group of columns has a scale s of its own per row. Its sum of integers is not turned into a float by itself: sums run
// on over a span of groups, and with P = what has come together up to a group,
//
//     Σ s·(P - P before) = Σ (s - s of the next group)·P
//
// which is one multiplication per group, by differences that all tokens share. P is below 2^22 within a span: begun at the
// bits of 1.5·2^23 it is a float that needs no conversion, and what it was begun at comes to kBase·(first s), taken off at
// the start. Halves of bytes are unpacked to 16 times their value, which fits into a byte and saves moving the upper half
// down; the scale of the token takes the 16 off again. Minimums are multiplied by the sums of a group's activations, which
// come with the digits. One order of sums, whatever the tile and the level.

constexpr float kBase = 12582912.0f;
constexpr int64_t span_groups(int64_t columns) { return kSpanColumns / columns; }
constexpr int64_t kStretchColumns = 1024;  // whose codes, of sixteen rows, stay in the L1 with the digits of a tile
constexpr int64_t kUnpackTokens = 24;  // from here on a block of rows is unpacked once, for all of them

// Whole numbers within ±128, as floats
inline Vec load_steps(const int8_t* at) {
#if defined(__aarch64__)
    int32_t four;
    std::memcpy(&four, at, sizeof four);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
#elif defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#endif
}

// Of a block of rows, or of some vectors of them, what a tile multiplies with
template <int kBits, int kSize, bool kNested, bool kMinimum, bool kFloats = false>
struct StoredRows {  // as they lie
    static constexpr int kGroup = kSize;
    static constexpr bool kHasMinimum = kMinimum;
    static constexpr float kCodeUnit = kFloats ? kFloatCodeUnit : kBits == 4 ? 16.0f : 1.0f;
    static constexpr Form kLower = kFloats ? Form::lower_floats : Form::lower;
    static constexpr Form kUpper = kFloats ? Form::upper_floats : Form::upper;
    static constexpr int64_t kGroupBytes = kSize * kBits / 8 * kCellRows;
    static constexpr bool kKnowsSteps = false;

    const int8_t* cells;
    ScaleRecord record;
    int64_t groups;
    int share = 0;  // the first vector of rows

    static StoredRows of(const Product& p, int64_t block) {
        const Matrix& m = *p.weight;
        return {static_cast<const int8_t*>(m.data) + block * block_code_bytes(m.groups, m.columns),
                scale_record(m.groups, m.columns, m.scales, block), group_count(m.groups, m.columns)};
    }

    StoredRows from(int vec) const {
        const int64_t lanes = vec * kWidth;
        StoredRows rows = *this;
        rows.cells += vec * kCodes;
        rows.share = vec;
        if constexpr (kFloats)
            rows.record.exponents += lanes;
        else
            rows.record.scales += lanes;
        if constexpr (kMinimum) rows.record.minimums += lanes;
        if constexpr (kNested) rows.record.scale_steps += lanes;
        if constexpr (kNested && kMinimum) rows.record.minimum_steps += lanes;
        return rows;
    }

    static int64_t half_at(int64_t group) { return (kNested ? group / (kNestColumns / kSize) : group) * kCellRows; }

    [[gnu::always_inline]] Vec scale(int64_t group, int v) const {
        if constexpr (kFloats) return load_half_powers(record.exponents + group * kCellRows + v * kWidth);
        const Vec half = load_halves(record.scales + half_at(group) + v * kWidth);
        if constexpr (kNested) return half * load_steps(record.scale_steps + group * kCellRows + v * kWidth);
        return half;
    }

    // What the sum of a group's activations is multiplied by, in the unit of the codes
    [[gnu::always_inline]] Vec minimum(int64_t group, int v) const {
        Vec least = load_halves(record.minimums + half_at(group) + v * kWidth);
        if constexpr (kNested)
            least = splat(0.0f) - least * load_steps(record.minimum_steps + group * kCellRows + v * kWidth);
        if constexpr (kBits == 4) least = fma(scale(group, v), splat(8.0f), least);
        return least * splat(kCodeUnit);
    }

    // Vectors of rows that come one after the other read the same lines: each of them fetches its share of the next rows'.
    template <int V>
    [[gnu::always_inline]] void fetch_ahead(const int8_t* at) const {
        constexpr int64_t kShare = kGroupBytes * V / kBlockVecs;
        const int64_t ahead = V == kBlockVecs ? kAheadBytes : groups * kGroupBytes + share * (kGroupBytes / kBlockVecs);
#pragma GCC unroll 8
        for (int64_t line = 0; line < kShare; line += kCellBytes) __builtin_prefetch(at + ahead + line);
    }

    template <int V, int T, class X>
    [[gnu::always_inline]] void dot_group(int64_t group, const X& x, Ints (*sums)[T]) const {
        const int8_t* at = cells + group * kGroupBytes;
        fetch_ahead<V>(at);
        if constexpr (kBits == 4) {
            dot_cells<V, T, kLower>(at, x, x.template place<kSize>(group, 0), sums);
            dot_cells<V, T, kUpper>(at, x, x.template place<kSize>(group, 16), sums);
        } else {
            dot_cells<V, T, Form::bytes>(at, x, x.template place<kSize>(group, 0), sums);
            if constexpr (kSize == 32)
                dot_cells<V, T, Form::bytes>(at + kGroupBytes / 2, x, x.template place<kSize>(group, 16), sums);
        }
    }

    // High digits of four columns of a group, which lie at `high`(token)
    template <int V, int T, class High>
    [[gnu::always_inline]] void dot_four(int64_t group, int64_t four, High&& high, Ints (*sums)[T]) const {
        const int8_t* at = cells + group * kGroupBytes;
        if constexpr (kBits == 8)
            dot_high<V, T, Form::bytes>(at + four * kCellBytes, high, sums);
        else if (four < 4)
            dot_high<V, T, kLower>(at + four * kCellBytes, high, sums);
        else
            dot_high<V, T, kUpper>(at + (four - 4) * kCellBytes, high, sums);
    }
};

// Unpacked into the scratch: codes in bytes (those that are bytes stay where they lie), scales and minimums as floats. As
// they are multiplied, but for AMX, whose tiles take them with their sign. There is room for a block or two, `slot`.
template <class Stored>
struct UnpackedRows {
    static constexpr int kGroup = Stored::kGroup;
    static constexpr bool kHasMinimum = Stored::kHasMinimum;
    static constexpr float kCodeUnit = Stored::kCodeUnit;
    static constexpr bool kNibbles = kCodeUnit != 1.0f;
    static constexpr Form kForm = kNibbles && !kHasTiles ? Form::ready : Form::bytes;
    static constexpr bool kKnowsSteps = true;

    const int8_t* cells;
    const float *scales, *steps, *minimums;  // [groups][kCellRows]
    int64_t groups;

    static int64_t code_bytes(int64_t groups) { return kNibbles ? groups * kGroup * kCellRows : 0; }
    static int64_t room(int64_t groups) {
        return code_bytes(groups) + 3 * groups * kCellRows * static_cast<int64_t>(sizeof(float));
    }

    static UnpackedRows of(const Product& p, int64_t block, int64_t slot = 0) {
        const Stored stored = Stored::of(p, block);
        const int8_t* scratch = reinterpret_cast<const int8_t*>(p.scratch) + slot * room(stored.groups);
        const float* floats = reinterpret_cast<const float*>(scratch + code_bytes(stored.groups));
        const int64_t count = stored.groups * kCellRows;
        return {kNibbles ? scratch : stored.cells, floats, floats + count, floats + 2 * count, stored.groups};
    }

    static UnpackedRows unpack(const Product& p, int64_t block, int64_t slot = 0) {
        const Stored stored = Stored::of(p, block);
        const UnpackedRows rows = of(p, block, slot);
        float *scales = const_cast<float*>(rows.scales), *steps = const_cast<float*>(rows.steps);
        float* minimums = const_cast<float*>(rows.minimums);
        const int8_t* ahead = stored.cells + stored.groups * Stored::kGroupBytes;  // the next sixteen rows, needed soon
        for (int64_t group = 0; group < rows.groups; ++group, ahead += Stored::kGroupBytes) {
#pragma GCC unroll 8
            for (int64_t line = 0; line < Stored::kGroupBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
            for (int v = 0; v < kBlockVecs; ++v) {
                const int64_t at = group * kCellRows + v * kWidth;
                store(scales + at, stored.scale(group, v));
                if constexpr (kHasMinimum) store(minimums + at, stored.minimum(group, v));
            }
        }
        for (int64_t group = 0; group < rows.groups; ++group) {
            const bool is_last = (group + 1) % span_groups(kGroup) == 0 || group + 1 == rows.groups;
            for (int v = 0; v < kBlockVecs; ++v) {
                const Vec next = is_last ? splat(0.0f) : rows.scale(group + 1, v);
                store(steps + group * kCellRows + v * kWidth, rows.scale(group, v) - next);
            }
        }
        if constexpr (kNibbles) unpack_codes(stored, const_cast<int8_t*>(rows.cells));
        return rows;
    }

    template <Form kHalf>
    static Codes load_half(const int8_t* at) {
        return kForm == Form::ready ? load_form<kHalf>(at) : load_signed<kHalf>(at);
    }

    static void unpack_codes(const Stored& stored, int8_t* __restrict bytes) {
        for (int64_t group = 0; group < stored.groups; ++group, bytes += 2 * Stored::kGroupBytes)
            for (int64_t at = 0; at < Stored::kGroupBytes; at += kCodes) {
                const int8_t* from = stored.cells + group * Stored::kGroupBytes + at;
                write_codes(bytes + at, load_half<Stored::kLower>(from));
                write_codes(bytes + Stored::kGroupBytes + at, load_half<Stored::kUpper>(from));
            }
    }

    UnpackedRows from(int vec) const {
        const int64_t lanes = vec * kWidth;
        return {cells + vec * kCodes, scales + lanes, steps + lanes, minimums + lanes, groups};
    }

    [[gnu::always_inline]] Vec scale(int64_t group, int v) const { return load(scales + group * kCellRows + v * kWidth); }
    [[gnu::always_inline]] Vec step(int64_t group, int v) const { return load(steps + group * kCellRows + v * kWidth); }
    [[gnu::always_inline]] Vec minimum(int64_t group, int v) const {
        return load(minimums + group * kCellRows + v * kWidth);
    }

    template <int V, int T, class X>
    [[gnu::always_inline]] void dot_group(int64_t group, const X& x, Ints (*sums)[T]) const {
#pragma GCC unroll 2
        for (int k = 0; k < kGroup; k += 16)
            dot_cells<V, T, kForm>(cells + (group * kGroup + k) * kCellRows, x, x.template place<kGroup>(group, k), sums);
    }

    template <int V, int T, class High>
    [[gnu::always_inline]] void dot_four(int64_t group, int64_t four, High&& high, Ints (*sums)[T]) const {
        dot_high<V, T, kForm>(cells + (group * kGroup + four * kMarkColumns) * kCellRows, high, sums);
    }
};

// Groups [begin, end), at most a span of them. Inlined without fail: the sums must stay in registers.
template <int V, int T, class Rows, class X>
[[gnu::always_inline]] inline void add_span(const Rows& rows, int64_t begin, int64_t end, const X& x, Vec (*sums)[T]) {
    constexpr int64_t kParts = Rows::kGroup / kSurplusColumns;
    const auto last_part = [](int64_t group) { return (group + 1) * kParts - 1; };
    Ints running[V][T];
    Vec scales[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
        scales[v] = rows.scale(begin, v);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            running[v][t] = as_ints(splat(kBase));
            sums[v][t] = fma(splat(-kBase), scales[v], sums[v][t]);
        }
    }
    for (int64_t group = begin; group < end; ++group) {
        rows.template dot_group<V, T>(group, x, running);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            Vec step;
            if constexpr (Rows::kKnowsSteps) {
                step = rows.step(group, v);
            } else {
                const Vec next = group + 1 < end ? rows.scale(group + 1, v) : splat(0.0f);
                step = scales[v] - next;
                scales[v] = next;
            }
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) {
                Ints total = running[v][t];
                if constexpr (kBiased) total = subtract(total, spread(x.low_surplus(t, last_part(group))));
                sums[v][t] = add_scaled(total, step, sums[v][t]);
            }
        }
    }
}

template <int V, int T, class Rows>
[[gnu::always_inline]] inline void scale_high(const Rows& rows, int64_t group, const Ints (*high)[T], Vec (*sums)[T]) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
        const Vec scale = rows.scale(group, v) * splat(128.0f);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = fma(to_floats(high[v][t]), scale, sums[v][t]);
    }
}

// 128 times the high digits of one group, those that `marks` name
template <int V, int T, class Rows>
[[gnu::always_inline]] inline void add_high_group(const Rows& rows, int64_t group, uint64_t marks, const TokenDigits<T>& x,
                                                  Vec (*sums)[T]) {
    Ints high[V][T];
    clear_sums<V, T>(high);
    for (; marks; marks &= marks - 1) {
        const int64_t four = __builtin_ctzll(marks);
        rows.template dot_four<V, T>(group, four, x.high_at(group * Rows::kGroup + four * kMarkColumns), high);
    }
    if constexpr (kBiased) {
        int32_t surplus[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) surplus[t] = x.high_surplus(t, group, Rows::kGroup);
        take_off<V, T>(high, surplus);
    }
    scale_high<V, T>(rows, group, high, sums);
}

// The same by a tile's list
template <int V, int T, class Rows>
[[gnu::always_inline]] inline void add_listed(const Rows& rows, const PackedDigits& x, Vec (*sums)[T]) {
    const HighFour* four = x.fours;
    for (const HighGroup *at = x.list->groups(), *end = at + x.list->num_groups; at < end; ++at) {
        Ints high[V][T];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) high[v][t] = kBiased ? spread(at->start[t]) : no_sum();
        for (const HighFour* last = four + at->count; four < last; ++four)
            rows.template dot_four<V, T>(at->group, four->four, four->digits[0], high);
        scale_high<V, T>(rows, at->group, high, sums);
    }
}

template <int V, int T, class Rows, class X>
[[gnu::always_inline]] inline void add_high_groups(const Rows& rows, const X& x, Vec (*sums)[T]) {
    if constexpr (std::is_same_v<X, PackedDigits> && Rows::kGroup == kSumColumns)
        if (x.listed()) return add_listed<V, T>(rows, x, sums);
    constexpr int64_t kGroupMarks = Rows::kGroup / kMarkColumns, kWordGroups = 64 / kGroupMarks;
    constexpr uint64_t kMask = (uint64_t{1} << kGroupMarks) - 1;
    for (int64_t word = 0; word < x.shape.words; ++word)
        for (uint64_t marks = x.marks(word); marks;) {
            const int64_t in_word = __builtin_ctzll(marks) / kGroupMarks, shift = in_word * kGroupMarks;
            add_high_group<V, T>(rows, word * kWordGroups + in_word, marks >> shift & kMask, x, sums);
            marks &= ~(kMask << shift);
        }
}

template <int V, int T, class Rows, class X>
[[gnu::always_inline]] inline void add_minimums(const Rows& rows, const X& x, Vec (*sums)[T]) {
    for (int64_t group = 0; group < rows.groups; ++group)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            const Vec least = rows.minimum(group, v);
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[v][t] = fma(splat(x.sum(t, group)), least, sums[v][t]);
        }
}

template <int V, int T, class Rows, class X>
[[gnu::always_inline]] inline void begin_sums(const Rows& rows, const X& x, Vec (*sums)[T]) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[v][t] = splat(0.0f);
    if constexpr (Rows::kHasMinimum) add_minimums<V, T>(rows, x, sums);
}

template <int V, int T>
[[gnu::always_inline]] inline void copy_sums(const Vec (*from)[T], Vec (*to)[T]) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) to[v][t] = from[v][t];
}

// With high digits, into the rows from `row` on
template <int V, int T, class Rows, class X>
[[gnu::always_inline]] inline void end_sums(const Product& p, const Rows& rows, int64_t row, int64_t token, const X& x,
                                            bool marked, Vec (*sums)[T]) {
    if (marked) add_high_groups<V, T>(rows, x, sums);
    float scales[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) scales[t] = x.scales[t] * (1.0f / Rows::kCodeUnit);
    write_tile<V, T>(p, row, token, sums, scales);
}

// Sixteen rows by the tokens of `x`, V vectors of them at a time: all vectors read the same lines of codes, and come back
// to them while they are in the L1. Sums wait for their next columns in memory.
template <int V, int T, class Rows, class X>
inline void group_tile(const Product& p, const Rows& block_rows, int64_t row, int64_t token, const X& x, bool marked) {
    constexpr int64_t kSpan = span_groups(Rows::kGroup);
    const int64_t groups = block_rows.groups, stretch = V < kBlockVecs ? kStretchColumns / Rows::kGroup : groups;
    Vec waiting[kBlockVecs][T];
    for (int64_t begin = 0; begin < groups; begin += stretch)
        for (int vec = 0; vec < kBlockVecs; vec += V) {
            const Rows rows = block_rows.from(vec);
            const int64_t end = begin + stretch < groups ? begin + stretch : groups;
            Vec sums[V][T];
            if (begin == 0)
                begin_sums<V, T>(rows, x, sums);
            else
                copy_sums<V, T>(waiting + vec, sums);
            for (int64_t group = begin; group < end; group += kSpan)
                add_span<V, T>(rows, group, group + kSpan < end ? group + kSpan : end, x, sums);
            if (end == groups)
                end_sums<V, T>(p, rows, row + vec * kWidth, token, x, marked, sums);
            else
                copy_sums<V, T>(sums, waiting + vec);
        }
}

// Lists of marked fours, in the scratch, of the few tiles whose tokens several threads have prepared: looked for once, not
// with every sixteen rows.
struct OwnLists {
    static constexpr int64_t kMost = kUnpackTokens / kPackedTokens;

    int64_t begin;  // first token
    const HighList* of_tile[kMost] = {};

    OwnLists(const Product& p, const DigitTiles& tiles) : begin(p.token_begin) {
        char* at = reinterpret_cast<char*>(p.scratch);
        for (int64_t i = 0; i < kMost && begin + (i + 1) * kPackedTokens <= p.token_end; ++i) {
            const char* digits = static_cast<const char*>(p.x);
            const int64_t token = begin + i * kPackedTokens;
            const HighList* made = reinterpret_cast<const HighList*>(digits + tiles.list_at(token));
            if (made->num_groups != HighList::kNone) continue;
            HighList* list = reinterpret_cast<HighList*>(at);
            list_high(tiles, digits + tiles.row_at(token), list);
            of_tile[i] = list;
            at += tiles.list_bytes();
        }
    }

    const HighList* of(int64_t token) const { return of_tile[(token - begin) / kPackedTokens]; }
};

template <class Rows, int kMostTokens>
struct GroupTile {  // sixteen rows
    static constexpr int kTokens = kMostTokens;

    const Product& p;
    const DigitTiles& tiles;
    int64_t block;
    const OwnLists* lists = nullptr;
    Rows rows = Rows::of(p, block);

    template <int T>
    void compute(int64_t token) const {
        constexpr int V = vecs_for(T, kNibbleSums);
        const char* digits = static_cast<const char*>(p.x);
        if constexpr (kPacksTiles && T == kPackedTokens)
            multiply<V, T>(token, PackedDigits(tiles, digits, token, lists ? lists->of(token) : nullptr));
        else
            multiply<V, T>(token, TokenDigits<T>(tiles, digits + tiles.row_at(token)));
    }

    template <int V, int T, class X>
    void multiply(int64_t token, const X& x) const {
        group_tile<V, T>(p, rows, block * kCellRows, token, x, x.marked());
    }
};

// Blocks of rows that are unpacked, by many tokens
template <class Rows>
using ManyTile = GroupTile<Rows, kUnpackedTokens>;
#if defined(__AMX_TILE__)
template <class Rows>
void multiply_many(const Product& p, const DigitTiles& tiles);  // tiles_groups.hpp
#else
template <class Rows>
void multiply_many(const Product& p, const DigitTiles& tiles) {
    for (int64_t block = p.row_begin / kCellRows; block * kCellRows < p.row_end; ++block) {
        const ManyTile<Rows> tile{p, tiles, block, nullptr, Rows::unpack(p, block)};
        for (int64_t token = p.token_begin; token < p.token_end; token += tile.kTokens) {
            const int64_t left = p.token_end - token;
            compute_tokens(tile, token, left < tile.kTokens ? left : tile.kTokens);
        }
    }
}
#endif

template <int kBits, int kSize, bool kNested, bool kMinimum, bool kFloats = false>
void multiply_form(const Product& p) {
    using Stored = StoredRows<kBits, kSize, kNested, kMinimum, kFloats>;
    using Few = GroupTile<Stored, kBits == 4 ? kNibbleTokens : kUnpackedTokens>;
    const DigitTiles tiles(p.weight->columns);
    if (p.token_end - p.token_begin < kUnpackTokens) {
        const auto walk = [&](const OwnLists* lists) {
            walk_cells(p, block_code_bytes(p.weight->groups, p.weight->columns),
                       [&](int64_t block) { return Few{p, tiles, block, lists}; });
        };
        if constexpr (!kPacksTiles) return walk(nullptr);
        const OwnLists lists(p, tiles);
        return walk(&lists);
    }
    multiply_many<UnpackedRows<Stored>>(p, tiles);
}

void multiply_groups(const Product& p) {
    const Groups& form = p.weight->groups;
    if (form.floats) return multiply_form<4, 32, false, false, true>(p);
    if (form.bits == 4) {
        if (!form.minimum) return multiply_form<4, 32, false, false>(p);
        return form.nested ? multiply_form<4, 32, true, true>(p) : multiply_form<4, 32, false, true>(p);
    }
    if (form.size == 16) return multiply_form<8, 16, true, false>(p);
    if (!form.minimum) return multiply_form<8, 32, false, false>(p);
    form.nested ? multiply_form<8, 32, true, true>(p) : multiply_form<8, 32, false, true>(p);
}

[[maybe_unused]] void multiply_digits(const Product& p) {
    p.weight->type == DType::grouped ? multiply_groups(p) : multiply_int8(p);
}
