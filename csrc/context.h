// A group: its collectives in the order of their issue, and who carries them out.
//
// [Note: who runs] Collectives of a group run one after the other, and one thread at a time runs them: a
// caller that waits, if it can, or else the group's own thread. What copies little when it is posted is
// posted by the caller that issues it. So a small collective that is waited for costs no switch of
// threads, and a large one goes on while its caller computes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives.h"
#include "members.h"
#include "messages.h"
#include "symmetric.h"

namespace gradsync {

class Context {
 public:
  Context(Segment segment, int rank, std::vector<Peer> peers, std::uint64_t nonce_a,
          std::uint64_t nonce_b, bool is_founder);
  // Its deleter does nothing in a child after fork(): the group is the parent's, and what its threads
  // waited on can be destroyed only once they have gone, which they never will there.
  template <typename... Arguments>
  static std::shared_ptr<Context> make(Arguments&&... arguments) {
    return {new Context(std::forward<Arguments>(arguments)...), [](Context* context) {
              if (context->is_owned_here()) delete context;
            }};
  }
  ~Context() { close(); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Members& members() { return members_; }
  const Counters& counters() const { return collectives_.counters(); }
  std::uint64_t issued() const { return sequence_; }

  // Issues a collective. `in_background`: it makes progress without anybody waiting for it.
  void issue(const std::shared_ptr<Op>& op, bool in_background);
  // Waits, and throws what went wrong.
  void wait(const std::shared_ptr<Op>& op, const Interrupted& interrupted = {});
  // Is it done? Asking is enough to get it done; waiting is faster.
  bool is_done(const std::shared_ptr<Op>& op);
  bool is_done(const std::shared_ptr<Message>& message) const { return message->is_done; }
  // Lets a collective that was issued for a waiter go on by itself after all.
  void leave_to_background();

  void issue(const std::shared_ptr<Message>& message);
  void wait(const std::shared_ptr<Message>& message, const Interrupted& interrupted = {});

  // Makes everything pending fail, here and on the others.
  void abort();
  // Lets nobody wait for this rank any more, and says why. `blames`: see Line.
  void fail(const std::string& reason, int blames);
  // Leaves the group. What is still pending fails.
  void close();

 private:
  bool is_owned_here() const;
  void run_until(std::unique_lock<std::mutex>& lock, const Op* last, const Patience& patience);
  void finish_ready(std::size_t rest);
  static void end(Op& op, const std::exception_ptr& error);
  void execute(Op& op, const Patience& patience);
  void start_worker();
  void work();
  void note_if_broken(const Op& op);

  Members members_;
  Collectives collectives_;
  Messages messages_;
  Patience waiting_;  // of a caller that has nothing else to do
  std::int64_t owner_;  // the process

  std::mutex mutex_;
  std::condition_variable changed_;  // something is done, or nobody runs
  std::condition_variable work_;     // there is something for the worker
  std::deque<std::shared_ptr<Op>> queue_;
  std::uint64_t sequence_ = 0;
  std::atomic<std::uint64_t> messages_issued_{0};
  bool is_running_ = false;   // somebody carries out collectives
  bool is_wanted_ = false;    // the worker is to do so
  bool is_closing_ = false;
  std::exception_ptr broken_;  // why nothing works any more
  std::thread worker_;
};

}  // namespace gradsync
