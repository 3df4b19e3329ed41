// Collectives between ranks that are threads, each result against one computed alone.
#include <sys/resource.h>

#include <csignal>
#include <random>

#include "../probe.h"
#include "ranks.h"

using namespace gradsync;

namespace {

// What rank r has in element i of its s-th collective; small whole numbers, so that all sums are exact.
float value(int rank, std::uint64_t seed, std::size_t i) {
  return static_cast<float>((seed * 31 + static_cast<std::uint64_t>(rank) * 7 + i * 3) % 23);
}

std::vector<float> filled(int rank, std::uint64_t seed, std::size_t count) {
  std::vector<float> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = value(rank, seed, i);
  return data;
}

float sum(int world, std::uint64_t seed, std::size_t i) {
  float total = 0;
  for (int rank = 0; rank < world; ++rank) total += value(rank, seed, i);
  return total;
}

// An operation under way, with its memory and what is to come out of it.
struct Pending {
  std::vector<std::vector<float>> memory;
  std::shared_ptr<Allocation> symmetric;
  OpPtr op;
  std::function<bool()> is_right;
  bool is_settled = false;
};

using PendingPtr = std::shared_ptr<Pending>;

PendingPtr begin(Context& context, Kind kind, std::size_t count, int root, std::uint64_t seed,
                 std::shared_ptr<Allocation> symmetric, bool in_background) {
  const int rank = context.members().rank();
  const int world = context.members().world();
  auto pending = std::make_shared<Pending>();
  Pending& p = *pending;
  const auto pieces = [&](int at) {  // one for each rank, all different
    for (int to = 0; to < world; ++to) p.memory.push_back(filled(at, seed + static_cast<std::uint64_t>(to) * 101, count));
  };
  const auto room = [&](int of) {
    for (int i = 0; i < of; ++i) p.memory.emplace_back(count, -1.0f);
  };
  const auto addresses = [&](std::size_t from, std::size_t until) {
    std::vector<void*> result;
    for (std::size_t i = from; i < until; ++i) result.push_back(p.memory[i].data());
    return result;
  };
  const auto constant = [](const std::vector<void*>& from) { return std::vector<const void*>(from.begin(), from.end()); };
  const std::size_t n = static_cast<std::size_t>(world);
  const auto all = [count](std::function<bool(std::size_t)> good) {
    for (std::size_t i = 0; i < count; ++i) {
      if (!good(i)) return false;
    }
    return true;
  };
  switch (kind) {
    case Kind::kAllReduce: {
      p.memory.push_back(filled(rank, seed, count));
      float* data = p.memory[0].data();
      if (symmetric != nullptr) {
        p.symmetric = symmetric;
        data = reinterpret_cast<float*>(symmetric->segment.data()) + seed % 3 * 16;
        std::memcpy(data, p.memory[0].data(), count * sizeof(float));
      }
      p.op = make_op(kind, DType::kFloat32, ReduceOp::kSum, -1, count, {data}, {data});
      p.is_right = [=] { return all([=](std::size_t i) { return data[i] == sum(world, seed, i); }); };
      break;
    }
    case Kind::kReduce: {
      p.memory.push_back(filled(rank, seed, count));
      p.op = make_op(kind, DType::kFloat32, ReduceOp::kSum, root, count, {p.memory[0].data()}, {p.memory[0].data()});
      const float* data = p.memory[0].data();
      p.is_right = [=] {
        return all([=](std::size_t i) { return data[i] == (rank == root ? sum(world, seed, i) : value(rank, seed, i)); });
      };
      break;
    }
    case Kind::kBroadcast: {
      p.memory.push_back(filled(rank, seed, count));
      p.op = make_op(kind, DType::kFloat32, ReduceOp::kNone, root, count, {p.memory[0].data()}, {p.memory[0].data()});
      const float* data = p.memory[0].data();
      p.is_right = [=] { return all([=](std::size_t i) { return data[i] == value(root, seed, i); }); };
      break;
    }
    case Kind::kAllGather:
    case Kind::kGather: {
      p.memory.push_back(filled(rank, seed, count));
      const bool gets = kind == Kind::kAllGather || rank == root;
      if (gets) room(world);
      p.op = make_op(kind, DType::kFloat32, ReduceOp::kNone, kind == Kind::kGather ? root : -1, count,
                     {p.memory[0].data()}, addresses(1, gets ? n + 1 : 1));
      Pending* raw = &p;
      p.is_right = [=] {
        for (std::size_t from = 1; from < raw->memory.size(); ++from) {
          const auto& got = raw->memory[from];
          if (!all([&](std::size_t i) { return got[i] == value(static_cast<int>(from) - 1, seed, i); })) return false;
        }
        return true;
      };
      break;
    }
    case Kind::kReduceScatter: {
      pieces(rank);
      room(1);
      p.op = make_op(kind, DType::kFloat32, ReduceOp::kSum, -1, count, constant(addresses(0, n)), addresses(n, n + 1));
      const float* data = p.memory[n].data();
      const std::uint64_t own = seed + static_cast<std::uint64_t>(rank) * 101;
      p.is_right = [=] { return all([=](std::size_t i) { return data[i] == sum(world, own, i); }); };
      break;
    }
    case Kind::kScatter: {
      if (rank == root) pieces(root);
      room(1);
      const std::size_t last = p.memory.size() - 1;
      p.op = make_op(kind, DType::kFloat32, ReduceOp::kNone, root, count, constant(addresses(0, last)), addresses(last, last + 1));
      const float* data = p.memory[last].data();
      const std::uint64_t own = seed + static_cast<std::uint64_t>(rank) * 101;
      p.is_right = [=] { return all([=](std::size_t i) { return data[i] == value(root, own, i); }); };
      break;
    }
    case Kind::kAllToAll: {
      // Rank a gives rank b `count` elements, less what differs between them.
      const auto length = [=](int a, int b) { return count > 64 ? count - static_cast<std::size_t>((a * 3 + b) % 5) : count; };
      pieces(rank);
      room(world);
      p.op = make_op(kind, DType::kBytes, ReduceOp::kNone, -1, 0, constant(addresses(0, n)), addresses(n, 2 * n));
      for (int other = 0; other < world; ++other) {
        p.op->source_bytes.push_back(length(rank, other) * sizeof(float));
        p.op->target_bytes.push_back(length(other, rank) * sizeof(float));
      }
      Pending* raw = &p;
      const std::uint64_t own = seed + static_cast<std::uint64_t>(rank) * 101;
      p.is_right = [=] {
        for (int from = 0; from < world; ++from) {
          const auto& got = raw->memory[n + static_cast<std::size_t>(from)];
          for (std::size_t i = 0; i < count; ++i) {
            if (got[i] != (i < length(from, rank) ? value(from, own, i) : -1.0f)) return false;
          }
        }
        return true;
      };
      break;
    }
    default:
      p.op = barrier();
      p.is_right = [] { return true; };
  }
  context.issue(p.op, in_background);
  return pending;
}

const Kind kKinds[] = {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter,
                       Kind::kAllToAll, Kind::kGather, Kind::kScatter, Kind::kBarrier};

TEST(every_collective_is_right_at_every_size) {
  // Around nothing, a cache line, what is small, several chunks, a slot, and several slots.
  std::vector<std::size_t> sizes = {0, 1, 31, 33, kSmallBytes / 4, kSmallBytes / 4 + 1, 100003, kMaxSlotBytes / 4 + 1};
  if (!kSanitized) sizes.insert(sizes.end(), {kMaxSlotBytes / 4, 2 * kMaxSlotBytes / 4 + 5});
  for (int world = 1; world <= (kSanitized ? 3 : 4); ++world) {
    Ranks ranks(world);
    ranks.run([&](int rank, Context& context) {
      std::uint64_t seed = 0;
      for (const Kind kind : kKinds) {
        for (const std::size_t size : sizes) {
          for (const bool in_background : {false, true}) {
            ++seed;
            if (kSanitized && in_background != (seed / 2 % 2 == 0)) continue;
            const int root = static_cast<int>(seed % static_cast<std::uint64_t>(world));
            const PendingPtr pending = begin(context, kind, size, root, seed, nullptr, in_background);
            context.wait(pending->op);
            if (!pending->is_right()) {
              check::report("collective", static_cast<int>(kind), "wrong on rank " + std::to_string(rank) + " of " +
                                std::to_string(world) + " with " + std::to_string(size) + " elements");
            }
          }
        }
      }
    });
  }
}

// The same random program on all ranks: kinds, sizes, roots, memory, and when each is waited for.
void run_mixed(int world, std::uint64_t seed, int count) {
  Ranks ranks(world);
  ranks.run([&](int rank, Context& context) {
    std::mt19937_64 engine(seed);
    std::mt19937_64 own(seed + 1000 + static_cast<std::uint64_t>(rank));  // what ranks may do differently
    std::vector<PendingPtr> pending;
    // Two, so that one is reduced while the next is filled.
    std::shared_ptr<Allocation> memory[2];
    constexpr std::size_t kMost = 600000;
    for (auto& each : memory) each = Registry::of_process().allocate(kMost * sizeof(float));
    std::shared_ptr<Pending> user[2];
    const auto settle = [&](const PendingPtr& one) {
      context.wait(one->op);
      if (std::exchange(one->is_settled, true)) return;  // its memory may be in use again
      CHECK(one->is_right());
    };
    for (int i = 0; i < count; ++i) {
      const Kind kind = kKinds[engine() % 9];
      const std::size_t limits[] = {8, 3000, 9000, 70000, 200000, kMost};
      const std::size_t size = engine() % limits[engine() % 6];
      const int root = static_cast<int>(engine() % static_cast<std::uint64_t>(world));
      const bool symmetric = engine() % 2 == 0;
      const bool only_some = engine() % 4 == 0;  // not all ranks have it there: through slots then
      const std::size_t which = engine() % 2;
      const bool is_async = engine() % 2 == 0;
      std::shared_ptr<Allocation> place;
      if (kind == Kind::kAllReduce && symmetric && !(only_some && rank == 0)) {
        place = memory[which];
        if (user[which] != nullptr) settle(user[which]);
      }
      const PendingPtr one = begin(context, kind, size, root, static_cast<std::uint64_t>(i), place, is_async || own() % 2 == 0);
      if (place != nullptr) user[which] = one;
      if (is_async) {
        pending.push_back(one);
      } else {
        settle(one);
      }
      while (pending.size() > own() % 6) {  // in any order
        const std::size_t at = own() % pending.size();
        settle(pending[at]);
        pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(at));
      }
      if (own() % 16 == 0) context.leave_to_background();
      if (own() % 64 == 0) memory[1 - which] = Registry::of_process().allocate(kMost * sizeof(float)), user[1 - which] = nullptr;
    }
    for (const PendingPtr& one : pending) settle(one);
    run_now(context, barrier());
  });
}

TEST(random_programs_of_collectives_are_right) {
  for (int world = 2; world <= 4; ++world) {
    for (std::uint64_t seed = 0; seed < (kSanitized ? 1 : 3); ++seed) run_mixed(world, seed, kSanitized ? 80 : 250);
  }
}

TEST(memory_is_reduced_in_place_where_all_ranks_have_it_and_the_counters_say_so) {
  Ranks ranks(3);
  ranks.run([&](int, Context& context) {
    const auto memory = Registry::of_process().allocate(1 << 20);
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const PendingPtr one = begin(context, Kind::kAllReduce, 100000, 0, seed, memory, seed % 2 == 0);
      context.wait(one->op);
      CHECK(one->is_right());
    }
    const PendingPtr other = begin(context, Kind::kAllReduce, 100000, 0, 9, nullptr, false);
    context.wait(other->op);
    CHECK_EQUAL(context.counters().symmetric.load(), 4u);
    CHECK_EQUAL(context.counters().copied.load(), 1u);
  });
}

// Long enough that the other one is done first, and shorter than a share takes.
void dawdle(int) {
  const auto end = Clock::now() + std::chrono::microseconds(15);
  while (Clock::now() < end) continue;
}

// How often this thread has lost its core, or left it.
long times_away() {
  rusage usage;
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw + usage.ru_nivcsw;
}

TEST(who_is_done_leaves_its_pieces_to_a_rank_that_is_a_little_late) {
  if (std::thread::hardware_concurrency() < 2 || kSanitized) return;
  constexpr std::size_t kCount = 1 << 20;
  Ranks ranks(2);
  std::vector<std::shared_ptr<Allocation>> memory;
  for (int rank = 0; rank < 2; ++rank) memory.push_back(Registry::of_process().allocate(kCount * sizeof(float)));
  const auto helped = [&] { return ranks.at(0).counters().helped + ranks.at(1).counters().helped; };
  const auto before = std::signal(SIGUSR1, dawdle);
  the_probe().signal = SIGUSR1;
  int counted = 0, with_help = 0;
  for (int round = 0; round < 5000 && counted < 40; ++round) {
    const std::uint64_t until_now = helped();
    the_probe().countdown = 1;  // whoever takes the first piece
    the_probe().phase = Phase::kTaken;
    std::atomic<bool> is_undisturbed{true};  // who loses the core is late by much more
    ranks.run([&](int rank, Context& context) {
      void* at = memory[static_cast<std::size_t>(rank)]->segment.data();
      run_now(context, barrier());
      const long until_now = times_away();
      run_now(context, make_op(Kind::kAllReduce, DType::kFloat32, ReduceOp::kMax, -1, kCount, {at}, {at}));
      if (times_away() != until_now) is_undisturbed = false;
    });
    if (!is_undisturbed) continue;
    ++counted;
    if (helped() > until_now) ++with_help;
  }
  the_probe().phase = Phase::kNever;
  std::signal(SIGUSR1, before);
  if (counted == 0) std::printf("     no round was undisturbed, so nothing can be said\n");
  CHECK(with_help <= counted / 2);  // without waiting it is nearly all of them
}

TEST(more_allocations_than_are_remembered_are_mapped_anew) {
  Ranks ranks(2);
  ranks.run([&](int, Context& context) {
    std::vector<std::shared_ptr<Allocation>> all;
    for (int i = 0; i < 258; ++i) all.push_back(Registry::of_process().allocate(64 * 1024));
    for (std::uint64_t round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const PendingPtr one = begin(context, Kind::kAllReduce, 10000, 0, i, all[i], false);
        context.wait(one->op);
        CHECK(one->is_right());
      }
    }
    CHECK_EQUAL(context.counters().symmetric.load(), 516u);
  });
}

// Every kind of disagreement is an error on all ranks, and the group goes on.
TEST(ranks_that_disagree_all_hear_of_it_and_the_group_goes_on) {
  for (int world = 2; world <= 3; ++world) {
    Ranks ranks(world);
    ranks.run([&](int rank, Context& context) {
      for (int round = 0; round < 20; ++round) {
        std::vector<float> small(10), large(100000);
        const bool other = rank == round % world;
        OpPtr op;
        switch (round % 6) {
          case 0: op = other ? all_reduce(large) : all_reduce(small); break;
          case 1: op = other ? barrier() : all_reduce(large); break;
          case 2: op = all_reduce(small, 60, other ? ReduceOp::kMax : ReduceOp::kSum); break;
          case 3: op = make_op(Kind::kBroadcast, DType::kFloat32, ReduceOp::kNone, other ? 0 : 1, 10, {small.data()}, {small.data()}); break;
          case 4: op = make_op(Kind::kBroadcast, other ? DType::kInt32 : DType::kFloat32, ReduceOp::kNone, 0, 100000, {large.data()}, {large.data()}); break;
          default: {
            std::vector<const void*> from(static_cast<std::size_t>(world), large.data());
            std::vector<void*> to(static_cast<std::size_t>(world), large.data());
            op = make_op(Kind::kAllToAll, DType::kBytes, ReduceOp::kNone, -1, 0, from, to);
            op->source_bytes.assign(static_cast<std::size_t>(world), 8);
            op->target_bytes.assign(static_cast<std::size_t>(world), other ? 16 : 8);
          }
        }
        const std::string text = CHECK_THROWS(MismatchError, run_now(context, op));
        CHECK(check::contains(text, "is not the same on all ranks") && check::contains(text, "rank "));
        const PendingPtr good = begin(context, Kind::kAllReduce, round % 2 ? 100000 : 5, 0, static_cast<std::uint64_t>(round), nullptr, false);
        context.wait(good->op);
        CHECK(good->is_right());
      }
    });
  }
}

// Every rank gives a chunk and takes it back as it is: also where the last is shorter than a share.
TEST(chunks_and_shares_cover_a_tensor_once) {
  constexpr std::size_t kSlot = 1024;  // small, so that there are many chunks and short last ones
  for (int world : {1, 2, 3, 7}) {
    for (std::size_t element : {1, 2, 8}) {
      for (std::size_t elements = 1; elements < 3000; elements += 37) {
        const std::size_t total = elements * element;
        std::vector<std::byte> data(total), before;
        for (std::size_t i = 0; i < total; ++i) data[i] = static_cast<std::byte>(i * 31 + i / 256);
        before = data;
        std::vector<int> covered(elements);
        for (int rank = 0; rank < world; ++rank) {
          const Chunks chunks(data.data(), total, element, kSlot, rank, world);
          std::vector<std::byte> slot(kSlot);
          CHECK(chunks.capacity <= kSlot && chunks.capacity % element == 0);
          for (std::size_t chunk = 0; chunk < chunks.count; ++chunk) {
            const std::size_t end = std::min(chunks.share.end, chunks.bytes(chunk) / element);
            for (std::size_t i = chunks.share.begin; i < end; ++i) ++covered[chunk * (chunks.capacity / element) + i];
            chunks.trade(slot.data(), chunk - 1, chunk);
          }
          chunks.trade(slot.data(), chunks.count - 1, kNoChunk);
        }
        CHECK(data == before);
        CHECK(std::count(covered.begin(), covered.end(), 1) == static_cast<std::ptrdiff_t>(elements));
      }
    }
  }
}

TEST(ranks_agree_if_they_say_the_same_and_are_shown_what_each_says_if_not) {
  Ranks ranks(3);
  ranks.run([&](int rank, Context& context) {
    for (int round = 0; round < 5; ++round) {
      run_now(context, make_agreement("the same " + std::to_string(round), in(60)));
      const std::string own = rank == 1 ? "this" : "that";
      const std::string text = CHECK_THROWS(MismatchError, run_now(context, make_agreement(own, in(60))));
      CHECK(check::contains(text, "rank 0: that; rank 1: this; rank 2: that."));
      std::vector<float> data(5, 1.0f);
      const OpPtr op = rank == 2 ? make_agreement("words", in(60)) : all_reduce(data);
      const std::string both = CHECK_THROWS(MismatchError, run_now(context, op));
      CHECK(check::contains(both, "rank 1: all_reduce(sum, 5 x float32); rank 2: words."));
      run_now(context, all_reduce(data));
      CHECK_EQUAL(data[4], 3.0f);
    }
    const std::string longest(1000, 'x');
    run_now(context, make_agreement(longest + std::to_string(rank), in(60)));  // what is cut is not compared
  });
}

}  // namespace
