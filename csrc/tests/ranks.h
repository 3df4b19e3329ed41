// A group whose ranks are threads of this process, each with a context of its own over one segment.
#pragma once

#include <unistd.h>

#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "../context.h"
#include "check.h"

namespace gradsync {

inline Deadline in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

inline std::vector<Peer> peers_here(int world) {
  std::vector<Peer> peers;
  for (int rank = 0; rank < world; ++rank) {
    peers.push_back({::getpid(), start_time(::getpid()), "rank " + std::to_string(rank), rank, "here"});
  }
  return peers;
}

class Ranks {
 public:
  explicit Ranks(int world) {
    Segment first = Segment::create(Layout(world).bytes());
    const Ticket ticket = first.ticket();
    std::vector<Segment> segments;
    for (int rank = 1; rank < world; ++rank) segments.push_back(Segment::open(ticket, Layout(world).bytes()));
    contexts.push_back(Context::make(std::move(first), 0, peers_here(world), 1, 2, true));
    for (int rank = 1; rank < world; ++rank) {
      contexts.push_back(Context::make(std::move(segments[static_cast<std::size_t>(rank) - 1]), rank,
                                       peers_here(world), 1, 2, false));
    }
  }

  // Runs `body` on all ranks at once; what one throws fails the test.
  void run(const std::function<void(int, Context&)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(rank, at(rank));
        } catch (const std::exception& error) {
          check::report("rank", rank, error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int world() const { return static_cast<int>(contexts.size()); }
  Context& at(int rank) { return *contexts[static_cast<std::size_t>(rank)]; }

  std::vector<std::shared_ptr<Context>> contexts;
};

using OpPtr = std::shared_ptr<Op>;
using MessagePtr = std::shared_ptr<Message>;

inline OpPtr make_op(Kind kind, DType dtype, ReduceOp op, int root, std::size_t count,
                     const std::vector<const void*>& sources, const std::vector<void*>& targets, double seconds = 60) {
  auto made = std::make_shared<Op>();
  made->announcement.kind = kind;
  made->announcement.dtype = dtype;
  made->announcement.op = op;
  made->announcement.root = root;
  made->announcement.count = count;
  for (const void* source : sources) made->sources.push_back(static_cast<const std::byte*>(source));
  for (void* target : targets) made->targets.push_back(static_cast<std::byte*>(target));
  made->deadline = in(seconds);
  return made;
}

inline OpPtr all_reduce(std::vector<float>& data, double seconds = 60, ReduceOp op = ReduceOp::kSum) {
  return make_op(Kind::kAllReduce, DType::kFloat32, op, -1, data.size(), {data.data()}, {data.data()}, seconds);
}

inline OpPtr barrier(double seconds = 60) {
  return make_op(Kind::kBarrier, DType::kBytes, ReduceOp::kNone, -1, 0, {}, {}, seconds);
}

inline void run_now(Context& context, const OpPtr& op) {
  context.issue(op, false);
  context.wait(op);
}

inline MessagePtr make_message(Kind kind, int other, int tag, void* data, std::size_t bytes, double seconds = 60) {
  auto made = std::make_shared<Message>();
  made->announcement.kind = kind;
  made->announcement.root = other;
  made->announcement.count = bytes;
  made->other = other;
  made->tag = tag;
  made->data = static_cast<std::byte*>(data);
  made->bytes = bytes;
  made->deadline = in(seconds);
  return made;
}

}  // namespace gradsync
