// The ranks of a group on this machine: where each stands, and whether it lives.
//
// Every rank has a clock, which only it moves, tick by tick. All protocols are made of two moves: tick()
// says that this rank has done something, await() waits until all others have come as far. Nobody ticks
// again before it has waited for that, so the sum of all clocks tells, and one word is enough to wait on.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "error.h"
#include "layout.h"
#include "segment.h"
#include "sync.h"

namespace gradsync {

// What is waited for, for messages.
struct Errand {
  const Announcement* announcement;
  Deadline deadline;
  const char* text = "";  // kElsewhere: what it is
};

class Members {
 public:
  Members(Segment segment, int rank, std::vector<Peer> peers, std::uint64_t nonce_a,
          std::uint64_t nonce_b, bool is_founder);

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(peers_.size()); }
  const std::string& label(int rank) const { return peers_[static_cast<std::size_t>(rank)].label; }

  std::uint32_t clock() const { return clock_; }
  void tick();
  bool all_reached(std::uint32_t tick) const;
  void await(std::uint32_t tick, const Errand& errand, const Patience& patience);

  // Pieces of work that whoever comes takes, of collective `sequence`. They are done when as many are as
  // there were to be since the beginning, `all`. Who has not begun is not waited for.
  void begin_pieces(std::uint64_t sequence);
  void add_pieces(std::uint64_t sequence, std::uint32_t pieces, std::uint32_t all);
  bool all_done(std::uint32_t all) const;
  void await_pieces(std::uint64_t sequence, std::uint32_t all, const Errand& errand,
                    const Patience& patience);

  Announcement& announcement(int rank, std::uint64_t sequence) {
    return line(rank).announcements[sequence & 1];
  }
  std::byte* slot(int rank, unsigned turn) { return layout_.slot(segment_.data(), rank, turn); }
  Channel& channel(int from, int to) { return *layout_.channel(segment_.data(), from, to); }
  std::size_t slot_bytes() const { return layout_.slot_bytes(); }
  std::size_t channel_bytes() const { return layout_.channel_bytes(); }
  Line& line(int rank) { return *layout_.line(segment_.data(), rank); }
  const Line& line(int rank) const { return *layout_.line(segment_.data(), rank); }

  // Point to point: wakes who waits for messages of `rank`, or its thread, or whichever is to see to them.
  void ring_bell(int rank);
  void ring_alarm(int rank);
  void call(int rank);

  // Everybody has mapped the segment.
  void close_descriptor() { segment_.close_descriptor(); }
  Ticket ticket() const { return segment_.ticket(); }

  // Let nobody wait for us any more. The first state that is set stays.
  void leave();
  void fail(const std::string& reason, int blames);
  void abort();
  bool aborted() const { return aborted_.load(std::memory_order_relaxed); }

  bool is_gone(int peer) const;
  // Has it given up in a way that is for all of the group?
  bool ends_all(int peer) const;
  // What a rank says of itself, and why if it has given up since somebody is gone.
  std::pair<State, std::string> state(int peer) const;
  // The number of the last collective that each rank has announced.
  std::vector<std::uint64_t> positions() const;
  // Throws if `peer` cannot be expected to go on.
  void check(int peer, const Errand& errand) const;
  // False if all is done, else throws if any rank says that it has given up or left.
  bool all_present(const Errand& errand, std::uint32_t all) const;
  [[noreturn]] void give_up(const Errand& errand, const std::vector<int>& missing) const;

 private:
  void set_state(State state);
  // Waits until the tally comes to `count`. Ranks for which `has_come` is false are to blame if it does not.
  template <typename HasCome>
  void await(Tally& tally, std::uint32_t count, const HasCome& has_come, const Errand& errand,
             const Patience& patience);
  Header& header() const { return *layout_.header(segment_.data()); }
  std::string reason(int peer) const;
  [[noreturn]] void lost(int peer, const Errand& errand, const std::string& how) const;

  Segment segment_;
  Layout layout_;
  int rank_;
  std::vector<Peer> peers_;
  std::vector<Life> lives_;
  std::uint32_t clock_ = 0;
  std::atomic<bool> aborted_{false};
};

std::string describe(const Announcement& announcement, const char* text = "");

}  // namespace gradsync
