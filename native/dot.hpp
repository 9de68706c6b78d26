// Products of weight rows with activation rows, both contiguous along the summed dimension, so neither is packed. Included
// once per level, inside an unnamed namespace, behind its simd header.
//
// Columns are summed up in runs, each to one number. So many tokens can go over a stretch of rows that stays in the L1.
//
// Within a run an output has one vector of partial sums or several, its chains, which take turns at the columns. With
// several, one row alone has enough additions under way to be multiplied as fast as memory hands it out, which is in one
// stream rather than eight; a tile of many outputs goes over the run once per chain, with one vector for each of them.
//
// One order either way, whatever the size of the tile that an output is computed in.

constexpr int kManyTokens = 4 * kTileTokens;  // from here on rows are copied, and those of 16 bits widened, before
constexpr int64_t kFewRows = 8, kBlockRows = 16, kMostTokens = 240;  // that are taken together
constexpr int64_t kRowAheadBytes = 512;                // a row that is a stream is fetched this far ahead

// How an output is summed up: here in float32, from weights as they are or widened as they are read.
template <class W>
struct Wide {
    using Weight = W;
    using Operand = float;
    using Sums = Vec;
    static constexpr int64_t kLanes = kWidth;
    static constexpr int64_t kRun = 512;
    static constexpr int kChains = 1;

    template <class T>
    static Sums load_from(const T* at) {
        return load(at);
    }
    static Sums zero() { return splat(0.0f); }
    static Sums add_product(Sums sums, Sums w, Sums x) { return fma(w, x, sums); }
    static float total(Sums sums) { return sum(sums); }
    static int64_t operand_stride(int64_t columns) { return columns; }
    static float scale(const Operand*, int64_t) { return 1.0f; }
};

template <int kCount, class Sums>
inline Sums add_up(const Sums* chains) {
    if constexpr (kCount == 1)
        return chains[0];
    else
        return add_up<kCount / 2>(chains) + add_up<kCount / 2>(chains + kCount / 2);
}

// Columns that fill no vector, one by one. Fused by name: left to the compiler, a product would be fused with its sum in one
// tile and not in another.
template <class A>
inline float dot_rest(const typename A::Weight* row, const typename A::Operand* x, int64_t count) {
    float total = 0.0f;
    for (int64_t k = count / A::kLanes * A::kLanes; k < count; ++k) total = __builtin_fmaf(widen(row[k]), widen(x[k]), total);
    return total;
}

// One chain of R rows by T tokens. `ahead`, if there is one, is fetched line by line, as many bytes as are read here.
template <class A, int R, int T, bool kAhead>
[[gnu::always_inline]] inline void dot_chain(const typename A::Weight* const* rows, const typename A::Operand* const* x,
                                             int chain, int64_t count, const typename A::Weight* ahead,
                                             typename A::Sums (*sums)[T]) {
    constexpr int64_t kStep = A::kChains * A::kLanes, kStepBytes = R * kStep * sizeof(typename A::Weight);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[r][t] = A::zero();
    for (int64_t k = chain * A::kLanes; k + A::kLanes <= count; k += kStep) {
        if (kAhead && chain == 0)
#pragma GCC unroll 16
            for (int64_t line = 0; line < kStepBytes; line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(ahead + R * k) + line);
        if constexpr (T < R && kTileTokens < R) {  // the fewer ones stay in registers
            decltype(A::load_from(x[0])) v[T];
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) v[t] = A::load_from(x[t] + k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const auto w = A::load_from(rows[r] + k);
#pragma GCC unroll 16
                for (int t = 0; t < T; ++t) sums[r][t] = A::add_product(sums[r][t], w, v[t]);
            }
            continue;
        }
        decltype(A::load_from(rows[0])) w[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) w[r] = A::load_from(rows[r] + k);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            const auto v = A::load_from(x[t] + k);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r][t] = A::add_product(sums[r][t], w[r], v);
        }
    }
}

// One run of R rows by T tokens
template <class A, int R, int T, bool kAhead>
[[gnu::always_inline]] inline void dot_tile(const typename A::Weight* const* rows, const typename A::Operand* const* x,
                                            int64_t count, const typename A::Weight* ahead, float (*out)[T]) {
    typename A::Sums sums[A::kChains][R][T];
#pragma GCC unroll 1
    for (int chain = 0; chain < A::kChains; ++chain) {
        typename A::Sums own[R][T];  // in registers
        dot_chain<A, R, T, kAhead>(rows, x, chain, count, ahead, own);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[chain][r][t] = own[r][t];
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            typename A::Sums chains[A::kChains];
#pragma GCC unroll 16
            for (int chain = 0; chain < A::kChains; ++chain) chains[chain] = sums[chain][r][t];
            out[r][t] = A::total(add_up<A::kChains>(chains));
        }
    if (__builtin_expect(count % A::kLanes == 0, true)) return;
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) out[r][t] += dot_rest<A>(rows[r], x[t], count);
}

template <class A, int T>
[[gnu::always_inline]] inline void add_vector(const typename A::Weight* row, const typename A::Operand* const* x, int64_t k,
                                              int chain, typename A::Sums (*sums)[A::kChains]) {
    const auto w = A::load_from(row + k);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) sums[t][chain] = A::add_product(sums[t][chain], w, A::load_from(x[t] + k));
}

// One run of one row by T tokens, all chains at once; what follows in memory is fetched meanwhile
template <class A, int T>
[[gnu::always_inline]] inline void stream_tile(const typename A::Weight* row, const typename A::Operand* const* x,
                                               int64_t count, float* out) {
    constexpr int kChains = A::kChains;
    constexpr int64_t kStep = kChains * A::kLanes;
    typename A::Sums sums[T][kChains];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int chain = 0; chain < kChains; ++chain) sums[t][chain] = A::zero();
    int64_t k = 0;
    for (; k + kStep <= count; k += kStep) {
        __builtin_prefetch(reinterpret_cast<const char*>(row + k) + kRowAheadBytes);
#pragma GCC unroll 16
        for (int chain = 0; chain < kChains; ++chain) add_vector<A, T>(row, x, k + chain * A::kLanes, chain, sums);
    }
#pragma GCC unroll 16
    for (int chain = 0; chain + 1 < kChains; ++chain)
        if (k + (chain + 1) * A::kLanes <= count) add_vector<A, T>(row, x, k + chain * A::kLanes, chain, sums);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
        out[t] = A::total(add_up<kChains>(sums[t]));
        if (count % A::kLanes) out[t] += dot_rest<A>(row, x[t], count);
    }
}

inline void write_sum(const Product& p, int64_t row, int64_t token, float value) {
    float* at = p.out + (token - p.token_begin) * p.out_stride + (row - p.row_begin);
    if (p.bias) value += p.bias[row - p.row_begin];
    *at = p.add ? *at + value : value;
}

template <class A>
inline const typename A::Operand* operand_of(const Product& p, int64_t token) {
    return static_cast<const typename A::Operand*>(p.x) + token * A::operand_stride(p.weight->columns);
}

template <class A>
inline void write_scaled(const Product& p, int64_t row, int64_t token, float value) {
    write_sum(p, row, token, value * A::scale(operand_of<A>(p, token), p.weight->columns));
}

// Rows that are streams, one after the other
template <class A, int T>
inline void stream_rows(const Product& p) {
    const int64_t columns = p.weight->columns;
    for (int64_t row = p.row_begin; row < p.row_end; ++row) {
        const typename A::Weight* from = static_cast<const typename A::Weight*>(p.weight->data) + row * columns;
        float sums[T] = {};
        for (int64_t begin = 0; begin < columns; begin += A::kRun) {
            const typename A::Operand* x[T];
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) x[t] = operand_of<A>(p, p.token_begin + t) + begin;
            float out[T];
            stream_tile<A, T>(from + begin, x, columns - begin < A::kRun ? columns - begin : A::kRun, out);
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[t] = begin == 0 ? out[t] : sums[t] + out[t];
        }
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) write_scaled<A>(p, row, p.token_begin + t, sums[t]);
    }
}

// Some rows by some tokens: a run of the rows stays in the L1 while the tokens go by.
template <class A>
struct Block {
    const typename A::Weight* rows[kBlockRows];  // at the run's first column
    const typename A::Weight* next;              // rows that follow in memory, to be fetched meanwhile; or null
    int64_t num_rows, first_token, num_tokens;
    int64_t begin, count;  // columns of the run
    float* sums;           // [kBlockRows][kMostTokens], over the runs so far
};

template <class A, int R, int T, bool kAhead>
inline void block_tile(const Product& p, const Block<A>& block, int64_t row, int64_t token) {
    const typename A::Operand* x[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) x[t] = operand_of<A>(p, block.first_token + token + t) + block.begin;
    const typename A::Weight* ahead = kAhead ? block.next + row * p.weight->columns + R * block.begin : nullptr;
    float out[R][T];
    dot_tile<A, R, T, kAhead>(block.rows + row, x, block.count, ahead, out);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            float* sum = block.sums + (row + r) * kMostTokens + token + t;
            *sum = block.begin == 0 ? out[r][t] : *sum + out[r][t];
        }
}

template <class A, int T, bool kAhead>
inline void block_tokens(const Product& p, const Block<A>& block, int64_t token) {
    int64_t row = 0;
    if constexpr (T == 1 && A::kChains == 1)  // enough sums to keep the units busy
        for (; row + 8 <= block.num_rows; row += 8) block_tile<A, 8, 1, kAhead>(p, block, row, token);
    for (; row + 4 <= block.num_rows; row += 4) block_tile<A, 4, T, kAhead>(p, block, row, token);
    for (; row < block.num_rows; ++row) block_tile<A, 1, T, kAhead>(p, block, row, token);
}

template <class A, bool kAhead, int T = kTileTokens>
inline void some_tokens(const Product& p, const Block<A>& block, int64_t token, int64_t count) {
    if (count == T) return block_tokens<A, T, kAhead>(p, block, token);
    if constexpr (T > 1) some_tokens<A, kAhead, T - 1>(p, block, token, count);
}

// All tokens, in tiles of much the same size
template <class A>
inline void block_run(const Product& p, const Block<A>& block) {
    const int64_t tiles = (block.num_tokens + kTileTokens - 1) / kTileTokens;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t token = block.num_tokens * tile / tiles, end = block.num_tokens * (tile + 1) / tiles;
        if (block.next && tile == 0)
            some_tokens<A, true>(p, block, token, end - token);
        else
            some_tokens<A, false>(p, block, token, end - token);
    }
}

// Many tokens: rows are copied, widened where they must be. Side by side they do not push each other out of the cache, as
// those of a matrix do whose columns are a power of two.
template <class W, class A>
inline void copy_rows(const Product& p, int64_t row, Block<A>& block) {
    auto* copies = reinterpret_cast<typename A::Weight*>(block.sums + kBlockRows * kMostTokens);
    for (int64_t r = 0; r < block.num_rows; ++r, copies += A::kRun) {
        const W* from = static_cast<const W*>(p.weight->data) + (row + r) * p.weight->columns + block.begin;
        if constexpr (std::is_same_v<W, typename A::Weight>)
            std::memcpy(copies, from, block.count * sizeof(W));
        else
            load_row_as(from, block.count, 1.0f, false, copies);
        block.rows[r] = copies;
    }
}

template <class W, class A, bool kCopies>
inline void multiply_block(const Product& p, int64_t row, int64_t rows, int64_t first, int64_t tokens) {
    const int64_t columns = p.weight->columns;
    Block<A> block{{}, nullptr, rows, first, tokens, 0, 0, p.scratch};
    if constexpr (!kCopies) {
        const W* from = static_cast<const W*>(p.weight->data) + row * columns;
        for (int64_t r = 0; r < rows; ++r) block.rows[r] = from + r * columns;
        block.next = from + rows * columns;
    }
    for (; block.begin < columns; block.begin += A::kRun) {
        block.count = columns - block.begin < A::kRun ? columns - block.begin : A::kRun;
        if constexpr (kCopies) copy_rows<W>(p, row, block);
        block_run(p, block);
        if constexpr (!kCopies)
            for (int64_t r = 0; r < rows; ++r) block.rows[r] += A::kRun;
    }
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t r = 0; r < rows; ++r)
            write_scaled<A>(p, row + r, first + token, block.sums[r * kMostTokens + token]);
}

// A: how few tokens are multiplied, B: many
template <class A, class B>
inline void multiply_rows(const Product& p) {
    using W = typename A::Weight;
    const int64_t tokens = p.token_end - p.token_begin;
    if constexpr (A::kChains > 1) {
        if (tokens == 1) return stream_rows<A, 1>(p);
        if (tokens == 2) return stream_rows<A, 2>(p);
        if (tokens == 3) return stream_rows<A, 3>(p);
    }
    const bool few = tokens < kManyTokens;
    const int64_t most_rows = few ? kFewRows : kBlockRows;
    for (int64_t row = p.row_begin; row < p.row_end; row += most_rows) {
        const int64_t rows = p.row_end - row < most_rows ? p.row_end - row : most_rows;
        if (few) {
            multiply_block<W, A, false>(p, row, rows, p.token_begin, tokens);
            continue;
        }
        for (int64_t token = p.token_begin; token < p.token_end; token += kMostTokens)
            multiply_block<W, B, true>(p, row, rows, token,
                                       p.token_end - token < kMostTokens ? p.token_end - token : kMostTokens);
    }
}

#if !defined(__AVX512F__)  // which have products of their own: dot_lanes.hpp
void multiply_wide(const Product& p) {
    switch (p.weight->type) {
        case DType::f32: return multiply_rows<Wide<float>, Wide<float>>(p);
        case DType::f16: return multiply_rows<Wide<f16>, Wide<float>>(p);
        default: return multiply_rows<Wide<bf16>, Wide<float>>(p);
    }
}
#endif
