// What Python sees. Numbers and addresses go in; of torch only torch_call.h knows.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "context.h"
#include "persistent.h"
#include "probe.h"
#include "quantise.h"
#include "requests.h"
#include "torch_call.h"

namespace py = pybind11;

namespace gradsync {
namespace {

template <typename Pointer>
std::vector<Pointer> pointers(const std::vector<Address>& addresses) {
  std::vector<Pointer> result;
  result.reserve(addresses.size());
  for (const Address address : addresses) result.push_back(reinterpret_cast<Pointer>(address));
  return result;
}

// A handle that keeps its group alive.
template <typename Thing>
struct Handle {
  std::shared_ptr<Context> context;
  std::shared_ptr<Thing> thing;
};
using OpHandle = Handle<Op>;
using MessageHandle = Handle<Message>;

// Begins an all-reduce in place of any tensor. Kind, dtype and operation are numbers, here and below: to look
// into an enum of Python's costs more than the rest.
OpHandle all_reduce(const std::shared_ptr<Context>& context, Address address, std::uint64_t count, int dtype,
                    int op, double seconds) {
  check_reducible(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
  auto request =
      all_reduce_of(address, count, static_cast<DType>(dtype), static_cast<ReduceOp>(op), seconds);
  context->issue(request, true);
  return {context, request};
}

OpHandle collective(const std::shared_ptr<Context>& context, int kind, int dtype, int op, int root,
                    std::uint64_t count, const Element& element, const std::vector<Address>& sources,
                    const std::vector<Address>& targets,
                    const std::vector<std::uint64_t>& source_bytes,
                    const std::vector<std::uint64_t>& target_bytes, double seconds, bool in_background) {
  auto request = std::make_shared<Op>();
  request->announcement.kind = static_cast<Kind>(kind);
  request->announcement.dtype = static_cast<DType>(dtype);
  request->announcement.op = static_cast<ReduceOp>(op);
  if (request->announcement.op != ReduceOp::kNone) {
    check_reducible(request->announcement.dtype, request->announcement.op);
  }
  request->announcement.root = root;
  request->announcement.count = count;
  request->announcement.element = element;
  request->sources = pointers<const std::byte*>(sources);
  request->targets = pointers<std::byte*>(targets);
  request->source_bytes = source_bytes;
  request->target_bytes = target_bytes;
  request->deadline = after(seconds);
  context->issue(request, in_background);
  return {context, request};
}

// Meets all ranks at what will go another way, which they have to describe in the same words.
OpHandle agree(const std::shared_ptr<Context>& context, const std::string& text, double seconds,
               bool in_background) {
  const std::shared_ptr<Op> request = make_agreement(text, after(seconds));
  context->issue(request, in_background);
  return {context, request};
}

MessageHandle message(const std::shared_ptr<Context>& context, Kind kind, Address address,
                      std::uint64_t bytes, const Element& element, int other, std::int32_t tag, double seconds) {
  const int world = context->members().world();
  if (other >= world || (other < 0 && !(kind == Kind::kRecv && other == kAnySource)) ||
      other == context->members().rank()) {
    throw InvalidError("no message can go between this rank and rank " + std::to_string(other));
  }
  auto request = std::make_shared<Message>();
  request->announcement.kind = kind;
  request->announcement.root = other;
  request->announcement.count = bytes;
  request->announcement.element = element;
  request->other = other;
  request->tag = tag;
  request->data = reinterpret_cast<std::byte*>(address);
  request->bytes = bytes;
  request->deadline = after(seconds);
  context->issue(request);
  return {context, request};
}

// Runs `work` on so many elements without the interpreter's lock, if it would hold others up.
template <typename Work>
void compute(std::size_t elements, const Work& work) {
  constexpr std::size_t kLong = 1 << 16;  // about 30 microseconds
  std::optional<py::gil_scoped_release> release;
  if (elements >= kLong) release.emplace();
  work();
}

Element element(const std::string& name, std::uint32_t bytes) {
  Element made;
  name.copy(made.name, sizeof made.name);
  made.bytes = bytes;
  return made;
}

Quantiser quantiser(DType dtype, std::size_t gradients, std::size_t length, std::size_t block,
                    std::size_t shares,
                    const std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>& stretches) {
  std::vector<Stretch> all;
  for (const auto& [start, at, size] : stretches) all.push_back({start, at, size});
  return Quantiser({dtype, gradients, length, block, shares}, all);
}

struct Memory {
  std::shared_ptr<Allocation> allocation;
};

template <typename Thing>
void bind_handle(py::class_<Handle<Thing>>& handle) {
  handle
      .def("wait", [](const Handle<Thing>& self) { wait(*self.context, self.thing); })
      .def_property_readonly(
          "done", [](const Handle<Thing>& self) { return self.context->is_done(self.thing); });
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Shared memory between the processes of one machine.";

  static py::exception<SystemError> system(module, "SystemError", PyExc_OSError);
  static py::exception<InvalidError> invalid(module, "InvalidError", PyExc_ValueError);
  static py::exception<StateError> state(module, "StateError", PyExc_RuntimeError);
  static py::exception<MismatchError> mismatch(module, "MismatchError", PyExc_RuntimeError);
  static py::exception<BrokenError> broken(module, "BrokenError", PyExc_RuntimeError);
  static py::exception<PeerLostError> lost(module, "PeerLostError", broken.ptr());
  static py::exception<DeadlineError> deadline(module, "DeadlineError", broken.ptr());
  static py::exception<AbortedError> aborted(module, "AbortedError", broken.ptr());
  static py::exception<InterruptedError> interrupted(module, "InterruptedError", broken.ptr());
  py::register_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](py::object& type, const char* text, const py::dict& facts) {
      py::object error = type(text);
      for (const auto& [name, value] : facts) error.attr(name) = value;
      PyErr_SetObject(type.ptr(), error.ptr());
    };
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const PeerLostError& error) {
      raise(lost, error.what(), py::dict(py::arg("rank") = error.peer.rank,
                                         py::arg("host") = error.peer.host,
                                         py::arg("pid") = error.peer.pid));
    } catch (const DeadlineError& error) {
      raise(deadline, error.what(), py::dict(py::arg("missing") = error.missing));
    } catch (const AbortedError& error) {
      py::set_error(aborted, error.what());
    } catch (const InterruptedError& error) {
      py::set_error(interrupted, error.what());
    } catch (const BrokenError& error) {
      py::set_error(broken, error.what());
    } catch (const MismatchError& error) {
      py::set_error(mismatch, error.what());
    } catch (const StateError& error) {
      py::set_error(state, error.what());
    } catch (const InvalidError& error) {
      py::set_error(invalid, error.what());
    } catch (const SystemError& error) {
      py::set_error(system, error.what());
    }
  });

  py::native_enum<DType>(module, "DType", "enum.IntEnum")
      .value("BYTES", DType::kBytes).value("UINT8", DType::kUInt8).value("INT8", DType::kInt8)
      .value("INT16", DType::kInt16).value("INT32", DType::kInt32).value("INT64", DType::kInt64)
      .value("FLOAT16", DType::kFloat16).value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT32", DType::kFloat32).value("FLOAT64", DType::kFloat64)
      .finalize();
  py::native_enum<ReduceOp>(module, "ReduceOp", "enum.IntEnum")
      .value("NONE", ReduceOp::kNone).value("SUM", ReduceOp::kSum).value("AVG", ReduceOp::kAvg)
      .value("PRODUCT", ReduceOp::kProduct).value("MIN", ReduceOp::kMin).value("MAX", ReduceOp::kMax)
      .value("BAND", ReduceOp::kBand).value("BOR", ReduceOp::kBor).value("BXOR", ReduceOp::kBxor)
      .finalize();
  py::native_enum<Kind>(module, "Kind", "enum.IntEnum")
      .value("ALL_REDUCE", Kind::kAllReduce).value("REDUCE", Kind::kReduce)
      .value("BROADCAST", Kind::kBroadcast).value("ALL_GATHER", Kind::kAllGather)
      .value("REDUCE_SCATTER", Kind::kReduceScatter).value("ALL_TO_ALL", Kind::kAllToAll)
      .value("GATHER", Kind::kGather).value("SCATTER", Kind::kScatter)
      .value("BARRIER", Kind::kBarrier).value("SEND", Kind::kSend).value("RECV", Kind::kRecv)
      .finalize();
  py::native_enum<State>(module, "State", "enum.IntEnum")
      .value("PRESENT", State::kPresent).value("LEFT", State::kLeft).value("ABORTED", State::kAborted)
      .value("FAILED", State::kFailed)
      .finalize();
  py::native_enum<Phase>(module, "Phase", "enum.IntEnum")
      .value("NEVER", Phase::kNever).value("POST", Phase::kPost).value("POSTED", Phase::kPosted)
      .value("ARRIVED", Phase::kArrived).value("TAKEN", Phase::kTaken).value("TICKED", Phase::kTicked)
      .value("FINISHED", Phase::kFinished).value("MESSAGE", Phase::kMessage)
      .finalize();

  module.attr("MAX_RANKS") = kMaxRanks;
  module.attr("ANY_SOURCE") = kAnySource;
  module.attr("SMALL_BYTES") = kSmallBytes;
  module.def("start_time", &start_time, py::arg("pid"));
  module.def("can_reduce", &can_reduce, py::arg("dtype"), py::arg("op"));
  module.def("signal_at", [](Phase phase, int nth, int signal) {
    the_probe().signal = signal;
    the_probe().countdown = nth;
    the_probe().phase = phase;
  }, py::arg("phase"), py::arg("nth"), py::arg("signal"));
  module.def("reduce_bare", [](const std::vector<Address>& parts, std::uint64_t begin, std::uint64_t end,
                               int dtype_number, int op_number) {
    const auto dtype = static_cast<DType>(dtype_number);
    const auto op = static_cast<ReduceOp>(op_number);
    check_reducible(dtype, op);
    py::gil_scoped_release release;
    const auto targets = pointers<void*>(parts);
    const std::vector<const void*> sources(targets.begin(), targets.end());
    const int count = static_cast<int>(targets.size());
    reduce({dtype, op, sources.data(), count, targets.data(), count}, begin, end);
  }, py::arg("parts"), py::arg("begin"), py::arg("end"), py::arg("dtype"), py::arg("op"));

  py::class_<Element>(module, "Element")
      .def(py::init<>())
      .def(py::init(&element), py::arg("name"), py::arg("bytes"));

  py::class_<Segment>(module, "Segment")
      .def_static("create", [](int world) { return Segment::create(Layout(world).bytes()); },
                  py::arg("world"))
      .def_static("alone", [] { return Segment::alone(Layout(1).bytes()); })
      .def_static("open", [](int world, std::int64_t pid, std::int64_t descriptor, std::uint64_t bytes) {
        return Segment::open({pid, descriptor, bytes}, Layout(world).bytes());
      }, py::arg("world"), py::arg("pid"), py::arg("descriptor"), py::arg("bytes"));

  py::class_<OpHandle> op(module, "Op");
  bind_handle<Op>(op);
  op.def_property_readonly("number", [](const OpHandle& self) { return self.thing->announcement.sequence; });
  py::class_<MessageHandle> sent(module, "Message");
  bind_handle<Message>(sent);
  sent.def_property_readonly("source", [](const MessageHandle& self) { return self.thing->source; });

  py::class_<Memory>(module, "Memory", py::buffer_protocol())
      .def(py::init([](std::uint64_t bytes) { return Memory{Registry::of_process().allocate(bytes)}; }),
           py::arg("bytes"))
      .def_buffer([](Memory& self) {
        const Segment& segment = self.allocation->segment;
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(segment.data()),
                               static_cast<py::ssize_t>(segment.size()), false);
      });

  py::class_<Quantiser>(module, "Quantiser")
      .def(py::init(&quantiser), py::arg("dtype"), py::arg("gradients"), py::arg("length"),
           py::arg("block"), py::arg("shares"), py::arg("stretches"))
      .def("fill", [](const Quantiser& self, Address gradients, Address residual, Address message) {
        compute(self.length(), [&] {
          self.fill(reinterpret_cast<const void*>(gradients), reinterpret_cast<float*>(residual),
                    reinterpret_cast<std::byte*>(message));
        });
      }, py::arg("gradients"), py::arg("residual"), py::arg("message"))
      .def("mean", [](const Quantiser& self, const std::vector<Address>& messages, Address gradients) {
        compute(self.length(), [&] {
          self.mean(pointers<const std::byte*>(messages), reinterpret_cast<void*>(gradients));
        });
      }, py::arg("messages"), py::arg("gradients"))
      .def("requantise", [](const Quantiser& self, const std::vector<Address>& parts, std::size_t share,
                            Address residual, Address answer) {
        compute(self.length(), [&] {
          self.requantise(pointers<const std::byte*>(parts), share, reinterpret_cast<float*>(residual),
                          reinterpret_cast<std::byte*>(answer));
        });
      }, py::arg("parts"), py::arg("share"), py::arg("residual"), py::arg("answer"));

  py::class_<Persistent>(module, "Persistent")
      .def(py::init<const std::shared_ptr<Context>&, Address, std::uint64_t, DType, ReduceOp>(),
           py::arg("context"), py::arg("address"), py::arg("count"), py::arg("dtype"), py::arg("op"))
      .def("run", &Persistent::run, py::arg("seconds"))
      .def("start", &Persistent::start, py::arg("seconds"))
      .def("wait", &Persistent::wait)
      .def_property_readonly("done", &Persistent::done);

  py::class_<Context, std::shared_ptr<Context>>(module, "Context")
      .def(py::init([](Segment& segment, int rank,
                       const std::vector<std::tuple<std::int64_t, std::uint64_t, std::string, int,
                                                    std::string>>& peers,
                       std::uint64_t nonce_a, std::uint64_t nonce_b, bool is_founder) {
             std::vector<Peer> all;
             for (const auto& [pid, started, label, own_rank, host] : peers) {
               all.push_back({pid, started, label, own_rank, host});
             }
             if (all.size() > kMaxRanks || rank < 0 || static_cast<std::size_t>(rank) >= all.size()) {
               throw InvalidError("a group of " + std::to_string(all.size()) + " has no rank " +
                                  std::to_string(rank));
             }
             return Context::make(std::move(segment), rank, std::move(all), nonce_a, nonce_b, is_founder);
           }),
           py::arg("segment"), py::arg("rank"), py::arg("peers"), py::arg("nonce_a"),
           py::arg("nonce_b"), py::arg("is_founder"))
      .def("collective", &collective, py::arg("kind"), py::arg("dtype"), py::arg("op"),
           py::arg("root"), py::arg("count"), py::arg("element"), py::arg("sources"), py::arg("targets"),
           py::arg("source_bytes"), py::arg("target_bytes"), py::arg("seconds"),
           py::arg("in_background"))
      .def("all_reduce", &all_reduce, py::arg("address"), py::arg("count"), py::arg("dtype"),
           py::arg("op"), py::arg("seconds"))
      .def("agree", &agree, py::arg("text"), py::arg("seconds"), py::arg("in_background"))
      .def("message", &message, py::arg("kind"), py::arg("address"), py::arg("bytes"),
           py::arg("element"), py::arg("other"), py::arg("tag"), py::arg("seconds"))
      .def("ticket", [](Context& self) {
        const Ticket ticket = self.members().ticket();
        return py::make_tuple(ticket.pid, ticket.descriptor, ticket.bytes);
      })
      .def("leave_to_background", &Context::leave_to_background)
      .def("close_descriptor", [](Context& self) { self.members().close_descriptor(); })
      .def("fail", [](Context& self, const std::string& reason, std::optional<int> blames) {
        self.fail(reason, blames.value_or(kOutsider));
      }, py::arg("reason"), py::arg("blames") = std::nullopt)
      .def("positions", [](Context& self) { return self.members().positions(); })
      .def("states", [](Context& self) {
        std::vector<std::pair<State, std::string>> states;
        for (int rank = 0; rank < self.members().world(); ++rank) states.push_back(self.members().state(rank));
        return states;
      })
      .def("abort", &Context::abort, py::call_guard<py::gil_scoped_release>())
      .def("close", &Context::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("issued", &Context::issued)
      .def("counters", [](const Context& self) {
        py::dict result;
        result["symmetric"] = self.counters().symmetric.load();
        result["helped"] = self.counters().helped.load();
        result["copied"] = self.counters().copied.load();
        result["copied_bytes"] = self.counters().copied_bytes.load();
        return result;
      });

  py::class_<TorchCall>(module, "TorchCall")
      .def(py::init<const py::object&, std::map<Py_hash_t, int>, py::object, py::object>(), py::arg("table"),
           py::arg("ops"), py::arg("no_timeout"), py::arg("is_profiling"))
      .def("all_reduce", &TorchCall::all_reduce, py::arg("context"), py::arg("tensors"), py::arg("options"),
           py::arg("seconds"));
}

}  // namespace gradsync
