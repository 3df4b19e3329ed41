#include "requests.h"

#include <chrono>
#include <cmath>
#include <string>
#include <thread>

namespace py = pybind11;

namespace gradsync {

Deadline after(double seconds) {
  constexpr double kLongest = 3e8;  // ten years: beyond, the clock's type ends
  const double bounded = std::fmin(std::fmax(seconds, 0.0), kLongest);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

bool is_interrupted() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void check_reducible(DType dtype, ReduceOp op) {
  if (can_reduce(dtype, op)) return;
  throw InvalidError(std::string(name_of(op)) + " is not defined for " + name_of(dtype));
}

std::shared_ptr<Op> all_reduce_of(Address address, std::uint64_t count, DType dtype, ReduceOp op,
                                  double seconds) {
  auto request = std::make_shared<Op>();
  request->announcement.kind = Kind::kAllReduce;
  request->announcement.dtype = dtype;
  request->announcement.op = op;
  request->announcement.count = count;
  request->sources = {reinterpret_cast<const std::byte*>(address)};
  request->targets = {reinterpret_cast<std::byte*>(address)};
  request->deadline = after(seconds);
  return request;
}

void run(Context& context, const std::shared_ptr<Op>& request) {
  context.issue(request, false);
  try {
    wait(context, request);
  } catch (...) {
    if (!request->is_done) {  // interrupted: no handle keeps the tensor, so nobody may use it any more
      py::gil_scoped_release release;
      context.abort();
      while (!context.is_done(request)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw;
  }
}

}  // namespace gradsync
