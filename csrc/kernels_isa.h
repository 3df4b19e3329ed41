// One entry a set of instructions; kernels.cc and quantise.cc take the best that this machine has.
#pragma once

#include "kernels.h"

namespace gradsync {

// Blocks to quantise into scales and integers, after the gradients are added to their beginning.
struct Filling {
  DType dtype;  // of the gradients
  const void* gradients;
  std::size_t size;  // of the gradients, at most that of the blocks
  float* values;
  std::size_t block;
  std::size_t blocks;
  float* scales;
  std::int8_t* integers;
};

// What one rank sent of some blocks.
struct Part {
  const float* scales;
  const std::int8_t* integers;
};

// The mean of the first elements of some blocks.
struct Mean {
  const Part* parts;
  std::size_t count;
  std::size_t block;
  DType dtype;  // of the result
  void* out;
  std::size_t size;
};

namespace plain {
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end);
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);
void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes);
void fill(const Filling& filling);
void mean(const Mean& mean);
}  // namespace plain
#if defined(__x86_64__)
bool has_avx2();
namespace avx2 {
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end);
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);
void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes);
void fill(const Filling& filling);
void mean(const Mean& mean);
}  // namespace avx2
bool has_quick_moves();
namespace moves {
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);
void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes);
}  // namespace moves
#endif
}  // namespace gradsync
