// The likeliest tokens of a row of logits, for whoever draws one of them.
#pragma once

#include <cstdint>

namespace dovetail {

// The `width` largest of x, largest first, of equals the first; where there are fewer, or what is not a number is among
// them, the rest has the value minus infinity and the token 0. Returns the sum of exp((x - largest)·sharpness) over all.
double find_candidates(const float* x, int64_t count, float sharpness, int64_t width, float* values, int64_t* tokens);

}  // namespace dovetail
