// One iteration on its way through the layers: buffers, units of attention, and the phases, each of which all threads go
// through together.
#pragma once

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
    Step(Decoder& model, const Iteration& iteration);

    void run(Team::Member& member);

    struct Merge {  // parts of one query head that are put together
        int64_t token, head, first_part;
        int64_t num_parts, part_stride;
    };

  private:
    void lay_out(char* base, int64_t* bytes);
    void plan_attention();
    void plan_sequence(int sequence, int64_t first_token);

    void look_up(const Matrix& table, int64_t row, float scale, bool add, float* out) const;
    void embed(Team::Member&);
    void normalize(Team::Member&, const Norm&, const Linear& next);
    void prepare(Team::Member&, const float* x, const Linear& next);
    void linear(Team::Member&, const Linear&, const float* x, float* out, bool add);
    void inner_mlp(Team::Member&, const Layer&);
    void update(Team::Member&, const Linear&, const Norm& post, const float* x);
    void rotate_and_store(Team::Member&, const Layer&, int64_t index);
    void attend(Team::Member&, const Layer&, int64_t index);
    void merge(const Merge&);
    void keep_sampled(Team::Member&);
    void logits(Team::Member&);

    void norm_row(const Norm&, const float* x, int64_t count, float* out) const;
    void angles_of(const Rope&, int64_t position, float* out) const;
    int64_t chunk_rows(int64_t rows, int64_t tokens) const;
    int64_t token_block(int64_t columns, Precision precision) const;
    Precision precision_of(const Linear& linear) const;
    CacheView cache_view(int64_t layer, int64_t kv_head) const;
    float* scratch(const Team::Member& member) const { return scratch_ + member.index * scratch_floats_; }
    const void* operand(const float* x, const Linear& linear) const;

    const Decoder& model_;
    const Shape& shape_;
    const Kernels& kernels_;
    const Iteration& iteration_;
    int64_t tokens_ = 0;  // rows still on their way
    std::vector<int64_t> sampled_at_, position_, slot_;  // slot: block·block_size + offset
    std::vector<Unit> units_;
    std::vector<Merge> merges_;
    int64_t num_parts_ = 0, scratch_floats_ = 0;

    float *hidden_ = nullptr, *normed_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *inner_ = nullptr;
    float *update_ = nullptr, *angles_ = nullptr, *angles_local_ = nullptr, *scratch_ = nullptr;
    float *largest_ = nullptr, *total_ = nullptr, *sums_ = nullptr;
    void* prepared_ = nullptr;
};

}  // namespace dovetail
