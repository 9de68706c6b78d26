#include <algorithm>
#include <tuple>

#include "step.hpp"

namespace dovetail {

void Decoder::Step::plan_attention() {
    int64_t first_token = 0;
    for (size_t i = 0; i < iteration_.sequences.size(); ++i) {
        plan_sequence(static_cast<int>(i), first_token);
        first_token += iteration_.sequences[i].count;
    }
    // Long ones first, so that none is left over at the end. Heads of the same keys one after the other: they lie side by
    // side, on the same pages.
    const auto rank = [](const Unit& unit) {
        const int64_t work = unit.tokens * (unit.key_end - unit.key_begin);
        return std::tuple(-work, unit.sequence, unit.key_begin, unit.first_token, unit.first_head);
    };
    std::sort(units_.begin(), units_.end(), [&](const Unit& a, const Unit& b) { return rank(a) < rank(b); });
}

void Decoder::Step::plan_sequence(int index, int64_t first_token) {
    const Sequence& sequence = iteration_.sequences[index];
    const int64_t group = shape_.num_heads / shape_.num_kv_heads;
    const int64_t heads_per_unit = std::min<int64_t>(group, kMaxQueries);
    const int64_t tokens_per_unit = std::max<int64_t>(kMaxQueries / heads_per_unit, 1);
    const int64_t end = sequence.start + sequence.count;
    // A query that is alone has one unit per key head: a long context is cut, and its parts are merged.
    const int64_t splits = sequence.count == 1 ? (end + kSplitKeys - 1) / kSplitKeys : 1;
    for (int64_t kv = 0; kv < shape_.num_kv_heads; ++kv)
        for (int64_t h = 0; h < group; h += heads_per_unit)
            for (int64_t t = 0; t < sequence.count; t += tokens_per_unit) {
                const int64_t tokens = std::min(tokens_per_unit, sequence.count - t);
                const int64_t heads = std::min(heads_per_unit, group - h), first_part = num_parts_;
                for (int64_t split = 0; split < splits; ++split) {
                    const int64_t key_end = splits == 1 ? sequence.start + t + tokens
                                                        : std::min((split + 1) * kSplitKeys, end);
                    units_.push_back({index, first_token + t, sequence.start + t, static_cast<int>(tokens),
                                      static_cast<int>(heads), kv * group + h, kv, split * kSplitKeys, key_end,
                                      splits == 1 ? -1 : num_parts_});
                    if (splits > 1) num_parts_ += heads;
                }
                for (int64_t head = 0; splits > 1 && head < heads; ++head)
                    merges_.push_back({first_token + t, kv * group + h + head, first_part + head, splits, heads});
            }
}

void Decoder::Step::rotate_and_store(Team::Member& member, const Layer& layer, int64_t index) {
    const int64_t d = shape_.head_dim, stride = shape_.q_size() + 2 * shape_.kv_size();
    const Rope& rope = layer.local_rope ? model_.rope_local : model_.rope;
    const float* angles = layer.local_rope ? angles_local_ : angles_;
    const DType type = iteration_.cache.type;
    const int64_t element = size_of(type), width = cache_width(type, d);
    const int64_t pieces = type == DType::int8 ? shape_.num_kv_heads : 1;  // each with a scale of its own
    const int64_t each = shape_.kv_size() / pieces;
    each_stretch(member, Precision::f32, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* row = qkv_ + t * stride;
            if (shape_.qk_norm_whole) {
                norm_row(layer.q_norm, row, shape_.q_size(), row);
                norm_row(layer.k_norm, row + shape_.q_size(), shape_.kv_size(), row + shape_.q_size());
            }
            for (int64_t head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
                const Norm& norm = head < shape_.num_heads ? layer.q_norm : layer.k_norm;
                if (norm.weight && !shape_.qk_norm_whole) norm_row(norm, row + head * d, d, row + head * d);
                if (!rope.frequencies.empty())
                    kernels_.rotate(row + head * d, angles + t * d, angles + t * d + d / 2, d);
            }
            const CacheView view = cache_view(index, 0);
            const int64_t size = iteration_.cache.block_size;
            const int64_t at = slot_[t] / size * view.block_stride + slot_[t] % size * view.token_stride;
            char* keys = static_cast<char*>(const_cast<void*>(view.keys)) + at * element;
            char* values = static_cast<char*>(const_cast<void*>(view.values)) + at * element;
            for (int64_t piece = 0; piece < pieces; ++piece) {
                const float* key = row + shape_.q_size() + piece * each;
                kernels_.store_row(key, each, type, keys + piece * width * element);
                kernels_.store_row(key + shape_.kv_size(), each, type, values + piece * width * element);
            }
        }
    });
}

CacheView Decoder::Step::cache_view(int64_t layer, int64_t kv_head) const {
    const Cache& cache = iteration_.cache;
    const int64_t width = cache_width(cache.type, shape_.head_dim), token = shape_.num_kv_heads * width;
    const int64_t part = cache.block_size * token, parts = shape_.kv_parts();  // part: keys of a block and layer
    const char* base = static_cast<const char*>(cache.data);
    const int64_t keys = layer * parts * part + kv_head * width, values = keys + (parts - 1) * part;
    return {base + keys * size_of(cache.type), base + values * size_of(cache.type),
            cache.type,                        cache.num_layers * parts * part,
            token,                             cache.block_size};
}

void Decoder::Step::attend(Team::Member& member, const Layer& layer, int64_t index) {
    const int64_t d = shape_.head_dim, stride = shape_.is_latent() ? shape_.q_size() : shape_.qkv_size();
    const float* queries = shape_.is_latent() ? queries_ : qkv_;
    member.loop(static_cast<int64_t>(units_.size()), [&](int64_t i) {
        const Unit& unit = units_[i];
        const bool whole = unit.part < 0;
        kernels_.attend({queries + unit.first_token * stride + unit.first_head * d,
                         stride,
                         unit.tokens,
                         unit.heads,
                         unit.position,
                         static_cast<int>(d),
                         cache_view(index, unit.kv_head),
                         iteration_.sequences[unit.sequence].blocks,
                         unit.key_begin,
                         unit.key_end,
                         layer.window,
                         shape_.attention_scale,
                         shape_.attention_softcap,
                         whole ? attended_ + unit.first_token * shape_.q_size() + unit.first_head * d : nullptr,
                         shape_.q_size(),
                         whole ? nullptr : largest_ + unit.part,
                         whole ? nullptr : total_ + unit.part,
                         whole ? nullptr : sums_ + unit.part * d,
                         scratch(member),
                         layer.sinks ? layer.sinks + unit.first_head : nullptr});
    });
    if (merges_.empty()) return;
    member.loop(static_cast<int64_t>(merges_.size()), [&](int64_t i) { merge(merges_[i], layer.sinks); });
}

void Decoder::Step::merge(const Merge& m, const float* sinks) {
    const int64_t d = shape_.head_dim;
    kernels_.merge({m.num_parts, m.part_stride, largest_ + m.first_part, total_ + m.first_part, sums_ + m.first_part * d,
                    static_cast<int>(d), sinks ? sinks + m.head : nullptr,
                    attended_ + m.token * shape_.q_size() + m.head * d});
}

}  // namespace dovetail
