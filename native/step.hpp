// One iteration on its way through the layers: buffers, units of attention, and the phases, each of which all threads go
// through together.
#pragma once

#include <algorithm>

#include "decoder.hpp"

namespace dovetail {

struct Decoder::Unit {
    int sequence;
    int64_t first_token;  // row of the batch
    int64_t position;
    int tokens, heads;
    int64_t first_head, kv_head;
    int64_t key_begin, key_end;
    int64_t part;  // row of the parts; -1: writes its result itself
};

struct Decoder::Step {
    Step(Decoder& model, Iteration iteration);

    void run(Team::Member& member, Time until);
    void go_on() { stopped_ = false, looked_ = std::chrono::steady_clock::now(); }
    bool has_stopped() const { return stopped_; }

    struct Spot {  // a projection of a layer: what adapters know it by
        int64_t layer = -1;  // none of them has anything for it
        Projection projection = Projection::qkv;
    };

    struct Adapted {  // tokens of one adapter that are multiplied together
        const Adapter* adapter;
        int64_t begin, end;
    };

    struct Gated {  // rows of an MLP's inner part for some tokens: activation(gate)·up, or activation(gate) without up
        const Matrix* gate;
        int64_t gate_row;
        const float* gate_bias;
        const Matrix* up;  // null: not gated
        int64_t up_row;
        const float* up_bias;
        int64_t rows;
        const void* x;
        int64_t begin, end;
        Precision precision;
        float* out;  // of (begin, first row)
        int64_t out_stride;
        int64_t layer = -1;  // whose adapters have a say
        bool is_expert = false;
    };

    struct Group {  // tokens of one expert that are multiplied together
        int64_t expert;
        int64_t begin, end;  // slots: rows of `grouped_`; begin is a multiple of kTokenTile
    };

    struct Merge {  // parts of one query head that are put together
        int64_t token, head, first_part;
        int64_t num_parts, part_stride;
    };

  private:
    void lay_out(char* base, int64_t* bytes);
    void plan_attention();
    void plan_sequence(int sequence, int64_t first_token);

    // All tokens, a stretch of them at a time: whole tiles where `prepare` handles tokens together, else so few that every
    // thread gets some.
    template <class Body>
    void each_stretch(Team::Member& member, Precision precision, Body&& body) const {
        const int64_t fair = std::clamp<int64_t>(tokens_ / (2 * member.size()), 1, kTokenTile);
        const bool eights = precision == Precision::grouped && tokens_ >= kWholeTokens * member.size();
        const int64_t whole = eights ? (fair + kWholeTokens - 1) / kWholeTokens * kWholeTokens : fair;
        const int64_t step = precision == Precision::bf16 ? kTokenTile : whole;
        member.loop((tokens_ + step - 1) / step,
                    [&](int64_t i) { body(i * step, std::min((i + 1) * step, tokens_)); });
    }

    void layer(Team::Member&, int64_t index);
    bool stops(Team::Member&, int64_t next, Time until);
    void look_up(const Matrix& table, int64_t row, float scale, bool add, float* out) const;
    void embed(Team::Member&);
    void normalize(Team::Member&, const Norm&, const Linear& next);
    void prepare(Team::Member&, const float* x, const Linear& next);
    void linear(Team::Member&, const Linear&, const float* x, float* out, bool add, Spot);
    void mlp(Team::Member&, const Layer&, const Norm&, int64_t index);
    void inner_mlp(Team::Member&, const Linear& up, int64_t inner, int64_t index);
    void plan_adapters();
    void reduce(Team::Member&, Spot, const float* x);
    void add_adapted(Spot, int64_t begin, int64_t end, int64_t row, int64_t rows, float* out, int64_t stride) const;
    void multiply_gated(Team::Member&, const Gated&);
    void limit_gate(float* gate, float* up, int64_t count) const;
    void mix_experts(Team::Member&, const Layer&);
    void route(Team::Member&, const Layer&);
    void choose_experts(int64_t token);
    void keep_best_groups(float* scores) const;
    void share_expert(Team::Member&, const Layer&);
    void group_tokens(int64_t block);
    void gather(Team::Member&, const Stack& next);
    void prepare_group(const Group&, const float* x, const Stack& next);
    void prepare_groups(Team::Member&, const float* x, const Stack& next);
    void inner_experts(Team::Member&, const Stack&);
    void outer_experts(Team::Member&, const Stack&);
    void combine(Team::Member&, const Norm& post);
    void update(Team::Member&, const Linear&, const Norm& post, const float* x, Spot);
    void rotate_and_store(Team::Member&, const Layer&, int64_t index);
    void attend(Team::Member&, const Layer&, int64_t index);
    void merge(const Merge&, const float* sinks);
    void make_latents(Team::Member&, const Layer&, int64_t index);
    void make_values(Team::Member&, const Layer&);
    void multiply_heads(Team::Member&, const Stack&, int64_t rows, float* out, int64_t stride, int64_t step);
    void keep_sampled(Team::Member&);
    void logits(Team::Member&);

    void norm_row(const Norm&, const float* x, int64_t count, float* out) const;
    void angles_of(const Rope&, int64_t position, float* out) const;
    int64_t chunk_rows(int64_t rows, int64_t tokens) const;
    int64_t token_block(int64_t columns, Precision precision) const;
    Precision precision_of(const std::vector<Matrix>& pieces) const;
    CacheView cache_view(int64_t layer, int64_t kv_head) const;
    float* scratch(const Team::Member& member) const { return scratch_ + member.index * scratch_floats_; }
    const void* operand(const float* x, const std::vector<Matrix>& pieces) const;
    int64_t max_slots(int64_t tokens) const;

    const Decoder& model_;
    const Shape& shape_;
    const Kernels& kernels_;
    const Iteration iteration_;
    int64_t next_ = -1;     // layer; -1: tokens are to be looked up first
    bool stopped_ = false;  // there
    Time looked_;           // when the last layer ended, or this stretch began
    int64_t tokens_ = 0;  // rows still on their way
    std::vector<int64_t> sampled_at_, position_, slot_;  // slot: block·block_size + offset
    std::vector<Unit> units_;
    std::vector<Merge> merges_;
    std::vector<Adapted> adapted_, adapted_sampled_;  // of the rows on their way, and of those that sample
    int64_t max_rank_ = 0;
    std::vector<Group> groups_;          // of this layer, by expert
    std::vector<int64_t> source_, slot_of_;  // token of a slot; slot of a token's n-th expert
    std::vector<int64_t> chosen_;        // experts of each token, the largest share first
    int64_t largest_group_ = 0;
    int64_t num_parts_ = 0, scratch_floats_ = 0;

    float *hidden_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *inner_ = nullptr;
    float *update_ = nullptr, *angles_ = nullptr, *angles_local_ = nullptr, *scratch_ = nullptr;
    float *scores_ = nullptr, *shares_ = nullptr;  // of the router: [token][expert], and of those chosen
    float* grouped_ = nullptr;                     // [slot][hidden]: what goes into the experts, then what comes out
    float *largest_ = nullptr, *total_ = nullptr, *sums_ = nullptr;
    float *queries_ = nullptr, *values_ = nullptr;  // of latent attention: [token][head][rank + rope], [token][head][value]
    float* heads_ = nullptr;                        // [head][token, filled up to whole tiles][rank or nope]
    float* reduced_ = nullptr;  // [part][token][max_rank]: a projection's input times the first matrices of adapters
    void* prepared_ = nullptr;
};

inline int64_t whole_tiles(int64_t tokens) { return (tokens + kTokenTile - 1) / kTokenTile * kTokenTile; }

struct Place {
    const Matrix* piece;
    int64_t row;
};

// Where row `row` of an expert, or of a head, is; `rows`: how many each of `count` has.
inline Place place_of(const Stack& stack, int64_t count, int64_t rows, int64_t number, int64_t row) {
    if (stack.pieces.size() == 1) return {&stack.pieces.front(), number * rows + row};
    const int64_t each = static_cast<int64_t>(stack.pieces.size()) / count, part = rows / each;
    return {&stack.pieces[number * each + row / part], row % part};
}

}  // namespace dovetail
