// The same kernels for x86 processors of the last ten years.
#if defined(__x86_64__)
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels_isa.h"

// Behind the standard headers: their functions stay as they are everywhere else.
#pragma GCC target("avx2,f16c")

namespace gradsync::avx2 {
namespace {
constexpr int kVectorBytes = 32;
#include "kernels.inl"
#include "quantise.inl"
}
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end) {
  reduce_any(reduction, begin, end);
}
void fill(const Filling& filling) { fill_any(filling); }
void mean(const Mean& mean) { mean_any(mean); }
}  // namespace gradsync::avx2
#endif
