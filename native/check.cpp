// A program without Python, for sanitizers and for machines that have nothing but a compiler: products against
// sums in double, then random models of several kinds in mixed iterations on several threads, where a batch must
// give the numbers that its sequences give alone. Sanitizers: -DDOVETAIL_SANITIZE=address|thread.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "check_cells.hpp"
#include "decoder.hpp"

using namespace dovetail;

void check_products(const Kernels& kernels);
void check_floats(const Kernels& kernels);

namespace {

class Source {
  public:
    const float* floats(int64_t count) {
        auto& values = held_.emplace_back(count);
        std::normal_distribution<float> normal(0.0f, 0.3f);
        for (float& value : values) value = normal(random_);
        return values.data();
    }

    Matrix matrix(int64_t rows, int64_t columns, DType type) {
        const float* values = floats(rows * columns);
        if (type == DType::f32) return {values, type, rows, columns};
        if (type == DType::int8) return quantised(values, rows, columns);
        if (type == DType::grouped) return grouped(rows, columns);
        auto& narrowed = narrow_.emplace_back(rows * columns);
        for (int64_t i = 0; i < rows * columns; ++i)
            narrowed[i] = type == DType::bf16 ? narrow<bf16>(values[i]).bits : narrow<f16>(values[i]).bits;
        return {narrowed.data(), type, rows, columns};
    }

    Matrix quantised(const float* values, int64_t rows, int64_t columns) {
        CellMatrix& cells = cells_.emplace_back(rows, columns);
        for (int64_t r = 0; r < rows; ++r) {
            float most = 0.0f;
            for (int64_t k = 0; k < columns; ++k) most = std::max(most, std::abs(values[r * columns + k]));
            cells.scales[r] = most / 127.0f;
            for (int64_t k = 0; k < columns; ++k)
                cells.set(r, k, static_cast<int>(std::lrint(values[r * columns + k] / cells.scales[r])));
        }
        return cells.matrix();
    }

    // The forms in turn, so that pieces of a matrix have several
    Matrix grouped(int64_t rows, int64_t columns) {
        CellMatrix& cells = cells_.emplace_back(rows, columns, kForms[next_form_++ % std::size(kForms)]);
        cells.fill(random_);
        return cells.matrix();
    }

  private:
    std::mt19937 random_{7};
    size_t next_form_ = 0;
    std::vector<std::vector<float>> held_;
    std::vector<std::vector<uint16_t>> narrow_;
    std::deque<CellMatrix> cells_;
};

constexpr int kBlockSize = 16, kBlocks = 96, kLayers = 2;

// experts: in the first layer, which all tokens go through; beside: attention and the MLP read the same rows; behind:
// norms are behind attention and the MLP only, and over all heads of q and k; sinks: a softmax with sinks, experts with
// biases and a limit; latent: attention over latents, experts of groups beside a shared one
enum class Kind { plain, gated, experts, beside, behind, sinks, latent };

DType plain_type(Precision precision) {
    return precision == Precision::bf16 ? DType::bf16 : precision == Precision::f16 ? DType::f16 : DType::f32;
}

void add_experts(Layer& layer, Precision precision, DType type, Source& source) {
    layer.router.pieces = {source.matrix(7, 72, plain_type(precision))};
    if (type != DType::f32) {
        layer.experts_up.pieces = {source.matrix(7 * 40, 72, type)};
        layer.experts_down.pieces = {source.matrix(7 * 72, 20, type)};
        return;
    }
    for (int i = 0; i < 7; ++i) {
        layer.experts_up.pieces.push_back(source.matrix(20, 72, type));
        layer.experts_up.pieces.push_back(source.matrix(20, 72, type));
        layer.experts_down.pieces.push_back(source.matrix(72, 20, type));
    }
}

void add_biases(Layer& layer, Source& source) {
    layer.sinks = source.floats(6);
    layer.router.bias = source.floats(7);
    layer.experts_up.bias = source.floats(7 * 40), layer.experts_down.bias = source.floats(7 * 72);
}

// One key head of 24 + 8 dimensions; queries of 10 + 8, values of 12
void make_latent(Shape& shape) {
    shape.num_kv_heads = 1, shape.latent_rank = 24, shape.rope_dim = 8, shape.nope_dim = 10, shape.value_dim = 12;
    shape.shares_scale = 1.5f, shape.expert_groups = 7, shape.groups_per_token = 4, shape.shared_size = 40;
}

void add_latent(Layer& layer, DType type, Source& source) {
    layer.q_norm = {}, layer.post_attn_norm = {}, layer.qkv.bias = nullptr;
    layer.qkv.pieces = {source.matrix(6 * 18, 72, type), source.matrix(32, 72, type)};
    layer.out.pieces = {source.matrix(72, 72, type)};
    layer.kv_norm.weight = source.floats(24);
    layer.k_up.pieces = {source.matrix(6 * 24, 10, type)}, layer.v_up.pieces = {source.matrix(6 * 12, 24, type)};
    layer.shared_up.pieces = {source.matrix(80, 72, type)}, layer.shared_down.pieces = {source.matrix(72, 40, type)};
}

void add_norms_behind(Layer& layer, Source& source) {
    layer.attn_norm = layer.mlp_norm = {};
    layer.post_attn_norm.weight = source.floats(72), layer.post_mlp_norm.weight = source.floats(72);
    layer.q_norm.weight = source.floats(192), layer.k_norm.weight = source.floats(64);
}

std::unique_ptr<Decoder> make_model(const Kernels& kernels, int threads, Precision precision, DType type, Kind kind,
                                    Source& source) {
    const bool plain = kind == Kind::plain;
    Shape shape;
    shape.vocab_size = 307, shape.hidden_size = 72, shape.num_heads = 6, shape.num_kv_heads = 2, shape.head_dim = 32;
    shape.intermediate_size = 88, shape.norm_eps = 1e-5f, shape.attention_scale = 0.2f;
    shape.attention_softcap = plain ? 0.0f : 30.0f, shape.final_softcap = plain ? 0.0f : 20.0f;
    shape.gated_mlp = !plain, shape.activation = plain ? Activation::relu : Activation::gelu_tanh;
    shape.precision = precision;
    shape.parallel_block = kind == Kind::beside, shape.qk_norm_whole = kind == Kind::behind;
    shape.logit_scale = kind == Kind::beside ? 0.5f : 1.0f;
    const bool has_experts = kind == Kind::experts || kind == Kind::sinks || kind == Kind::latent;
    if (kind == Kind::latent) make_latent(shape);
    if (kind == Kind::sinks) shape.activation = Activation::silu, shape.gate_limit = 0.5f, shape.gate_alpha = 1.7f;
    if (has_experts) {
        shape.num_experts = 7, shape.experts_per_token = 3, shape.expert_size = 20;
        shape.normalize_shares = precision == Precision::f32;
    }
    auto model = std::make_unique<Decoder>(kernels, threads, shape);
    model->embed = source.matrix(307, 72, type);
    model->head.pieces = {source.matrix(307, 72, type)};
    model->final_norm.weight = source.floats(72);
    for (int i = 0; i < shape.turning_dim() / 2; ++i) model->rope.frequencies.push_back(std::pow(1e-4f, i / 16.0f));
    for (int i = 0; i < kLayers; ++i) {
        Layer& layer = model->layers.emplace_back();
        layer.attn_norm.weight = source.floats(72), layer.mlp_norm.weight = source.floats(72);
        if (kind == Kind::behind) add_norms_behind(layer, source);
        else if (!plain) layer.post_attn_norm.weight = source.floats(72), layer.q_norm.weight = source.floats(32);
        if (plain) layer.mlp_norm.bias = source.floats(72);
        layer.qkv.pieces = {source.matrix(192, 72, type), source.matrix(64, 72, type), source.matrix(64, 72, type)};
        layer.qkv.bias = source.floats(320);
        layer.out.pieces = {source.matrix(72, 192, type)};
        layer.up.pieces = {source.matrix(plain ? 88 : 176, 72, type)};
        layer.down.pieces = {source.matrix(72, 88, type)};
        layer.window = i == 1 && !plain ? 40 : 0;
        if (i == 0 && has_experts) add_experts(layer, precision, type, source);
        if (i == 0 && kind == Kind::sinks) add_biases(layer, source);
        if (kind == Kind::latent) add_latent(layer, type, source);
    }
    model->check();
    return model;
}

// `stops`: between any two layers
std::vector<float> run(Decoder& model, Cache& cache, const std::vector<Sequence>& sequences, bool stops = false) {
    std::vector<int32_t> tokens;
    int64_t sampling = 0;
    for (const Sequence& sequence : sequences) {
        for (int64_t i = 0; i < sequence.count; ++i) tokens.push_back((31 * (sequence.start + i)) % 307);
        sampling += sequence.samples;
    }
    std::vector<float> logits(sampling * 307, NAN);
    std::vector<int32_t> best(sampling, -2);
    Iteration iteration;
    iteration.tokens = tokens.data(), iteration.sequences = sequences, iteration.cache = cache;
    iteration.logits = logits.data(), iteration.best = best.data();
    model.begin(iteration);
    int64_t slices = 1;
    while (!model.advance(stops ? Decoder::Time() : Decoder::Time::max())) ++slices;
    if (slices != (stops ? kLayers + 1 : 1)) std::printf("computed in %d slices\n", static_cast<int>(slices)), std::exit(1);
    for (const int32_t token : best)
        if (token < 0) std::printf("a logit is not a number\n"), std::exit(1);
    return logits;
}

void check(const Kernels& kernels, Precision precision, DType weights, Kind kind, DType type) {
    Source source;
    const auto model = make_model(kernels, 4, precision, weights, kind, source);
    const int64_t width = model->shape.num_kv_heads * cache_width(type, 32) * size_of(type);
    std::vector<char> memory(size_t{kBlocks} * kLayers * model->shape.kv_parts() * kBlockSize * width, -1);  // in any type: not a number
    Cache cache{memory.data(), type, kBlocks, kLayers, kBlockSize};
    std::vector<int32_t> tables(kBlocks);
    for (int i = 0; i < kBlocks; ++i) tables[i] = (i * 37) % kBlocks;
    const std::vector<Sequence> fill{{0, 600, tables.data(), true}, {0, 50, tables.data() + 40, false}};
    const std::vector<Sequence> mixed{{600, 1, tables.data(), true}, {50, 7, tables.data() + 40, true},
                                      {0, 33, tables.data() + 50, true}};
    run(*model, cache, fill);
    const std::vector<float> together = run(*model, cache, mixed);
    for (size_t i = 0; i < mixed.size(); ++i) {
        const std::vector<float> alone = run(*model, cache, {mixed[i]}, true);
        for (int j = 0; j < 307; ++j)
            if (alone[j] != together[i * 307 + j]) std::printf("sequence %zu differs in company\n", i), std::exit(1);
    }
}

void check_level(const Kernels& kernels) {
    check_floats(kernels);
    check_products(kernels);
    for (const Kind kind : {Kind::plain, Kind::gated, Kind::experts, Kind::beside, Kind::behind, Kind::sinks,
                            Kind::latent}) {
        check(kernels, Precision::f32, DType::f32, kind, DType::f32);
        check(kernels, Precision::bf16, DType::bf16, kind, DType::bf16);
        check(kernels, Precision::f32, DType::bf16, kind, DType::f32);
        check(kernels, Precision::f16, DType::f16, kind, DType::f16);
        check(kernels, Precision::f32, DType::int8, kind, DType::int8);
        check(kernels, Precision::bf16, DType::int8, kind, DType::int8);
        check(kernels, Precision::f32, DType::grouped, kind, DType::f32);
    }
}

bool is_wanted(const char* level, int count, char** names) {
    return count <= 1 || std::any_of(names + 1, names + count, [&](const char* name) { return !std::strcmp(name, level); });
}

}  // namespace

// kernels_check [LEVEL ...]: a line for every level of the build; all that the processor runs unless told which
int main(int count, char** names) {
    for (const char* const* level = built_levels(); *level; ++level) {
        if (!is_wanted(*level, count, names)) continue;
        const Kernels* kernels = find_kernels(*level);
        if (kernels) check_level(*kernels);
        std::printf("%s %s\n", *level, kernels ? "ok" : "lacking");
        std::fflush(stdout);
    }
}
