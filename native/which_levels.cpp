// Prints the levels that this processor runs, weakest first, for CMake to choose among.
#include <cstdio>

#include "levels.cpp"

namespace dovetail {

#define LEVEL(name) \
    const Kernels* name##_kernels() { return nullptr; }
#include "built_levels.inc"
#undef LEVEL

}  // namespace dovetail

int main() {
    for (const char* const* name = dovetail::usable_levels(); *name; ++name) std::printf("%s;", *name);
    return 0;
}
