// A decoder-only model as one native call per iteration: tokens in, logits of the rows that sample out. Knows the
// families by the few ways in which they differ; weights are used where they lie and never copied.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"
#include "team.hpp"

namespace dovetail {

struct Linear {  // pieces of a matrix that lie apart, concatenated along the rows
    std::vector<Matrix> pieces;
    const float* bias = nullptr;

    int64_t rows() const;
    int64_t columns() const { return pieces.at(0).columns; }
};

struct Stack {  // one matrix per expert or head, all of one shape: in one piece, or each in as many as a matrix has
    std::vector<Matrix> pieces;
    const float* bias = nullptr;  // of all rows

    int64_t columns() const { return pieces.at(0).columns; }
};

struct Norm {
    const float* weight = nullptr;  // null: there is no such norm, rows are read as they are
    const float* bias = nullptr;    // a layer norm if there is one, else an RMS norm
};

struct Layer {
    Norm attn_norm, q_norm, k_norm, post_attn_norm, mlp_norm, post_mlp_norm;
    Linear qkv, out, up, down;  // up: gate and up one after the other if the MLP is gated
    Linear router;              // empty: the layer has one MLP, `up` and `down`; else it has experts instead
    Stack experts_up, experts_down;
    Linear shared_up, shared_down;  // besides the experts, for every token; empty: none
    const float* sinks = nullptr;   // [heads]: scores that take part in the softmax and have no value
    Norm kv_norm;                   // of latent attention: of the latent,
    Stack k_up, v_up;               // what makes a head's key of it (transposed), and its value
    int64_t window = 0;
    bool local_rope = false;
};

enum class Projection : uint8_t { qkv, out, up, down };
constexpr int64_t kMostParts = 3;  // of a projection: q, k and v

struct LowRank {  // what an adapter adds to some outputs of a projection: scale·(x·firstᵀ)·second
    Matrix first;     // [rank, columns of the projection]
    Matrix second;    // [rank, outputs]
    int64_t row = 0;  // of the projection, where the outputs begin
};

struct Adapter {
    float scale = 1.0f;
    std::vector<std::array<std::vector<LowRank>, 4>> layers;  // by projection

    const std::vector<LowRank>& parts(int64_t layer, Projection projection) const {
        return layers[layer][static_cast<size_t>(projection)];
    }
};

struct Rope {
    std::vector<float> frequencies;  // [turning_dim / 2]; empty: no rotation; 0: that pair stays
    float scale = 1.0f;              // of the pairs that turn
};

struct Shape {
    int64_t vocab_size = 0, hidden_size = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0, intermediate_size = 0;
    float norm_eps = 0.0f, embed_scale = 1.0f, attention_scale = 1.0f;
    float attention_softcap = 0.0f, final_softcap = 0.0f;  // 0 = none
    float logit_scale = 1.0f;
    int64_t position_offset = -1;                          // rows before learned position 0; -1 = none learned
    Activation activation = Activation::silu;
    bool gated_mlp = true;
    bool qk_norm_whole = false;   // over all heads of a token at once
    bool parallel_block = false;  // attention and the MLP read the same rows, through attn_norm
    int64_t num_experts = 0, experts_per_token = 0, expert_size = 0;  // size: of an expert's inner rows
    bool normalize_shares = false;  // the shares of a token's experts add up to 1
    float shares_scale = 1.0f;
    int64_t expert_groups = 1, groups_per_token = 1;  // experts come of so many groups, those with the largest shares
    int64_t shared_size = 0;                          // inner rows of the MLP beside the experts; 0 = none
    float gate_alpha = 1.0f, gate_limit = 0.0f;       // of experts; limit 0 = the usual gate
    // Latent attention: keys are a latent and a part that turns, which all heads share, and values the keys themselves.
    // head_dim is then rank + rope, num_kv_heads 1; rank 0 = none
    int64_t latent_rank = 0, rope_dim = 0, nope_dim = 0, value_dim = 0;
    float latent_eps = 1e-6f;
    Precision precision = Precision::f32;

    int64_t q_size() const { return num_heads * head_dim; }
    int64_t kv_size() const { return num_kv_heads * head_dim; }
    bool is_latent() const { return latent_rank > 0; }
    int64_t kv_parts() const { return is_latent() ? 1 : 2; }  // of a token in the cache
    int64_t turning_dim() const { return is_latent() ? rope_dim : head_dim; }
    int64_t query_dim() const { return is_latent() ? nope_dim + rope_dim : head_dim; }  // as projected
    int64_t qkv_size() const { return num_heads * query_dim() + (is_latent() ? head_dim : 2 * kv_size()); }
    int64_t attended_size() const { return is_latent() ? num_heads * value_dim : q_size(); }
};

struct Cache {  // [block][layer][key | value][token in block][kv head][cache_width]; of latents, keys only
    void* data = nullptr;
    DType type = DType::f32;
    int64_t num_blocks = 0, num_layers = 0;
    int block_size = 0;
};

struct Sequence {  // `count` tokens from position `start` on, on top of what the cache holds
    int64_t start = 0, count = 0;
    const int32_t* blocks = nullptr;
    bool samples = false;
    const Adapter* adapter = nullptr;  // null: the model as it is
};

struct Iteration {
    const int32_t* tokens = nullptr;  // of all sequences, one after the other
    std::vector<Sequence> sequences;
    Cache cache;
    float* logits = nullptr;   // [sampling sequences][vocab]; null: only the states are wanted
    int32_t* best = nullptr;   // [sampling sequences], index of the largest logit, -1 if one is not a number
    float* states = nullptr;   // [sampling sequences][hidden], what the logits are made of; null: not wanted
};

class Decoder {
  public:
    using Time = std::chrono::steady_clock::time_point;

    Decoder(const Kernels& kernels, int threads, const Shape& shape);
    ~Decoder();
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

    Shape shape;
    std::vector<Layer> layers;
    Matrix embed{}, positions{};
    Norm final_norm;
    Linear head;
    Rope rope, rope_local;

    // Throws std::invalid_argument if the parts do not fit each other.
    void check() const;
    // What the iteration points to has to stay until it is computed, or another one is begun.
    void begin(Iteration iteration);
    // Computes until the end, or stops between two layers as soon as it is so late; true: it is computed. Other models may
    // have the threads meanwhile.
    bool advance(Time until = Time::max());
    const Kernels& kernels() const { return kernels_; }

  private:
    void check_sizes() const;
    void check_mlp(const Layer& layer, const std::string& prefix) const;
    void check_experts(const Layer& layer, const std::string& prefix) const;
    void check_latent(const Layer& layer, const std::string& prefix) const;

    struct Unit;  // of attention: queries of one sequence, one key head, one stretch of keys
    struct Step;  // an iteration on its way through the layers

    const Kernels& kernels_;
    std::shared_ptr<Team> team_;
    Buffer buffer_;  // activations; kept between iterations
    std::unique_ptr<Step> step_;  // the iteration under way
};

}  // namespace dovetail
