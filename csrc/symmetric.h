// Memory that all ranks of a group have alike and map whole: a reduction needs no copy there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "segment.h"

namespace gradsync {

struct Allocation {
  Segment segment;
  std::uint64_t id = 0;
  std::size_t stride = 0;  // from one rank's part to the next one's
  std::size_t bytes = 0;   // of a part that can be used
  int rank = 0;

  std::byte* part(int of) const { return segment.data() + static_cast<std::size_t>(of) * stride; }
};

// Which allocation is an address in? Only of those that are still in use.
class Registry {
 public:
  void add(const std::shared_ptr<Allocation>& allocation) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = by_end_.begin(); entry != by_end_.end();) {
      entry = entry->second.expired() ? by_end_.erase(entry) : std::next(entry);
    }
    by_end_[allocation->part(allocation->rank) + allocation->bytes] = allocation;
  }

  std::shared_ptr<Allocation> find(const std::byte* begin, std::size_t bytes) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = by_end_.upper_bound(begin);
    if (entry == by_end_.end()) return nullptr;
    std::shared_ptr<Allocation> found = entry->second.lock();
    if (found == nullptr || begin < found->part(found->rank) || begin + bytes > entry->first) {
      return nullptr;
    }
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::weak_ptr<Allocation>> by_end_;
};

}  // namespace gradsync
