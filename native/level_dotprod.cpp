// AArch64 with the dot product instructions (Armv8.2 and later, optional until 8.4).
#include "level_neon.cpp"
