// Scratch memory that grows and is handed out in aligned pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace dovetail {

// Of scratch memory that was used and is not needed now, more than this goes back to the system after so many times in a
// row: taking it anew costs 0.3 ms per MiB, which parts of a prompt with answers in between shall not pay each time.
constexpr int64_t kSpareBytes = 2 << 20;
constexpr int kSpareTimes = 8;

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
            used_ = 0;
        }
        spared_ = used_ - bytes > kSpareBytes ? spared_ + 1 : 0;
        if (spared_ == kSpareTimes) give_back(bytes);
        used_ = std::max(used_, bytes);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        std::memset(data_, 0xff, size_);
#endif
        return data_;
    }

  private:
    // The pages after the first `kept` bytes: a model decodes for long after a large prompt, beside many others.
    void give_back(int64_t kept) {
#if defined(__linux__)
        const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const uintptr_t begin = (reinterpret_cast<uintptr_t>(data_ + kept) + page - 1) / page * page;
        const uintptr_t end = reinterpret_cast<uintptr_t>(data_ + used_) / page * page;
        if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#endif
        used_ = kept;
    }

    char* data_ = nullptr;
    int64_t size_ = 0;
    int64_t used_ = 0;  // of it, what was handed out since pages were given back: the rest holds none
    int spared_ = 0;    // times in a row that much of that was not needed
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
