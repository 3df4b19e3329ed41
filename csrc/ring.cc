#include "ring.h"

namespace gradsync {

std::uint64_t Ring::waiting() const {
  // First `read`, which does not overtake. In one order with wants_alarm: see [Note: bell and alarm].
  const std::uint64_t read = channel_.read.load(std::memory_order_seq_cst);
  const std::uint64_t bytes = channel_.written.load(std::memory_order_seq_cst) - read;
  if (bytes > capacity_) {
    throw InvalidError("the channel from " + members_.label(from_) + " to " + members_.label(to_) + " is damaged");
  }
  return bytes;
}

void Ring::put(const std::byte* data, std::size_t bytes) {
  const std::uint64_t written = channel_.written.load(std::memory_order_relaxed);
  const std::size_t at = written % capacity_;
  const std::size_t first = std::min(bytes, capacity_ - at);
  copy_bytes(bytes_at(at), data, first);
  if (bytes > first) copy_bytes(bytes_at(0), data + first, bytes - first);
  channel_.written.store(written + whole_lines(bytes), std::memory_order_seq_cst);
}

void Ring::get(std::byte* data, std::size_t bytes) {
  const std::uint64_t read = channel_.read.load(std::memory_order_relaxed);
  const std::size_t at = read % capacity_;
  const std::size_t first = std::min(bytes, capacity_ - at);
  if (data != nullptr) copy_bytes(data, bytes_at(at), first);
  if (data != nullptr && bytes > first) copy_bytes(data + first, bytes_at(0), bytes - first);
  channel_.read.store(read + whole_lines(bytes), std::memory_order_seq_cst);
}

}  // namespace gradsync
