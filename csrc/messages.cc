#include "messages.h"

#include <algorithm>
#include <cstring>

#include "probe.h"
#include "ring.h"

namespace gradsync {
namespace {

constexpr std::uint32_t kHeadMagic = 0x6d736731;
constexpr std::chrono::milliseconds kPatience{100};
constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::seconds kIdle{1};  // after which the thread rests

Errand errand(const Message& message) { return {&message.announcement, message.deadline}; }

}  // namespace

Messages::Messages(Members& members, bool yields)
    : members_(members),
      yields_(yields),
      sends_(static_cast<std::size_t>(members.world())),
      severed_(static_cast<std::size_t>(members.world())),
      inlets_(static_cast<std::size_t>(members.world())) {}

Messages::~Messages() { stop(); }

void Messages::send(const std::shared_ptr<Message>& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto to = static_cast<std::size_t>(message->other);
  if (severed_[to] != nullptr) return finish(*message, severed_[to]);
  sends_[to].push_back(message);
  begin(*message);
}

void Messages::receive(const std::shared_ptr<Message>& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  receives_.push_back(message);
  begin(*message);
}

void Messages::begin(const Message& message) {
  if (members_.aborted()) {
    fail_all(std::make_exception_ptr(AbortedError("The group was aborted.")));
    return;
  }
  if (stopping_) {
    fail_all(std::make_exception_ptr(AbortedError("The group has been closed.")));
    return;
  }
  progress();
  if (message.is_done) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (is_resting_) work_.notify_all();
  if (callers_ == 0) want_alarm(true);
}

void Messages::wait(const std::shared_ptr<Message>& message, const Interrupted& interrupted) {
  if (message->is_done) return;
  const Caller caller(*this);
  Line& own = members_.line(members_.rank());
  Spin spin(kSpin, yields_);
  auto looked = Clock::now();  // for deaths and deadlines, now and then also where much is moving
  while (!message->is_done) {
    const std::uint32_t seen = own.bell.load(std::memory_order_seq_cst);
    const bool is_spinning = spin.again();
    const bool is_time = Clock::now() - looked > kPatience;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (progress() && !is_time) {
        spin = Spin(kSpin, yields_);
        continue;
      }
      if (message->is_done) break;
      bool overdue = false;
      if (!is_spinning || is_time) {
        looked = Clock::now();
        check_peers(overdue);
      }
      if (overdue || message->is_done) continue;
    }
    if (!is_time && (own.bell.load(std::memory_order_seq_cst) != seen || is_spinning)) continue;
    if (interrupted && interrupted()) throw InterruptedError("A message was interrupted.");
    sleep_on(own.bell, seen, own.bell_sleepers, kPatience);
  }
}

Messages::Caller::Caller(Messages& all) : all_(all) {
  std::unique_lock<std::mutex> lock(all_.mutex_);
  if (all_.callers_++ == 0) all_.want_alarm(false);
}

Messages::Caller::~Caller() {
  std::unique_lock<std::mutex> lock(all_.mutex_);
  if (--all_.callers_ == 0 && all_.is_pending()) all_.want_alarm(true);
}

// See [Note: bell and alarm].
void Messages::want_alarm(bool wanted) {
  Line& own = members_.line(members_.rank());
  if (own.wants_alarm.load(std::memory_order_relaxed) == wanted) return;
  own.wants_alarm.store(wanted, std::memory_order_seq_cst);
  if (wanted) progress();  // what has been moved until now has rung no alarm
}

bool Messages::is_pending() const {
  return !receives_.empty() ||
         std::any_of(sends_.begin(), sends_.end(), [](const auto& queue) { return !queue.empty(); }) ||
         std::any_of(inlets_.begin(), inlets_.end(),  // what has begun to arrive
                     [](const Inlet& inlet) { return inlet.message != nullptr; });
}

void Messages::stop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    fail_all(std::make_exception_ptr(AbortedError("The group was closed with messages on their way.")));
  }
  work_.notify_all();
  members_.ring_bell(members_.rank());
  members_.ring_alarm(members_.rank());
  if (thread_.joinable()) thread_.join();
}

void Messages::run() {
  Line& own = members_.line(members_.rank());
  std::unique_lock<std::mutex> lock(mutex_);
  auto busy = Clock::now(), looked = busy;
  while (!stopping_) {
    const auto now = Clock::now();
    const std::uint32_t seen = own.alarm.load(std::memory_order_seq_cst);
    if (is_pending()) {
      busy = now;
    } else {
      want_alarm(false);
      if (now - busy > kIdle) {
        is_resting_ = true;
        work_.wait(lock, [this] { return stopping_ || is_pending(); });
        is_resting_ = false;
        continue;
      }
    }
    // Callers move messages, unless a signal handler of Python's holds them up.
    const bool is_time = now - looked >= kPatience;  // for deaths and deadlines, also where much is moving
    if (is_pending() && (callers_ == 0 || is_time)) {
      if (progress() && !is_time) continue;
      looked = now;
      bool overdue = false;
      check_peers(overdue);
      if (overdue) continue;
    }
    lock.unlock();
    sleep_on(own.alarm, seen, own.alarm_sleepers, kPatience);
    lock.lock();
  }
}

// ------------------------------------------------------------------------------- moving

// Moves what can be moved. What is wrong with a channel ends all messages, on whatever thread it is noticed.
bool Messages::progress() {
  try {
    return move();
  } catch (const std::exception&) {
    fail_all(std::current_exception());
    return true;
  }
}

bool Messages::move() {
  bool moved = false;
  for (auto& queue : sends_) {
    while (!queue.empty()) {
      const std::shared_ptr<Message> message = queue.front();
      moved |= push(*message);
      if (!message->is_done) break;
      queue.pop_front();
    }
  }
  moved |= take_strays();
  for (int from = 0; from < members_.world(); ++from) {
    if (from != members_.rank()) moved |= pull(from);
  }
  if (moved) {  // another thread of ours may wait for what this one has moved
    members_.ring_bell(members_.rank());
  }
  return moved;
}

bool Messages::push(Message& message) {
  Ring ring(members_, members_.rank(), message.other);
  std::size_t room = ring.room();
  bool has_told = true, moved = false;
  if (!message.has_begun) {
    const Head head{message.bytes, message.tag, kHeadMagic};
    if (room < sizeof head) return false;
    ring.put(reinterpret_cast<const std::byte*>(&head), sizeof head);
    room -= sizeof head;
    message.has_begun = moved = true;
    has_told = false;
    probe(Phase::kMessage);
  }
  while (message.moved < message.bytes) {  // no more than there was room for: others want to be moved too
    const std::size_t piece = ring.piece_of(message.bytes - message.moved);
    if (whole_lines(piece) > room) break;
    ring.put(message.data + message.moved, piece);
    message.moved += piece;
    room -= whole_lines(piece);
    members_.call(message.other);
    has_told = moved = true;
  }
  if (!has_told) members_.call(message.other);
  if (message.moved == message.bytes) finish(message, nullptr);
  return moved;
}

bool Messages::pull(int from) {
  Inlet& inlet = inlets_[static_cast<std::size_t>(from)];
  Ring ring(members_, from, members_.rank());
  bool moved = false;
  while (true) {
    if (!inlet.has_head) {
      if (ring.waiting() < sizeof(Head)) break;
      ring.get(reinterpret_cast<std::byte*>(&inlet.head), sizeof(Head));
      if (inlet.head.magic != kHeadMagic) {
        fail_all(std::make_exception_ptr(InvalidError("the channel from " + members_.label(from) +
                                                      " holds something that is no message")));
        break;
      }
      inlet.has_head = moved = true;
      inlet.taken = 0;
    }
    const bool is_known = inlet.message != nullptr || inlet.is_stray || inlet.is_dropped;
    if (!is_known && !match(from)) break;
    std::byte* data = nullptr;
    if (!inlet.is_dropped) data = inlet.is_stray ? inlet.strays.back().data.data() : inlet.message->data;
    std::uint64_t there = ring.waiting();
    while (inlet.taken < inlet.head.bytes) {
      const std::size_t piece = ring.piece_of(inlet.head.bytes - inlet.taken);
      if (whole_lines(piece) > there) break;
      ring.get(data == nullptr ? nullptr : data + inlet.taken, piece);
      inlet.taken += piece;
      there -= whole_lines(piece);
      members_.call(from);
      moved = true;
    }
    if (inlet.taken < inlet.head.bytes) break;
    if (inlet.head.bytes == 0) members_.call(from);  // there is room for a header
    if (inlet.message != nullptr) finish(*inlet.message, nullptr);
    inlet.message = nullptr;
    inlet.has_head = inlet.is_stray = inlet.is_dropped = false;
    moved = true;
    take_strays();
  }
  return moved;
}

// Whose is the message that stands first in the channel? False: nobody's yet, and it is in nobody's way.
bool Messages::match(int from) {
  Inlet& inlet = inlets_[static_cast<std::size_t>(from)];
  bool is_in_the_way = false;
  for (auto entry = receives_.begin(); entry != receives_.end(); ++entry) {
    Message& message = **entry;
    if (message.other != kAnySource && message.other != from) continue;
    if (message.tag != inlet.head.tag) {
      is_in_the_way = true;
      continue;
    }
    message.source = from;
    if (message.bytes != inlet.head.bytes) {
      finish(message, std::make_exception_ptr(MismatchError(
                          "recv from " + members_.label(from) + " with tag " +
                          std::to_string(message.tag) + " expects " + std::to_string(message.bytes) +
                          " bytes, but " + std::to_string(inlet.head.bytes) + " were sent.")));
      receives_.erase(entry);
      inlet.is_dropped = true;
      return true;
    }
    inlet.message = *entry;
    receives_.erase(entry);
    return true;
  }
  if (!is_in_the_way) return false;
  inlet.strays.push_back({inlet.head.tag, std::vector<std::byte>(inlet.head.bytes)});
  inlet.is_stray = true;
  return true;
}

bool Messages::take_strays() {
  bool moved = false;
  for (auto entry = receives_.begin(); entry != receives_.end();) {
    Message& message = **entry;
    bool found = false;
    for (int from = 0; from < members_.world() && !found; ++from) {
      if (message.other != kAnySource && message.other != from) continue;
      Inlet& inlet = inlets_[static_cast<std::size_t>(from)];
      for (auto stray = inlet.strays.begin(); stray != inlet.strays.end(); ++stray) {
        const bool is_arriving = inlet.is_stray && std::next(stray) == inlet.strays.end();
        if (is_arriving || stray->tag != message.tag) continue;
        message.source = from;
        std::exception_ptr error;
        if (stray->data.size() == message.bytes) {
          if (message.bytes > 0) std::memcpy(message.data, stray->data.data(), message.bytes);
        } else {
          error = std::make_exception_ptr(MismatchError(
              "recv from " + members_.label(from) + " with tag " + std::to_string(message.tag) +
              " expects " + std::to_string(message.bytes) + " bytes, but " +
              std::to_string(stray->data.size()) + " were sent."));
        }
        inlet.strays.erase(stray);
        finish(message, error);
        found = true;
        break;
      }
    }
    moved |= found;
    entry = found ? receives_.erase(entry) : std::next(entry);
  }
  return moved;
}

void Messages::finish(Message& message, std::exception_ptr error) {
  message.error = error;
  message.is_done.store(true, std::memory_order_release);
}

void Messages::fail_all(std::exception_ptr error) {
  for (std::size_t to = 0; to < sends_.size(); ++to) {
    if (!sends_[to].empty() && sends_[to].front()->has_begun) severed_[to] = error;
    for (auto& message : sends_[to]) finish(*message, error);
    sends_[to].clear();
  }
  for (auto& message : receives_) finish(*message, error);
  receives_.clear();
  for (Inlet& inlet : inlets_) {
    if (inlet.message == nullptr) continue;
    finish(*inlet.message, error);
    inlet.message = nullptr;
    inlet.is_dropped = true;  // should the rest come after all
  }
}

// Fails what cannot succeed any more, each message by itself.
void Messages::check_peers(bool& overdue) {
  if (members_.aborted()) {
    overdue = true;
    return fail_all(std::make_exception_ptr(AbortedError("The group was aborted.")));
  }
  // What a peer sent before it ended counts: fetch that first, and only then hold its end against it.
  std::vector<bool> gone(static_cast<std::size_t>(members_.world()));
  bool any = false;
  for (int peer = 0; peer < members_.world(); ++peer) {
    if (peer == members_.rank()) continue;
    any |= gone[static_cast<std::size_t>(peer)] = members_.is_gone(peer);
  }
  if (any) overdue = progress();
  const auto look = [&](Message& message, int peer) {
    try {
      check(message, peer, gone);
    } catch (const std::exception&) {
      finish(message, std::current_exception());
      overdue = true;
    }
    return message.is_done.load();
  };
  for (int to = 0; to < members_.world(); ++to) {
    auto& queue = sends_[static_cast<std::size_t>(to)];
    if (!queue.empty() && queue.front()->has_begun && look(*queue.front(), to)) {
      // What came behind it would be taken for its rest.
      auto& error = severed_[static_cast<std::size_t>(to)] = queue.front()->error;
      for (auto& message : queue) finish(*message, error);
      queue.clear();
    }
    const auto fails = [&](const auto& message) { return look(*message, to); };
    queue.erase(std::remove_if(queue.begin(), queue.end(), fails), queue.end());
  }
  receives_.remove_if([&](const auto& message) { return look(*message, message->other); });
  for (int from = 0; from < members_.world(); ++from) {
    Inlet& inlet = inlets_[static_cast<std::size_t>(from)];
    if (inlet.message != nullptr && look(*inlet.message, from)) {
      inlet.message = nullptr;
      inlet.is_dropped = true;  // should the rest come after all
    }
  }
}

// Throws if a message from or to `peer` cannot succeed any more. Who aborts ends those of others too. Who left
// owes nothing to one from anywhere, as long as others are there who may send it; who was killed may have been
// about to.
void Messages::check(const Message& message, int peer, const std::vector<bool>& gone) const {
  for (int rank = 0; rank < members_.world(); ++rank) {
    if (rank != members_.rank() && members_.ends_all(rank)) members_.check(rank, errand(message));
  }
  std::vector<int> awaited;
  int left = kAnySource;
  for (int rank = 0; rank < members_.world(); ++rank) {
    if (peer == kAnySource ? rank == members_.rank() : rank != peer) continue;
    if (!gone[static_cast<std::size_t>(rank)]) {
      awaited.push_back(rank);
    } else if (peer == kAnySource && members_.line(rank).state.load(std::memory_order_acquire) == State::kLeft) {
      left = rank;
    } else {
      members_.check(rank, errand(message));
    }
  }
  if (awaited.empty() && left != kAnySource) members_.check(left, errand(message));
  if (Clock::now() < message.deadline) return;
  if (awaited.empty()) {
    throw DeadlineError(describe(message.announcement) + ": the deadline has passed, and nobody else is in the group.",
                        {});
  }
  members_.give_up(errand(message), awaited);
}

}  // namespace gradsync
