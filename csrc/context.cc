#include "context.h"

#include <sched.h>

#include <cstring>
#include <utility>

#include "process.h"

namespace gradsync {
namespace {

constexpr std::chrono::microseconds kCallerSpin{120};  // longer than it takes to wake a sleeper
constexpr std::chrono::microseconds kWorkerSpin{4};
constexpr std::chrono::milliseconds kSlice{100};
constexpr int kAsks = 16;

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::exception_ptr of_a_child() {
  return std::make_exception_ptr(StateError(
      "This process was forked from a rank of the group, and is none itself: it cannot use the group."));
}

}  // namespace

Context::Context(Segment segment, int rank, std::vector<Peer> peers, std::uint64_t nonce_a,
                 std::uint64_t nonce_b, bool is_founder)
    : members_(std::move(segment), rank, std::move(peers), nonce_a, nonce_b, is_founder),
      collectives_(members_),
      messages_(members_, members_.world() > cores()),
      waiting_{kCallerSpin, members_.world() > cores(), {}},
      owner_(own_pid()) {}

bool Context::is_owned_here() const { return own_pid() == owner_; }

// ------------------------------------------------------------------------------- collectives

void Context::issue(const std::shared_ptr<Op>& op, bool in_background) {
  if (!is_owned_here()) return end(*op, of_a_child());
  std::unique_lock<std::mutex> lock(mutex_);
  op->announcement.sequence = ++sequence_;
  if (broken_ != nullptr) return end(*op, broken_);
  if (is_closing_ || members_.aborted()) {
    const char* what = is_closing_ ? "The group has been closed." : "The group was aborted.";
    return end(*op, std::make_exception_ptr(AbortedError(what)));
  }
  if (op->announcement.kind == Kind::kAllReduce) {
    const std::size_t bytes = op->announcement.count * size_of(op->announcement.dtype);
    if (op->allocation == nullptr) op->allocation = Registry::of_process().find(op->targets[0], bytes);
    if (op->allocation != nullptr) {
      const Segment& segment = op->allocation->segment;
      op->announcement.symmetric = op->allocation->id;
      op->announcement.offset = static_cast<std::uint64_t>(op->targets[0] - segment.data());
      op->announcement.ticket = segment.ticket();
    }
  }
  queue_.push_back(op);
  if (!is_running_) {
    finish_ready(1);  // what is before us is done on the way
    if (queue_.front() == op && collectives_.is_light(*op)) collectives_.post(*op);
  }
  const bool needs_somebody = queue_.front() != op || !collectives_.is_small(*op);
  if (in_background && needs_somebody) start_worker();
}

void Context::wait(const std::shared_ptr<Op>& op, const Interrupted& interrupted) {
  if (!is_owned_here() && !op->is_done) std::rethrow_exception(of_a_child());
  std::unique_lock<std::mutex> lock(mutex_);
  while (!op->is_done) {
    if (!is_running_) {
      run_until(lock, op.get(), {waiting_.spin, waiting_.yields, interrupted});
    } else if (changed_.wait_for(lock, kSlice) == std::cv_status::timeout && interrupted) {
      lock.unlock();  // it takes Python's lock, which a thread may hold that comes for ours
      if (interrupted()) {
        throw InterruptedError("The wait for " + describe(op->announcement) + " was interrupted.");
      }
      lock.lock();
    }
  }
  lock.unlock();
  if (op->error != nullptr) std::rethrow_exception(op->error);
}

bool Context::is_done(const std::shared_ptr<Op>& op) {
  if (op->is_done || !is_owned_here()) return op->is_done;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || is_running_ || is_closing_) return op->is_done;
  finish_ready(0);
  // Who asks for so long does not wait, and somebody has to notice deadlines and deaths.
  if (!op->is_done && ++op->asked > kAsks) start_worker();
  return op->is_done;
}

// Does what needs no waiting, and leaves the last `rest` collectives as they are.
void Context::finish_ready(std::size_t rest) {
  while (queue_.size() > rest && queue_.front()->is_posted && collectives_.is_small(*queue_.front()) &&
         collectives_.can_finish(*queue_.front())) {
    execute(*queue_.front(), {});
    note_if_broken(*queue_.front());
    queue_.pop_front();
  }
}

void Context::leave_to_background() {
  if (!is_owned_here()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!queue_.empty()) start_worker();
}

// Carries out what is queued, up to `last` or all of it.
void Context::run_until(std::unique_lock<std::mutex>& lock, const Op* last,
                        const Patience& patience) {
  is_running_ = true;
  while (!queue_.empty() && (last == nullptr || !last->is_done)) {
    const std::shared_ptr<Op> op = queue_.front();
    if (broken_ != nullptr) {
      end(*op, broken_);
    } else {
      lock.unlock();
      execute(*op, patience);
      lock.lock();
      note_if_broken(*op);
    }
    queue_.pop_front();
    changed_.notify_all();
  }
  is_running_ = false;
  changed_.notify_all();
  if (last != nullptr && !queue_.empty() && is_wanted_) work_.notify_all();
}

void Context::execute(Op& op, const Patience& patience) {
  std::exception_ptr error;
  try {
    if (!op.is_posted) collectives_.post(op);
    collectives_.finish(op, patience);
  } catch (...) {
    error = std::current_exception();
  }
  end(op, error);
}

void Context::end(Op& op, const std::exception_ptr& error) {
  op.error = error;
  op.allocation = nullptr;
  op.is_done.store(true, std::memory_order_release);
}

void Context::note_if_broken(const Op& op) {
  if (op.error == nullptr || broken_ != nullptr) return;
  try {
    std::rethrow_exception(op.error);
  } catch (const PeerLostError& lost) {
    members_.fail(lost.what(), lost.index);
  } catch (const MismatchError&) {
    return;  // on all ranks alike
  } catch (const std::exception& other) {  // also out of memory: this rank may have left in the middle
    members_.fail(other.what(), kNobody);
  }
  broken_ = op.error;
}

void Context::start_worker() {
  is_wanted_ = true;
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  work_.notify_all();
}

void Context::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return is_closing_ || (is_wanted_ && !queue_.empty() && !is_running_); });
    if (is_closing_) return;
    run_until(lock, nullptr, {kWorkerSpin, false, {}});
    is_wanted_ = false;
  }
}

// ------------------------------------------------------------------------------- point to point

void Context::issue(const std::shared_ptr<Message>& message) {
  message->announcement.sequence = ++messages_issued_;
  if (!is_owned_here()) {
    message->error = of_a_child();
    message->is_done = true;
    return;
  }
  if (message->announcement.kind == Kind::kSend) {
    messages_.send(message);
  } else {
    messages_.receive(message);
  }
}

void Context::wait(const std::shared_ptr<Message>& message, const Interrupted& interrupted) {
  if (!is_owned_here() && !message->is_done) std::rethrow_exception(of_a_child());
  messages_.wait(message, interrupted);
  if (message->error != nullptr) std::rethrow_exception(message->error);
}

// ------------------------------------------------------------------------------- the end

void Context::abort() {
  if (is_owned_here()) members_.abort();
}

void Context::fail(const std::string& reason, int blames) {
  if (is_owned_here()) members_.fail(reason, blames);
}

void Context::close() {
  if (!is_owned_here()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_closing_ && !worker_.joinable()) return;
  if (!is_running_) finish_ready(0);  // nobody has waited for it, but all have come
  is_closing_ = true;
  const bool is_pending = !queue_.empty();
  if (is_pending) members_.abort();
  work_.notify_all();
  while (is_running_) changed_.wait(lock);
  for (const auto& op : queue_) {
    if (op->is_done) continue;
    end(*op, std::make_exception_ptr(AbortedError("The group was closed with this on its way.")));
  }
  queue_.clear();
  changed_.notify_all();
  lock.unlock();
  if (worker_.joinable()) worker_.join();
  members_.leave();
  messages_.stop();
}

}  // namespace gradsync
