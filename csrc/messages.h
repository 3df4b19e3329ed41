// Point to point: bytes through a ring for each pair of ranks.
//
// A message is a header and its bytes. The sender puts in what fits, the receiver takes out what is
// there, whoever moved rings the other's bell. Messages of one sender with one tag arrive in order.
//
// [Note: bell and alarm] Messages are moved by callers that wait, and by a thread while there are none. A
// thread that woke for every message would take the core from the callers. So callers sleep on the bell and
// the thread on the alarm, which others ring only if this rank wants that: there is something to move and
// no caller. Who begins to want it looks once more whether there is anything to move now. The thread does
// not hear of what is issued, unless it rests, since there was nothing for a while.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "members.h"

namespace gradsync {

constexpr int kAnySource = -1;

struct Message {
  Announcement announcement;  // for messages to the user; the root is the other rank
  int other = kAnySource;
  std::int32_t tag = 0;
  std::byte* data = nullptr;  // a sender's is only read
  std::uint64_t bytes = 0;
  Deadline deadline;

  std::uint64_t moved = 0;
  bool has_begun = false;  // its header is in the ring, or has been read
  int source = kAnySource;
  std::atomic<bool> is_done{false};
  std::exception_ptr error;
};

class Messages {
 public:
  // `yields`: there are more ranks than cores, so who waits lets the others run.
  Messages(Members& members, bool yields);
  ~Messages();

  // Moves what can be moved now. If that is not all, who waits goes on, or else a thread.
  void send(const std::shared_ptr<Message>& message);
  void receive(const std::shared_ptr<Message>& message);
  void wait(const std::shared_ptr<Message>& message, const Interrupted& interrupted);
  // Ends the thread; what is pending fails with AbortedError if the group was aborted.
  void stop();

 private:
  struct alignas(kCacheLine) Head {
    std::uint64_t bytes;
    std::int32_t tag;
    std::uint32_t magic;
  };
  // What has come and was not asked for yet, but stood before something that was.
  struct Stray {
    std::int32_t tag;
    std::vector<std::byte> data;
  };
  // What arrives from one rank.
  struct Inlet {
    bool has_head = false;
    Head head{};
    std::uint64_t taken = 0;
    std::shared_ptr<Message> message;  // whose it is
    bool is_stray = false;             // the last of `strays` is being filled
    bool is_dropped = false;           // nobody can use it any more
    std::deque<Stray> strays;
  };

  // Somebody who waits, and moves messages meanwhile: the thread need not.
  class Caller {
   public:
    explicit Caller(Messages& all);
    ~Caller();

   private:
    Messages& all_;
  };

  void begin(const Message& message);
  bool is_pending() const;
  void want_alarm(bool wanted);
  bool progress();
  bool move();
  bool push(Message& message);
  bool pull(int from);
  bool take_strays();
  bool match(int from);
  void finish(Message& message, std::exception_ptr error);
  void fail_all(std::exception_ptr error);
  void check_peers(bool& overdue);
  void check(const Message& message, int peer, const std::vector<bool>& gone) const;
  void run();

  Members& members_;
  const bool yields_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by receiver, in order
  std::vector<std::exception_ptr> severed_;  // by receiver: why half a message stands in its channel for good
  std::list<std::shared_ptr<Message>> receives_;
  std::vector<Inlet> inlets_;
  std::thread thread_;
  bool stopping_ = false;
  bool is_resting_ = false;  // the thread, until there is something to do
  int callers_ = 0;
};

}  // namespace gradsync
