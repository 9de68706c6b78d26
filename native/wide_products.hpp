// Products of a level that has no instructions for bf16: floats as they are or widened, and codes. Included once per
// level, inside an unnamed namespace, behind dot.hpp and dot_int4.hpp.

int64_t prepared_bytes(int64_t tokens, int64_t columns, Precision precision) {
    return is_digits(precision) ? prepared_digits_bytes(tokens, columns) : 0;
}

void prepare(const float* x, int64_t begin, int64_t end, int64_t columns, Precision precision, void* prepared) {
    if (is_digits(precision)) prepare_digits(x, begin, end, columns, prepared);
}

void multiply(const Product& p) { is_digits(p.precision) ? multiply_digits(p) : multiply_wide(p); }
