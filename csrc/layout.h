// What lies where in the segment of a group.
//
//   Header | a Line for each rank | two slots for each rank | a Channel for each pair
//
// A Line is written by its rank alone, but for bell and alarm and what is taken of its share. Its slots it
// fills, or whoever's turn it is to: see collectives.cc. The tallies in the header are everybody's. See
// docs/shared-memory.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "segment.h"

namespace gradsync {

constexpr std::uint64_t kMagic = 0x636e797364617267;  // "gradsync"
constexpr std::uint32_t kVersion = 7;
constexpr int kMaxRanks = 256;
constexpr std::size_t kMaxSlotBytes = 1024 * 1024;
constexpr std::size_t kAllSlotsBytes = 32 * 1024 * 1024;  // of a group together, at most
constexpr std::size_t kSmallBytes = 32 * 1024;       // up to here one exchange does it all
constexpr std::size_t kPairBytes = 16 * 1024 * 1024;  // of all channels together, at most
constexpr std::size_t kMaxChannelBytes = 256 * 1024;
constexpr std::size_t kTextBytes = 128;  // of what is announced in words
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kAlignment = 128;  // two cache lines: neighbours are fetched in pairs

enum class Kind : std::uint32_t {
  kNone, kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll, kGather, kScatter,
  kBarrier, kElsewhere, kSend, kRecv, kCount
};

// What the user's elements are, where the dtype does not say: those that are moved as bytes. All zero where it does.
struct Element {
  char name[28] = {};
  std::uint32_t bytes = 0;
};

// What a rank is about to do. All ranks have to say the same, but for the fields below the line.
struct Announcement {
  std::uint64_t sequence = 0;
  Kind kind = Kind::kNone;
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kNone;
  std::int32_t root = -1;
  std::uint64_t count = 0;  // elements a rank contributes, or of a piece
  Element element;
  // ---
  std::uint64_t symmetric = 0;  // the allocation of this rank that the tensor is in, or 0
  std::uint64_t offset = 0;     // where in it
  Ticket ticket;                // how to map it
};

enum class State : std::uint32_t { kPresent, kLeft, kAborted, kFailed };
constexpr std::int32_t kNobody = -1;
constexpr std::int32_t kOutsider = -2;  // somebody of another machine: nobody here can go on either

struct alignas(kAlignment) Line {
  std::atomic<std::uint32_t> clock;     // how many ticks this rank has gone
  std::atomic<State> state;
  std::atomic<std::int32_t> blames;     // kFailed: the rank that it lost, or one of those below
  std::atomic<std::uint64_t> last;      // the number of its last announcement, for messages of others
  char reason[480];                     // kFailed: what it said, written before the state
  alignas(64) Announcement announcements[2];
  // All-reduce in place: the number of the last one in which this rank may have pieces in hand, of the
  // last in which it has told of all that it had ...
  std::atomic<std::uint64_t> begun;
  std::atomic<std::uint64_t> reduced;
  // ... and how many pieces of its share are taken, see take_piece.
  alignas(kAlignment) std::atomic<std::uint64_t> taken;
  // Point to point: rung whenever a channel from or to this rank has moved.
  alignas(kAlignment) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> bell_sleepers;
  // While nobody waits who would hear that, but there is something to move: rung too, for its thread.
  std::atomic<bool> wants_alarm;
  std::atomic<std::uint32_t> alarm;
  std::atomic<std::uint32_t> alarm_sleepers;
};

// A ring of bytes from one rank to another. All that is put in begins with a cache line.
struct alignas(kAlignment) Channel {
  std::atomic<std::uint64_t> written;  // by the sender
  alignas(kAlignment) std::atomic<std::uint64_t> read;  // by the receiver
};

// What all ranks together have done since the beginning.
struct Tally {
  std::atomic<std::uint32_t> count;  // a futex
  std::atomic<std::uint32_t> sleepers;
};

struct Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t world;
  std::uint64_t nonce[2];
  alignas(kAlignment) Tally ticks;   // of all clocks together
  alignas(kAlignment) Tally pieces;  // of reductions in place, that are done
};

static_assert(std::atomic<bool>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// The places, computed and never read from the segment.
class Layout {
 public:
  explicit Layout(int world) : world_(static_cast<std::size_t>(world)) {
    while (slot_bytes_ * 2 * world_ > kAllSlotsBytes) slot_bytes_ /= 2;
    channel_bytes_ = kMaxChannelBytes;
    while (channel_bytes_ * world_ * world_ > kPairBytes) channel_bytes_ /= 2;
  }

  std::size_t bytes() const { return channels() + world_ * world_ * channel_stride(); }
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t channel_bytes() const { return channel_bytes_; }

  Header* header(std::byte* base) const { return reinterpret_cast<Header*>(base); }
  Line* line(std::byte* base, int rank) const {
    return reinterpret_cast<Line*>(base + sizeof(Header)) + rank;
  }
  std::byte* slot(std::byte* base, int rank, unsigned turn) const {
    return base + slots() + (static_cast<std::size_t>(rank) * 2 + (turn & 1)) * slot_bytes_;
  }
  Channel* channel(std::byte* base, int from, int to) const {
    const std::size_t pair = static_cast<std::size_t>(from) * world_ + static_cast<std::size_t>(to);
    return reinterpret_cast<Channel*>(base + channels() + pair * channel_stride());
  }

 private:
  static constexpr std::size_t up(std::size_t bytes) {
    return (bytes + 4095) / 4096 * 4096;
  }
  std::size_t slots() const { return up(sizeof(Header) + world_ * sizeof(Line)); }
  std::size_t channels() const { return slots() + world_ * 2 * slot_bytes_; }
  std::size_t channel_stride() const { return sizeof(Channel) + channel_bytes_; }

  std::size_t world_;
  std::size_t slot_bytes_ = kMaxSlotBytes;
  std::size_t channel_bytes_;
};

}  // namespace gradsync
