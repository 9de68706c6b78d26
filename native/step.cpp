#include "step.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace dovetail {
namespace {

constexpr int64_t kMaxChunkRows = 256;
constexpr int64_t kManyTokens = 64;
constexpr int64_t kLeastRounds = 4;  // of chunks, for each thread
constexpr int64_t kBlockBytes = 512 * 1024;  // activations that a product goes over again and again: stay in the L2

int64_t tiles(int64_t tokens) { return (tokens + kTokenTile - 1) / kTokenTile; }

struct Rows {  // a stretch of one piece
    const Matrix* piece;
    int64_t begin, end;
    int64_t first;  // of the whole matrix
};

int64_t count_chunks(const Linear& linear, int64_t rows_per_chunk) {
    int64_t count = 0;
    for (const Matrix& piece : linear.pieces) count += (piece.rows + rows_per_chunk - 1) / rows_per_chunk;
    return count;
}

Rows chunk_at(const Linear& linear, int64_t rows_per_chunk, int64_t chunk) {
    int64_t first = 0;
    for (const Matrix& piece : linear.pieces) {
        const int64_t chunks = (piece.rows + rows_per_chunk - 1) / rows_per_chunk;
        if (chunk < chunks) {
            const int64_t begin = chunk * rows_per_chunk;
            return {&piece, begin, std::min(begin + rows_per_chunk, piece.rows), first + begin};
        }
        chunk -= chunks;
        first += piece.rows;
    }
    return {nullptr, 0, 0, 0};
}

}  // namespace

Decoder::Step::Step(Decoder& model, Iteration iteration)
    : model_(model), shape_(model.shape), kernels_(model.kernels_), iteration_(std::move(iteration)) {
    for (const Sequence& sequence : iteration_.sequences) {
        for (int64_t i = 0; i < sequence.count; ++i) {
            const int64_t position = sequence.start + i, size = iteration_.cache.block_size;
            position_.push_back(position);
            slot_.push_back(sequence.blocks[position / size] * size + position % size);
        }
        tokens_ += sequence.count;
        if (sequence.samples) sampled_at_.push_back(tokens_ - 1);
    }
    plan_attention();
    plan_adapters();
    if (shape_.num_experts > 0) {
        chosen_.resize(tokens_ * shape_.experts_per_token);
        slot_of_.resize(tokens_ * shape_.experts_per_token);
        source_.resize(max_slots(tokens_));
    }
    int64_t bytes = 0;
    lay_out(nullptr, &bytes);
    lay_out(model.buffer_.reserve(bytes), &bytes);
}

void Decoder::Step::lay_out(char* base, int64_t* bytes) {
    const int64_t tokens = tiles(tokens_) * kTokenTile;
    const int64_t slots = std::max(tokens, max_slots(tokens));
    const int64_t widest = std::max({shape_.hidden_size, shape_.attended_size(), shape_.intermediate_size,
                                     shape_.expert_size, shape_.shared_size, shape_.latent_rank, shape_.nope_dim});
    const int64_t block = token_block(shape_.hidden_size, Precision::int8);  // no other is larger
    const int64_t gated = 2 * std::max(block * 4 * kRowTile, kManyTokens * kMaxChunkRows);  // gate and up of one chunk
    scratch_floats_ = product_scratch(widest) + std::max(gated, attend_scratch(shape_.head_dim));
    scratch_floats_ = (scratch_floats_ + 63) / 64 * 64;
    Carver carver(base);
    hidden_ = carver.take<float>(tokens * shape_.hidden_size);
    // What is never needed at the same time shares its place: attention writes when the norm before it has been read, and
    // the MLP's inner part when attention is over.
    normed_ = attended_ = carver.take<float>(tokens * std::max(shape_.hidden_size, shape_.q_size()));
    if (shape_.parallel_block) attended_ = carver.take<float>(tokens * shape_.q_size());  // the MLP comes in between
    const int64_t inner_floats = std::max(tokens * std::max(shape_.intermediate_size, shape_.shared_size),
                                          slots * shape_.expert_size);
    const int64_t attention_floats = tokens * std::max(shape_.qkv_size(), shape_.attended_size());
    qkv_ = inner_ = values_ = carver.take<float>(std::max(attention_floats, inner_floats));
    const int64_t head_width = std::max(shape_.latent_rank, shape_.nope_dim), head_slots = shape_.num_heads * tokens;
    queries_ = carver.take<float>(shape_.is_latent() ? tokens * shape_.q_size() : 0);
    heads_ = carver.take<float>(shape_.is_latent() ? head_slots * head_width : 0);
    const auto norms_update = [](const Layer& layer) { return layer.post_attn_norm.weight || layer.post_mlp_norm.weight; };
    const bool updates = shape_.num_experts > 0 || std::ranges::any_of(model_.layers, norms_update);
    update_ = carver.take<float>(updates ? tokens * shape_.hidden_size : 0);
    angles_ = carver.take<float>(tokens * shape_.turning_dim());
    angles_local_ = carver.take<float>(model_.rope_local.frequencies.empty() ? 0 : tokens * shape_.turning_dim());
    int64_t prepared = 0;
    for (const Precision precision : {shape_.precision, Precision::int8, Precision::grouped}) {
        prepared = std::max(prepared, kernels_.prepared_bytes(slots, widest, precision));
        if (shape_.is_latent())
            prepared = std::max(prepared, kernels_.prepared_bytes(head_slots, head_width, precision));
    }
    // Parts of attention are put together before anything is prepared for the product after it.
    const int64_t parts = num_parts_ * shape_.head_dim * static_cast<int64_t>(sizeof(float));
    prepared_ = carver.take<char>(std::max(prepared, parts));
    sums_ = static_cast<float*>(prepared_);
    if (shape_.num_experts > 0) {
        scores_ = carver.take<float>(tokens * shape_.num_experts);
        shares_ = carver.take<float>(tokens * shape_.experts_per_token);
        grouped_ = carver.take<float>(slots * shape_.hidden_size);
    }
    reduced_ = carver.take<float>(kMostParts * tokens * max_rank_);
    largest_ = carver.take<float>(num_parts_);
    total_ = carver.take<float>(num_parts_);
    scratch_ = carver.take<float>(scratch_floats_ * model_.team_->size());
    *bytes = carver.used();
}

void Decoder::Step::run(Team::Member& member, Time until) {
    const int64_t count = static_cast<int64_t>(model_.layers.size());
    int64_t index = next_;  // nobody writes it before all have read it: there are barriers in between
    if (index < 0) embed(member), index = 0;
    for (; index < count; ++index) {
        layer(member, index);
        if (until != Time::max() && stops(member, index + 1, until)) return;
    }
    logits(member);
}

// Behind the layer that ends nearest to then: the next one should take as long as the last. All of them know it, or nobody.
bool Decoder::Step::stops(Team::Member& member, int64_t next, Time until) {
    member.loop(1, [&](int64_t) {
        const Time now = std::chrono::steady_clock::now();
        next_ = next;
        stopped_ = now + (now - looked_) / 2 >= until;
        looked_ = now;
    });
    return stopped_;
}

void Decoder::Step::layer(Team::Member& member, int64_t index) {
    const Layer& layer = model_.layers[index];
    normalize(member, layer.attn_norm, layer.qkv);
    linear(member, layer.qkv, normed_, qkv_, false, {index, Projection::qkv});
    shape_.is_latent() ? make_latents(member, layer, index) : rotate_and_store(member, layer, index);
    attend(member, layer, index);
    if (index + 1 == static_cast<int64_t>(model_.layers.size())) keep_sampled(member);
    if (shape_.parallel_block) mlp(member, layer, layer.attn_norm, index);  // before attention changes what it reads
    if (shape_.is_latent()) make_values(member, layer);
    const float* attended = shape_.is_latent() ? values_ : attended_;
    prepare(member, attended, layer.out);
    update(member, layer.out, layer.post_attn_norm, attended, {index, Projection::out});
    if (shape_.parallel_block) return;
    layer.router.pieces.empty() ? mlp(member, layer, layer.mlp_norm, index) : mix_experts(member, layer);
}

void Decoder::Step::look_up(const Matrix& table, int64_t row, float scale, bool add, float* out) const {
    const int64_t columns = table.columns;
    if (table.type == DType::int8) {
        const int64_t lane = row % kCellRows, block = row - lane;  // four columns of each row side by side: see cells.hpp
        const int8_t* codes = static_cast<const int8_t*>(table.data) + block * byte_columns(columns) + lane * 4;
        const float step = static_cast<const float*>(table.scales)[row] * scale;
        for (int64_t i = 0; i < columns; ++i)
            out[i] = static_cast<float>(codes[i / 4 * kCellBytes + i % 4]) * step + (add ? out[i] : 0.0f);
        return;
    }
    if (table.type == DType::grouped)
        return unpack_row(table.groups, table.data, table.scales, row, columns, scale, add, out);
    const char* data = static_cast<const char*>(table.data) + row * columns * size_of(table.type);
    kernels_.load_row(data, table.type, columns, scale, add, out);
}

void Decoder::Step::embed(Team::Member& member) {
    each_stretch(member, Precision::f32, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* out = hidden_ + t * shape_.hidden_size;
            look_up(model_.embed, iteration_.tokens[t], shape_.embed_scale, false, out);
            if (model_.positions.data)
                look_up(model_.positions, position_[t] + shape_.position_offset, 1.0f, true, out);
            angles_of(model_.rope, position_[t], angles_ + t * shape_.turning_dim());
            angles_of(model_.rope_local, position_[t], angles_local_ + t * shape_.turning_dim());
        }
    });
}

// Cosines, then sines
void Decoder::Step::angles_of(const Rope& rope, int64_t position, float* out) const {
    const int64_t half = static_cast<int64_t>(rope.frequencies.size());
    for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position) * rope.frequencies[i];
        const float scale = rope.frequencies[i] == 0.0f ? 1.0f : rope.scale;
        out[i] = std::cos(angle) * scale;
        out[half + i] = std::sin(angle) * scale;
    }
}

void Decoder::Step::norm_row(const Norm& norm, const float* x, int64_t count, float* out) const {
    if (!norm.weight)
        std::copy_n(x, count, out);
    else if (norm.bias)
        kernels_.layer_norm(x, norm.weight, norm.bias, shape_.norm_eps, count, out);
    else
        kernels_.rms_norm(x, norm.weight, shape_.norm_eps, count, out);
}

Precision Decoder::Step::precision_of(const std::vector<Matrix>& pieces) const {
    switch (pieces.front().type) {
        case DType::int8: return Precision::int8;
        case DType::grouped: return Precision::grouped;
        default: return shape_.precision;
    }
}

// The residual stream, for the product that reads it next.
void Decoder::Step::normalize(Team::Member& member, const Norm& norm, const Linear& next) {
    const int64_t columns = shape_.hidden_size;
    const Precision precision = precision_of(next.pieces);
    each_stretch(member, precision, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) norm_row(norm, hidden_ + t * columns, columns, normed_ + t * columns);
        kernels_.prepare(normed_, begin, end, columns, precision, prepared_);
    });
}

void Decoder::Step::prepare(Team::Member& member, const float* x, const Linear& next) {
    const int64_t columns = next.columns();
    const Precision precision = precision_of(next.pieces);
    if (kernels_.prepared_bytes(1, columns, precision) == 0) return;
    each_stretch(member, precision, [&](int64_t begin, int64_t end) {
        kernels_.prepare(x, begin, end, columns, precision, prepared_);
    });
}

const void* Decoder::Step::operand(const float* x, const std::vector<Matrix>& pieces) const {
    return kernels_.prepared_bytes(1, pieces.front().columns, precision_of(pieces)) ? prepared_ : x;
}

// The largest of which every thread gets as many as the others, or nearly so: whoever has one more decides how long all of
// them take. Several for each, so that none waits long for one that was held up. With many tokens pairs of tiles, which some
// levels multiply together.
int64_t Decoder::Step::chunk_rows(int64_t rows, int64_t tokens) const {
    const bool many = tokens > kManyTokens;
    const int64_t threads = model_.team_->size(), all = (rows + kRowTile - 1) / kRowTile;
    int64_t best = 1, least = std::numeric_limits<int64_t>::max();
    for (int64_t each = (many ? 4 * kRowTile : kMaxChunkRows) / kRowTile; each > 1; each -= many ? 2 : 1) {
        const int64_t chunks = (all + each - 1) / each, rounds = (chunks + threads - 1) / threads;
        const int64_t slowest = rounds * each;
        if (rounds >= kLeastRounds && slowest < least - least / 64) best = each, least = slowest;
    }
    return best * kRowTile;
}

int64_t Decoder::Step::token_block(int64_t columns, Precision precision) const {
    const int64_t fits = kBlockBytes / (columns * (precision == Precision::f32 ? 4 : 2));
    return std::max<int64_t>(fits / 48 * 48, 48);  // 48: whole tiles of every kernel
}

void Decoder::Step::linear(Team::Member& member, const Linear& weights, const float* x, float* out, bool add,
                           Spot spot) {
    reduce(member, spot, x);
    const int64_t rows = weights.rows(), columns = weights.columns();
    const Precision precision = precision_of(weights.pieces);
    const int64_t per_chunk = chunk_rows(rows, tokens_), block = token_block(columns, precision);
    const int64_t chunks = count_chunks(weights, per_chunk), blocks = (tokens_ + block - 1) / block;
    const void* prepared = operand(x, weights.pieces);
    member.loop_apart(chunks * blocks, [&](int64_t task) {
        const Rows part = chunk_at(weights, per_chunk, task % chunks);
        const int64_t begin = task / chunks * block, end = std::min(begin + block, tokens_);
        kernels_.multiply({part.piece, part.begin, part.end, prepared, begin, end, precision,
                           weights.bias ? weights.bias + part.first : nullptr, add, out + begin * rows + part.first,
                           rows, scratch(member)});
        add_adapted(spot, begin, end, part.first, part.end - part.begin, out + begin * rows + part.first, rows);
    });
}

void Decoder::Step::mlp(Team::Member& member, const Layer& layer, const Norm& norm, int64_t index) {
    normalize(member, norm, layer.up);
    inner_mlp(member, layer.up, shape_.intermediate_size, index);
    prepare(member, inner_, layer.down);
    update(member, layer.down, layer.post_mlp_norm, inner_, {index, Projection::down});
}

void Decoder::Step::inner_mlp(Team::Member& member, const Linear& up, int64_t inner, int64_t index) {
    reduce(member, {index, Projection::up}, normed_);
    const Precision precision = precision_of(up.pieces);
    const int64_t per_chunk = chunk_rows(inner, tokens_), block = token_block(shape_.hidden_size, precision);
    const int64_t chunks = (inner + per_chunk - 1) / per_chunk, blocks = (tokens_ + block - 1) / block;
    const void* prepared = operand(normed_, up.pieces);
    const Matrix* second = shape_.gated_mlp ? &up.pieces.back() : nullptr;
    const int64_t shift = up.pieces.size() == 1 ? inner : 0;  // of the up half, within its piece
    const float* bias = up.bias;
    member.loop_apart(chunks * blocks, [&](int64_t task) {
        const int64_t row = task % chunks * per_chunk, begin = task / chunks * block;
        multiply_gated(member, {&up.pieces.front(), row, bias ? bias + row : nullptr, second, shift + row,
                                bias ? bias + inner + row : nullptr, std::min(per_chunk, inner - row), prepared, begin,
                                std::min(begin + block, tokens_), precision, inner_ + begin * inner + row, inner, index});
    });
}

void Decoder::Step::multiply_gated(Team::Member& member, const Gated& g) {
    float* own = scratch(member);
    float* gate = own + product_scratch(g.gate->columns);
    float* up = gate + (g.end - g.begin) * g.rows;
    kernels_.multiply({g.gate, g.gate_row, g.gate_row + g.rows, g.x, g.begin, g.end, g.precision, g.gate_bias, false, gate,
                       g.rows, own});
    if (g.up)
        kernels_.multiply({g.up, g.up_row, g.up_row + g.rows, g.x, g.begin, g.end, g.precision, g.up_bias, false, up,
                           g.rows, own});
    if (g.layer >= 0) {
        const Spot spot{g.layer, Projection::up};
        add_adapted(spot, g.begin, g.end, g.gate_row, g.rows, gate, g.rows);
        if (g.up) add_adapted(spot, g.begin, g.end, shape_.intermediate_size + g.gate_row, g.rows, up, g.rows);
    }
    if (g.is_expert && shape_.gate_limit > 0.0f) limit_gate(gate, up, (g.end - g.begin) * g.rows);
    for (int64_t t = 0; t < g.end - g.begin; ++t) {
        float* out = g.out + t * g.out_stride;
        if (g.up)
            kernels_.gate(shape_.activation, gate + t * g.rows, up + t * g.rows, g.rows, out);
        else
            kernels_.activate(shape_.activation, gate + t * g.rows, g.rows, out);
    }
}

// (up + 1)·gate·sigmoid(alpha·gate) within limits, as silu(gate')·up'. What is not a number stays so.
void Decoder::Step::limit_gate(float* gate, float* up, int64_t count) const {
    const float limit = shape_.gate_limit, alpha = shape_.gate_alpha, inverse = 1.0f / alpha;
    for (int64_t i = 0; i < count; ++i) {
        gate[i] = (gate[i] > limit ? limit : gate[i]) * alpha;
        up[i] = ((up[i] > limit ? limit : up[i] < -limit ? -limit : up[i]) + 1.0f) * inverse;
    }
}

// Back onto the residual stream, through a norm of its own where the family has one.
void Decoder::Step::update(Team::Member& member, const Linear& weights, const Norm& post, const float* x, Spot spot) {
    if (!post.weight) return linear(member, weights, x, hidden_, true, spot);
    linear(member, weights, x, update_, false, spot);
    each_stretch(member, Precision::f32, [&](int64_t begin, int64_t end) {
        const int64_t columns = shape_.hidden_size;
        for (int64_t t = begin; t < end; ++t) {
            float* row = update_ + t * columns;
            norm_row(post, row, columns, row);
            kernels_.load_row(row, DType::f32, columns, 1.0f, true, hidden_ + t * columns);
        }
    });
}

// Behind the last attention only rows that sample go on.
void Decoder::Step::keep_sampled(Team::Member& member) {
    const int64_t kept = static_cast<int64_t>(sampled_at_.size());
    member.loop(1, [&](int64_t) {
        for (int64_t i = 0; i < kept; ++i) {
            const int64_t from = sampled_at_[i];
            std::copy_n(hidden_ + from * shape_.hidden_size, shape_.hidden_size, hidden_ + i * shape_.hidden_size);
            std::copy_n(attended_ + from * shape_.q_size(), shape_.q_size(), attended_ + i * shape_.q_size());
        }
    });
    member.loop(1, [&](int64_t) {
        tokens_ = kept;
        adapted_.swap(adapted_sampled_);
    });
}

void Decoder::Step::logits(Team::Member& member) {
    normalize(member, model_.final_norm, model_.head);
    if (iteration_.states)
        member.loop(1, [&](int64_t) { std::copy_n(normed_, tokens_ * shape_.hidden_size, iteration_.states); });
    if (!iteration_.logits) return;
    linear(member, model_.head, normed_, iteration_.logits, false, {});
    member.loop(tokens_, [&](int64_t t) {
        float* row = iteration_.logits + t * shape_.vocab_size;
        if (const float scale = shape_.logit_scale; scale != 1.0f)
            for (int64_t i = 0; i < shape_.vocab_size; ++i) row[i] *= scale;
        if (const float cap = shape_.final_softcap; cap > 0.0f)
            for (int64_t i = 0; i < shape_.vocab_size; ++i) row[i] = std::tanh(row[i] / cap) * cap;
        iteration_.best[t] = static_cast<int32_t>(kernels_.argmax(row, shape_.vocab_size));
    });
}

}  // namespace dovetail
