#include "members.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace gradsync {
namespace {

// A sleeper looks this often whether its peers still live.
constexpr std::chrono::milliseconds kSlice{100};

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"nothing",    "all_reduce",     "reduce",     "broadcast",
                                           "all_gather", "reduce_scatter", "all_to_all", "gather",
                                           "scatter",    "barrier",        "a collective through gloo", "send", "recv"};
  return kind < Kind::kCount ? kNames[static_cast<int>(kind)] : "an unknown collective";
}

bool is_point_to_point(Kind kind) { return kind == Kind::kSend || kind == Kind::kRecv; }

std::string name_of(const Errand& errand) {
  const Announcement& a = *errand.announcement;
  if (is_point_to_point(a.kind)) return "message " + std::to_string(a.sequence) + ", " + describe(a);
  return "collective " + std::to_string(a.sequence) + ", " + describe(a, errand.text);
}

}  // namespace

std::string describe(const Announcement& a, const char* words) {
  std::string text = name_of(a.kind);
  if (a.kind == Kind::kElsewhere) return *words == '\0' ? text : std::string(words, ::strnlen(words, kTextBytes));
  if (a.kind == Kind::kBarrier || a.kind == Kind::kNone) return text;
  text += '(';
  if (a.op != ReduceOp::kNone) text += std::string(name_of(a.op)) + ", ";
  if (a.root >= 0) {
    const char* role = a.kind == Kind::kSend ? "to group rank " : a.kind == Kind::kRecv
                           ? "from group rank "
                           : "root ";
    text += role + std::to_string(a.root) + ", ";
  }
  const std::size_t length = ::strnlen(a.element.name, sizeof a.element.name);
  const std::string name = length == 0 ? name_of(a.dtype) : std::string(a.element.name, length);
  if (a.kind == Kind::kAllToAll) return text + name + ')';  // the pieces may differ
  const std::uint64_t bytes = a.element.bytes == 0 ? size_of(a.dtype) : a.element.bytes;
  return text + std::to_string(a.count * size_of(a.dtype) / bytes) + " x " + name + ')';
}

Members::Members(Segment segment, int rank, std::vector<Peer> peers, std::uint64_t nonce_a,
                 std::uint64_t nonce_b, bool is_founder)
    : segment_(std::move(segment)),
      layout_(static_cast<int>(peers.size())),
      rank_(rank),
      peers_(std::move(peers)) {
  Header& header = this->header();
  if (is_founder) {  // fresh pages are zero, and State::kPresent is
    header.magic = kMagic;
    header.version = kVersion;
    header.world = static_cast<std::uint32_t>(world());
    header.nonce[0] = nonce_a;
    header.nonce[1] = nonce_b;
  } else if (header.magic != kMagic || header.version != kVersion ||
             header.world != static_cast<std::uint32_t>(world()) || header.nonce[0] != nonce_a ||
             header.nonce[1] != nonce_b) {
    throw InvalidError("the segment that was announced belongs to another group");
  }
  lives_.resize(peers_.size());
  for (int peer = 0; peer < world(); ++peer) {
    const Peer& facts = peers_[static_cast<std::size_t>(peer)];
    if (peer != rank_) lives_[static_cast<std::size_t>(peer)] = Life(facts.pid, facts.started);
  }
}

void Members::tick() {
  const std::uint32_t all = ++clock_ * static_cast<std::uint32_t>(world());
  // Who dies between the two has come but is blamed for not having: better than that nobody is.
  const std::uint32_t before = header().ticks.count.fetch_add(1, std::memory_order_seq_cst);
  line(rank_).clock.store(clock_, std::memory_order_release);
  if (before + 1 == all) ring(header().ticks.count, header().ticks.sleepers);
}

bool Members::all_reached(std::uint32_t tick) const {
  const std::uint32_t all = tick * static_cast<std::uint32_t>(world());
  return reached(header().ticks.count.load(std::memory_order_acquire), all);
}

void Members::await(std::uint32_t tick, const Errand& errand, const Patience& patience) {
  const auto has_come = [&](int peer) {
    return reached(line(peer).clock.load(std::memory_order_acquire), tick);
  };
  await(header().ticks, tick * static_cast<std::uint32_t>(world()), has_come, errand, patience);
}

void Members::begin_pieces(std::uint64_t sequence) {
  line(rank_).begun.store(sequence, std::memory_order_release);
}

void Members::add_pieces(std::uint64_t sequence, std::uint32_t pieces, std::uint32_t all) {
  Tally& tally = header().pieces;
  const std::uint32_t before = tally.count.fetch_add(pieces, std::memory_order_seq_cst);
  line(rank_).reduced.store(sequence, std::memory_order_release);
  if (pieces > 0 && before + pieces == all) ring(tally.count, tally.sleepers);
}

bool Members::all_done(std::uint32_t all) const {
  return reached(header().pieces.count.load(std::memory_order_acquire), all);
}

// Who waits has found no piece that is not taken, and whoever took one had begun before. So as long as
// pieces are not done, somebody has begun and has not told.
void Members::await_pieces(std::uint64_t sequence, std::uint32_t all, const Errand& errand,
                           const Patience& patience) {
  const auto has_come = [&](int peer) {
    return line(peer).begun.load(std::memory_order_acquire) < sequence ||
           line(peer).reduced.load(std::memory_order_acquire) >= sequence;
  };
  await(header().pieces, all, has_come, errand, patience);
}

template <typename HasCome>
void Members::await(Tally& tally, std::uint32_t count, const HasCome& has_come, const Errand& errand,
                    const Patience& patience) {
  Spin spinning(patience.spin, patience.yields);
  bool has_slept = false;
  while (true) {
    const std::uint32_t seen = tally.count.load(std::memory_order_acquire);
    if (reached(seen, count)) return;
    if (aborted()) throw AbortedError(name_of(errand) + " was aborted.");
    if (spinning.again()) continue;
    const auto left = errand.deadline - Clock::now();
    if (!has_slept) {  // most waits end with the first sleep: questions cost more than that
      has_slept = sleep_on(tally.count, seen, tally.sleepers, std::min<Clock::duration>(kSlice, left));
      continue;
    }
    if (patience.interrupted && patience.interrupted()) {
      throw InterruptedError(name_of(errand) + " was interrupted.");
    }
    std::vector<int> missing;
    int aborter = -1;
    for (int each = 0; each < world(); ++each) {
      if (each == rank_) continue;
      // First whether it is gone, then how far it came: what it did before it ended counts.
      const bool gone = is_gone(each);
      if (ends_all(each)) aborter = each;
      if (has_come(each)) continue;
      if (reached(tally.count.load(std::memory_order_acquire), count)) return;
      if (gone) check(each, errand);
      missing.push_back(each);
    }
    if (!missing.empty() && reached(tally.count.load(std::memory_order_acquire), count)) return;
    if (aborter >= 0 && !missing.empty()) check(aborter, errand);  // though it may have come itself
    if (left <= left.zero() && !missing.empty()) give_up(errand, missing);
    sleep_on(tally.count, seen, tally.sleepers, std::min<Clock::duration>(kSlice, left));
  }
}

std::pair<State, std::string> Members::state(int peer) const {
  const State state = line(peer).state.load(std::memory_order_acquire);
  const bool blames_somebody = state == State::kFailed && line(peer).blames.load() != kNobody;
  return {state, blames_somebody ? reason(peer) : ""};
}

std::string Members::reason(int peer) const {
  const Line& other = line(peer);
  return std::string(other.reason, ::strnlen(other.reason, sizeof other.reason));
}

std::vector<std::uint64_t> Members::positions() const {
  std::vector<std::uint64_t> positions;
  for (int peer = 0; peer < world(); ++peer) {
    positions.push_back(line(peer).last.load(std::memory_order_relaxed));
  }
  return positions;
}

bool Members::is_gone(int peer) const {
  return line(peer).state.load(std::memory_order_acquire) != State::kPresent ||
         lives_[static_cast<std::size_t>(peer)].is_over();
}

bool Members::ends_all(int peer) const {
  const State state = line(peer).state.load(std::memory_order_acquire);
  return state == State::kAborted || (state == State::kFailed && line(peer).blames.load() == kOutsider);
}

void Members::check(int peer, const Errand& errand) const {
  const Line& other = line(peer);
  const State state = other.state.load(std::memory_order_acquire);
  if (state == State::kPresent && !lives_[static_cast<std::size_t>(peer)].is_over()) return;
  if (state == State::kFailed) {
    const int blamed = other.blames.load(std::memory_order_relaxed);
    const std::string text =
        name_of(errand) + " cannot complete: " + label(peer) + " gave up: " + reason(peer);
    if (blamed >= 0 && blamed < world()) throw PeerLostError(text, blamed, peers_[static_cast<std::size_t>(blamed)]);
    throw BrokenError(text);
  }
  if (state == State::kAborted) {
    throw AbortedError(name_of(errand) + " cannot complete: " + label(peer) + " aborted the group.");
  }
  lost(peer, errand, state == State::kLeft ? "has left the group" : "has ended");
}

bool Members::all_present(const Errand& errand, std::uint32_t all) const {
  if (aborted()) throw AbortedError(name_of(errand) + " was aborted.");
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_ || line(peer).state.load(std::memory_order_acquire) == State::kPresent) continue;
    if (all_done(all)) return false;  // so it left with good reason
    check(peer, errand);
  }
  return true;
}

void Members::lost(int peer, const Errand& errand, const std::string& how) const {
  const Line& other = line(peer);
  const Announcement* last = &other.announcements[0];
  if (other.announcements[1].sequence > last->sequence) last = &other.announcements[1];
  throw PeerLostError(label(peer) + " " + how + " while " + name_of(errand) +
                          ", waited for it. Its last collective was " +
                          std::to_string(last->sequence) + ", " + describe(*last) + '.',
                      peer, peers_[static_cast<std::size_t>(peer)]);
}

void Members::give_up(const Errand& errand, const std::vector<int>& missing) const {
  std::string text = name_of(errand) + ": the deadline has passed, which is the timeout of the group or "
                                       "of the call. Not arrived: ";
  std::vector<int> ranks;
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const Line& other = line(missing[i]);
    ranks.push_back(peers_[static_cast<std::size_t>(missing[i])].rank);
    text += (i ? ", " : "") + label(missing[i]);
    if (!is_point_to_point(errand.announcement->kind)) {
      text += ", whose last collective was " + std::to_string(other.last.load(std::memory_order_relaxed));
    }
  }
  throw DeadlineError(text + '.', ranks);
}

void Members::set_state(State state) {
  Line& own = line(rank_);
  State present = State::kPresent;
  own.state.compare_exchange_strong(present, state, std::memory_order_seq_cst);
  wake_all(header().ticks.count);
  wake_all(header().pieces.count);
  for (int peer = 0; peer < world(); ++peer) {  // who wait for a message of ours
    if (peer != rank_) call(peer);
  }
}

void Members::ring_bell(int rank) {
  Line& other = line(rank);
  other.bell.fetch_add(1, std::memory_order_seq_cst);
  ring(other.bell, other.bell_sleepers);
}

void Members::ring_alarm(int rank) {
  Line& other = line(rank);
  other.alarm.fetch_add(1, std::memory_order_seq_cst);
  ring(other.alarm, other.alarm_sleepers);
}

void Members::call(int rank) {
  ring_bell(rank);
  if (line(rank).wants_alarm.load(std::memory_order_seq_cst)) ring_alarm(rank);
}

void Members::leave() { set_state(State::kLeft); }

void Members::fail(const std::string& reason, int blames) {
  Line& own = line(rank_);
  if (own.state.load(std::memory_order_relaxed) != State::kPresent) return;
  std::size_t length = std::min(reason.size(), sizeof own.reason - 1);
  while (length < reason.size() && length > 0 && (reason[length] & 0xc0) == 0x80) --length;  // whole characters
  std::memcpy(own.reason, reason.data(), length);
  own.reason[length] = '\0';
  own.blames.store(blames, std::memory_order_relaxed);
  set_state(State::kFailed);
}

void Members::abort() {
  aborted_.store(true, std::memory_order_relaxed);
  set_state(State::kAborted);
  call(rank_);
}

}  // namespace gradsync
