// Which process this is.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace gradsync {

// Without asking the kernel each time. A child after fork() is another one.
inline std::int64_t own_pid() {
  static std::atomic<pid_t> pid{0};
  static const int is_watched =
      ::pthread_atfork(nullptr, nullptr, [] { pid.store(::getpid(), std::memory_order_relaxed); });
  if (is_watched != 0) return ::getpid();
  pid_t known = pid.load(std::memory_order_relaxed);
  if (known == 0) pid.store(known = ::getpid(), std::memory_order_relaxed);
  return known;
}

}  // namespace gradsync
