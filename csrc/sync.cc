#include "sync.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "error.h"

namespace gradsync {
namespace {

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* limit) {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, limit,
                   nullptr, 0);
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void wake_all(std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

void ring(std::atomic<std::uint32_t>& word, std::atomic<std::uint32_t>& sleepers) {
  // Pairs with sleep_on: either we see the sleeper, or it sees the new value.
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all(word);
}

bool sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen,
              std::atomic<std::uint32_t>& sleepers, Clock::duration limit) {
  const auto nanoseconds =
      std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count());
  const timespec time{static_cast<time_t>(nanoseconds / 1'000'000'000),
                      static_cast<long>(nanoseconds % 1'000'000'000)};
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const bool slept = word.load(std::memory_order_seq_cst) == seen &&
                     (futex(word, FUTEX_WAIT, seen, &time) == 0 || errno != EAGAIN);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return slept;
}

bool Spin::again() {
  if (limit_.count() == 0) return false;
  if (turns_++ == 0) start_ = Clock::now();
  if (yields_) {
    ::sched_yield();
    return Clock::now() - start_ < limit_;
  }
  for (int i = 0; i < 16; ++i) pause();
  return turns_ % 8 != 0 || Clock::now() - start_ < limit_;
}

std::uint64_t start_time(std::int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  // The name, in brackets, may have spaces and brackets itself; the 20th field behind it is ours.
  std::istringstream fields(line.substr(std::min(line.size(), line.rfind(')') + 1)));
  std::string field;
  for (int i = 0; i < 20; ++i) fields >> field;
  try {
    return std::stoull(field);
  } catch (const std::exception&) {
    return 0;
  }
}

Life::Life(std::int64_t pid, std::uint64_t started) {
  descriptor_ = static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
  if (descriptor_ < 0) {
    throw SystemError("pidfd_open of process " + std::to_string(pid) + ": " + std::strerror(errno));
  }
  if (start_time(pid) != started) {  // asked only now that the pid cannot be given away any more
    ::close(std::exchange(descriptor_, -1));
    throw SystemError("process " + std::to_string(pid) + " is not the one that announced itself");
  }
}

Life::Life(Life&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

Life& Life::operator=(Life&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Life::~Life() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool Life::is_over() const {
  if (descriptor_ < 0) return false;
  pollfd request{descriptor_, POLLIN, 0};
  return ::poll(&request, 1, 0) == 1;
}

}  // namespace gradsync
