// Scratch memory that grows and is handed out in aligned pieces.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace dovetail {

class Buffer {
  public:
    Buffer() = default;
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // What it held is gone. Under a sanitizer it is overwritten with what is not a number, so that nobody reads it unseen.
    char* reserve(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            data_ = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        std::memset(data_, 0xff, size_);
#endif
        return data_;
    }

  private:
    char* data_ = nullptr;
    int64_t size_ = 0;
};

// Adds pieces up first, then hands them out in the same order.
class Carver {
  public:
    explicit Carver(char* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }

    int64_t used() const { return used_; }

  private:
    char* base_;
    int64_t used_ = 0;
};

}  // namespace dovetail
