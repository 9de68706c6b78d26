// Which levels this build has and this processor runs.
#include <cstring>

#include "kernels.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dovetail {
namespace {

#if defined(__aarch64__)
bool has_dotprod() {  // and arithmetic in float16: no processor has one without the other
#if defined(__linux__)
    constexpr unsigned long kNeeded = 1ul << 20 | 1ul << 10;  // HWCAP_ASIMDDP, HWCAP_ASIMDHP
    return (getauxval(AT_HWCAP) & kNeeded) == kNeeded;
#else
    return true;  // every Apple processor of this architecture that is still sold
#endif
}
#elif defined(__x86_64__)
bool has_f16c() {
    unsigned a = 1, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return c & (1u << 29);
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// Linux gives a process the large tile registers only when it asks for them.
bool has_amx() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 7, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const bool tiles = d & (1u << 24), bf16 = d & (1u << 22), int8 = d & (1u << 25);
    return tiles && bf16 && int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

struct Usable {
    const char* names[8] = {};

    Usable() {
        [[maybe_unused]] int count = 0;
#if defined(__aarch64__)
        names[count++] = "neon";
        if (has_dotprod()) names[count++] = "dotprod";
#elif defined(__x86_64__)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) names[count++] = "avx2";
        if (has_avx512()) names[count++] = "avx512";
        if (has_avx512() && has_amx()) names[count++] = "amx";
#endif
    }
};

}  // namespace

const char* const* usable_levels() {
    static const Usable usable;
    return usable.names;
}

const Kernels* find_kernels(const char* level) {
    for (const char* const* name = usable_levels(); *name; ++name) {
        if (std::strcmp(*name, level) != 0) continue;
#if defined(__aarch64__)
        return std::strcmp(level, "neon") == 0 ? neon_kernels() : dotprod_kernels();
#elif defined(__x86_64__)
        if (std::strcmp(level, "avx2") == 0) return avx2_kernels();
        if (std::strcmp(level, "avx512") == 0) return avx512_kernels();
        return amx_kernels();
#endif
    }
    return nullptr;
}

}  // namespace dovetail
