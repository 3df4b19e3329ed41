// Waiting for other processes: a futex, and never without a deadline or past a death.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gradsync {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Asked now and then by who waits: is it to stop? May be empty.
using Interrupted = std::function<bool()>;

// How to wait.
struct Patience {
  std::chrono::microseconds spin{0};
  bool yields = false;  // spin by giving the core to others: what is waited for may need it
  Interrupted interrupted;
};

// Has a clock that runs round come to `tick`?
inline bool reached(std::uint32_t clock, std::uint32_t tick) {
  return static_cast<std::int32_t>(clock - tick) >= 0;
}

// A word that others may sleep on; `sleepers` spares the system call when nobody does.
void wake_all(std::atomic<std::uint32_t>& word);
void ring(std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& sleepers);
// Sleeps until it is woken or `limit` is over; false if the word is no longer `seen`, and it did not.
bool sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen,
              std::atomic<std::uint32_t>& sleepers, Clock::duration limit);

// Spinning, for as long as it pays.
class Spin {
 public:
  explicit Spin(std::chrono::microseconds limit, bool yields = false)
      : limit_(limit), yields_(yields) {}
  bool again();

 private:
  std::chrono::microseconds limit_;
  bool yields_;
  int turns_ = 0;
  Clock::time_point start_;
};

// When the process began: with the pid it names a process for good, since pids come again.
std::uint64_t start_time(std::int64_t pid);

// The life of another process, told by the kernel.
class Life {
 public:
  Life() = default;
  Life(std::int64_t pid, std::uint64_t started);
  Life(Life&& other) noexcept;
  Life& operator=(Life&& other) noexcept;
  ~Life();
  bool is_over() const;

 private:
  int descriptor_ = -1;
};

}  // namespace gradsync
