#include "decoder.hpp"

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "step.hpp"

namespace dovetail {
namespace {

void need(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

DType weight_type(Precision precision) { return precision == Precision::bf16 ? DType::bf16 : DType::f16; }

void check_linear(const Linear& linear, int64_t rows, int64_t columns, Precision precision, const std::string& name) {
    need(!linear.pieces.empty(), name + " is missing");
    need(linear.rows() == rows, name + " has " + std::to_string(linear.rows()) + " rows, not " + std::to_string(rows));
    for (const Matrix& piece : linear.pieces) {
        need(piece.columns == columns, name + " has " + std::to_string(piece.columns) + " columns");
        need(piece.type == linear.pieces[0].type || !(is_quantised(piece.type) || is_quantised(linear.pieces[0].type)),
             name + " is quantised in part");
        need(!is_quantised(piece.type) || piece.scales, name + " has no scales");
        need(precision == Precision::f32 || is_quantised(piece.type) || piece.type == weight_type(precision),
             name + " is not of the type that the model is computed in");
    }
}

void check_stack(const Stack& stack, int64_t experts, int64_t rows, int64_t columns, size_t most_pieces,
                 Precision precision, const std::string& name) {
    check_linear({stack.pieces}, experts * rows, columns, precision, name);
    const size_t count = stack.pieces.size(), each = count / experts;
    need(count == 1 || (count == each * experts && each <= most_pieces), name + " is cut at an odd place");
    for (const Matrix& piece : stack.pieces)
        need(count == 1 || piece.rows == rows / static_cast<int64_t>(each), name + " has experts of several sizes");
}

}  // namespace

int64_t Linear::rows() const {
    int64_t total = 0;
    for (const Matrix& piece : pieces) total += piece.rows;
    return total;
}

Decoder::Decoder(const Kernels& kernels, int threads, const Shape& shape)
    : shape(shape), kernels_(kernels), team_(Team::shared(threads)) {}

Decoder::~Decoder() = default;

// Sizes that no tensor vouches for (of the MLP where all layers have experts) make buffers too: a product of any two of
// them, a few thousand tokens and the size of a number stays within 64 bits.
void Decoder::check_sizes() const {
    constexpr int64_t most = 1 << 24;
    const auto fits = [&](int64_t size, int64_t least, const char* name) {
        need(size >= least && size <= most, std::string(name) + " is " + std::to_string(size));
    };
    need(shape.vocab_size > 0 && shape.vocab_size <= INT32_MAX, "vocab_size is " + std::to_string(shape.vocab_size));
    fits(shape.hidden_size, 1, "hidden_size");
    fits(shape.num_heads, 1, "num_heads");
    fits(shape.num_kv_heads, 1, "num_kv_heads");
    fits(shape.intermediate_size, 1, "intermediate_size");
    fits(shape.num_experts, 0, "num_experts");
    if (shape.num_experts > 0) {
        fits(shape.expert_size, 1, "the size of an expert");
        fits(shape.shared_size, 0, "the size of the shared expert");
        need(shape.expert_groups > 0 && shape.num_experts % shape.expert_groups == 0, "groups of experts are uneven");
        need(shape.groups_per_token > 0 &&
                 shape.num_experts / shape.expert_groups * shape.groups_per_token >= shape.experts_per_token,
             "a token's groups have too few experts");
        need(shape.gate_limit == 0.0f || (shape.gate_limit > 0.0f && shape.gate_alpha > 0.0f), "a gate has no such limit");
        need(shape.experts_per_token > 0 && shape.experts_per_token <= shape.num_experts, "a token has no such experts");
    }
    fits(shape.position_offset, -1, "position_offset");
}

void Decoder::check() const {
    check_sizes();
    need(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "heads do not share key heads evenly");
    need(shape.head_dim > 0 && shape.head_dim <= (shape.is_latent() ? 1024 : 512), "head_dim is above 512");
    need(!shape.is_latent() || (shape.num_kv_heads == 1 && shape.rope_dim > 0 && shape.rope_dim % 2 == 0 &&
                                shape.nope_dim > 0 && shape.value_dim > 0 &&
                                shape.head_dim == shape.latent_rank + shape.rope_dim && !rope.frequencies.empty() &&
                                !shape.parallel_block && !shape.qk_norm_whole),
         "the sizes of latent attention do not fit");
    need(embed.data && embed.rows == shape.vocab_size && embed.columns == shape.hidden_size, "embed does not fit");
    need(!is_quantised(positions.type), "learned positions are floats");
    need(!positions.data || (shape.position_offset >= 0 && positions.columns == shape.hidden_size),
         "learned positions do not fit");
    need(final_norm.weight, "final_norm is missing");
    for (size_t i = 0; i < layers.size(); ++i) {
        const Layer& layer = layers[i];
        const std::string prefix = "layers." + std::to_string(i) + ".";
        const bool before = layer.attn_norm.weight && (layer.mlp_norm.weight || shape.parallel_block);
        const bool after = layer.post_attn_norm.weight && layer.post_mlp_norm.weight;
        need(before || after, prefix + "norms are missing");
        need(!shape.qk_norm_whole || (layer.q_norm.weight && layer.k_norm.weight), prefix + "q_norm or k_norm is missing");
        need(!shape.parallel_block || layer.router.pieces.empty(), prefix + "experts are beside attention");
        need(layer.window >= 0, prefix + "window is " + std::to_string(layer.window));
        check_linear(layer.qkv, shape.qkv_size(), shape.hidden_size, shape.precision, prefix + "qkv");
        check_linear(layer.out, shape.hidden_size, shape.attended_size(), shape.precision, prefix + "out");
        if (shape.is_latent()) check_latent(layer, prefix);
        layer.router.pieces.empty() ? check_mlp(layer, prefix) : check_experts(layer, prefix);
    }
    check_linear(head, shape.vocab_size, shape.hidden_size, shape.precision, "lm_head");
}

void Decoder::check_mlp(const Layer& layer, const std::string& prefix) const {
    const int64_t rows = shape.intermediate_size * (shape.gated_mlp ? 2 : 1);
    check_linear(layer.up, rows, shape.hidden_size, shape.precision, prefix + "up");
    check_linear(layer.down, shape.hidden_size, shape.intermediate_size, shape.precision, prefix + "down");
    const size_t pieces = layer.up.pieces.size();
    need(pieces == 1 || (shape.gated_mlp && pieces == 2 && layer.up.pieces[0].rows == shape.intermediate_size),
         prefix + "up is cut at an odd place");
}

void Decoder::check_experts(const Layer& layer, const std::string& prefix) const {
    const int64_t experts = shape.num_experts, size = shape.expert_size, hidden = shape.hidden_size;
    need(experts > 0, "a token has no such experts");
    need(shape.gated_mlp, "experts are gated");
    check_linear(layer.router, experts, hidden, shape.precision, prefix + "router");
    check_stack(layer.experts_up, experts, 2 * size, hidden, 2, shape.precision, prefix + "experts.gate_up");
    check_stack(layer.experts_down, experts, hidden, size, 1, shape.precision, prefix + "experts.down");
    need(shape.gate_limit == 0.0f || shape.activation == Activation::silu, prefix + "experts have a limit without silu");
    if (shape.shared_size == 0) return;
    need(!layer.post_mlp_norm.weight, prefix + "shared expert has a norm behind it");
    check_linear(layer.shared_up, 2 * shape.shared_size, hidden, shape.precision, prefix + "shared.gate_up");
    check_linear(layer.shared_down, hidden, shape.shared_size, shape.precision, prefix + "shared.down");
    const size_t pieces = layer.shared_up.pieces.size();
    need(pieces == 1 || (pieces == 2 && layer.shared_up.pieces[0].rows == shape.shared_size),
         prefix + "shared.gate_up is cut at an odd place");
}

void Decoder::check_latent(const Layer& layer, const std::string& prefix) const {
    need(layer.kv_norm.weight && !layer.sinks && !layer.local_rope, prefix + "kv_norm is missing");
    check_stack(layer.k_up, shape.num_heads, shape.latent_rank, shape.nope_dim, 1, shape.precision, prefix + "k_up");
    check_stack(layer.v_up, shape.num_heads, shape.value_dim, shape.latent_rank, 1, shape.precision, prefix + "v_up");
}

void Decoder::begin(Iteration iteration) {
    step_.reset();  // which may be under way: its buffer is this one's
    step_ = std::make_unique<Step>(*this, std::move(iteration));
}

bool Decoder::advance(Time until) {
    need(step_ != nullptr, "no iteration was begun");
    step_->go_on();
    team_->run([&](Team::Member& member) { step_->run(member, until); });
    if (step_->has_stopped()) return false;
    step_.reset();
    return true;
}

}  // namespace dovetail
