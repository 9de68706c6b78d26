// The products of a level: for each way that activations enter one, the best that the level has. Included once per level,
// inside an unnamed namespace, after dot.hpp and dot_int4.hpp.

// bf16 by bf16; a level without such instructions takes activations as they are and widens the weights.
#if defined(__AMX_TILE__)
#include "tiles.hpp"
#elif defined(__AVX512BF16__)
#include "dot_bf16.hpp"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "dot_bf16_arm.hpp"
#else
int64_t prepared_pairs_bytes(int64_t, int64_t) { return 0; }
void prepare_pairs(const float*, int64_t, int64_t, int64_t, void*) {}
void multiply_pairs(const Product& p) { multiply_wide(p); }
#endif

// float16 by float16, likewise
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#include "dot_half.hpp"
#else
int64_t prepared_halves_bytes(int64_t, int64_t) { return 0; }
void prepare_halves(const float*, int64_t, int64_t, int64_t, void*) {}
void multiply_halves(const Product& p) { multiply_wide(p); }
#endif

// Codes by digits
#if defined(__AMX_TILE__)
#include "tiles_int8.hpp"
#include "tiles_groups.hpp"
#else
int64_t prepared_bytes_bytes(int64_t tokens, int64_t columns) { return prepared_digits_bytes(tokens, columns); }
void multiply_bytes(const Product& p) { multiply_int8(p); }
#endif

int64_t prepared_bytes(int64_t tokens, int64_t columns, Precision precision) {
    switch (precision) {
        case Precision::bf16: return prepared_pairs_bytes(tokens, columns);
        case Precision::f16: return prepared_halves_bytes(tokens, columns);
        case Precision::int8: return prepared_bytes_bytes(tokens, columns);
        case Precision::grouped: return prepared_groups_bytes(tokens, columns);
        default: return 0;
    }
}

void prepare(const float* x, int64_t begin, int64_t end, int64_t columns, Precision precision, void* prepared) {
    switch (precision) {
        case Precision::bf16: return prepare_pairs(x, begin, end, columns, prepared);
        case Precision::f16: return prepare_halves(x, begin, end, columns, prepared);
        case Precision::int8: return prepare_digits(x, begin, end, columns, prepared);
        case Precision::grouped: return prepare_groups(x, begin, end, columns, prepared);
        default: return;
    }
}

void multiply(const Product& p) {
    switch (p.precision) {
        case Precision::bf16: return multiply_pairs(p);
        case Precision::f16: return multiply_halves(p);
        case Precision::int8: return multiply_bytes(p);
        case Precision::grouped: return multiply_groups(p);
        default: return multiply_wide(p);
    }
}
