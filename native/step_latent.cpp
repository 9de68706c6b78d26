// Latent attention (multi-head latent attention): the cache has one latent per token, and beside it the part of the key
// that turns; all heads share them. What makes a head's key of the latent is applied to the query before attention, and
// what makes its value to the sum of latents behind it, so that attention is one over a single key head, whose values are
// its keys. (The sum of the parts that turned is nobody's value and is left alone.)
//
//     qkv → latent: norm, rotation → cache; query: rotation, k_up per head → attention → v_up per head → out
#include <algorithm>

#include "step.hpp"

namespace dovetail {

void Decoder::Step::make_latents(Team::Member& member, const Layer& layer, int64_t index) {
    const int64_t rank = shape_.latent_rank, rope = shape_.rope_dim, nope = shape_.nope_dim, d = shape_.head_dim;
    const int64_t padded = whole_tiles(tokens_), size = iteration_.cache.block_size;
    const CacheView view = cache_view(index, 0);
    each_stretch(member, Precision::f32, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* row = qkv_ + t * shape_.qkv_size();
            const float *cosines = angles_ + t * rope, *sines = cosines + rope / 2;
            for (int64_t head = 0; head < shape_.num_heads; ++head) {
                float *query = row + head * (nope + rope), *out = queries_ + t * shape_.q_size() + head * d;
                kernels_.rotate(query + nope, cosines, sines, rope);
                std::copy_n(query, nope, heads_ + (head * padded + t) * nope);
                std::copy_n(query + nope, rope, out + rank);
            }
            float* latent = row + shape_.num_heads * (nope + rope);
            kernels_.rms_norm(latent, layer.kv_norm.weight, shape_.latent_eps, rank, latent);
            kernels_.rotate(latent + rank, cosines, sines, rope);
            const int64_t at = slot_[t] / size * view.block_stride + slot_[t] % size * view.token_stride;
            char* keys = static_cast<char*>(const_cast<void*>(view.keys)) + at * size_of(view.type);
            kernels_.store_row(latent, d, view.type, keys);
        }
    });
    multiply_heads(member, layer.k_up, rank, queries_, shape_.q_size(), d);
}

void Decoder::Step::make_values(Team::Member& member, const Layer& layer) {
    const int64_t rank = shape_.latent_rank, d = shape_.head_dim, padded = whole_tiles(tokens_);
    each_stretch(member, Precision::f32, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int64_t head = 0; head < shape_.num_heads; ++head)
                std::copy_n(attended_ + t * shape_.q_size() + head * d, rank, heads_ + (head * padded + t) * rank);
    });
    multiply_heads(member, layer.v_up, shape_.value_dim, values_, shape_.attended_size(), shape_.value_dim);
}

// What each head has in `heads_` by its own matrix, of `rows`; a token's outputs lie `stride` apart, a head's `step`.
void Decoder::Step::multiply_heads(Team::Member& member, const Stack& stack, int64_t rows, float* out, int64_t stride,
                                   int64_t step) {
    const int64_t heads = shape_.num_heads, columns = stack.columns(), padded = whole_tiles(tokens_);
    const int64_t tiles = padded / kTokenTile;
    const Precision precision = precision_of(stack.pieces);
    const void* prepared = operand(heads_, stack.pieces);
    if (prepared != heads_)
        member.loop(heads * tiles, [&](int64_t i) {
            const int64_t first = i / tiles * padded, begin = first + i % tiles * kTokenTile;
            kernels_.prepare(heads_, begin, std::min(begin + kTokenTile, first + tokens_), columns, precision, prepared_);
        });
    const int64_t per_chunk = chunk_rows(rows, tokens_), block = token_block(columns, precision);
    const int64_t chunks = (rows + per_chunk - 1) / per_chunk, blocks = (tokens_ + block - 1) / block;
    member.loop_apart(heads * chunks * blocks, [&](int64_t task) {
        const int64_t head = task / (chunks * blocks), row = task % chunks * per_chunk;
        const int64_t begin = task / chunks % blocks * block, end = std::min(begin + block, tokens_);
        const Place at = place_of(stack, heads, rows, head, row);
        kernels_.multiply({at.piece, at.row, at.row + std::min(per_chunk, rows - row), prepared, head * padded + begin,
                           head * padded + end, precision, nullptr, false, out + begin * stride + head * step + row,
                           stride, scratch(member)});
    });
}

}  // namespace dovetail
