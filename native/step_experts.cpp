// The phases of a layer with experts: each token goes through the few that its router chooses, and tokens of one expert are
// multiplied together. A token's numbers depend on the token alone: its experts are summed up in the order of their shares.
//
//     router → shares → slots by expert → rows into slots → gate, up, activation → down → weighted sum + residual
#include <algorithm>
#include <cmath>

#include "step.hpp"

namespace dovetail {

// Every expert's tokens begin at a tile of their own.
int64_t Decoder::Step::max_slots(int64_t tokens) const {
    const int64_t pairs = tokens * shape_.experts_per_token;
    return whole_tiles(pairs) + std::min(pairs, shape_.num_experts) * (kTokenTile - 1);
}

void Decoder::Step::mix_experts(Team::Member& member, const Layer& layer) {
    normalize(member, layer.mlp_norm, layer.router);
    linear(member, layer.router, normed_, scores_, false, {});
    route(member, layer);
    gather(member, layer.experts_up);
    inner_experts(member, layer.experts_up);
    prepare_groups(member, inner_, layer.experts_down);
    outer_experts(member, layer.experts_down);
    combine(member, layer.post_mlp_norm);
    if (shape_.shared_size > 0) share_expert(member, layer);
}

// The MLP that every token goes through besides: it reads what the router read.
void Decoder::Step::share_expert(Team::Member& member, const Layer& layer) {
    prepare(member, normed_, layer.shared_up);
    inner_mlp(member, layer.shared_up, shape_.shared_size, -1);
    prepare(member, inner_, layer.shared_down);
    linear(member, layer.shared_down, inner_, hidden_, true, {});
}

void Decoder::Step::route(Team::Member& member, const Layer& layer) {
    const int64_t block = std::min(token_block(shape_.hidden_size, precision_of(layer.experts_up.pieces)),
                                   token_block(shape_.expert_size, precision_of(layer.experts_down.pieces)));
    member.loop(tokens_, [&](int64_t token) { choose_experts(token); });
    member.loop(1, [&](int64_t) { group_tokens(block); });
}

// What is not a number makes all shares so, and thereby every output of the token; which experts it has is then all the same.
void Decoder::Step::choose_experts(int64_t token) {
    float* scores = scores_ + token * shape_.num_experts;
    float* shares = shares_ + token * shape_.experts_per_token;
    const float largest = *std::max_element(scores, scores + shape_.num_experts);
    float total = 0.0f, kept = 0.0f;
    for (int64_t i = 0; i < shape_.num_experts; ++i) total += scores[i] = std::exp(scores[i] - largest);
    if (shape_.groups_per_token < shape_.expert_groups) keep_best_groups(scores);
    for (int64_t rank = 0; rank < shape_.experts_per_token; ++rank) {
        float* best = std::max_element(scores, scores + shape_.num_experts);
        chosen_[token * shape_.experts_per_token + rank] = best - scores;
        kept += shares[rank] = *best;
        *best = -1.0f;  // below all that is left
    }
    const float whole = shape_.normalize_shares && total == total ? kept : total;
    for (int64_t rank = 0; rank < shape_.experts_per_token; ++rank) shares[rank] = shares[rank] / whole * shape_.shares_scale;
}

// Shares of the other groups become 0.
void Decoder::Step::keep_best_groups(float* scores) const {
    const int64_t size = shape_.num_experts / shape_.expert_groups;
    std::vector<float> best(shape_.expert_groups);
    for (int64_t i = 0; i < shape_.expert_groups; ++i) best[i] = *std::max_element(scores + i * size, scores + (i + 1) * size);
    for (int64_t kept = 0; kept < shape_.groups_per_token; ++kept) *std::max_element(best.begin(), best.end()) = -1.0f;
    for (int64_t i = 0; i < shape_.expert_groups; ++i)
        if (best[i] != -1.0f) std::fill_n(scores + i * size, size, 0.0f);
}

void Decoder::Step::group_tokens(int64_t block) {
    const int64_t pairs = tokens_ * shape_.experts_per_token;
    std::vector<int64_t> next(shape_.num_experts, 0);  // tokens of each expert, then its next free slot
    for (int64_t i = 0; i < pairs; ++i) ++next[chosen_[i]];
    groups_.clear();
    largest_group_ = 0;
    int64_t first = 0;
    for (int64_t expert = 0; expert < shape_.num_experts; ++expert) {
        const int64_t count = next[expert];
        for (int64_t at = 0; at < count; at += block)
            groups_.push_back({expert, first + at, first + std::min(at + block, count)});
        largest_group_ = std::max(largest_group_, std::min(block, count));
        next[expert] = first;
        first += whole_tiles(count);
    }
    for (int64_t i = 0; i < pairs; ++i) {
        slot_of_[i] = next[chosen_[i]]++;
        source_[slot_of_[i]] = i / shape_.experts_per_token;
    }
}

void Decoder::Step::gather(Team::Member& member, const Stack& next) {
    const int64_t columns = shape_.hidden_size;
    member.loop(static_cast<int64_t>(groups_.size()), [&](int64_t i) {
        for (int64_t slot = groups_[i].begin; slot < groups_[i].end; ++slot)
            std::copy_n(normed_ + source_[slot] * columns, columns, grouped_ + slot * columns);
        prepare_group(groups_[i], grouped_, next);
    });
}

void Decoder::Step::prepare_groups(Team::Member& member, const float* x, const Stack& next) {
    if (operand(x, next.pieces) == x) return;
    member.loop(static_cast<int64_t>(groups_.size()), [&](int64_t i) { prepare_group(groups_[i], x, next); });
}

void Decoder::Step::prepare_group(const Group& group, const float* x, const Stack& next) {
    for (int64_t slot = group.begin; slot < group.end; slot += kTokenTile)
        kernels_.prepare(x, slot, std::min(slot + kTokenTile, group.end), next.columns(), precision_of(next.pieces),
                         prepared_);
}

void Decoder::Step::inner_experts(Team::Member& member, const Stack& up) {
    const int64_t size = shape_.expert_size, per_chunk = chunk_rows(size, largest_group_);
    const int64_t chunks = (size + per_chunk - 1) / per_chunk;
    const Precision precision = precision_of(up.pieces);
    const void* prepared = operand(grouped_, up.pieces);
    member.loop_apart(chunks * static_cast<int64_t>(groups_.size()), [&](int64_t task) {
        const Group& group = groups_[task / chunks];
        const int64_t row = task % chunks * per_chunk;
        const Place gate = place_of(up, shape_.num_experts, 2 * size, group.expert, row);
        const Place other = place_of(up, shape_.num_experts, 2 * size, group.expert, size + row);
        const float* bias = up.bias ? up.bias + group.expert * 2 * size + row : nullptr;
        multiply_gated(member, {gate.piece, gate.row, bias, other.piece, other.row, bias ? bias + size : nullptr,
                                std::min(per_chunk, size - row), prepared, group.begin, group.end, precision,
                                inner_ + group.begin * size + row, size, -1, true});
    });
}

void Decoder::Step::outer_experts(Team::Member& member, const Stack& down) {
    const int64_t hidden = shape_.hidden_size, per_chunk = chunk_rows(hidden, largest_group_);
    const int64_t chunks = (hidden + per_chunk - 1) / per_chunk;
    const void* prepared = operand(inner_, down.pieces);
    member.loop_apart(chunks * static_cast<int64_t>(groups_.size()), [&](int64_t task) {
        const Group& group = groups_[task / chunks];
        const int64_t row = task % chunks * per_chunk, rows = std::min(per_chunk, hidden - row);
        const Place at = place_of(down, shape_.num_experts, hidden, group.expert, row);
        kernels_.multiply({at.piece, at.row, at.row + rows, prepared, group.begin, group.end, precision_of(down.pieces),
                           down.bias ? down.bias + group.expert * hidden + row : nullptr, false, grouped_ + group.begin * hidden + row, hidden, scratch(member)});
    });
}

void Decoder::Step::combine(Team::Member& member, const Norm& post) {
    const int64_t columns = shape_.hidden_size, each = shape_.experts_per_token;
    member.loop(whole_tiles(tokens_) / kTokenTile, [&](int64_t tile) {
        const int64_t end = std::min((tile + 1) * kTokenTile, tokens_);
        for (int64_t t = tile * kTokenTile; t < end; ++t) {
            float* mixed = update_ + t * columns;
            for (int64_t i = t * each; i < (t + 1) * each; ++i)
                kernels_.load_row(grouped_ + slot_of_[i] * columns, DType::f32, columns, shares_[i], i > t * each, mixed);
            if (post.weight) norm_row(post, mixed, columns, mixed);
            kernels_.load_row(mixed, DType::f32, columns, 1.0f, true, hidden_ + t * columns);
        }
    });
}

}  // namespace dovetail
