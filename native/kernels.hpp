// The kernels of one instruction set, as a table. Activations are float32 everywhere; weights and caches may be
// bf16, or integers with scales.
//
// Every output of `multiply` is one sum in one order, whatever else is in the batch and however the work is split, so a
// sequence gets the same numbers alone and in company.
#pragma once

#include <cstddef>
#include <cstdint>

#include "groups.hpp"
#include "number.hpp"

namespace dovetail {

enum class Activation : uint8_t { silu, gelu, gelu_tanh, relu };

// How activations enter a product: as they are, rounded to bf16 or float16 for instructions that multiply these (weights are
// of that type then), or as 8-bit digits for those that multiply bytes (digits.hpp), with int8 weights or with grouped ones.
// A level without such instructions for float16 takes the activations as they are.
enum class Precision : uint8_t { f32, bf16, f16, int8, grouped };

inline bool is_digits(Precision precision) { return precision == Precision::int8 || precision == Precision::grouped; }

constexpr int kTokenTile = 16;      // tokens that `prepare` handles together
constexpr int kWholeTokens = 8;     // that grouped products like to have prepared in one go
constexpr int kRowTile = 16;        // weight rows per chunk are a multiple of this, except at the end
constexpr int kMaxQueries = 48;     // (token, head) pairs of one Attend
constexpr int kKeyChunk = 64;       // keys between two rescalings of the softmax
// Keys that are summed up by themselves: the sums of a query depend neither on how many threads there are nor on whether
// it is computed alone or with others.
constexpr int64_t kSplitKeys = 512;
static_assert(kSplitKeys % kKeyChunk == 0);
constexpr float kNothingSeen = -1e30f;  // largest score of a query that saw no key

struct Matrix {  // [rows, columns], row-major, without gaps; codes in cells, with scales: see cells.hpp
    const void* data;
    DType type;
    int64_t rows, columns;
    const void* scales = nullptr;
    Groups groups = {};  // of grouped codes
};

struct Product {  // out[t][r] = (add ? out[t][r] : 0) + x[t]·weight[r] + bias[r]
    const Matrix* weight;
    int64_t row_begin, row_end;
    const void* x;  // from `prepare`, or float32 [tokens][columns] where it has nothing to do
    int64_t token_begin, token_end;  // token_begin is a multiple of kTokenTile
    Precision precision;
    const float* bias;  // of row_begin, or null
    bool add;
    float* out;  // of (token_begin, row_begin)
    int64_t out_stride;
    float* scratch;  // product_scratch(columns) floats of the calling thread, 64-byte aligned
};

struct Ranks {  // out[t][i] += sum over r of x[t][r]·rows[r][i], one after the other: what a low-rank update adds
    const void* rows;  // of the first i
    DType type;
    int64_t rank, row_stride, count;
    const float* x;
    int64_t x_stride, tokens;
    float* out;
    int64_t out_stride;
};

static constexpr int64_t product_scratch(int64_t columns) { return 8 * columns + 103424; }

// How quantised matrices lie is told in cells.hpp: in cells of so many rows and bytes, columns of int8 filled up to 64.
// Static, as all of this: levels compile this file with flags of their own, and no two of them may be merged.
constexpr int64_t kCellRows = 16, kCellBytes = 64;
static inline int64_t byte_columns(int64_t columns) { return (columns + 63) / 64 * 64; }

// Elements from one head's key (or value) to the next one's. As int8 it has its scale, a float, behind its codes.
static inline int64_t cache_width(DType type, int64_t head_dim) {
    return type == DType::int8 ? head_dim + static_cast<int64_t>(sizeof(float)) : head_dim;
}

struct CacheView {  // of one layer and one key head; strides in elements
    const void* keys;
    const void* values;
    DType type;
    int64_t block_stride, token_stride;
    int block_size;
};

struct Attend {
    const float* q;  // of the first token and head
    int64_t q_stride;  // between tokens
    int tokens, heads;  // heads share the key head; tokens·heads <= kMaxQueries
    int64_t position;  // of the first token
    int head_dim;
    CacheView cache;
    const int32_t* blocks;
    int64_t key_begin, key_end;
    int64_t window;  // 0 = all
    float scale, softcap;  // softcap 0 = none
    float* out;  // null: leave the parts in `largest`, `total` and `sums`
    int64_t out_stride;
    float* largest;  // [tokens·heads]
    float* total;
    float* sums;  // [tokens·heads][head_dim]
    float* scratch;  // attend_scratch(head_dim) floats
    const float* sinks = nullptr;  // of the first head: scores without a value; of parts, whoever merges them adds it
};

struct AttendParts {  // of one query, over stretches of kSplitKeys keys each
    int64_t count, stride;  // of the first to the next, in parts
    const float *largest, *total;
    const float* sums;  // [parts][head_dim]
    int head_dim;
    const float* sink;  // null = none
    float* out;
};

// Floats of a chunk of keys, or of what else is made of them
static inline int64_t wide_keys(int64_t head_dim) { return kKeyChunk * (head_dim < 32 ? 32 : head_dim) + 256; }
static inline int64_t attend_scratch(int64_t head_dim) {  // scores, sums, keys widened, and turned where heads are short
    return kMaxQueries * (kKeyChunk + head_dim + 4) + wide_keys(head_dim) + kKeyChunk * (head_dim <= 128 ? head_dim : 0);
}

struct Kernels {
    const char* level;
    // Bytes of prepared activations; 0: `multiply` takes them as they are.
    int64_t (*prepared_bytes)(int64_t tokens, int64_t columns, Precision);
    // Tokens [begin, end); for bf16 begin is a multiple of kTokenTile, and the tile is filled up with zeros.
    void (*prepare)(const float* x, int64_t begin, int64_t end, int64_t columns, Precision, void* prepared);
    void (*multiply)(const Product&);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t count, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t count, float* out);
    void (*activate)(Activation, const float* x, int64_t count, float* out);
    void (*gate)(Activation, const float* gate, const float* up, int64_t count, float* out);
    void (*rotate)(float* head, const float* cosines, const float* sines, int64_t head_dim);
    void (*attend)(const Attend&);
    void (*merge)(const AttendParts&);
    void (*load_row)(const void* row, DType, int64_t count, float scale, bool add, float* out);
    // As int8: the codes, then their scale, which is not a number if any of x is not finite.
    void (*store_row)(const float* x, int64_t count, DType, void* row);
    void (*add_ranks)(const Ranks&);
    // Index of the largest; -1 if any is not a number.
    int64_t (*argmax)(const float* x, int64_t count);
};

// By name; null if this build or this processor lacks the level.
const Kernels* find_kernels(const char* level);
// Levels of this build that the processor can run, weakest first.
const char* const* usable_levels();

// Levels of this build, weakest first, whatever the processor.
const char* const* built_levels();

// What the file of a level is called by, which is compiled with -DDOVETAIL_LEVEL=name.
#define DOVETAIL_JOIN_(a, b) a##b
#define DOVETAIL_JOIN(a, b) DOVETAIL_JOIN_(a, b)
#define DOVETAIL_TEXT_(a) #a
#define DOVETAIL_TEXT(a) DOVETAIL_TEXT_(a)
#define LEVEL_NAME DOVETAIL_TEXT(DOVETAIL_LEVEL)
#define LEVEL_KERNELS DOVETAIL_JOIN(DOVETAIL_LEVEL, _kernels)
#if defined(DOVETAIL_LEVEL)
const Kernels* LEVEL_KERNELS();
#endif

}  // namespace dovetail
