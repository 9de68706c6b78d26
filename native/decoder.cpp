#include "decoder.hpp"

#include <stdexcept>

#include "step.hpp"

namespace dovetail {
namespace {

void need(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void check_linear(const Linear& linear, int64_t rows, int64_t columns, Precision precision, const std::string& name) {
    need(!linear.pieces.empty(), name + " is missing");
    need(linear.rows() == rows, name + " has " + std::to_string(linear.rows()) + " rows, not " + std::to_string(rows));
    for (const Matrix& piece : linear.pieces) {
        need(piece.columns == columns, name + " has " + std::to_string(piece.columns) + " columns");
        need(piece.type == linear.pieces[0].type || !(is_quantised(piece.type) || is_quantised(linear.pieces[0].type)),
             name + " is quantised in part");
        need(!is_quantised(piece.type) || piece.scales, name + " has no scales");
        need(precision == Precision::f32 || piece.type != DType::f32, name + " is not bf16");
    }
}

}  // namespace

int64_t Linear::rows() const {
    int64_t total = 0;
    for (const Matrix& piece : pieces) total += piece.rows;
    return total;
}

Decoder::Decoder(const Kernels& kernels, int threads, const Shape& shape)
    : shape(shape), kernels_(kernels), team_(Team::shared(threads)) {}

void Decoder::check() const {
    need(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "heads do not share key heads evenly");
    need(shape.head_dim > 0 && shape.head_dim <= 512, "head_dim is above 512");
    need(embed.data && embed.rows == shape.vocab_size && embed.columns == shape.hidden_size, "embed does not fit");
    need(embed.type != DType::int4 && !is_quantised(positions.type), "rows of int4 cannot be looked up");
    need(final_norm.weight, "final_norm is missing");
    const int64_t up_rows = shape.intermediate_size * (shape.gated_mlp ? 2 : 1);
    for (size_t i = 0; i < layers.size(); ++i) {
        const Layer& layer = layers[i];
        const std::string prefix = "layers." + std::to_string(i) + ".";
        need(layer.attn_norm.weight && layer.mlp_norm.weight, prefix + "norms are missing");
        check_linear(layer.qkv, shape.q_size() + 2 * shape.kv_size(), shape.hidden_size, shape.precision, prefix + "qkv");
        check_linear(layer.out, shape.hidden_size, shape.q_size(), shape.precision, prefix + "out");
        check_linear(layer.up, up_rows, shape.hidden_size, shape.precision, prefix + "up");
        check_linear(layer.down, shape.hidden_size, shape.intermediate_size, shape.precision, prefix + "down");
        const size_t pieces = layer.up.pieces.size();
        need(pieces == 1 || (shape.gated_mlp && pieces == 2 && layer.up.pieces[0].rows == shape.intermediate_size),
             prefix + "up is cut at an odd place");
    }
    check_linear(head, shape.vocab_size, shape.hidden_size, shape.precision, "lm_head");
}

void Decoder::run(const Iteration& iteration) {
    Step step(*this, iteration);
    team_->run([&](Team::Member& member) { step.run(member); });
}

}  // namespace dovetail
