#include "../sync.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "../error.h"
#include "check.h"

using namespace gradsync;
using namespace std::chrono_literals;

namespace {

using Word = std::atomic<std::uint32_t>;

// A process that does nothing until it is killed.
class Sleeper {
 public:
  Sleeper() {
    char* arguments[] = {const_cast<char*>("sleep"), const_cast<char*>("1000"), nullptr};
    char* nothing[] = {nullptr};
    CHECK(::posix_spawnp(&pid, "sleep", nullptr, nullptr, arguments, nothing) == 0);
  }
  ~Sleeper() { end(); }
  void kill() {
    if (pid > 0) ::kill(pid, SIGKILL);  // -1 would be everybody
  }
  void end() {
    if (pid > 0) {
      kill();
      ::waitpid(std::exchange(pid, -1), nullptr, 0);
    }
  }
  pid_t pid = -1;
};

bool becomes_over(const Life& life) {
  for (int i = 0; i < 500 && !life.is_over(); ++i) std::this_thread::sleep_for(10ms);
  return life.is_over();
}

TEST(a_clock_that_runs_round_is_still_compared_rightly) {
  CHECK(reached(5, 5) && reached(6, 5) && !reached(4, 5));
  CHECK(reached(0, 0xffffffffu) && !reached(0xffffffffu, 0));
  CHECK(reached(3, 0xfffffff0u) && !reached(0xfffffff0u, 3));
}

TEST(a_sleeper_is_woken_by_a_ring) {
  Word word{0}, sleepers{0};
  std::thread sleeper([&] {
    const auto start = Clock::now();
    while (word.load() == 0) sleep_on(word, 0, sleepers, 20s);
    CHECK(Clock::now() - start < 10s);
  });
  while (sleepers.load() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(20ms);
  word.store(1);
  ring(word, sleepers);
  sleeper.join();
  CHECK_EQUAL(sleepers.load(), 0u);
}

TEST(who_comes_late_does_not_sleep_and_who_is_not_woken_sleeps_for_its_limit) {
  Word word{1}, sleepers{0};
  auto start = Clock::now();
  CHECK(!sleep_on(word, 0, sleepers, 20s));  // the word has moved on
  CHECK(Clock::now() - start < 5s);
  start = Clock::now();
  CHECK(sleep_on(word, 1, sleepers, 30ms));
  CHECK(Clock::now() - start >= 25ms);
  start = Clock::now();
  sleep_on(word, 1, sleepers, -1s);  // a deadline that has passed
  CHECK(Clock::now() - start < 5s);
  CHECK_EQUAL(sleepers.load(), 0u);
}

// Each waits for the other in turn, without spinning: a wake-up that got lost would take 10 s.
TEST(no_wake_up_is_lost_in_many_rounds) {
  const std::uint32_t rounds = kSanitized ? 5000 : 50000;
  Word a{0}, b{0}, a_sleepers{0}, b_sleepers{0};
  const auto play = [&](Word& own, Word& own_sleepers, Word& other, Word& other_sleepers) {
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      own.store(round);
      ring(own, own_sleepers);
      for (std::uint32_t seen = other.load(); !reached(seen, round); seen = other.load()) {
        const auto start = Clock::now();
        sleep_on(other, seen, other_sleepers, 10s);
        if (Clock::now() - start > 9s) {
          CHECK(!"a wake-up was lost");
          return;
        }
      }
    }
  };
  std::thread first([&] { play(a, a_sleepers, b, b_sleepers); });
  play(b, b_sleepers, a, a_sleepers);
  first.join();
}

TEST(spinning_ends) {
  Spin none(0us);
  CHECK(!none.again());
  Spin some(200us);
  const auto start = Clock::now();
  while (some.again()) continue;
  CHECK(Clock::now() - start >= 200us);
  CHECK(Clock::now() - start < 5s);
}

TEST(the_life_of_a_process_ends_when_it_is_killed_also_before_it_is_waited_for) {
  Sleeper sleeper;
  Life life(sleeper.pid, start_time(sleeper.pid));
  CHECK(!life.is_over());
  Life moved(std::move(life));
  CHECK(!life.is_over() && !moved.is_over());
  sleeper.kill();
  CHECK(becomes_over(moved));  // a zombie is over
  sleeper.end();
  CHECK(moved.is_over());
}

TEST(a_process_that_took_over_a_pid_is_not_taken_for_the_old_one) {
  Sleeper sleeper;
  CHECK_THROWS(SystemError, Life(sleeper.pid, start_time(sleeper.pid) + 1));
  const pid_t gone = sleeper.pid;
  sleeper.end();
  CHECK_THROWS(SystemError, Life(gone, 1));
  CHECK_THROWS(SystemError, Life(-1, 1));
}

TEST(the_start_of_a_process_is_known_and_stays) {
  CHECK(start_time(::getpid()) > 0);
  CHECK_EQUAL(start_time(::getpid()), start_time(::getpid()));
  CHECK_EQUAL(start_time(-1), 0u);
  CHECK(!Life(::getpid(), start_time(::getpid())).is_over());
}

}  // namespace
