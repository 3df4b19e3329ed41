// The all-reduce that has to be quick: of the same symmetric memory, again and again. Each time is an
// operation of its own, which keeps the memory. The group's segment does not live longer for it.
#pragma once

#include <memory>

#include "requests.h"
#include "symmetric.h"

namespace gradsync {

class Persistent {
 public:
  Persistent(const std::shared_ptr<Context>& context, Address address, std::uint64_t count, DType dtype,
             ReduceOp op)
      : context_(context), address_(address), count_(count), dtype_(dtype), op_(op) {
    check_reducible(dtype, op);
    if (count == 0) return;  // it may have no address
    allocation_ = Registry::of_process().find(reinterpret_cast<const std::byte*>(address),
                                              count * size_of(dtype));
    if (allocation_ == nullptr) throw InvalidError("the memory is not symmetric");
  }

  void run(double seconds) const { gradsync::run(*group(), request(seconds)); }

  void start(double seconds) {
    const std::shared_ptr<Op> next = request(seconds);
    group()->issue(next, true);
    last_ = next;
  }

  // Of what was started last, also if another thread starts the next one meanwhile.
  void wait() const {
    const std::shared_ptr<Op> last = last_;
    if (last == nullptr) return;
    if (!last->is_done) return gradsync::wait(*group(), last);
    if (last->error != nullptr) std::rethrow_exception(last->error);
  }

  bool done() const {
    const std::shared_ptr<Op> last = last_;
    if (last == nullptr || last->is_done) return true;
    const std::shared_ptr<Context> context = context_.lock();
    return context == nullptr || context->is_done(last);  // its end has ended all that was on its way
  }

 private:
  std::shared_ptr<Context> group() const {
    if (std::shared_ptr<Context> context = context_.lock()) return context;
    throw AbortedError("The group has been closed.");
  }

  std::shared_ptr<Op> request(double seconds) const {
    auto request = all_reduce_of(address_, count_, dtype_, op_, seconds);
    request->allocation = allocation_;
    return request;
  }

  std::weak_ptr<Context> context_;
  std::shared_ptr<Allocation> allocation_;
  Address address_;
  std::uint64_t count_;
  DType dtype_;
  ReduceOp op_;
  std::shared_ptr<Op> last_;
};

}  // namespace gradsync
