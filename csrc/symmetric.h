// Memory that peers can map: a reduction needs no copy there.
//
// A process makes such memory by itself, at any time. Its peers map it when they first meet it in a
// collective, and keep the mapping for the next time.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "segment.h"

namespace gradsync {

struct Allocation {
  explicit Allocation(std::size_t bytes) : segment(Segment::create(bytes)), owner(::getpid()) {}
  // Peers may have it mapped for longer: they keep addresses then, and no memory. A child that was
  // forked has a copy of this object, and must leave the memory to its parent.
  ~Allocation() {
    if (::getpid() == owner) segment.discard();
  }

  Segment segment;
  pid_t owner;
  std::uint64_t id = 0;  // of this process; never given twice
};

// All symmetric memory of this process.
class Registry {
 public:
  static Registry& of_process();

  std::shared_ptr<Allocation> allocate(std::size_t bytes);
  // The allocation that a range of addresses lies in, or nothing.
  std::shared_ptr<Allocation> find(const std::byte* begin, std::size_t bytes) const;

 private:
  mutable std::mutex mutex_;
  std::uint64_t last_id_ = 0;
  std::map<const std::byte*, std::weak_ptr<Allocation>> by_end_;
};

// The memory of one peer that this process has mapped. All ranks of a group remember and forget the
// same allocations, so that they agree on which are new.
class Mappings {
 public:
  bool knows(std::uint64_t id) const { return by_id_.count(id) != 0; }
  // Nullptr for one that could not be mapped.
  const Segment* find(std::uint64_t id) const;
  void remember(std::uint64_t id, std::shared_ptr<Segment> segment);

 private:
  static constexpr std::size_t kMost = 256;
  std::map<std::uint64_t, std::shared_ptr<Segment>> by_id_;
  std::deque<std::uint64_t> in_order_;
};

}  // namespace gradsync
