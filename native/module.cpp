// The Python module: a decoder that is filled tensor by tensor, and single kernels for tests and measurements. Tensors
// cross as DLPack; no copy is made, and what is held is kept alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>

#include "decoder.hpp"
#include "sampling.hpp"

namespace nb = nanobind;

void add_single_kernels(nb::module_& module);

namespace dovetail {

using Array = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;
template <class T>
using Output = nb::ndarray<T, nb::device::cpu, nb::c_contig>;
using Integers = nb::ndarray<const int32_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;

constexpr double kEndless = 1e6;  // seconds: an iteration that takes so long does not stop
constexpr nb::dlpack::dtype kHalf{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};

DType type_of(const Array& array) {
    const nb::dlpack::dtype type = array.dtype();
    if (type == nb::dtype<float>()) return DType::f32;
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16) return DType::bf16;
    if (type == kHalf) return DType::f16;
    throw std::invalid_argument("tensors must be float32, bfloat16 or float16");
}

DType cache_type_of(const Array& array) {
    return array.dtype() == nb::dtype<int8_t>() ? DType::int8 : type_of(array);
}

const Kernels& kernels_of(const std::string& level) {
    const Kernels* kernels = find_kernels(level.c_str());
    if (!kernels) throw std::invalid_argument("this machine cannot run the kernels of " + level);
    return *kernels;
}

// By the names that layouts have in Python
Groups groups_of(const std::string& layout) {
    struct Named {
        const char* name;
        Groups groups;
    };
    constexpr Named kForms[] = {{"int8-g32", {8, 32, false, false}},     {"int8-g32-min", {8, 32, false, true}},
                                {"int8-k32-min", {8, 32, true, true}},   {"int8-k16", {8, 16, true, false}},
                                {"int4-g32", {4, 32, false, false}},     {"int4-cells", {4, 32, false, false}},
                                {"int4-g32-min", {4, 32, false, true}},  {"int4-k32-min", {4, 32, true, true}},
                                {"fp4-e32", {4, 32, false, false, true}}};
    for (const Named& form : kForms)
        if (layout == form.name) return form.groups;
    throw std::invalid_argument("there are no kernels for the layout " + layout);
}

// All bytes of a matrix in a quantised layout, codes first. Rows of a stack of matrices count through.
Matrix quantised_of(const Array& bytes, const std::string& layout, int64_t rows, int64_t columns) {
    if (bytes.dtype() != nb::dtype<uint8_t>() || rows < 1 || columns < 1)
        throw std::invalid_argument("a quantised matrix is given as its bytes");
    const bool by_row = layout == "int8-cells";
    const Groups groups = by_row ? Groups{} : groups_of(layout);
    const int64_t blocks = (rows + kCellRows - 1) / kCellRows;
    const int64_t codes = blocks * (by_row ? kCellRows * byte_columns(columns) : block_code_bytes(groups, columns));
    const int64_t scales = blocks * (by_row ? kCellRows * 4 : block_scale_bytes(groups, columns));
    if (static_cast<int64_t>(bytes.size()) != codes + scales)
        throw std::invalid_argument("a matrix of layout " + layout + " and this shape has " +
                                    std::to_string(codes + scales) + " bytes");
    const char* data = static_cast<const char*>(bytes.data());
    return {data, by_row ? DType::int8 : DType::grouped, rows, columns, data + codes, groups};
}

Matrix matrix_of(const Array& array) {
    if (array.ndim() != 2) throw std::invalid_argument("a weight has two dimensions");
    return {array.data(), type_of(array), static_cast<int64_t>(array.shape(0)), static_cast<int64_t>(array.shape(1))};
}

// How the activations of a model enter products with weights that are no codes
Precision precision_of(const std::string& name) {
    if (name == "f32") return Precision::f32;
    if (name == "bf16") return Precision::bf16;
    if (name == "f16") return Precision::f16;
    throw std::invalid_argument("unknown precision " + name);
}

namespace {

Activation activation_of(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "relu") return Activation::relu;
    throw std::invalid_argument("unknown activation " + name);
}

class Model {
  public:
    Model(const std::string& level, int threads, const Shape& shape, int num_layers)
        : decoder_(kernels_of(level), threads, shape) {
        decoder_.layers.resize(num_layers);
    }

    // `name` as in modelspec; one piece or several, concatenated along the first dimension.
    void add(const std::string& name, std::vector<Array> pieces) {
        for (const Array& piece : pieces) held_.push_back(piece);
        if (name == "embed.weight") return void(decoder_.embed = matrix_of(pieces.at(0)));
        if (name == "positions.weight") return void(decoder_.positions = matrix_of(pieces.at(0)));
        if (name.ends_with("norm.weight") || name.ends_with("norm.bias")) return add_norm(norm_of(name), name, pieces);
        if (name.ends_with(".sinks.weight"))
            return void(place_of(name).first->sinks = vector_of(name, pieces, decoder_.shape.num_heads));
        if (name.ends_with(".bias")) return add_bias(name, pieces);
        for (const Array& piece : pieces) pieces_of(name).push_back(matrix_of(piece));
    }

    // A matrix as it is stored, or the next of its pieces.
    void add_quantised(const std::string& name, Array bytes, const std::string& layout, int64_t rows, int64_t columns) {
        const Matrix matrix = quantised_of(bytes, layout, rows, columns);
        held_.push_back(bytes);
        if (name == "embed.weight") return void(decoder_.embed = matrix);
        pieces_of(name).push_back(matrix);
    }

    void set_layer(int index, int64_t window, bool local_rope) {
        decoder_.layers.at(index).window = window;
        decoder_.layers.at(index).local_rope = local_rope;
    }

    void set_rope(const std::vector<float>& frequencies, float scale, bool local) {
        (local ? decoder_.rope_local : decoder_.rope) = {frequencies, scale};
        if (static_cast<int64_t>(frequencies.size()) * 2 != decoder_.shape.turning_dim())
            throw std::invalid_argument("a rotation has one frequency per pair of a head's dimensions");
    }

    void check() const { decoder_.check(); }

    void add_adapter(int id, float scale) {
        HeldAdapter& held = adapters_[id] = {};
        held.adapter.scale = scale;
        held.adapter.layers.resize(decoder_.layers.size());
    }

    void remove_adapter(int id) { adapters_.erase(id); }

    // To the outputs of `name` from `row` on: first [rank, columns], second [rank, outputs].
    void add_low_rank(int id, const std::string& name, int64_t row, Array first, Array second) {
        const Linear& linear = linear_of(name);
        const LowRank part{matrix_of(first), matrix_of(second), row};
        if (linear.pieces.empty()) throw std::invalid_argument(name + ": the layer has no such matrix");
        if (part.first.columns != linear.columns() || part.first.rows != part.second.rows || part.first.rows < 1 || row < 0 ||
            row + part.second.columns > linear.rows())
            throw std::invalid_argument(name + ": the adapter's matrices do not fit");
        HeldAdapter& held = adapters_.at(id);
        std::vector<LowRank>& parts = parts_of(held.adapter, name);
        if (static_cast<int64_t>(parts.size()) == kMostParts) throw std::invalid_argument(name + ": has too many parts");
        parts.push_back(part);
        held.arrays.push_back(first);
        held.arrays.push_back(second);
    }

    // False: it has stopped between two layers, after so many seconds, and `resume` goes on with it.
    bool forward(Integers tokens, Integers starts, Integers counts, Integers table_offsets, Integers tables,
                 Integers samples, Array cache, Output<float> logits, Output<int32_t> best,
                 std::optional<Integers> adapters, double seconds) {
        Iteration iteration = iteration_of(tokens, starts, counts, table_offsets, tables, samples, cache, adapters);
        const int64_t sampling = num_sampling(iteration);
        if (static_cast<int64_t>(logits.size()) != sampling * decoder_.shape.vocab_size ||
            static_cast<int64_t>(best.size()) != sampling)
            throw std::invalid_argument("one row of logits per sampling sequence");
        iteration.logits = logits.data();
        iteration.best = best.data();
        return begin(std::move(iteration), {tokens, tables, cache, logits, best}, seconds);
    }

    // The same, but what the logits would be made of.
    bool states(Integers tokens, Integers starts, Integers counts, Integers table_offsets, Integers tables,
                Integers samples, Array cache, Output<float> states, std::optional<Integers> adapters, double seconds) {
        Iteration iteration = iteration_of(tokens, starts, counts, table_offsets, tables, samples, cache, adapters);
        if (static_cast<int64_t>(states.size()) != num_sampling(iteration) * decoder_.shape.hidden_size)
            throw std::invalid_argument("one row of states per sampling sequence");
        iteration.states = states.data();
        return begin(std::move(iteration), {tokens, tables, cache, states, std::nullopt}, seconds);
    }

    bool resume(double seconds) {
        if (!open_) throw std::invalid_argument("no iteration has stopped");
        const bool is_done = advance(seconds);
        if (is_done) open_.reset();
        return is_done;
    }

  private:
    struct Open {  // what an iteration that has stopped reads and writes
        Integers tokens, tables;
        Array cache;
        Output<float> out;
        std::optional<Output<int32_t>> best;
    };

    bool begin(Iteration iteration, Open open, double seconds) {
        decoder_.begin(std::move(iteration));
        open_ = std::move(open);
        return resume(seconds);
    }

    bool advance(double seconds) {
        nb::gil_scoped_release released;
        using Clock = std::chrono::steady_clock;
        const bool stops = seconds < kEndless;
        return decoder_.advance(stops ? Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9))
                                      : Decoder::Time::max());
    }

    Iteration iteration_of(const Integers& tokens, const Integers& starts, const Integers& counts,
                           const Integers& table_offsets, const Integers& tables, const Integers& samples,
                           const Array& cache, const std::optional<Integers>& adapters) const {
        Iteration iteration;
        if (adapters && adapters->size() != starts.size()) throw std::invalid_argument("one adapter, or -1, per sequence");
        iteration.tokens = tokens.data();
        iteration.cache = cache_of(cache);
        int64_t total = 0;
        for (size_t i = 0; i < starts.size(); ++i) {
            const int64_t end = i + 1 < table_offsets.size() ? table_offsets(i + 1) : tables.size();
            Sequence sequence{starts(i), counts(i), tables.data() + table_offsets(i), samples(i) != 0};
            if (adapters && (*adapters)(i) >= 0) sequence.adapter = &adapters_.at((*adapters)(i)).adapter;
            check_sequence(sequence, iteration.cache, end - table_offsets(i));
            iteration.sequences.push_back(sequence);
            total += sequence.count;
        }
        if (total != static_cast<int64_t>(tokens.size()))
            throw std::invalid_argument("as many tokens as the sequences have");
        for (size_t i = 0; i < tokens.size(); ++i)
            if (tokens(i) < 0 || tokens(i) >= decoder_.shape.vocab_size)
                throw std::invalid_argument("token " + std::to_string(tokens(i)) + " is not in the vocabulary");
        return iteration;
    }

    static int64_t num_sampling(const Iteration& iteration) {
        return std::ranges::count_if(iteration.sequences, [](const Sequence& sequence) { return sequence.samples; });
    }

    void add_norm(Norm& norm, const std::string& name, const std::vector<Array>& pieces) {
        const Shape& shape = decoder_.shape;
        const bool of_q = name.ends_with(".q_norm.weight"), of_k = name.ends_with(".k_norm.weight");
        const int64_t heads = shape.qk_norm_whole ? (of_q ? shape.num_heads : shape.num_kv_heads) : 1;
        const int64_t size = name.ends_with(".kv_norm.weight") ? shape.latent_rank
                             : of_q || of_k                    ? heads * shape.head_dim
                                                               : shape.hidden_size;
        (name.ends_with(".bias") ? norm.bias : norm.weight) = vector_of(name, pieces, size);
    }

    static const float* vector_of(const std::string& name, const std::vector<Array>& pieces, int64_t size) {
        if (pieces.size() != 1 || type_of(pieces[0]) != DType::f32 || static_cast<int64_t>(pieces[0].size()) != size)
            throw std::invalid_argument(name + ": expected one float32 tensor of " + std::to_string(size) + " numbers");
        return static_cast<const float*>(pieces[0].data());
    }

    void add_bias(const std::string& name, const std::vector<Array>& pieces) {
        const Shape& shape = decoder_.shape;
        if (name.ends_with(".experts.gate_up.bias"))
            place_of(name).first->experts_up.bias = vector_of(name, pieces, shape.num_experts * 2 * shape.expert_size);
        else if (name.ends_with(".experts.down.bias"))
            place_of(name).first->experts_down.bias = vector_of(name, pieces, shape.num_experts * shape.hidden_size);
        else
            linear_of(name).bias = vector_of(name, pieces, linear_of(name).rows());
    }

    // layers.<i>.<part>.weight
    std::pair<Layer*, std::string> place_of(const std::string& name) {
        if (name.rfind("layers.", 0) != 0) throw std::invalid_argument("unknown tensor " + name);
        const size_t dot = name.find('.', 7);
        Layer& layer = decoder_.layers.at(std::stoul(name.substr(7, dot - 7)));
        return {&layer, name.substr(dot + 1, name.rfind('.') - dot - 1)};
    }

    Linear& linear_of(const std::string& name) {
        if (name == "lm_head.weight") return decoder_.head;
        const auto [layer, part] = place_of(name);
        if (part == "qkv") return layer->qkv;
        if (part == "out") return layer->out;
        if (part == "gate_up" || part == "up") return layer->up;
        if (part == "down") return layer->down;
        if (part == "router") return layer->router;
        if (part == "shared.gate_up") return layer->shared_up;
        if (part == "shared.down") return layer->shared_down;
        throw std::invalid_argument("unknown tensor " + name);
    }

    std::vector<LowRank>& parts_of(Adapter& adapter, const std::string& name) {
        const auto [layer, part] = place_of(name);
        const Projection projection = part == "qkv"    ? Projection::qkv
                                      : part == "out"  ? Projection::out
                                      : part == "down" ? Projection::down
                                                       : Projection::up;
        if (part == "router" || part.starts_with("shared."))
            throw std::invalid_argument(name + ": a router and a shared expert have no adapter");
        return adapter.layers.at(layer - decoder_.layers.data())[static_cast<size_t>(projection)];
    }

    std::vector<Matrix>& pieces_of(const std::string& name) {
        if (name.ends_with(".experts.gate_up.weight")) return place_of(name).first->experts_up.pieces;
        if (name.ends_with(".experts.down.weight")) return place_of(name).first->experts_down.pieces;
        if (name.ends_with(".k_up.weight")) return place_of(name).first->k_up.pieces;
        if (name.ends_with(".v_up.weight")) return place_of(name).first->v_up.pieces;
        return linear_of(name).pieces;
    }

    Norm& norm_of(const std::string& name) {
        if (name.rfind("final_norm.", 0) == 0) return decoder_.final_norm;
        const auto [layer, part] = place_of(name);
        if (part == "attn_norm") return layer->attn_norm;
        if (part == "q_norm") return layer->q_norm;
        if (part == "k_norm") return layer->k_norm;
        if (part == "kv_norm") return layer->kv_norm;
        if (part == "post_attn_norm") return layer->post_attn_norm;
        if (part == "mlp_norm") return layer->mlp_norm;
        if (part == "post_mlp_norm") return layer->post_mlp_norm;
        throw std::invalid_argument("unknown tensor " + name);
    }

    Cache cache_of(const Array& cache) const {
        const Shape& shape = decoder_.shape;
        const DType type = cache_type_of(cache);
        if (cache.ndim() != 6 || cache.shape(1) != decoder_.layers.size() ||
            static_cast<int64_t>(cache.shape(2)) != shape.kv_parts() ||
            static_cast<int64_t>(cache.shape(4)) != shape.num_kv_heads ||
            static_cast<int64_t>(cache.shape(5)) != cache_width(type, shape.head_dim))
            throw std::invalid_argument("the cache is [blocks, layers, 2 (1 of latents), block_size, kv_heads, head_dim], with 4 bytes "
                                        "for a scale behind each head of int8");
        return {const_cast<void*>(cache.data()), type, static_cast<int64_t>(cache.shape(0)),
                static_cast<int64_t>(cache.shape(1)), static_cast<int>(cache.shape(3))};
    }

    void check_sequence(const Sequence& sequence, const Cache& cache, int64_t num_blocks) const {
        const int64_t end = sequence.start + sequence.count;
        if (sequence.start < 0 || sequence.count < 1 || num_blocks * cache.block_size < end)
            throw std::invalid_argument("the block table covers the sequence");
        for (int64_t i = 0; i < num_blocks; ++i)
            if (sequence.blocks[i] < 0 || sequence.blocks[i] >= cache.num_blocks)
                throw std::invalid_argument("block " + std::to_string(sequence.blocks[i]) + " is not in the cache");
        if (decoder_.positions.data && end + decoder_.shape.position_offset > decoder_.positions.rows)
            throw std::invalid_argument("there is no learned position " + std::to_string(end - 1));
    }

    struct HeldAdapter {
        Adapter adapter;
        std::vector<Array> arrays;
    };

    Decoder decoder_;
    std::optional<Open> open_;
    std::vector<Array> held_;
    std::map<int, HeldAdapter> adapters_;
};

// Of `rows` of the logits: values and tokens [rows, width], and the sum of all exponentials
void candidates(int threads, nb::ndarray<const float, nb::ndim<2>, nb::device::cpu, nb::c_contig> logits, Integers rows,
                nb::ndarray<const float, nb::ndim<1>, nb::device::cpu, nb::c_contig> sharpness, Output<float> values,
                Output<int64_t> tokens, Output<double> totals) {
    const int64_t count = rows.size(), vocab = logits.shape(1), width = count ? values.size() / count : 0;
    if (static_cast<int64_t>(sharpness.size()) != count || static_cast<int64_t>(totals.size()) != count || width < 1 ||
        static_cast<int64_t>(values.size()) != count * width || tokens.size() != values.size())
        throw std::invalid_argument("one of each per row, and as many values as tokens");
    for (int64_t i = 0; i < count; ++i)
        if (rows(i) < 0 || rows(i) >= static_cast<int64_t>(logits.shape(0)))
            throw std::invalid_argument("there is no such row of logits");
    const std::shared_ptr<Team> team = Team::shared(threads);
    nb::gil_scoped_release released;
    team->run([&](Team::Member& member) {
        member.loop(count, [&](int64_t i) {
            totals.data()[i] = find_candidates(logits.data() + rows(i) * vocab, vocab, sharpness(i), width,
                                               values.data() + i * width, tokens.data() + i * width);
        });
    });
}

}  // namespace

}  // namespace dovetail

NB_MODULE(_kernels, module) {
    using namespace dovetail;
    module.def("levels", [] {
        std::vector<std::string> names;
        for (const char* const* name = usable_levels(); *name; ++name) names.emplace_back(*name);
        return names;
    }, "Levels that this processor can run, weakest first.");
    nb::class_<Shape>(module, "Shape")
        .def(nb::init<>())
        .def_rw("vocab_size", &Shape::vocab_size)
        .def_rw("hidden_size", &Shape::hidden_size)
        .def_rw("num_heads", &Shape::num_heads)
        .def_rw("num_kv_heads", &Shape::num_kv_heads)
        .def_rw("head_dim", &Shape::head_dim)
        .def_rw("intermediate_size", &Shape::intermediate_size)
        .def_rw("norm_eps", &Shape::norm_eps)
        .def_rw("embed_scale", &Shape::embed_scale)
        .def_rw("attention_scale", &Shape::attention_scale)
        .def_rw("attention_softcap", &Shape::attention_softcap)
        .def_rw("final_softcap", &Shape::final_softcap)
        .def_rw("position_offset", &Shape::position_offset)
        .def_rw("gated_mlp", &Shape::gated_mlp)
        .def_rw("logit_scale", &Shape::logit_scale)
        .def_rw("qk_norm_whole", &Shape::qk_norm_whole)
        .def_rw("parallel_block", &Shape::parallel_block)
        .def_rw("num_experts", &Shape::num_experts)
        .def_rw("experts_per_token", &Shape::experts_per_token)
        .def_rw("expert_size", &Shape::expert_size)
        .def_rw("normalize_shares", &Shape::normalize_shares)
        .def_rw("shares_scale", &Shape::shares_scale)
        .def_rw("expert_groups", &Shape::expert_groups)
        .def_rw("groups_per_token", &Shape::groups_per_token)
        .def_rw("shared_size", &Shape::shared_size)
        .def_rw("gate_alpha", &Shape::gate_alpha)
        .def_rw("gate_limit", &Shape::gate_limit)
        .def_rw("latent_rank", &Shape::latent_rank)
        .def_rw("rope_dim", &Shape::rope_dim)
        .def_rw("nope_dim", &Shape::nope_dim)
        .def_rw("value_dim", &Shape::value_dim)
        .def_rw("latent_eps", &Shape::latent_eps)
        .def_prop_rw("activation", [](const Shape& shape) { return static_cast<int>(shape.activation); },
                     [](Shape& shape, const std::string& name) { shape.activation = activation_of(name); })
        .def_prop_rw("precision", [](const Shape& shape) { return static_cast<int>(shape.precision); },
                     [](Shape& shape, const std::string& name) { shape.precision = precision_of(name); });
    nb::class_<Model>(module, "Model")
        .def(nb::init<const std::string&, int, const Shape&, int>())
        .def("add", &Model::add)
        .def("add_quantised", &Model::add_quantised)
        .def("set_layer", &Model::set_layer)
        .def("set_rope", &Model::set_rope)
        .def("check", &Model::check)
        .def("add_adapter", &Model::add_adapter)
        .def("add_low_rank", &Model::add_low_rank)
        .def("remove_adapter", &Model::remove_adapter)
        .def("forward", &Model::forward, nb::arg("tokens"), nb::arg("starts"), nb::arg("counts"),
             nb::arg("table_offsets"), nb::arg("tables"), nb::arg("samples"), nb::arg("cache"), nb::arg("logits"),
             nb::arg("best"), nb::arg("adapters") = nb::none(), nb::arg("seconds") = kEndless)
        .def("states", &Model::states, nb::arg("tokens"), nb::arg("starts"), nb::arg("counts"),
             nb::arg("table_offsets"), nb::arg("tables"), nb::arg("samples"), nb::arg("cache"), nb::arg("states"),
             nb::arg("adapters") = nb::none(), nb::arg("seconds") = kEndless)
        .def("resume", &Model::resume, nb::arg("seconds") = kEndless);
    module.def("candidates", &candidates);
    add_single_kernels(module);
}
