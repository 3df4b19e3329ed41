// One entry a set of instructions; kernels.cc takes the best that this machine has.
#pragma once

#include "kernels.h"

namespace gradsync {
namespace plain {
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end);
}
#if defined(__x86_64__)
namespace avx2 {
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end);
}
#endif
}  // namespace gradsync
