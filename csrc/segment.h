// Memory that several processes map.
//
// A segment is an anonymous file (memfd): it has no name in any file system, so nobody can find it
// who is not told, and it is gone when the last process that maps it is. The processes that share it
// open it through /proc/<pid>/fd/<n> of its creator, which the kernel allows to the same user only.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace gradsync {

// What one process tells another so that it can map a segment. Not trusted: see Segment::open.
struct Ticket {
  std::int64_t pid = 0;
  std::int64_t descriptor = -1;
  std::uint64_t bytes = 0;
};

class Segment {
 public:
  // Makes a segment whose pages exist: running out of memory is an error here and not a SIGBUS later.
  static Segment create(std::size_t bytes);
  // Maps another process' segment, after checking that it is one: the same user's, sealed against
  // changes of its size, and exactly as large as `bytes`.
  static Segment open(const Ticket& ticket, std::size_t bytes);
  // Memory that nobody else can map, for a rank that has nobody to share with. It needs no file.
  static Segment alone(std::size_t bytes) { return Segment(kNone, bytes); }

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  Ticket ticket() const;
  // Gives the memory back, also if others still map it. What it held is gone.
  void discard();
  // Nobody needs to open it any more.
  void close_descriptor();

 private:
  static constexpr int kNone = -1;

  Segment(int descriptor, std::size_t bytes);

  int descriptor_ = kNone;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace gradsync
