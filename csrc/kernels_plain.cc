// The kernels for any machine.
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels_isa.h"

namespace gradsync::plain {
namespace {
constexpr int kVectorBytes = 16;
#include "kernels.inl"
#include "quantise.inl"
}
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end) {
  reduce_any(reduction, begin, end);
}
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes) {
  copy_bytes(taken, slot, bytes);
  copy_bytes(slot, next, bytes);
}
void fill(const Filling& filling) { fill_any(filling); }
void mean(const Mean& mean) { mean_any(mean); }
}  // namespace gradsync::plain
