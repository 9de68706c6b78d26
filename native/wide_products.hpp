// Products of a level that has no instructions for bf16: floats as they are or widened, and codes; float16 in arithmetic of
// its own where there is one. Included once per level, inside an unnamed namespace, behind dot.hpp and dot_int4.hpp.

#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#include "dot_half.hpp"
#else
int64_t prepared_halves_bytes(int64_t, int64_t) { return 0; }  // activations are taken as they are
void prepare_halves(const float*, int64_t, int64_t, int64_t, void*) {}
void multiply_halves(const Product& p) { multiply_wide(p); }
#endif

int64_t prepared_bytes(int64_t tokens, int64_t columns, Precision precision) {
    if (precision == Precision::f16) return prepared_halves_bytes(tokens, columns);
    return is_digits(precision) ? prepared_digits_bytes(tokens, columns) : 0;
}

void prepare(const float* x, int64_t begin, int64_t end, int64_t columns, Precision precision, void* prepared) {
    if (precision == Precision::f16) prepare_halves(x, begin, end, columns, prepared);
    if (is_digits(precision)) prepare_digits(x, begin, end, columns, prepared);
}

void multiply(const Product& p) {
    if (is_digits(p.precision)) return multiply_digits(p);
    p.precision == Precision::f16 ? multiply_halves(p) : multiply_wide(p);
}
