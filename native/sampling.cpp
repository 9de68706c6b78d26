#include "sampling.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace dovetail {
namespace {

constexpr int64_t kBlock = 64;  // logits that share a maximum
constexpr int kLanes = 16;      // sums side by side, which a compiler turns into vectors
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Of what is not above 0; 0 below exp(-87). Without branches or calls, so that loops over it become vectors.
inline float exponential(float x) {
    const float bounded = x < -87.0f ? -87.0f : x;
    const float shifted = bounded * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;  // to the nearest whole number
    const float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
    const float result = (p * r * r + r + 1.0f) * power;
    return x < -87.0f ? 0.0f : result;
}

double sum_exponentials(const float* x, int64_t count, float largest, float sharpness) {
    double total = 0.0;
    int64_t i = 0;
    for (; i + kBlock <= count; i += kBlock) {
        float sums[kLanes] = {};
        for (int64_t j = i; j < i + kBlock; j += kLanes)
            for (int lane = 0; lane < kLanes; ++lane) sums[lane] += exponential((x[j + lane] - largest) * sharpness);
        for (const float sum : sums) total += sum;
    }
    for (; i < count; ++i) total += exponential((x[i] - largest) * sharpness);
    return total;
}

std::vector<float> block_maxima(const float* x, int64_t count) {
    std::vector<float> maxima;
    maxima.reserve((count + kBlock - 1) / kBlock);
    for (int64_t i = 0; i < count; i += kBlock) {
        float most[kLanes];
        std::fill_n(most, kLanes, kNothing);
        const int64_t end = std::min(i + kBlock, count), whole = i + (end - i) / kLanes * kLanes;
        for (int64_t j = i; j < whole; j += kLanes)
            for (int lane = 0; lane < kLanes; ++lane) most[lane] = x[j + lane] > most[lane] ? x[j + lane] : most[lane];
        for (int64_t j = whole; j < end; ++j) most[0] = x[j] > most[0] ? x[j] : most[0];
        maxima.push_back(*std::max_element(most, most + kLanes));
    }
    return maxima;
}

}  // namespace

double find_candidates(const float* x, int64_t count, float sharpness, int64_t width, float* values, int64_t* tokens) {
    std::vector<float> maxima = block_maxima(x, count), ranked = maxima;
    // As many blocks as there are candidates reach this: no candidate is below.
    float least = kNothing;
    if (static_cast<int64_t>(ranked.size()) > width) {
        std::nth_element(ranked.begin(), ranked.begin() + width - 1, ranked.end(), std::greater<>());
        least = ranked[width - 1];
    }
    std::vector<int64_t> found;
    for (size_t block = 0; block < maxima.size(); ++block) {
        const int64_t begin = static_cast<int64_t>(block) * kBlock, end = std::min(begin + kBlock, count);
        for (int64_t i = begin; maxima[block] >= least && i < end; ++i)
            if (x[i] >= least) found.push_back(i);
    }
    const int64_t kept = std::min<int64_t>(width, found.size());
    std::partial_sort(found.begin(), found.begin() + kept, found.end(),
                      [&](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    for (int64_t i = 0; i < width; ++i) {
        tokens[i] = i < kept ? found[i] : 0;
        values[i] = i < kept ? x[found[i]] : kNothing;
    }
    return sum_exponentials(x, count, values[0], sharpness);
}

}  // namespace dovetail
