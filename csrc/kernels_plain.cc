// The kernels for any machine.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels_isa.h"

namespace gradsync::plain {
namespace {
#include "kernels.inl"
}
void reduce(const Reduction& reduction, std::size_t begin, std::size_t end) {
  reduce_any(reduction, begin, end);
}
}  // namespace gradsync::plain
