// How an all-reduce is cut: into shares, one a rank, and through slots into chunks before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "kernels.h"
#include "layout.h"

namespace gradsync {

constexpr std::size_t kPieceBytes = 32 * 1024;  // of a reduction in place, at a time
// Of one through slots, at a time: ranks meet for each, and more does not stay in a second-level cache.
constexpr std::size_t kChunkBytes = 512 * 1024;
constexpr std::size_t kNoChunk = std::numeric_limits<std::size_t>::max();

// The part of `count` elements that a rank reduces, cut at cache lines; in place it is done by pieces.
struct Share {
  Share(std::size_t count, std::size_t element, int rank, int world) : piece(kPieceBytes / element) {
    const std::size_t line = 128 / element;
    const std::size_t lines = (count + line - 1) / line;
    const auto at = [&](int r) {
      const std::size_t cut = lines * static_cast<std::size_t>(r) / static_cast<std::size_t>(world);
      return std::min(count, cut * line);
    };
    begin = at(rank);
    end = at(rank + 1);
  }
  std::size_t pieces() const { return (end - begin + piece - 1) / piece; }
  std::size_t piece;  // elements
  std::size_t begin;
  std::size_t end;
};

// A tensor that is reduced through slots: chunks of the same length, but for the last, cut into shares alike.
struct Chunks {
  Chunks(std::byte* data, std::size_t total, std::size_t element, std::size_t slot_bytes, int rank, int world)
      : data(data),
        total(total),
        element(element),
        capacity(even(total, std::min(kChunkBytes, slot_bytes))),
        count((total + capacity - 1) / capacity),
        share(capacity / element, element, rank, world) {}

  // So much that no more chunks are needed than with `most`, and none is much shorter.
  static std::size_t even(std::size_t total, std::size_t most) {
    const std::size_t count = (total + most - 1) / most;
    return (total + count * kAlignment - 1) / (count * kAlignment) * kAlignment;
  }
  std::byte* at(std::size_t chunk) const { return data + chunk * capacity; }
  std::size_t bytes(std::size_t chunk) const {
    return chunk < count ? std::min(capacity, total - chunk * capacity) : 0;
  }

  // Takes out of a slot of this rank's what the others have reduced of chunk `done`, and puts in what they are
  // to reduce of chunk `next`, if there are such chunks.
  void trade(std::byte* slot, std::size_t done, std::size_t next) const {
    trade(slot, done, next, 0, share.begin * element);
    trade(slot, done, next, share.end * element, capacity);
  }
  void trade(std::byte* slot, std::size_t done, std::size_t next, std::size_t begin, std::size_t end) const {
    const auto length = [&](std::size_t chunk) { return std::max(begin, std::min(end, bytes(chunk))) - begin; };
    const std::size_t out = length(done), in = length(next), both = std::min(out, in);
    if (both > 0) swap_bytes(at(done) + begin, slot + begin, at(next) + begin, both);
    begin += both;
    if (out > both) copy_bytes(at(done) + begin, slot + begin, out - both);
    if (in > both) copy_bytes(slot + begin, at(next) + begin, in - both);
  }

  std::byte* data;
  std::size_t total;
  std::size_t element;
  std::size_t capacity;  // bytes of a chunk
  std::size_t count;     // chunks
  Share share;           // of this rank, elements of a chunk
};

}  // namespace gradsync
