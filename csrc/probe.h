// Where tests stop or kill a rank, to see what the others make of it.
#pragma once

#include <csignal>

#include <atomic>

namespace gradsync {

enum class Phase : int { kNever, kPost, kPosted, kArrived, kTaken, kTicked, kFinished, kMessage, kCount };

struct Probe {
  std::atomic<Phase> phase{Phase::kNever};
  std::atomic<int> countdown{0};
  std::atomic<int> signal{0};
};

inline Probe& the_probe() {
  static Probe probe;
  return probe;
}

inline void probe(Phase phase) {
  Probe& armed = the_probe();
  if (armed.phase.load(std::memory_order_relaxed) != phase) return;
  if (armed.countdown.fetch_sub(1) == 1) std::raise(armed.signal.load());
}

}  // namespace gradsync
