// Element-wise reductions over memory, and copies: no ranks, no synchronisation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradsync {

enum class DType : std::uint32_t {
  kBytes, kUInt8, kInt8, kInt16, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64, kCount
};
enum class ReduceOp : std::uint32_t {
  kNone, kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kCount
};

std::size_t size_of(DType dtype);
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);
// Bitwise operations are for integers.
bool can_reduce(DType dtype, ReduceOp op);

// One reduction: what is read in rank order, and where the result goes. A target may be one of the
// sources.
struct Reduction {
  DType dtype;
  ReduceOp op;
  const void* const* sources;
  int source_count;
  void* const* targets;
  int target_count;
};

// Reduces elements [begin, end). The order of the arithmetic is that of the sources, 16-bit floats
// are added up in float32, so the result depends on the values alone. The average of
// floats is multiplied by 1 / source_count, that of integers is divided and cut towards zero.
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end);

// As memcpy, for memory that another core has just written or is about to read.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);

// Takes what is in a slot and puts the next there, for a slot that another core has just written.
void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes);

}  // namespace gradsync
