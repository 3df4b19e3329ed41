// The collectives: what each rank writes where, and who reads it.
//
// A collective has two halves. post() announces it and never blocks; finish() waits for the others
// and moves the data. Between them nothing is asked of this rank, so a caller can go on computing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"
#include "members.h"
#include "shares.h"
#include "symmetric.h"

namespace gradsync {

// One collective, as a caller asks for it.
struct Op {
  Announcement announcement;
  // What this rank gives to each rank, and what it gets from each. One that gives everybody the same
  // has one source; all-reduce, reduce and broadcast have one target, which is also the source.
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> targets;
  std::vector<std::uint64_t> source_bytes;  // all-to-all only: the pieces may differ
  std::vector<std::uint64_t> target_bytes;
  Deadline deadline;
  std::string text;  // kElsewhere: what it is, in words, which is all that is compared

  std::shared_ptr<Allocation> allocation;  // the memory of the target, if it is symmetric
  unsigned turn = 0;
  std::uint32_t first_tick = 0;
  bool is_posted = false;
  int asked = 0;  // how often whether it is done
  std::atomic<bool> is_done{false};
  std::exception_ptr error;
};

// One that moves nothing: ranks meet, and all have to say the same `text`, of less than kTextBytes.
std::shared_ptr<Op> make_agreement(const std::string& text, Deadline deadline);

// What has been moved, and how.
struct Counters {
  std::atomic<std::uint64_t> symmetric{0};     // reductions in place
  std::atomic<std::uint64_t> helped{0};        // pieces of theirs that were other ranks'
  std::atomic<std::uint64_t> copied{0};        // reductions of all ranks through slots
  std::atomic<std::uint64_t> copied_bytes{0};  // into slots, by any collective
};

class Collectives {
 public:
  explicit Collectives(Members& members)
      : members_(members), mappings_(static_cast<std::size_t>(members.world())) {}

  // Is one exchange of slots all that it takes?
  bool is_small(const Op& op) const;
  // Is little or nothing copied when it is posted?
  bool is_light(const Op& op) const;
  void post(Op& op);
  bool can_finish(const Op& op) const { return members_.all_reached(op.first_tick); }
  void finish(Op& op, const Patience& patience);

  const Counters& counters() const { return counters_; }

 private:
  void check(const Op& op) const;
  void announce_pieces(const Op& op);
  void check_pieces(const Op& op) const;
  void exchange(Op& op);
  void reduce_in_place(Op& op);
  void reduce_pieces(const Op& op);
  void leave_to_owners(const Op& op, Clock::duration own_time);
  void reduce_through_slots(Op& op);
  Chunks chunks_of(const Op& op) const;
  bool any_symmetric(const Op& op);
  bool is_symmetric(Op& op);
  void map_new(Op& op);
  std::size_t largest_piece(const Op& op) const;
  std::byte* place(const Op& op, int from, int to, unsigned turn);
  std::size_t head_bytes(const Op& op) const;
  std::size_t piece_capacity(const Op& op) const;
  void write(const Op& op, std::size_t round, unsigned turn);
  void read(Op& op, std::size_t round, unsigned turn);
  void tick_and_await(const Op& op);

  Members& members_;
  unsigned turn_ = 0;  // of the slots: each rank has two, so that one is filled while one is read
  std::uint32_t pieces_ = 0;  // of all reductions in place since the beginning
  Patience patience_;
  std::vector<Mappings> mappings_;  // by rank
  Counters counters_;
};

}  // namespace gradsync
