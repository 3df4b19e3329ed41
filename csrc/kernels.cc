#include "kernels.h"

#include "kernels_isa.h"

namespace gradsync {
namespace {

struct Kernels {
  void (*reduce)(const Reduction&, std::size_t, std::size_t);
  void (*copy_bytes)(std::byte*, const std::byte*, std::size_t);
  void (*swap_bytes)(std::byte*, std::byte*, const std::byte*, std::size_t);
};

const Kernels& best_kernels() {
  static const Kernels best = [] {
    Kernels found{plain::reduce, plain::copy_bytes, plain::swap_bytes};
#if defined(__x86_64__)
    if (has_avx2()) found = {avx2::reduce, avx2::copy_bytes, avx2::swap_bytes};
    if (has_quick_moves()) found.copy_bytes = moves::copy_bytes, found.swap_bytes = moves::swap_bytes;
#endif
    return found;
  }();
  return best;
}

}  // namespace

#if defined(__x86_64__)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
#endif

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kInt32:
    case DType::kFloat32: return 4;
    case DType::kInt64:
    case DType::kFloat64: return 8;
    default: return 1;
  }
}

const char* name_of(DType dtype) {
  static constexpr const char* kNames[] = {"bytes",   "uint8",    "int8",    "int16",  "int32",
                                           "int64",   "float16",  "bfloat16", "float32", "float64"};
  return dtype < DType::kCount ? kNames[static_cast<int>(dtype)] : "an unknown dtype";
}

const char* name_of(ReduceOp op) {
  static constexpr const char* kNames[] = {"",    "sum", "avg",  "product", "min",
                                           "max", "band", "bor", "bxor"};
  return op < ReduceOp::kCount ? kNames[static_cast<int>(op)] : "an unknown operation";
}

bool can_reduce(DType dtype, ReduceOp op) {
  if (dtype == DType::kBytes || dtype >= DType::kCount || op >= ReduceOp::kCount) return false;
  const bool is_float = dtype >= DType::kFloat16;
  const bool is_bitwise = op >= ReduceOp::kBand;
  return op != ReduceOp::kNone && !(is_float && is_bitwise);
}

void reduce(const Reduction& reduction, std::size_t begin, std::size_t end) {
  best_kernels().reduce(reduction, begin, end);
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) { best_kernels().copy_bytes(to, from, bytes); }

void swap_bytes(std::byte* taken, std::byte* slot, const std::byte* next, std::size_t bytes) {
  best_kernels().swap_bytes(taken, slot, next, bytes);
}

}  // namespace gradsync
