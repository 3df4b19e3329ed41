#include "torch_call.h"

#include <cstddef>
#include <utility>

namespace py = pybind11;

namespace gradsync {
namespace {

// What DLPack 1 lays down of a tensor, of its dtype and of the table.
constexpr std::int32_t kCpu = 1;
// Below, an address may be an offset from nowhere: of a view of what has been freed, is fake or stands for
// others. It may also be a heap's, in a program that is not loaded anywhere.
constexpr Address kLowest = Address{1} << 38;
enum Code : std::uint8_t { kInt, kUInt, kFloat, kBFloat = 4 };

struct Shown {
  void* data;
  std::int32_t device;
  std::int32_t device_index;
  std::int32_t dimensions;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; none if it is contiguous
  std::uint64_t offset;   // in bytes
};

}  // namespace

// DLPack 1 has the same on all machines of 64 bits.
static_assert(sizeof(Shown) == 48 && offsetof(Shown, code) == 20 && offsetof(Shown, strides) == 32);

struct DLPackTable {
  std::uint32_t major;
  std::uint32_t minor;
  void* older;
  void* unused[3];
  int (*show)(void* object, Shown* shown);
  void* stream;
};
static_assert(offsetof(DLPackTable, show) == 40);

namespace {

const char* const kCapsule = "dlpack_exchange_api";

py::object name(const char* text) { return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text)); }

py::object taken(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object attribute(PyObject* object, const py::object& name) {
  return taken(PyObject_GetAttr(object, name.ptr()));
}

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

// How many elements, if they lie one behind the other.
bool count_of(const Shown& shown, std::uint64_t& count) {
  std::int64_t elements = 1;
  bool is_contiguous = true;
  for (std::int32_t i = shown.dimensions - 1; i >= 0; --i) {
    const bool is_in_order = shown.strides == nullptr || shown.strides[i] == elements;
    is_contiguous &= is_in_order || shown.shape[i] == 1;
    elements *= shown.shape[i];
  }
  count = static_cast<std::uint64_t>(elements);
  return is_contiguous || elements == 0;
}

DType dtype_of(const Shown& shown) {
  switch (shown.lanes << 16 | shown.code << 8 | shown.bits) {
    case 1 << 16 | kUInt << 8 | 8: return DType::kUInt8;
    case 1 << 16 | kInt << 8 | 8: return DType::kInt8;
    case 1 << 16 | kInt << 8 | 16: return DType::kInt16;
    case 1 << 16 | kInt << 8 | 32: return DType::kInt32;
    case 1 << 16 | kInt << 8 | 64: return DType::kInt64;
    case 1 << 16 | kFloat << 8 | 16: return DType::kFloat16;
    case 1 << 16 | kFloat << 8 | 32: return DType::kFloat32;
    case 1 << 16 | kFloat << 8 | 64: return DType::kFloat64;
    case 1 << 16 | kBFloat << 8 | 16: return DType::kBFloat16;
    default: return DType::kBytes;
  }
}

}  // namespace

TorchCall::TorchCall(const py::object& table, std::map<Py_hash_t, int> ops, py::object no_timeout,
                     py::object is_profiling)
    : ops_(std::move(ops)),
      no_timeout_(std::move(no_timeout)),
      is_profiling_(std::move(is_profiling)),
      is_neg_(name("is_neg")),
      storage_offset_(name("storage_offset")),
      async_(name("asyncOp")),
      timeout_(name("timeout")),
      op_(name("reduceOp")) {
  if (table.is_none()) return;
  const auto* found = static_cast<const DLPackTable*>(PyCapsule_GetPointer(table.ptr(), kCapsule));
  if (found == nullptr) throw py::error_already_set();
  if (found->major == 1 && found->show != nullptr) table_ = found;
}

bool TorchCall::all_reduce(const std::shared_ptr<Context>& context, const py::object& tensors,
                           const py::object& options, double seconds) const {
  if (table_ == nullptr || !PyList_Check(tensors.ptr()) || PyList_GET_SIZE(tensors.ptr()) != 1) return false;
  const auto tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors.ptr(), 0));
  Plain plain;
  ReduceOp op;
  if (!is_for_us(options.ptr(), op) || !look(tensor.ptr(), plain) || !can_reduce(plain.dtype, op)) return false;
  run(*context, all_reduce_of(plain.address, plain.count, plain.dtype, op, seconds));
  return true;
}

bool TorchCall::is_for_us(PyObject* options, ReduceOp& op) const {
  if (is_true(attribute(options, async_)) || is_true(taken(PyObject_CallNoArgs(is_profiling_.ptr())))) return false;
  const int has_none = PyObject_RichCompareBool(attribute(options, timeout_).ptr(), no_timeout_.ptr(), Py_EQ);
  if (has_none < 0) throw py::error_already_set();
  if (has_none == 0) return false;
  const Py_hash_t hash = PyObject_Hash(attribute(options, op_).ptr());
  if (hash == -1) throw py::error_already_set();
  const auto entry = ops_.find(hash);
  if (entry == ops_.end()) return false;
  op = static_cast<ReduceOp>(entry->second);
  return true;
}

// In its storage, in elements.
Address TorchCall::offset_of(PyObject* tensor) const {
  const Address offset = PyLong_AsSize_t(taken(PyObject_CallMethodNoArgs(tensor, storage_offset_.ptr())).ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  return offset;
}

bool TorchCall::look(PyObject* tensor, Plain& found) const {
  Shown shown;
  if (table_->show(tensor, &shown) != 0) {  // it has nothing to show: sparse, on no device, ...
    PyErr_Clear();
    return false;
  }
  if (shown.device != kCpu || !count_of(shown, found.count)) return false;
  const auto data = reinterpret_cast<Address>(shown.data);
  if (data < kLowest && found.count > 0 && data == offset_of(tensor) * (shown.bits / 8)) return false;
  if (is_true(taken(PyObject_CallMethodNoArgs(tensor, is_neg_.ptr())))) return false;
  found.address = reinterpret_cast<Address>(shown.data) + shown.offset;
  found.dtype = dtype_of(shown);
  return true;
}

}  // namespace gradsync
