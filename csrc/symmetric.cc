#include "symmetric.h"

namespace gradsync {

Registry& Registry::of_process() {
  static Registry* registry = new Registry;  // tensors may outlive static objects
  return *registry;
}

std::shared_ptr<Allocation> Registry::allocate(std::size_t bytes) {
  auto allocation = std::make_shared<Allocation>(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  allocation->id = ++last_id_;
  for (auto entry = by_end_.begin(); entry != by_end_.end();) {
    entry = entry->second.expired() ? by_end_.erase(entry) : std::next(entry);
  }
  by_end_[allocation->segment.data() + bytes] = allocation;
  return allocation;
}

std::shared_ptr<Allocation> Registry::find(const std::byte* begin, std::size_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = by_end_.upper_bound(begin);
  if (entry == by_end_.end()) return nullptr;
  std::shared_ptr<Allocation> found = entry->second.lock();
  if (found == nullptr || begin < found->segment.data() || begin + bytes > entry->first) return nullptr;
  return found;
}

const Segment* Mappings::find(std::uint64_t id) const {
  const auto entry = by_id_.find(id);
  return entry == by_id_.end() ? nullptr : entry->second.get();
}

void Mappings::remember(std::uint64_t id, std::shared_ptr<Segment> segment) {
  if (in_order_.size() == kMost) {
    by_id_.erase(in_order_.front());
    in_order_.pop_front();
  }
  by_id_[id] = std::move(segment);
  in_order_.push_back(id);
}

}  // namespace gradsync
