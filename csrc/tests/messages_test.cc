// Messages between ranks that are threads.
#include <random>

#include "ranks.h"

using namespace gradsync;
using namespace std::chrono_literals;

namespace {

std::vector<std::byte> bytes(std::size_t count, unsigned seed) {
  std::vector<std::byte> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::byte>(i * 7 + seed);
  return data;
}

MessagePtr start_send(Context& context, int to, int tag, std::vector<std::byte>& data, double seconds = 60) {
  const MessagePtr message = make_message(Kind::kSend, to, tag, data.data(), data.size(), seconds);
  context.issue(message);
  return message;
}

MessagePtr start_receive(Context& context, int from, int tag, std::vector<std::byte>& data, double seconds = 60) {
  const MessagePtr message = make_message(Kind::kRecv, from, tag, data.data(), data.size(), seconds);
  context.issue(message);
  return message;
}

TEST(messages_of_every_size_arrive_in_order_and_whole) {
  const std::size_t sizes[] = {0, 1, 15, 16, 17, 4096, kMaxChannelBytes - 16, kMaxChannelBytes,
                               kMaxChannelBytes + 1, 300001};
  Ranks ranks(2);
  ranks.run([&](int rank, Context& context) {
    for (unsigned round = 0; round < 3; ++round) {
      for (const std::size_t size : sizes) {
        const auto right = bytes(size, round);
        if (rank == 0) {
          auto data = right;
          context.wait(start_send(context, 1, 0, data));
        } else {
          std::vector<std::byte> data(size);
          const MessagePtr message = start_receive(context, 0, 0, data);
          context.wait(message);
          CHECK(data == right);
          CHECK_EQUAL(message->source, 0);
        }
      }
    }
  });
}

TEST(messages_with_other_tags_do_not_stand_in_the_way) {
  Ranks ranks(2);
  ranks.run([&](int rank, Context& context) {
    constexpr int kCount = 20;
    std::vector<std::vector<std::byte>> data;
    std::vector<MessagePtr> messages;
    for (int i = 0; i < kCount; ++i) data.push_back(rank == 0 ? bytes(10000u + static_cast<unsigned>(i), static_cast<unsigned>(i)) : std::vector<std::byte>(10000u + static_cast<unsigned>(i)));
    for (int i = 0; i < kCount; ++i) {
      const int tag = rank == 0 ? i : kCount - 1 - i;  // the last one first
      auto& place = data[static_cast<std::size_t>(tag)];
      messages.push_back(rank == 0 ? start_send(context, 1, tag, place) : start_receive(context, 0, tag, place));
      if (rank == 1) context.wait(messages.back());
    }
    for (const auto& message : messages) context.wait(message);
    if (rank == 1) {
      for (int i = 0; i < kCount; ++i) {
        CHECK(data[static_cast<std::size_t>(i)] == bytes(10000u + static_cast<unsigned>(i), static_cast<unsigned>(i)));
      }
    }
  });
}

TEST(a_receiver_from_anywhere_gets_each_message_once_and_knows_whose_it_is) {
  constexpr int kWorld = 4;
  Ranks ranks(kWorld);
  ranks.run([&](int rank, Context& context) {
    if (rank != 0) {
      auto data = bytes(100000, static_cast<unsigned>(rank));
      context.wait(start_send(context, 0, 5, data));
      return;
    }
    std::vector<bool> seen(kWorld);
    for (int i = 1; i < kWorld; ++i) {
      std::vector<std::byte> data(100000);
      const MessagePtr message = start_receive(context, kAnySource, 5, data);
      context.wait(message);
      CHECK(message->source > 0 && !seen[static_cast<std::size_t>(message->source)]);
      seen[static_cast<std::size_t>(message->source)] = true;
      CHECK(data == bytes(100000, static_cast<unsigned>(message->source)));
    }
  });
}

TEST(everybody_sends_to_everybody_at_once_with_collectives_in_between) {
  for (int world = 2; world <= 4; ++world) {
    Ranks ranks(world);
    ranks.run([&](int rank, Context& context) {
      std::mt19937_64 engine(static_cast<unsigned>(world));
      for (unsigned round = 0; round < (kSanitized ? 15u : 60u); ++round) {
        const std::size_t size = engine() % (round % 3 ? 2000 : 200000);
        std::vector<std::vector<std::byte>> out, in;
        std::vector<MessagePtr> messages;
        out.reserve(4), in.reserve(4);
        for (int other = 0; other < world; ++other) {
          if (other == rank) continue;
          out.push_back(bytes(size, round + static_cast<unsigned>(rank)));
          in.emplace_back(size);
          messages.push_back(start_send(context, other, 3, out.back()));
          messages.push_back(start_receive(context, other, 3, in.back()));
        }
        std::vector<float> data(round % 2 ? 10 : 20000, static_cast<float>(rank + 1));
        run_now(context, all_reduce(data));
        CHECK_EQUAL(data.back(), static_cast<float>(world * (world + 1) / 2));
        for (const auto& message : messages) context.wait(message);
        std::size_t at = 0;
        for (int other = 0; other < world; ++other) {
          if (other != rank) CHECK(in[at++] == bytes(size, round + static_cast<unsigned>(other)));
        }
      }
    });
  }
}

TEST(several_threads_of_a_rank_wait_each_for_its_own_message) {
  Ranks ranks(2);
  ranks.run([&](int rank, Context& context) {
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 3; ++tag) {
      threads.emplace_back([&, tag] {
        for (unsigned round = 0; round < (kSanitized ? 30u : 200u); ++round) {
          const auto right = bytes(1 + round * 997 % 90000, round + static_cast<unsigned>(tag));
          std::vector<std::byte> got(right.size());
          auto data = right;
          const MessagePtr sent = start_send(context, 1 - rank, tag, data);
          const MessagePtr received = start_receive(context, 1 - rank, tag, got);
          context.wait(received);
          context.wait(sent);
          CHECK(got == right);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

// Each message that nobody was told of would take as long as a sleep.
TEST(messages_that_nobody_waits_for_are_moved_at_once) {
  Ranks ranks(2);
  const auto start = Clock::now();
  ranks.run([&](int rank, Context& context) {
    for (unsigned round = 0; round < 300; ++round) {
      const auto right = bytes(1 + round * 4999, round);
      std::vector<std::byte> got(right.size()), note(1), out(1);
      auto data = right;
      const MessagePtr received = start_receive(context, 1 - rank, 0, got);
      const MessagePtr sent = start_send(context, 1 - rank, 0, data);
      if (round % 3 == 0) {  // a caller comes, and leaves the others as they are
        const MessagePtr noted = start_receive(context, 1 - rank, 1, note);
        context.wait(start_send(context, 1 - rank, 1, out));
        context.wait(noted);
      }
      while (!received->is_done || !sent->is_done) std::this_thread::sleep_for(20us);
      CHECK(got == right);
    }
  });
  CHECK(Clock::now() - start < (kSanitized ? 60s : 20s));  // a sleep for each would be 30 s
}

// Nothing but headers is in the ring: who takes one makes room for the next.
TEST(many_empty_messages_are_moved_at_once) {
  constexpr std::size_t kRings = 10;
  auto best = Clock::duration::max();
  for (int round = 0; round < 3; ++round) {
    Ranks ranks(2);
    std::vector<std::byte> none;
    std::vector<MessagePtr> sent, received;
    for (std::size_t i = 0; i < kRings * kMaxChannelBytes / kCacheLine; ++i) {
      sent.push_back(start_send(ranks.at(0), 1, 0, none));
    }
    CHECK(!sent.back()->is_done);
    const auto start = Clock::now();
    for (std::size_t i = 0; i < sent.size(); ++i) received.push_back(start_receive(ranks.at(1), 0, 0, none));
    ranks.at(1).wait(received.back());
    ranks.at(0).wait(sent.back());
    best = std::min(best, Clock::now() - start);
  }
  CHECK(best < (kSanitized ? 20s : 800ms));  // a sleep for each ring would be a second
}

TEST(a_message_is_moved_by_a_thread_that_had_nothing_to_do_for_long) {
  Ranks ranks(2);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::byte> got(10);
    auto data = bytes(10, 1);
    const MessagePtr received = start_receive(ranks.at(0), 1, 0, got);
    ranks.at(1).wait(start_send(ranks.at(1), 0, 0, data));
    for (int i = 0; i < 1000 && !received->is_done; ++i) std::this_thread::sleep_for(5ms);
    CHECK(received->is_done);
    std::this_thread::sleep_for(1300ms);  // it rests by now
  }
}

TEST(a_message_of_another_size_than_expected_is_an_error_and_the_next_one_arrives) {
  Ranks ranks(2);
  ranks.run([&](int rank, Context& context) {
    for (const std::size_t size : {10, 100000}) {
      auto first = bytes(size, 1), second = bytes(size, 2);
      if (rank == 0) {
        const MessagePtr one = start_send(context, 1, 0, first), two = start_send(context, 1, 0, second);
        context.wait(one);
        context.wait(two);
      } else {
        std::vector<std::byte> wrong(size + 1), good(size);
        const std::string text = CHECK_THROWS(MismatchError, context.wait(start_receive(context, 0, 0, wrong)));
        CHECK(check::contains(text, "expects"));
        context.wait(start_receive(context, 0, 0, good));
        CHECK(good == second);
      }
    }
  });
}

TEST(what_a_rank_sent_before_it_left_arrives_and_only_then_is_it_missed) {
  Ranks ranks(2);
  auto data = bytes(1000, 3);
  std::vector<std::byte> got(1000), more(1000);
  ranks.at(0).wait(start_send(ranks.at(0), 1, 0, data));
  ranks.at(0).close();
  ranks.at(1).wait(start_receive(ranks.at(1), 0, 0, got));
  CHECK(got == data);
  const std::string text = CHECK_THROWS(PeerLostError, ranks.at(1).wait(start_receive(ranks.at(1), 0, 0, more)));
  CHECK(check::contains(text, "rank 0 has left the group"));
}

TEST(who_waits_for_a_message_hears_of_the_end_of_its_sender) {
  Ranks ranks(3);
  std::vector<std::byte> a(10), b(10);
  const MessagePtr from_one = start_receive(ranks.at(0), 1, 0, a);
  const MessagePtr from_two = start_receive(ranks.at(0), 2, 0, b);
  std::thread leaver([&] {
    std::this_thread::sleep_for(30ms);
    ranks.at(1).close();
  });
  CHECK_THROWS(PeerLostError, ranks.at(0).wait(from_one));
  leaver.join();
  auto data = bytes(10, 1);
  ranks.at(2).wait(start_send(ranks.at(2), 0, 0, data));  // the other message is not concerned
  ranks.at(0).wait(from_two);
  CHECK(b == data);
}

TEST(who_left_is_not_missed_by_a_receiver_from_anywhere_while_others_are_there) {
  Ranks ranks(3);
  auto first = bytes(1000, 1), second = bytes(1000, 2);
  std::vector<std::byte> got(1000);
  ranks.at(1).wait(start_send(ranks.at(1), 0, 0, first));
  ranks.at(1).close();
  ranks.at(0).wait(start_receive(ranks.at(0), kAnySource, 0, got));
  CHECK(got == first);
  const MessagePtr message = start_receive(ranks.at(0), kAnySource, 0, got);
  std::this_thread::sleep_for(300ms);  // the receiver has looked for its peers by then
  CHECK(!message->is_done);
  ranks.at(2).wait(start_send(ranks.at(2), 0, 0, second));
  ranks.at(0).wait(message);
  CHECK(got == second);
  CHECK_EQUAL(message->source, 2);
  const MessagePtr last = start_receive(ranks.at(0), kAnySource, 0, got);
  ranks.at(2).close();
  const std::string text = CHECK_THROWS(PeerLostError, ranks.at(0).wait(last));
  CHECK(check::contains(text, "has left the group"));
}

TEST(who_gave_up_is_missed_by_a_receiver_from_anywhere_though_others_are_there) {
  Ranks ranks(4);
  std::vector<std::byte> got(10);
  const MessagePtr message = start_receive(ranks.at(0), kAnySource, 0, got);
  ranks.at(1).close();
  ranks.at(2).members().fail("it was tired", -1);
  const std::string text = CHECK_THROWS(BrokenError, ranks.at(0).wait(message));
  CHECK(check::contains(text, "rank 2 gave up: it was tired"));
}

TEST(at_the_deadline_a_receiver_from_anywhere_names_those_who_could_have_sent) {
  Ranks ranks(4);
  std::vector<std::byte> got(10);
  ranks.at(2).close();
  const std::string text =
      CHECK_THROWS(DeadlineError, ranks.at(0).wait(start_receive(ranks.at(0), kAnySource, 0, got, 0.05)));
  CHECK(check::contains(text, "Not arrived: rank 1, rank 3."));
  Ranks alone(1);
  const std::string other =
      CHECK_THROWS(DeadlineError, alone.at(0).wait(start_receive(alone.at(0), kAnySource, 0, got, 0.05)));
  CHECK(check::contains(other, "nobody else"));
}

TEST(a_message_has_a_deadline_in_both_directions) {
  Ranks ranks(2);
  std::vector<std::byte> in(10);
  auto out = bytes(1000000, 1);
  const std::string text = CHECK_THROWS(DeadlineError, ranks.at(0).wait(start_receive(ranks.at(0), 1, 0, in, 0.05)));
  CHECK(check::contains(text, "rank 1"));
  CHECK_THROWS(DeadlineError, ranks.at(0).wait(start_send(ranks.at(0), 1, 0, out, 0.05)));
}

// Half of a message is in the channel for good: what came behind it would be taken for the other half.
TEST(after_a_message_that_was_sent_by_half_no_other_is_mistaken_for_its_rest) {
  Ranks ranks(2);
  auto out = bytes(1000000, 1), next = bytes(10, 2);
  CHECK_THROWS(DeadlineError, ranks.at(0).wait(start_send(ranks.at(0), 1, 0, out, 0.05)));
  const auto start = Clock::now();
  CHECK_THROWS(DeadlineError, ranks.at(0).wait(start_send(ranks.at(0), 1, 0, next)));
  CHECK(Clock::now() - start < 5s);
  std::vector<std::byte> got(out.size());
  CHECK_THROWS(DeadlineError, ranks.at(1).wait(start_receive(ranks.at(1), 0, 0, got, 0.05)));
  // The other direction has nothing to do with it.
  ranks.at(1).wait(start_send(ranks.at(1), 0, 0, next));
  std::vector<std::byte> back(10);
  ranks.at(0).wait(start_receive(ranks.at(0), 1, 0, back));
  CHECK(back == next);
}

TEST(abort_ends_messages_here_and_there) {
  Ranks ranks(2);
  std::vector<std::byte> a(10), b(10);
  const MessagePtr here = start_receive(ranks.at(0), 1, 0, a), there = start_receive(ranks.at(1), 0, 0, b);
  ranks.at(0).abort();
  CHECK_THROWS(AbortedError, ranks.at(0).wait(here));
  CHECK_THROWS(AbortedError, ranks.at(1).wait(there));
  CHECK_THROWS(AbortedError, ranks.at(0).wait(start_receive(ranks.at(0), 1, 0, a)));
}

TEST(abort_ends_messages_of_others_too) {
  Ranks ranks(3);
  std::vector<std::byte> a(10), b(1 << 20);
  const MessagePtr received = start_receive(ranks.at(1), 2, 0, a), sent = start_send(ranks.at(1), 2, 1, b);
  ranks.at(0).abort();
  const auto start = Clock::now();
  CHECK(check::contains(CHECK_THROWS(AbortedError, ranks.at(1).wait(received)), "rank 0 aborted the group"));
  CHECK_THROWS(AbortedError, ranks.at(1).wait(sent));
  CHECK(Clock::now() - start < 10s);
}

TEST(who_leaves_with_something_done_that_it_has_not_waited_for_ends_nothing) {
  Ranks ranks(3);
  std::vector<float> data[3] = {{1.0f}, {2.0f}, {3.0f}};
  std::vector<OpPtr> ops;
  for (int rank = 0; rank < 3; ++rank) ranks.at(rank).issue(ops.emplace_back(all_reduce(data[rank])), false);
  for (const int rank : {1, 2}) ranks.at(rank).wait(ops[static_cast<std::size_t>(rank)]);
  std::vector<std::byte> sent(10, std::byte{7}), got(10);
  const MessagePtr expected = start_receive(ranks.at(1), 2, 0, got);
  ranks.at(0).close();
  CHECK_EQUAL(data[0][0], 6.0f);
  std::this_thread::sleep_for(300ms);  // somebody looks for who is gone
  ranks.at(2).wait(start_send(ranks.at(2), 1, 0, sent));
  ranks.at(1).wait(expected);
  CHECK(got == sent);
}

TEST(nothing_is_held_up_after_an_abort_or_a_damaged_channel) {
  for (const bool is_aborted : {true, false}) {
    auto best = Clock::duration::max();  // of three: the machine may be busy
    for (int attempt = 0; attempt < 3 && best >= 600ms; ++attempt) {
      Ranks ranks(2);
      std::vector<std::byte> data(10);
      const MessagePtr pending = start_receive(ranks.at(0), 1, 0, data);
      if (is_aborted) ranks.at(0).abort();
      if (!is_aborted) ranks.at(1).members().channel(1, 0).written.store(std::uint64_t{1} << 40);
      for (int i = 0; i < 500 && !pending->is_done; ++i) std::this_thread::sleep_for(2ms);
      std::this_thread::sleep_for(10ms);
      const auto start = Clock::now();
      const MessagePtr next = start_receive(ranks.at(0), 1, 0, data, 5);
      ranks.at(0).close();
      CHECK(next->is_done);
      best = std::min(best, Clock::now() - start);
    }
    CHECK(best < 600ms);  // a thread that looked on and on would have the lock for a second
  }
}

TEST(a_short_deadline_behind_a_long_one_is_kept) {
  Ranks ranks(2);
  auto large = bytes(1000000, 1), small = bytes(10, 2);
  const MessagePtr first = start_send(ranks.at(0), 1, 0, large);
  CHECK_THROWS(DeadlineError, ranks.at(0).wait(start_send(ranks.at(0), 1, 0, small, 0.05)));
  std::vector<std::byte> got(large.size());
  ranks.at(1).wait(start_receive(ranks.at(1), 0, 0, got));
  ranks.at(0).wait(first);
  CHECK(got == large);
}

TEST(a_message_after_the_end_of_its_group_fails_at_once) {
  Ranks ranks(2);
  std::vector<std::byte> data(10);
  const MessagePtr pending = start_receive(ranks.at(0), 1, 0, data);
  ranks.at(0).close();
  CHECK_THROWS(AbortedError, ranks.at(0).wait(pending));
  CHECK_THROWS(AbortedError, ranks.at(0).wait(start_receive(ranks.at(0), 1, 0, data, 5)));
  CHECK_THROWS(AbortedError, ranks.at(0).wait(start_send(ranks.at(0), 1, 0, data, 5)));
}

TEST(a_damaged_channel_is_an_error_of_its_messages_and_not_the_end_of_the_process) {
  for (const bool is_waited : {true, false}) {
    Ranks ranks(2);
    std::vector<std::byte> data(10);
    const MessagePtr message = start_receive(ranks.at(0), 1, 0, data, 5);
    ranks.at(1).members().channel(1, 0).written.store(std::uint64_t{1} << 40);
    ranks.at(1).members().call(0);
    for (int i = 0; !is_waited && i < 500 && !message->is_done; ++i) std::this_thread::sleep_for(10ms);
    CHECK_THROWS(InvalidError, ranks.at(0).wait(message));
  }
  Ranks ranks(2);
  std::vector<std::byte> data(10);
  Channel& channel = ranks.at(1).members().channel(1, 0);
  std::memset(reinterpret_cast<std::byte*>(&channel + 1), 0x55, 64);
  channel.written.store(64);
  CHECK_THROWS(InvalidError, ranks.at(0).wait(start_receive(ranks.at(0), 1, 0, data, 5)));
}

TEST(what_interrupts_a_wait_does_not_take_the_message) {
  Ranks ranks(2);
  std::vector<std::byte> got(10);
  const MessagePtr message = start_receive(ranks.at(0), 1, 0, got);
  CHECK_THROWS(InterruptedError, ranks.at(0).wait(message, [] { return true; }));
  auto data = bytes(10, 4);
  ranks.at(1).wait(start_send(ranks.at(1), 0, 0, data));
  ranks.at(0).wait(message);
  CHECK(got == data);
}

}  // namespace
