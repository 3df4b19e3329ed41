// torch's all_reduce as it comes to a group, `allreduce([tensor], options)`, carried out without Python.
//
// To look into both in Python takes longer than to reduce 64 kB. Of torch nothing is known here but names of
// attributes, and the table of functions by which it shows a tensor to others (DLPack, which has its own
// specification). What is not plain is left to Python: another device or layout, a stride, a time-out of its
// own, a profiler, a caller who does not wait.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>

#include "requests.h"

namespace gradsync {

struct DLPackTable;

class TorchCall {
 public:
  // `table`: torch.Tensor.__dlpack_c_exchange_api__, or None where there is none. `ops`: the numbers of our
  // operations by the hashes of torch's. `no_timeout`: what options say that have none of their own.
  TorchCall(const pybind11::object& table, std::map<Py_hash_t, int> ops, pybind11::object no_timeout,
            pybind11::object is_profiling);

  // False if it is not plain, and nothing has been done.
  bool all_reduce(const std::shared_ptr<Context>& context, const pybind11::object& tensors,
                  const pybind11::object& options, double seconds) const;

 private:
  struct Plain {
    Address address;
    std::uint64_t count;
    DType dtype;
  };
  bool look(PyObject* tensor, Plain& found) const;
  Address offset_of(PyObject* tensor) const;
  bool is_for_us(PyObject* options, ReduceOp& op) const;

  const DLPackTable* table_ = nullptr;
  std::map<Py_hash_t, int> ops_;
  pybind11::object no_timeout_, is_profiling_;
  pybind11::object is_neg_, storage_offset_, async_, timeout_, op_;  // names
};

}  // namespace gradsync
