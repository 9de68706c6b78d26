// Quantised matrices for the checks, code by code, in cells as cells.hpp describes them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.hpp"

struct CellMatrix {
    int64_t rows, columns;
    dovetail::DType type;
    std::vector<int8_t> codes;
    std::vector<float> scales;           // of int8
    std::vector<uint16_t> half_scales;  // of int4

    CellMatrix(int64_t rows, int64_t columns, dovetail::DType type)
        : rows(rows), columns(columns), type(type), codes(blocks() * 16 * width()),
          scales(is_byte() ? blocks() * 16 : 0), half_scales(is_byte() ? 0 : blocks() * 16 * groups()) {}

    bool is_byte() const { return type == dovetail::DType::int8; }
    int64_t blocks() const { return (rows + 15) / 16; }
    int64_t groups() const { return (columns + 31) / 32; }
    int64_t width() const { return is_byte() ? (columns + 63) / 64 * 64 : groups() * 16; }  // bytes of a row

    void set(int64_t row, int64_t column, int code) {
        const int64_t byte = is_byte() ? column : column / 32 * 16 + column % 16;
        int8_t& at = codes[row / 16 * 16 * width() + byte / 4 * 64 + row % 16 * 4 + byte % 4];
        if (is_byte())
            at = static_cast<int8_t>(code);
        else
            at = static_cast<int8_t>(at | (code & 15) << (column % 32 < 16 ? 0 : 4));
    }
    uint16_t& half_scale(int64_t row, int64_t group) {
        return half_scales[(row / 16 * groups() + group) * 16 + row % 16];
    }
    dovetail::Matrix matrix() const {
        const void* beside = is_byte() ? static_cast<const void*>(scales.data()) : half_scales.data();
        return {codes.data(), type, rows, columns, beside};
    }
};
