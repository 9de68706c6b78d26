// Products of bf16 rows by the instruction that multiplies pairs of bf16 and adds in float32. Included inside an unnamed
// namespace, behind dot.hpp. Prepared activations: bf16 rows, filled up with zeros to a multiple of 32 columns.

inline int64_t padded_columns(int64_t columns) { return (columns + 31) / 32 * 32; }

inline __m512bh load_pairs(const bf16* at, int64_t given) {
    const __mmask32 mask = given >= 32 ? ~__mmask32{0} : (__mmask32{1} << given) - 1;
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, at));
}

int64_t prepared_pairs_bytes(int64_t tokens, int64_t columns) { return tokens * padded_columns(columns) * 2; }

void prepare_pairs(const float* x, int64_t begin, int64_t end, int64_t columns, void* prepared) {
    const int64_t stride = padded_columns(columns);
    for (int64_t token = begin; token < end; ++token) {
        bf16* row = static_cast<bf16*>(prepared) + token * stride;
        store_row(x + token * columns, columns, DType::bf16, row);
        for (int64_t k = columns; k < stride; ++k) row[k] = {0};
    }
}

template <int R, int T>
inline void pair_block(const Product& p, int64_t row, int64_t token) {
    const int64_t columns = p.weight->columns, stride = padded_columns(columns);
    const bf16* weight = static_cast<const bf16*>(p.weight->data) + row * columns;
    const bf16* x = static_cast<const bf16*>(p.x) + token * stride;
    Vec sums[R][T];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[r][t] = splat(0.0f);
    for (int64_t k = 0; k < columns; k += 32) {
        __m512bh w[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) w[r] = load_pairs(weight + r * columns + k, columns - k);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            const __m512bh v = load_pairs(x + t * stride + k, 32);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sums[r][t] = _mm512_dpbf16_ps(sums[r][t], w[r], v);
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) write_sum(p, row + r, token + t, sum(sums[r][t]));
}

template <int R>
inline void pair_rows(const Product& p, int64_t row) {
    int64_t token = p.token_begin;
    for (; token + 6 <= p.token_end; token += 6) pair_block<R, 6>(p, row, token);
    for (; token + 2 <= p.token_end; token += 2) pair_block<R, 2>(p, row, token);
    for (; token < p.token_end; ++token) pair_block<R, 1>(p, row, token);
}

void multiply_pairs(const Product& p) {
    int64_t row = p.row_begin;
    if (p.token_end - p.token_begin == 1)
        for (; row + 8 <= p.row_end; row += 8) pair_block<8, 1>(p, row, p.token_begin);
    for (; row + 4 <= p.row_end; row += 4) pair_rows<4>(p, row);
    for (; row < p.row_end; ++row) pair_rows<1>(p, row);
}
