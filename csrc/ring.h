// A ring of bytes from one rank to another, in their channel: the one puts in, the other takes out.
//
// It counts in whole cache lines, since copies that straddle them are slow. Neither side waits here: who puts in has
// looked for room, who takes out has looked for bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "members.h"

namespace gradsync {

// What so many bytes take in a ring.
inline std::size_t whole_lines(std::size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

class Ring {
 public:
  Ring(Members& members, int from, int to)
      : members_(members),
        from_(from),
        to_(to),
        channel_(members.channel(from, to)),
        capacity_(members.channel_bytes()) {}

  // How many bytes are in it: later more for who takes out, fewer for who puts in. Throws InvalidError if that
  // cannot be.
  std::uint64_t waiting() const;
  std::size_t room() const { return capacity_ - waiting(); }
  void put(const std::byte* data, std::size_t bytes);
  // Without `data` they are dropped.
  void get(std::byte* data, std::size_t bytes);

  // Of a long message a good part is moved at a time: each move rings a bell. The other rank goes on with it
  // meanwhile. It cannot get stuck: where there is too little to take out, there is room enough to put in.
  std::size_t piece_of(std::uint64_t rest) const {
    return static_cast<std::size_t>(std::min<std::uint64_t>(rest, std::max(capacity_ / 8, kCacheLine)));
  }

 private:
  std::byte* bytes_at(std::size_t at) const { return reinterpret_cast<std::byte*>(&channel_ + 1) + at; }

  Members& members_;
  const int from_;
  const int to_;
  Channel& channel_;
  const std::size_t capacity_;
};

}  // namespace gradsync
