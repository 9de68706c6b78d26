// Which levels this build has and this processor runs.
#include <cstring>

#include "kernels.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace dovetail {

#define LEVEL(name) const Kernels* name##_kernels();
#include "built_levels.inc"
#undef LEVEL

namespace {

#if defined(__aarch64__)
bool runs_neon() { return true; }

#if defined(__linux__)
bool runs_dotprod() {  // and arithmetic in float16: no processor has one without the other
    constexpr unsigned long kNeeded = 1ul << 20 | 1ul << 10;  // HWCAP_ASIMDDP, HWCAP_ASIMDHP
    return (getauxval(AT_HWCAP) & kNeeded) == kNeeded;
}

bool runs_i8mm() {  // and bf16: likewise
    constexpr unsigned long kNeeded = 1ul << 13 | 1ul << 14;  // HWCAP2_I8MM, HWCAP2_BF16
    return runs_dotprod() && (getauxval(AT_HWCAP2) & kNeeded) == kNeeded;
}
#elif defined(__APPLE__)
bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}

bool runs_dotprod() { return true; }  // every Apple processor of this architecture that is still sold
bool runs_i8mm() { return has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16"); }
#else
bool runs_dotprod() { return false; }
bool runs_i8mm() { return false; }
#endif
#elif defined(__x86_64__)
struct Cpuid {
    unsigned a = 0, b = 0, c = 0, d = 0;

    Cpuid(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }  // zeros where there is none
};

// __builtin_cpu_supports asks the operating system too whether it saves the registers of AVX and AVX-512.
bool runs_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && Cpuid(1, 0).c & (1u << 29);  // F16C
}

bool runs_avxvnni() { return runs_avx2() && Cpuid(7, 0).a >= 1 && Cpuid(7, 1).a & (1u << 4); }

bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool runs_avx512vnni() { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool runs_avx512bf16() { return runs_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }

// Linux gives a process the large tile registers only when it asks for them.
bool runs_amx() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    const unsigned d = Cpuid(7, 0).d;
    const bool tiles = d & (1u << 24), bf16 = d & (1u << 22), int8 = d & (1u << 25);
    return runs_avx512bf16() && tiles && bf16 && int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

struct Level {
    const char* name;
    bool (*runs)();
    const Kernels* (*kernels)();
};

constexpr Level kLevels[] = {
#define LEVEL(name) {#name, runs_##name, name##_kernels},
#include "built_levels.inc"
#undef LEVEL
};
constexpr int kCount = sizeof kLevels / sizeof kLevels[0];

struct Names {
    const char* names[kCount + 1] = {};

    explicit Names(bool usable_only) {
        int count = 0;
        for (const Level& level : kLevels)
            if (!usable_only || level.runs()) names[count++] = level.name;
    }
};

}  // namespace

const char* const* built_levels() {
    static const Names built(false);
    return built.names;
}

const char* const* usable_levels() {
    static const Names usable(true);
    return usable.names;
}

const Kernels* find_kernels(const char* level) {
    for (const char* const* name = usable_levels(); *name; ++name)
        if (std::strcmp(*name, level) == 0)
            for (const Level& known : kLevels)
                if (known.name == *name) return known.kernels();
    return nullptr;
}

}  // namespace dovetail
