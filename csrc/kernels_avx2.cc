// The same kernels for x86 processors of the last ten years.
#if defined(__x86_64__)
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels_isa.h"

// Behind the standard headers: their functions stay as they are everywhere else.
#pragma GCC target("avx2,f16c,prfchw")

namespace gradsync::avx2 {
namespace {
constexpr int kVectorBytes = 32;
#include "kernels.inl"
#include "quantise.inl"

inline void copy_line(std::byte* to, const std::byte* from) {
  typedef char Vector __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  const Vector* source = reinterpret_cast<const Vector*>(from);
  const Vector low = source[0], high = source[1];
  Vector* target = reinterpret_cast<Vector*>(to);
  target[0] = low;
  target[1] = high;
}
}
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end) {
  reduce_any(reduction, begin, end);
}

// Lines that another core has are slow to come: who asks for them a little ahead copies a fifth faster. Those
// that are written next are asked for as this core's own.
constexpr std::size_t kLine = 64;

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kAhead = 4 * kLine, kFew = 4096;
  std::size_t at = 0;
  for (; bytes > kFew && bytes - at >= kLine; at += kLine) {
    __builtin_prefetch(from + at + kAhead, 0);
    __builtin_prefetch(to + at + kAhead, 1);
    copy_line(to + at, from + at);
  }
  if (bytes > at) std::memcpy(to + at, from + at, bytes - at);
}

void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes) {
  constexpr std::size_t kAhead = 8 * kLine;
  std::size_t at = 0;
  for (; bytes - at >= kLine; at += kLine) {
    __builtin_prefetch(slot + at + kAhead, 1);
    __builtin_prefetch(taken + at + kAhead, 1);
    __builtin_prefetch(next + at + kAhead, 0);
    copy_line(taken + at, slot + at);
    copy_line(slot + at, next + at);
  }
  if (bytes == at) return;
  std::memcpy(taken + at, slot + at, bytes - at);
  std::memcpy(slot + at, next + at, bytes - at);
}

void fill(const Filling& filling) { fill_any(filling); }
void mean(const Mean& mean) { mean_any(mean); }
}  // namespace gradsync::avx2
#endif
