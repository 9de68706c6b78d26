// Quantised matrices for the checks, code by code, in cells as cells.hpp and groups.hpp describe them.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.hpp"

constexpr dovetail::Groups kForms[] = {{8, 32, false, false}, {8, 32, false, true}, {8, 32, true, true},
                                       {8, 16, true, false},  {4, 32, false, false}, {4, 32, false, true},
                                       {4, 32, true, true},   {4, 32, false, false, true}};

struct CellMatrix {
    int64_t rows, columns;
    dovetail::DType type;  // int8, or grouped
    dovetail::Groups groups;
    std::vector<int8_t> codes;
    std::vector<float> scales;        // of int8
    std::vector<uint8_t> records;  // of grouped codes

    CellMatrix(int64_t rows, int64_t columns)
        : rows(rows), columns(columns), type(dovetail::DType::int8),
          codes(blocks() * 16 * dovetail::byte_columns(columns)), scales(blocks() * 16) {}
    CellMatrix(int64_t rows, int64_t columns, const dovetail::Groups& groups)
        : rows(rows), columns(columns), type(dovetail::DType::grouped), groups(groups),
          codes(blocks() * dovetail::block_code_bytes(groups, columns)),
          records(blocks() * dovetail::block_scale_bytes(groups, columns)) {}

    bool is_byte() const { return type == dovetail::DType::int8 || groups.bits == 8; }
    int64_t blocks() const { return (rows + 15) / 16; }

    void set(int64_t row, int64_t column, int code) {
        const int64_t byte = is_byte() ? column : column / 32 * 16 + column % 16;
        const int64_t block_bytes = static_cast<int64_t>(codes.size()) / blocks();
        int8_t& at = codes[row / 16 * block_bytes + byte / 4 * 64 + row % 16 * 4 + byte % 4];
        if (is_byte())
            at = static_cast<int8_t>(code);
        else
            at = static_cast<int8_t>(at | (code & 15) << (column % 32 < 16 ? 0 : 4));
    }

    // Codes and scales at random: halves of either sign between 2^-10 and 2^-7, whole numbers within ±63, powers of two
    // from 2^-15 to 2^-7
    void fill(std::mt19937& random) {
        for (int8_t& code : codes) code = static_cast<int8_t>(random() % 256);
        const int64_t bytes = static_cast<int64_t>(records.size()) / blocks();
        const int64_t count = groups.nested ? dovetail::nest_count(columns) : dovetail::group_count(groups, columns);
        const int64_t half_bytes = 16 * 2 * count * (groups.minimum ? 2 : 1);
        for (int64_t at = 0; at < static_cast<int64_t>(records.size()); ++at) {
            if (groups.floats) {
                records[at] = static_cast<uint8_t>(112 + random() % 9);
                continue;
            }
            const bool is_half = at % bytes < half_bytes;
            records[at] = static_cast<uint8_t>(is_half ? (at % 2 ? (random() & 0x83) | 0x14 : random() % 256)
                                                       : static_cast<int>(random() % 127) - 63);
        }
    }

    dovetail::Matrix matrix() const {
        if (type == dovetail::DType::int8) return {codes.data(), type, rows, columns, scales.data()};
        return {codes.data(), type, rows, columns, records.data(), groups};
    }
};
