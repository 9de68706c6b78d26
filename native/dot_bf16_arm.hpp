// Products of bf16 rows by the instruction that multiplies pairs of bf16 and adds them to a float32. Included inside an
// unnamed namespace, after dot.hpp. Prepared activations: rows of bf16, each from a new line of memory on.

struct Pairs {
    using Weight = bf16;
    using Operand = bf16;
    using Sums = float32x4_t;
    static constexpr int64_t kLanes = 8;
    static constexpr int kChains = 1;
    static constexpr int64_t kRun = 1024;

    static bfloat16x8_t load_from(const bf16* at) {
        return vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(at)));
    }
    static Sums zero() { return vdupq_n_f32(0); }
    static Sums add_product(Sums sums, bfloat16x8_t w, bfloat16x8_t x) { return vbfdotq_f32(sums, w, x); }
    static float total(Sums sums) { return sum(sums); }
    static int64_t operand_stride(int64_t columns) { return (columns + 31) / 32 * 32; }
    static float scale(const Operand*, int64_t) { return 1.0f; }
};

int64_t prepared_pairs_bytes(int64_t tokens, int64_t columns) { return tokens * Pairs::operand_stride(columns) * 2; }

void prepare_pairs(const float* x, int64_t begin, int64_t end, int64_t columns, void* prepared) {
    for (int64_t token = begin; token < end; ++token)
        store_row(x + token * columns, columns, DType::bf16,
                  static_cast<bf16*>(prepared) + token * Pairs::operand_stride(columns));
}

void multiply_pairs(const Product& p) { multiply_rows<Pairs, Pairs>(p); }
