// What adapters add to the projections of the tokens that are theirs: x through the first, narrow matrices in a phase of its
// own, and through the second ones where the projection's own product has just been written.
#include <algorithm>

#include "step.hpp"

namespace dovetail {
namespace {

constexpr int64_t kMostTokens = 64;  // of one task

}  // namespace

void Decoder::Step::plan_adapters() {
    const auto append = [](std::vector<Adapted>& list, const Adapter* adapter, int64_t begin, int64_t end) {
        while (begin < end) {
            const bool joins = !list.empty() && list.back().adapter == adapter && list.back().end == begin &&
                               list.back().end - list.back().begin < kMostTokens;
            if (!joins) list.push_back({adapter, begin, begin});
            list.back().end = begin = std::min(list.back().begin + kMostTokens, end);
        }
    };
    int64_t first = 0, sampled = 0;
    for (const Sequence& sequence : iteration_.sequences) {
        if (sequence.adapter) {
            append(adapted_, sequence.adapter, first, first + sequence.count);
            if (sequence.samples) append(adapted_sampled_, sequence.adapter, sampled, sampled + 1);
        }
        first += sequence.count;
        sampled += sequence.samples;
    }
    for (const Adapted& group : adapted_)
        for (const auto& layer : group.adapter->layers)
            for (const auto& parts : layer)
                for (const LowRank& part : parts) max_rank_ = std::max(max_rank_, part.first.rows);
}

void Decoder::Step::reduce(Team::Member& member, Spot spot, const float* x) {
    if (adapted_.empty() || spot.layer < 0) return;
    member.loop(static_cast<int64_t>(adapted_.size()) * kMostParts, [&](int64_t task) {
        const Adapted& group = adapted_[task / kMostParts];
        const int64_t at = task % kMostParts;
        const std::vector<LowRank>& parts = group.adapter->parts(spot.layer, spot.projection);
        if (at >= static_cast<int64_t>(parts.size())) return;
        const Matrix& first = parts[at].first;
        float* out = reduced_ + (at * position_.size() + group.begin) * max_rank_;
        const int64_t tokens = group.end - group.begin;
        kernels_.multiply({&first, 0, first.rows, x + group.begin * first.columns, 0, tokens, Precision::f32, nullptr, false,
                           out, max_rank_, scratch(member)});
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t rank = 0; rank < first.rows; ++rank) out[t * max_rank_ + rank] *= group.adapter->scale;
    });
}

// Outputs [row, row + rows) of tokens [begin, end), which lie at `out`
void Decoder::Step::add_adapted(Spot spot, int64_t begin, int64_t end, int64_t row, int64_t rows, float* out,
                                int64_t stride) const {
    if (spot.layer < 0) return;
    for (const Adapted& group : adapted_) {
        const int64_t from = std::max(begin, group.begin), to = std::min(end, group.end);
        if (from >= to) continue;
        const std::vector<LowRank>& parts = group.adapter->parts(spot.layer, spot.projection);
        for (size_t at = 0; at < parts.size(); ++at) {
            const Matrix& second = parts[at].second;
            const int64_t first = std::max(row, parts[at].row), last = std::min(row + rows, parts[at].row + second.columns);
            if (first >= last) continue;
            const char* data = static_cast<const char*>(second.data) + (first - parts[at].row) * size_of(second.type);
            kernels_.add_ranks({data, second.type, second.rows, second.columns, last - first,
                                reduced_ + (at * position_.size() + from) * max_rank_, max_rank_, to - from,
                                out + (from - begin) * stride + first - row, stride});
        }
    }
}

}  // namespace dovetail
