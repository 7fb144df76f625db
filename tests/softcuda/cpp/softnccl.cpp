// torch.distributed's "nccl" over soft devices: gloo on the devices' bytes, with NCCL's rules. A module for Python.
//
//   tensors      Only CUDA's, and dense.
//   devices      Each rank of a communicator brings a GPU of its own, and all ranks come to its first operation.
//   messages     Single sends and receives run one after the other: p2p.h.
//   completion   In strict mode results read as NaN until their work is waited for, and what is sent must not change
//                before that.
//   order        Ranks issue the same collectives: TORCH_DISTRIBUTED_DEBUG=DETAIL has torch itself compare them.
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <set>

#include "p2p.h"
#include "softcuda.h"

namespace py = pybind11;
using namespace c10d;
using at::Tensor;
using c10::intrusive_ptr;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

// What a collective reads and writes: the devices' bytes; in strict mode copies of them until the work is done.
struct Buffers {
  struct Input {
    Tensor bytes;
    uint64_t before;
  };
  struct Output {
    Tensor bytes, result;
  };
  std::string operation;
  int64_t stream;  // of the communicator
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  softcuda::Pointers reads, writes;
  int64_t device = 0, number = 0;  // of the work
  Tensors averages;  // results to divide by the number of ranks, since gloo has no mean

  static Tensor open(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu (soft NCCL takes CUDA tensors)");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous (soft NCCL)");
    return softcuda::cpu_alias(tensor);
  }
  static uint64_t checksum_of(const Tensor& bytes) { return softcuda::checksum(bytes.const_data_ptr(), bytes.nbytes()); }

  void note(softcuda::Pointers& pointers, const Tensor& tensor) {
    pointers.push_back(tensor.storage().data());
    device = tensor.device().index();
  }
  Tensor read(const Tensor& tensor) {
    auto bytes = open(tensor);
    note(reads, tensor);
    if (!softcuda::is_strict()) return bytes;
    inputs.push_back({bytes, 0});
    return bytes.clone();
  }
  Tensor write(const Tensor& tensor) {
    auto bytes = open(tensor);
    note(writes, tensor);
    if (!softcuda::is_strict()) return bytes;
    outputs.push_back({bytes, at::empty_like(bytes)});
    return outputs.back().result;
  }
  Tensor update(const Tensor& tensor) {
    auto bytes = open(tensor);
    note(writes, tensor);
    if (!softcuda::is_strict()) return bytes;
    outputs.push_back({bytes, bytes.clone()});
    return outputs.back().result;
  }
  Tensors read(const Tensors& tensors) { return each<Tensors>(tensors, [&](auto& t) { return read(t); }); }
  Tensors write(const Tensors& tensors) { return each<Tensors>(tensors, [&](auto& t) { return write(t); }); }
  Tensors update(const Tensors& tensors) { return each<Tensors>(tensors, [&](auto& t) { return update(t); }); }
  TensorLists read(const TensorLists& lists) { return each<TensorLists>(lists, [&](auto& l) { return read(l); }); }
  TensorLists write(const TensorLists& lists) { return each<TensorLists>(lists, [&](auto& l) { return write(l); }); }

  template <class List, class Function>
  static List each(const List& list, Function function) {
    List result;
    for (auto& item : list) result.push_back(function(item));
    return result;
  }

  // The collective is on its way: what it writes is unknown from now on, and what it reads must stay.
  void start() {
    static std::atomic<int64_t> last_number{0};
    number = -++last_number;  // no address of an event
    if (softcuda::is_watched()) {  // the communicator's stream goes on from here, as CUDA's NCCL has it
      softcuda::tell("record event", "", softcuda::current_stream(device), number);
      softcuda::tell("stream waits for event", "", stream, number);
      softcuda::tell("kernel", "nccl::" + operation, stream, 0, reads, writes);
      softcuda::tell("record event", "", stream, number);
    }
    for (auto& output : outputs)
      if (output.bytes.nbytes()) memset(output.bytes.mutable_data_ptr(), 0xff, output.bytes.nbytes());
    for (auto& input : inputs) input.before = checksum_of(input.bytes);
  }
  void finish(int num_ranks) {
    if (softcuda::is_watched()) softcuda::tell("stream waits for event", "", softcuda::current_stream(device), number);
    for (auto& input : inputs)
      if (checksum_of(input.bytes) != input.before)
        softcuda::report(c10::str("a tensor of shape ", input.bytes.sizes(), " was changed while ", operation,
                                  " was reading it: wait for the work first"));
    for (auto& average : averages) average.div_(num_ranks);
    for (auto& output : outputs) output.bytes.copy_(output.result);
  }
};

// A collective under way.
struct SoftWork : Work {
  intrusive_ptr<Work> work;
  Buffers buffers;
  int num_ranks;
  Tensors results;  // of an all-reduce
  std::function<void()> meet = [] {};  // wait until other ranks have come, where gloo would not
  bool is_finished = false;

  SoftWork(intrusive_ptr<Work> work_, Buffers buffers_, int num_ranks_)
      : work(std::move(work_)), buffers(std::move(buffers_)), num_ranks(num_ranks_) {}
  bool isCompleted() override { return is_finished || work->isCompleted(); }
  bool isSuccess() const override { return is_finished || work->isSuccess(); }
  int sourceRank() const override { return work->sourceRank(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (is_finished) return true;
    meet();
    work->wait(timeout);
    is_finished = true;
    at::NoGradGuard no_grad;
    buffers.finish(num_ranks);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  // For DDP, which takes an all-reduce's result from there: it is complete when the future exists.
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results));
    return future;
  }
};

// What was issued between startCoalescing and endCoalescing.
struct SoftGroup : Work {
  std::vector<intrusive_ptr<Work>> works;
  std::function<void()> meet;

  SoftGroup(std::vector<intrusive_ptr<Work>> works_, std::function<void()> meet_)
      : works(std::move(works_)), meet(std::move(meet_)) {}
  bool isCompleted() override {
    return std::all_of(works.begin(), works.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works.begin(), works.end(), [](auto& work) { return work->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    meet();
    for (auto& work : works) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
};

// DDP measures its steps on its device.
struct SoftTimer : c10d::Timer {
  explicit SoftTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    return from < 0 || to < from ? std::nullopt : std::optional<int64_t>(to - from);
  }
};
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SoftTimer);
}

struct NcclOptions : Backend::Options {
  NcclOptions() : Backend::Options("nccl") {}
  bool is_high_priority_stream = false;
  intrusive_ptr<Backend> split_from;
  int64_t split_color = 0;
};

struct SoftNCCL : Backend {
  intrusive_ptr<Backend> gloo;
  intrusive_ptr<Store> store;
  intrusive_ptr<NcclOptions> options;
  std::set<int> devices;  // that this rank has brought
  bool has_come = false;  // to the communicator of all ranks
  int num_splits = 0;
  int64_t stream = new_stream();
  std::shared_ptr<softcuda::PeerOrder> order;
  std::optional<softcuda::Unit> group;  // that is being issued
  std::vector<intrusive_ptr<Work>> group_works;

  static int64_t new_stream() {
    static std::atomic<int64_t> last{1 << 20};  // beyond those of torch
    return ++last;
  }

  SoftNCCL(int rank, int size, intrusive_ptr<Backend> gloo_, intrusive_ptr<Store> store_,
           intrusive_ptr<NcclOptions> options_)
      : Backend(rank, size), gloo(std::move(gloo_)), store(std::move(store_)), options(std::move(options_)),
        order(std::make_shared<softcuda::PeerOrder>(rank, size, store)) {}

  static intrusive_ptr<SoftNCCL> make(py::object store, int rank, int size, intrusive_ptr<NcclOptions> options) {
    auto c10d = py::module_::import("torch._C._distributed_c10d");
    auto gloo = c10d.attr("ProcessGroupGloo")(store, rank, size, py::arg("timeout") = options->timeout);
    return c10::make_intrusive<SoftNCCL>(rank, size, gloo.cast<intrusive_ptr<Backend>>(),
                                         store.cast<intrusive_ptr<Store>>(), std::move(options));
  }

  const std::string getBackendName() const override { return "nccl"; }
  intrusive_ptr<Backend::Options> getBackendOptions() override { return options; }
  void eagerConnectSingleDevice(at::Device) override {}
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override {}
  void shutdown() override {}

  bool supportsSplitting() const override { return true; }
  intrusive_ptr<Backend> split(const intrusive_ptr<Store>& parent, const std::vector<int>& ranks,
                               const intrusive_ptr<Backend::Options>& given) override {
    std::string name = "softnccl_split_" + std::to_string(num_splits++);
    for (int member : ranks) name += "_" + std::to_string(member);
    auto own = std::find(ranks.begin(), ranks.end(), rank_);
    if (own == ranks.end()) return {};
    py::gil_scoped_acquire gil;
    auto split_options = c10::make_intrusive<NcclOptions>(*static_cast<NcclOptions*>(given.get()));
    auto c10d = py::module_::import("torch._C._distributed_c10d");
    return make(c10d.attr("PrefixStore")(name, py::cast(parent)), own - ranks.begin(), ranks.size(), split_options);
  }

  // NCCL makes a communicator of one GPU for each rank when the first tensor of a GPU comes. Single sends and receives
  // have one of two ranks, the others that of all ranks, which come to it together.
  void bring(const Tensor& tensor, bool with_all = true) {
    if (!tensor.is_cuda()) return;
    const bool is_first = with_all && !std::exchange(has_come, true);
    if (is_first) store->set(coming(rank_), "1");
    claim(tensor.device().index());
    if (is_first) wait_for_all();
  }
  void bring(const Tensors& tensors, bool with_all = true) {
    for (auto& tensor : tensors) bring(tensor, with_all);
  }
  void bring(const TensorLists& lists) {
    for (auto& tensors : lists) bring(tensors);
  }
  void claim(int device) {
    if (!devices.insert(device).second) return;
    const auto own = std::to_string(rank_);
    const std::string owner = store->compareSet("softnccl_gpu_" + std::to_string(device), std::string(), own);
    TORCH_CHECK(owner == own, "NCCL error: ncclInvalidUsage. Duplicate GPU detected: rank ", owner, " and rank ", own,
                " both on CUDA device ", device, " (soft NCCL)");
  }
  static std::string coming(int rank) { return "softnccl_coming_" + std::to_string(rank); }
  void wait_for_all() {
    const auto end = std::chrono::steady_clock::now() + options->timeout;
    for (int rank = 0; rank < size_; rank++)
      while (!store->check({coming(rank)})) {
        TORCH_CHECK(std::chrono::steady_clock::now() < end, "Timed out: rank ", rank, " has not come to the first ",
                    "operation of its process group within ", options->timeout.count(), " ms. All ranks take part in ",
                    "it, since it makes NCCL's communicator (soft NCCL)");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
  }

  void startCoalescing() override { group = softcuda::Unit{true}; }
  intrusive_ptr<Work> endCoalescing() override {
    auto works = std::exchange(group_works, {});
    auto unit = *std::exchange(group, std::nullopt);
    if (works.empty()) return {};
    return c10::make_intrusive<SoftGroup>(std::move(works), unit.open.empty() ? std::function<void()>([] {}) : meeting(unit));
  }
  std::function<void()> meeting(const softcuda::Unit& unit) {
    return [order = order, number = order->issue(unit), timeout = options->timeout] { order->wait_for(number, timeout); };
  }

  intrusive_ptr<SoftWork> under_way(Buffers buffers, intrusive_ptr<Work> work) {
    auto soft = c10::make_intrusive<SoftWork>(std::move(work), std::move(buffers), size_);
    if (group) group_works.push_back(soft);
    return soft;
  }
  // The options for gloo; what it sums is divided afterwards.
  template <class Options>
  Options sum_for_mean(Options given, const Tensors& results, Buffers& buffers) {
    if (given.reduceOp.op_ == ReduceOp::AVG) {
      given.reduceOp = ReduceOp(ReduceOp::SUM);
      buffers.averages = results;
    }
    return given;
  }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& given) override {
    bring(tensors);
    Buffers buffers{"broadcast", stream};
    auto data = given.rootRank == rank_ ? buffers.read(tensors) : buffers.write(tensors);
    buffers.start();
    return under_way(std::move(buffers), gloo->broadcast(data, given));
  }
  intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& given) override {
    bring(tensors);
    Buffers buffers{"all_reduce", stream};
    auto data = buffers.update(tensors);
    buffers.start();
    auto for_gloo = sum_for_mean(given, data, buffers);
    auto work = under_way(std::move(buffers), gloo->allreduce(data, for_gloo));
    work->results = tensors;
    return work;
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& given) override {
    bring(tensors);
    Buffers buffers{"all_reduce_coalesced", stream};
    auto data = buffers.update(tensors);
    buffers.start();
    auto for_gloo = sum_for_mean(given, data, buffers);
    return under_way(std::move(buffers), gloo->allreduce_coalesced(data, for_gloo));
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const ReduceOptions& given) override {
    bring(tensors);
    Buffers buffers{"reduce", stream};
    auto data = given.rootRank == rank_ ? buffers.update(tensors) : buffers.read(tensors);
    buffers.start();
    auto for_gloo = sum_for_mean(given, data, buffers);
    return under_way(std::move(buffers), gloo->reduce(data, for_gloo));
  }

  // Collectives with inputs and outputs: `call` is gloo's, for the buffers.
  template <class Out, class In, class Function>
  intrusive_ptr<Work> exchange(const char* name, Out& outputs, In& inputs, Function call) {
    bring(outputs);
    bring(inputs);
    Buffers buffers{name, stream};
    auto in = buffers.read(inputs);
    auto out = buffers.write(outputs);
    buffers.start();
    auto work = call(out, in, buffers);
    return under_way(std::move(buffers), std::move(work));
  }
  intrusive_ptr<Work> allgather(TensorLists& outputs, Tensors& inputs, const AllgatherOptions& given) override {
    return exchange("all_gather", outputs, inputs,
                    [&](auto& out, auto& in, auto&) { return gloo->allgather(out, in, given); });
  }
  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& given) override {
    return exchange("all_gather_into_tensor", output, input,
                    [&](auto& out, auto& in, auto&) { return gloo->_allgather_base(out, in, given); });
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const AllgatherOptions& given) override {
    return exchange("all_gather_into_tensor", outputs, inputs, [&](auto& out, auto& in, auto&) {
      return gloo->allgather_into_tensor_coalesced(out, in, given);
    });
  }
  intrusive_ptr<Work> gather(TensorLists& outputs, Tensors& inputs, const GatherOptions& given) override {
    return exchange("gather", outputs, inputs,
                    [&](auto& out, auto& in, auto&) { return gloo->gather(out, in, given); });
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, TensorLists& inputs, const ScatterOptions& given) override {
    return exchange("scatter", outputs, inputs,
                    [&](auto& out, auto& in, auto&) { return gloo->scatter(out, in, given); });
  }
  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                     const ReduceScatterOptions& given) override {
    return exchange("reduce_scatter", outputs, inputs, [&](auto& out, auto& in, auto& buffers) {
      return gloo->reduce_scatter(out, in, sum_for_mean(given, out, buffers));
    });
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& given) override {
    return exchange("reduce_scatter_tensor", output, input, [&](auto& out, auto& in, auto& buffers) {
      return gloo->_reduce_scatter_base(out, in, sum_for_mean(given, {out}, buffers));
    });
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const ReduceScatterOptions& given) override {
    return exchange("reduce_scatter_tensor", outputs, inputs, [&](auto& out, auto& in, auto& buffers) {
      return gloo->reduce_scatter_tensor_coalesced(out, in, sum_for_mean(given, out, buffers));
    });
  }
  intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                    std::vector<int64_t>& input_sizes, const AllToAllOptions& given) override {
    return exchange("all_to_all_single", output, input, [&](auto& out, auto& in, auto&) {
      return gloo->alltoall_base(out, in, output_sizes, input_sizes, given);
    });
  }
  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& given) override {
    return exchange("all_to_all", outputs, inputs,
                    [&](auto& out, auto& in, auto&) { return gloo->alltoall(out, in, given); });
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    bring(tensors, group.has_value());
    Buffers buffers{"send", stream};
    auto data = buffers.read(tensors);
    buffers.start();
    return message({true, to}, under_way(std::move(buffers), gloo->send(data, to, tag)));
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    bring(tensors, group.has_value());
    Buffers buffers{"recv", stream};
    auto data = buffers.write(tensors);
    buffers.start();
    return message({false, from}, under_way(std::move(buffers), gloo->recv(data, from, tag)));
  }
  intrusive_ptr<Work> message(softcuda::Operation operation, intrusive_ptr<SoftWork> work) {
    if (group)
      group->open.push_back(operation);
    else
      work->meet = meeting({false, {operation}});
    return work;
  }
  intrusive_ptr<Work> barrier(const BarrierOptions& given) override {
    if (softcuda::is_watched()) softcuda::tell("host waits for device", "barrier", 0, 0);
    return gloo->barrier(given);
  }
};

PYBIND11_MODULE(softnccl, m) {
  py::module_::import("torch._C._distributed_c10d");
  auto group = py::class_<SoftNCCL, intrusive_ptr<SoftNCCL>, Backend>(m, "ProcessGroupNCCL");
  group.def(py::init(&SoftNCCL::make))
      .def_property_readonly("options", [](SoftNCCL& self) { return c10::make_intrusive<NcclOptions>(*self.options); })
      .def("_set_default_timeout",
           [](SoftNCCL& self, std::chrono::milliseconds timeout) {
             self.options->timeout = timeout;
             self.gloo->setTimeout(timeout);
           })
      .def("_shutdown", [](SoftNCCL&) {})
      .def("abort", [](SoftNCCL&) {})
      .def_static("_group_start", [] {})
      .def_static("_group_end", [] {});
  py::class_<NcclOptions, intrusive_ptr<NcclOptions>, Backend::Options>(group, "Options")
      .def(py::init([](bool is_high_priority_stream) {
             auto options = c10::make_intrusive<NcclOptions>();
             options->is_high_priority_stream = is_high_priority_stream;
             return options;
           }),
           py::arg("is_high_priority_stream") = false)
      .def("__deepcopy__", [](NcclOptions& self, py::object) { return c10::make_intrusive<NcclOptions>(self); })
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_readwrite("split_from", &NcclOptions::split_from)
      .def_readwrite("split_color", &NcclOptions::split_color);
}
