// Who carries out what, and how a group ends.
#include <signal.h>
#include <sys/wait.h>

#include <atomic>

#include "../probe.h"
#include "ranks.h"

using namespace gradsync;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kLarge = 200000;

std::vector<float> ones(std::size_t count) { return std::vector<float>(count, 1.0f); }

bool becomes_done(const std::function<bool()>& is_done) {
  for (int i = 0; i < 1000 && !is_done(); ++i) std::this_thread::sleep_for(5ms);
  return is_done();
}

TEST(a_large_collective_is_done_in_the_background_without_anybody_waiting) {
  Ranks ranks(2);
  std::vector<std::vector<float>> data(2, ones(kLarge));
  std::vector<OpPtr> ops;
  for (int rank = 0; rank < 2; ++rank) {
    ops.push_back(all_reduce(data[static_cast<std::size_t>(rank)]));
    ranks.at(rank).issue(ops.back(), true);
  }
  for (const OpPtr& op : ops) CHECK(becomes_done([&] { return op->is_done.load(); }));
  CHECK_EQUAL(data[0][kLarge - 1], 2.0f);
}

// A rank that has issued a small collective and computes does not keep the others.
TEST(a_small_collective_needs_nothing_more_of_a_rank_that_has_issued_it) {
  Ranks ranks(2);
  auto a = ones(10), b = ones(10);
  const OpPtr early = all_reduce(a);
  ranks.at(0).issue(early, true);
  run_now(ranks.at(1), all_reduce(b));  // while rank 0 does nothing
  CHECK_EQUAL(b[9], 2.0f);
  ranks.at(0).wait(early);
  CHECK_EQUAL(a[9], 2.0f);
}

// torch's programs may ask again and again, and never wait.
TEST(a_collective_that_is_asked_for_gets_done_without_a_wait) {
  for (const std::size_t size : {std::size_t{10}, kLarge}) {
    for (const bool in_background : {true, false}) {
      Ranks ranks(2);
      auto a = ones(size), b = ones(size);
      const OpPtr one = all_reduce(a), other = all_reduce(b);
      ranks.at(0).issue(one, in_background);
      CHECK(!ranks.at(0).is_done(one));
      ranks.at(1).issue(other, in_background);
      CHECK(becomes_done([&] { return ranks.at(0).is_done(one) & ranks.at(1).is_done(other); }));
      CHECK_EQUAL(a[size - 1], 2.0f);
      CHECK_EQUAL(b[size - 1], 2.0f);
    }
  }
}

TEST(threads_that_wait_for_each_others_collectives_all_get_on) {
  Ranks ranks(2);
  ranks.run([&](int, Context& context) {
    for (int round = 0; round < (kSanitized ? 20 : 100); ++round) {
      std::vector<std::vector<float>> data(6, ones(round % 3 ? 100 : kLarge / 4));
      std::vector<OpPtr> ops;
      for (std::size_t i = 0; i < data.size(); ++i) {
        ops.push_back(all_reduce(data[i]));
        context.issue(ops.back(), i % 2 == 0);
      }
      std::vector<std::thread> waiters;
      for (std::size_t i = 0; i < ops.size(); ++i) {
        waiters.emplace_back([&, i] {
          if (i == 3) context.leave_to_background();
          if (i == 4) while (!context.is_done(ops[i])) std::this_thread::yield();
          context.wait(ops[i]);
          CHECK_EQUAL(data[i][0], 2.0f);
        });
      }
      for (std::thread& waiter : waiters) waiter.join();
    }
  });
}

// Python asks whether to stop while it holds a lock of its own, which an issuing thread has already.
TEST(asking_whether_to_stop_does_not_keep_others_from_issuing) {
  Ranks ranks(2);
  auto a = ones(kLarge), b = ones(10);
  const OpPtr running = all_reduce(a), waited = all_reduce(b);
  ranks.at(0).issue(running, true);  // the worker waits for rank 1
  ranks.at(0).issue(waited, true);
  std::atomic<bool> was_asked{false}, has_issued{false};
  std::thread waiter([&] {
    ranks.at(0).wait(waited, [&] {
      was_asked = true;
      CHECK(becomes_done([&] { return has_issued.load(); }));
      return false;
    });
  });
  CHECK(becomes_done([&] { return was_asked.load(); }));
  const OpPtr third = barrier();
  ranks.at(0).issue(third, false);
  has_issued = true;
  auto c = ones(kLarge), d = ones(10);
  run_now(ranks.at(1), all_reduce(c));
  run_now(ranks.at(1), all_reduce(d));
  run_now(ranks.at(1), barrier());
  waiter.join();
  ranks.at(0).wait(third);
}

TEST(a_rank_that_leaves_is_missed_by_name_and_what_it_did_before_counts) {
  Ranks ranks(2);
  auto a = ones(10), b = ones(10);
  const OpPtr last = all_reduce(b);
  ranks.at(1).issue(last, false);
  run_now(ranks.at(0), all_reduce(a));
  ranks.at(0).close();
  ranks.at(1).wait(last);  // rank 0 had come before it left
  CHECK_EQUAL(b[0], 2.0f);
  const std::string text = CHECK_THROWS(PeerLostError, run_now(ranks.at(1), barrier()));
  CHECK(check::contains(text, "rank 0 has left the group"));
  CHECK(check::contains(text, "collective 2, barrier"));
  CHECK_THROWS(PeerLostError, run_now(ranks.at(1), barrier()));  // for good
}

TEST(a_leaver_is_never_missed_in_a_collective_that_it_had_come_to) {
  for (int round = 0; round < (kSanitized ? 50 : 300); ++round) {
    Ranks ranks(3);
    ranks.run([&](int, Context& context) {
      run_now(context, barrier());
      context.close();
    });
  }
}

TEST(a_sleeper_hears_at_once_of_a_rank_that_leaves) {
  Ranks ranks(2);
  std::thread leaver([&] {
    std::this_thread::sleep_for(250ms);
    ranks.at(1).close();
  });
  const auto start = Clock::now();
  CHECK_THROWS(PeerLostError, run_now(ranks.at(0), barrier()));
  CHECK(Clock::now() - start < 5s);
  leaver.join();
}

TEST(a_deadline_names_who_is_missing_and_breaks_the_group_for_all) {
  Ranks ranks(3);
  std::atomic<int> gave_up{0};
  ranks.run([&](int rank, Context& context) {
    if (rank == 2) {
      CHECK(becomes_done([&] { return gave_up == 2; }));
      const std::string text = CHECK_THROWS(BrokenError, run_now(context, barrier()), run_now(context, barrier()));
      CHECK(check::contains(text, "gave up"));
      return;
    }
    const std::string text = CHECK_THROWS(BrokenError, run_now(context, barrier(0.1)));
    CHECK(check::contains(text, "the deadline has passed") && check::contains(text, "rank 2"));
    ++gave_up;
  });
}

TEST(abort_wakes_everybody) {
  for (const std::size_t size : {std::size_t{10}, kLarge}) {
    Ranks ranks(3);
    std::thread aborter([&] {
      std::this_thread::sleep_for(20ms);
      ranks.at(0).abort();
    });
    ranks.run([&](int rank, Context& context) {
      if (rank == 2) return;  // never comes
      auto data = ones(size);
      const OpPtr op = all_reduce(data);
      context.issue(op, rank == 1);
      CHECK_THROWS(AbortedError, context.wait(op));
      CHECK_THROWS(AbortedError, run_now(context, barrier()));
    });
    aborter.join();
  }
}

TEST(who_fails_for_somebody_elsewhere_ends_the_wait_of_all_though_it_has_come) {
  Ranks ranks(3);
  std::thread failing([&] {
    std::this_thread::sleep_for(20ms);
    ranks.at(0).members().fail("rank 9 has ended", kOutsider);
  });
  ranks.run([&](int rank, Context& context) {
    if (rank == 2) return;  // never comes
    if (rank == 0) return context.issue(barrier(), false);  // has come
    const std::string text = CHECK_THROWS(BrokenError, run_now(context, barrier(30)));
    CHECK(check::contains(text, "rank 0 gave up: rank 9 has ended"));
  });
  failing.join();
  CHECK(ranks.at(1).members().state(0).first == State::kFailed);
  CHECK(ranks.at(1).members().state(0).second == "rank 9 has ended");
  CHECK(ranks.at(1).members().state(2).first == State::kPresent);
}

TEST(every_rank_sees_how_far_the_others_are) {
  Ranks ranks(3);
  ranks.at(0).issue(barrier(), false);
  ranks.at(2).issue(barrier(), false);
  CHECK((ranks.at(1).members().positions() == std::vector<std::uint64_t>{1, 0, 1}));
}

TEST(a_reason_that_is_too_long_is_cut_between_characters) {
  Ranks ranks(2);
  std::string reason(478, 'x');
  reason += "\xc3\xa9";  // of two bytes, for which there is one
  ranks.at(0).members().fail(reason, kOutsider);
  CHECK(ranks.at(1).members().state(0).second == std::string(478, 'x'));
}

TEST(closing_ends_what_is_pending_and_what_comes_later) {
  for (const bool in_background : {true, false}) {
    Ranks ranks(2);
    auto a = ones(kLarge), b = ones(10), c = ones(kLarge);
    const OpPtr first = all_reduce(a), second = all_reduce(b);
    ranks.at(0).issue(first, in_background);
    ranks.at(0).issue(second, in_background);
    ranks.at(0).close();
    CHECK_THROWS(AbortedError, ranks.at(0).wait(first));
    CHECK_THROWS(AbortedError, ranks.at(0).wait(second));
    CHECK_THROWS(AbortedError, run_now(ranks.at(0), barrier()));
    CHECK_THROWS(AbortedError, run_now(ranks.at(1), all_reduce(c)));
    ranks.at(0).close();  // again is nothing
  }
}

TEST(an_interrupt_breaks_the_group_and_says_so_to_the_others) {
  Ranks ranks(2);
  const OpPtr op = barrier();
  ranks.at(0).issue(op, false);
  CHECK_THROWS(InterruptedError, ranks.at(0).wait(op, [] { return true; }));
  CHECK_THROWS(BrokenError, run_now(ranks.at(1), barrier()), run_now(ranks.at(1), barrier()));
}

TEST(the_header_of_another_group_is_refused) {
  const std::size_t size = Layout(2).bytes();
  Segment made = Segment::create(size);
  const Ticket ticket = made.ticket();
  const Context founder(std::move(made), 0, peers_here(2), 1, 2, true);
  CHECK_THROWS(InvalidError, Context(Segment::open(ticket, size), 1, peers_here(2), 1, 3, false));
  CHECK_THROWS(InvalidError, Context(Segment::open(ticket, size), 1, peers_here(3), 1, 2, false));
  Context(Segment::open(ticket, size), 1, peers_here(2), 1, 2, false);
}

TEST(several_groups_of_the_same_threads_do_not_disturb_each_other) {
  constexpr int kGroups = 3;
  std::vector<std::unique_ptr<Ranks>> groups;
  for (int g = 0; g < kGroups; ++g) groups.push_back(std::make_unique<Ranks>(2));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      for (int round = 0; round < (kSanitized ? 20 : 100); ++round) {
        std::vector<std::vector<float>> data(kGroups, ones(round % 2 ? 10 : kLarge / 4));
        std::vector<OpPtr> ops;
        for (std::size_t g = 0; g < kGroups; ++g) {
          ops.push_back(all_reduce(data[g]));
          groups[g]->at(rank).issue(ops[g], true);
        }
        for (std::size_t g = kGroups; g-- > 0;) {
          groups[rank == 0 ? g : kGroups - 1 - g]->at(rank).wait(ops[rank == 0 ? g : kGroups - 1 - g]);
        }
        for (const auto& each : data) CHECK_EQUAL(each[0], 2.0f);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#if !defined(__SANITIZE_THREAD__)  // which has no processes that share memory, nor forks with threads
// A child has a copy of the objects, and shares the memory. It must leave the group to its parent.
TEST(a_forked_child_can_end_as_it_likes_without_harm_to_its_parent) {
  Ranks ranks(2);
  std::vector<float> large = ones(kLarge), other = ones(kLarge);
  const OpPtr pending = all_reduce(large);
  ranks.at(0).issue(pending, true);  // there is a worker
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ranks.at(0).close();
    ranks.at(0).abort();
    ranks.contexts.clear();
    ::_exit(0);
  }
  CHECK(child > 0);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status));
  run_now(ranks.at(1), all_reduce(other));
  ranks.at(0).wait(pending);
  CHECK_EQUAL(large[0], 2.0f);
}

// Threads do not survive a fork, but what they wait on and are joined by is copied.
TEST(a_forked_child_can_drop_a_group_whose_threads_wait) {
  for (const auto pause : {10ms, 1300ms}) {  // the thread of the messages waits for one, and for any
    Ranks ranks(2);
    std::vector<float> one = ones(kLarge), other = ones(kLarge), message = ones(1);
    const std::vector<OpPtr> ops{all_reduce(one), all_reduce(other)};
    for (int rank = 0; rank < 2; ++rank) ranks.at(rank).issue(ops[static_cast<std::size_t>(rank)], true);
    for (const OpPtr& op : ops) CHECK(becomes_done([&] { return op->is_done.load(); }));
    const MessagePtr expected = make_message(Kind::kRecv, 1, 0, message.data(), sizeof(float));
    ranks.at(0).issue(expected);
    if (pause > 1s) ranks.at(1).wait([&] {
      const MessagePtr sent = make_message(Kind::kSend, 0, 0, one.data(), sizeof(float));
      ranks.at(1).issue(sent);
      return sent;
    }());
    std::this_thread::sleep_for(pause);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(5);
      ranks.contexts.clear();
      ::_exit(0);
    }
    int status = 0;
    CHECK(child > 0 && ::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

// Real processes: rank 1 is killed, or stopped, at each point of a collective.
void end_at(Phase phase, int nth, int signal, std::size_t size, bool symmetric) {
  const std::size_t bytes = Layout(2).bytes();
  Segment made = Segment::create(bytes);
  const Ticket ticket = made.ticket();
  int go[2];
  CHECK(::pipe(go) == 0);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  std::vector<Peer> peers = peers_here(2);
  const auto program = [&](Context& context) {
    std::shared_ptr<Allocation> memory;
    auto data = ones(size);
    float* at = data.data();
    if (symmetric) {
      memory = Registry::of_process().allocate(size * sizeof(float));
      at = reinterpret_cast<float*>(memory->segment.data());
    }
    for (int round = 0; round < 20; ++round) {
      run_now(context, make_op(Kind::kAllReduce, DType::kFloat32, ReduceOp::kMax, -1, size, {at}, {at}));
    }
  };
  if (child == 0) {
    peers[0] = {parent, start_time(parent), "rank 0", 0, "here"};
    peers[1] = {::getpid(), start_time(::getpid()), "rank 1", 1, "here"};
    the_probe().signal = signal;
    the_probe().countdown = nth;
    the_probe().phase = phase;
    ::close(go[1]);  // so that the end of the parent ends us
    char byte;
    if (::read(go[0], &byte, 1) != 1) ::_exit(2);
    try {
      Context context(Segment::open(ticket, bytes), 1, peers, 1, 2, false);
      program(context);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    ::_exit(3);  // the probe has not fired
  }
  peers[1] = {child, start_time(child), "rank 1", 1, "here"};
  {
    Context context(std::move(made), 0, peers, 1, 2, true);
    CHECK(::write(go[1], "!", 1) == 1);
    const auto start = Clock::now();
    const std::string text = CHECK_THROWS(PeerLostError, program(context));
    CHECK(check::contains(text, "rank 1 has ended"));
    CHECK(Clock::now() - start < 10s);
  }
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == signal);
  ::close(go[0]);
  ::close(go[1]);
}

TEST(a_rank_that_is_killed_in_any_state_is_missed_at_once) {
  for (const Phase phase :
       {Phase::kPost, Phase::kPosted, Phase::kArrived, Phase::kTaken, Phase::kTicked, Phase::kFinished}) {
    for (const std::size_t size : {std::size_t{10}, kLarge}) {
      for (const bool symmetric : {false, true}) {
        if (phase == Phase::kTicked && size == 10) continue;  // a small one ticks once, as it is posted
        if (phase == Phase::kTaken && (size == 10 || !symmetric)) continue;
        for (const int nth : {1, 3}) end_at(phase, nth, SIGKILL, size, symmetric);
      }
    }
  }
}
#endif

}  // namespace
