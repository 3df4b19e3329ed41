#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "check.h"

int main(int count, char** arguments) {
  // Should a test ask for too much memory, let that be an error and not the end of other processes.
  const rlimit limit{std::size_t{1} << 30, std::size_t{1} << 30};  // of one segment
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const rlimit all{std::size_t{4} << 30, std::size_t{4} << 30};
  if (!kSanitized) ::setrlimit(RLIMIT_AS, &all);  // the sanitizers have a limit of their own
  ::signal(SIGXFSZ, SIG_IGN);
  ::alarm(kSanitized ? 900 : 300);  // and should one hang, let that end
  int ran = 0;
  for (const check::Test& test : check::tests()) {
    bool is_named = count < 2;
    for (int i = 1; i < count; ++i) is_named |= std::strstr(test.name, arguments[i]) != nullptr;
    if (!is_named) continue;
    ++ran;
    const long before = check::failures;
    const auto start = std::chrono::steady_clock::now();
    try {
      test.run();
    } catch (const std::exception& error) {
      check::report(test.name, 0, std::string("throws ") + error.what());
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (check::failures != before || took.count() > 2) {
      std::printf("%-4s %s (%.1f s)\n", check::failures == before ? "ok" : "FAIL", test.name, took.count());
      std::fflush(stdout);
    }
  }
  std::printf("%d tests, %ld checks, %ld failures\n", ran, check::checks.load(), check::failures.load());
  return check::failures == 0 && ran > 0 ? 0 : 1;
}
