// What Python asks for, made into operations and waited for without the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <memory>

#include "context.h"

namespace gradsync {

using Address = std::uintptr_t;

Deadline after(double seconds);

// Lets Python's signal handlers run. True if one has raised; its exception stays set.
bool is_interrupted();

template <typename Thing>
void wait(Context& context, const std::shared_ptr<Thing>& thing) {
  if (!thing->is_done.load(std::memory_order_acquire)) {
    try {
      pybind11::gil_scoped_release release;
      context.wait(thing, is_interrupted);
    } catch (const InterruptedError&) {
      if (PyErr_Occurred()) throw pybind11::error_already_set();
      throw;
    }
  }
  if (thing->error != nullptr) std::rethrow_exception(thing->error);
}

void check_reducible(DType dtype, ReduceOp op);

std::shared_ptr<Op> all_reduce_of(Address address, std::uint64_t count, DType dtype, ReduceOp op,
                                  double seconds);

// Issues it and waits for it.
void run(Context& context, const std::shared_ptr<Op>& request);

}  // namespace gradsync
