// Products of int4 rows with digits of activations. Included once per level, inside an unnamed namespace, behind
// dot_int8.hpp.
//
// A group of 32 columns has a scale of its own: its integer sums become floats, are scaled and added up, group after group
// and lane by lane, in one order whatever the tile. Nibbles are unpacked in registers to 16 times their value, which fits
// into a byte and saves moving the upper one down; the scale of the token takes the 16 off again.

constexpr int64_t kGroup = 32, kBlockGroups = kDigitBlock / kGroup;

inline int64_t scales_stride(int64_t groups) { return groups + groups % 2; }  // a step may have two groups

// Scales of R rows in float32, in the thread's scratch
template <int R>
inline const float* widen_scales(const Product& p, int64_t row, int64_t groups) {
    const uint16_t* halves = static_cast<const uint16_t*>(p.weight->scales) + row * groups;
    const int64_t stride = scales_stride(groups);
    for (int r = 0; r < R; ++r, halves += groups) {
        float* out = p.scratch + r * stride;
        if (stride > groups) out[groups] = 0.0f;
        if (groups < kWidth) {
            uint16_t some[kWidth] = {};
            float wide[kWidth];
            for (int64_t i = 0; i < groups; ++i) some[i] = halves[i];
            store(wide, load_halves(some));
            for (int64_t i = 0; i < groups; ++i) out[i] = wide[i];
            continue;
        }
        for (int64_t i = 0; i + kWidth <= groups; i += kWidth) store(out + i, load_halves(halves + i));
        store(out + groups - kWidth, load_halves(halves + groups - kWidth));  // the rest, and some again
    }
    return p.scratch;
}

// One step of groups; `marked` ones have high digits. Inlined without fail: the sums must stay in registers.
template <int R, int T, bool kMarked>
[[gnu::always_inline]] inline void nibble_step(const uint8_t* weight, int64_t stride, const float* scales,
                                               int64_t groups, int64_t group, const int8_t* const* low,
                                               const int8_t* const* high, Vec (*sums)[T]) {
    const int64_t column = group * kGroup;
    GroupDigits lower[T], upper[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
        lower[t] = load_group(low[t] + column);
        if constexpr (kMarked) upper[t] = load_group(high[t] + column);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const Nibbles w = load_nibbles(weight + r * stride + group * (kGroup / 2), groups - group);
        const Scale scale = spread_scales(scales + r * scales_stride(groups) + group);
        const Ints start = nibble_start(w);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
            Vec total;
            if constexpr (kMarked) {
                const Ints high_sum = times_128(dot_nibbles(start, w, upper[t]));
                total = to_floats(dot_nibbles(add(high_sum, start), w, lower[t]));
            } else {
                total = dot_low(start, w, lower[t]);
            }
            sums[r][t] = add_scaled(sums[r][t], total, scale);
        }
    }
}

template <int R, int T, bool kAhead>
inline void nibble_block(const Product& p, int64_t row, int64_t token) {
    const int64_t groups = (p.weight->columns + kGroup - 1) / kGroup, stride = groups * (kGroup / 2);
    const DigitRow digits(p.weight->columns);
    const uint8_t* weight = static_cast<const uint8_t*>(p.weight->data) + row * stride;
    const float* scales = widen_scales<R>(p, row, groups);
    const char* x[T];
    const int8_t *low[T], *high[T];
    Vec sums[R][T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
        x[t] = static_cast<const char*>(p.x) + (token + t) * digits.bytes;
        low[t] = digits.low(x[t]), high[t] = digits.high(x[t]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sums[r][t] = splat(0.0f);
    for (int64_t word = 0; word < digits.words; ++word) {
        uint64_t marks = 0;
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) marks |= digits.marks(x[t])[word];
        const int64_t begin = word * 64 * kBlockGroups;
        const int64_t end = begin + 64 * kBlockGroups < groups ? begin + 64 * kBlockGroups : groups;
        for (int64_t group = begin; group < end; group += kStepGroups) {
            if (kAhead)
#pragma GCC unroll 16
                for (int line = 0; line < R * kStepGroups * 16; line += 64)
                    __builtin_prefetch(weight + R * (stride + group * 16) + line);
            if (marks >> ((group - begin) / kBlockGroups) & 1)
                nibble_step<R, T, true>(weight, stride, scales, groups, group, low, high, sums);
            else
                nibble_step<R, T, false>(weight, stride, scales, groups, group, low, high, sums);
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            write_digits(p, row + r, token + t, sum(sums[r][t]), digits.scale(x[t]) * (1.0f / 16.0f));
}

struct NibbleBlocks {
    static constexpr int kSingleRows = 4;
    template <int R, int T, bool kAhead>
    static void compute(const Product& p, int64_t row, int64_t token) {
        nibble_block<R, T, kAhead>(p, row, token);
    }
};

void multiply_int4(const Product& p) { walk_blocks<NibbleBlocks>(p, p.weight->columns / 2 + 16); }

[[maybe_unused]] void multiply_digits(const Product& p) {
    p.weight->type == DType::int4 ? multiply_int4(p) : multiply_int8(p);
}
