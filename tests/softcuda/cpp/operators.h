// Every operator at the CUDA key: its CPU kernel runs on CPU tensors that share the bytes of the device's, and what it
// returns becomes the device's. A kernel that is given tensors of two devices, or of the host, is refused as CUDA does.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/NonSymbolicBC.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>

#include "device.h"

namespace softcuda {
using at::Tensor;

// ---- Tensors of one device as those of another

struct OpenedTensorImpl : TensorImpl {
  static void set_device(TensorImpl* impl, Device device) { impl->*(&OpenedTensorImpl::device_opt_) = device; }
};

void release_storage(void* storage) { raw::intrusive_ptr::decref(static_cast<StorageImpl*>(storage)); }

Tensor cpu_alias(const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == kStrided, "soft device: only strided tensors, not ", tensor.layout());
  auto* shared = tensor.storage().unsafeGetStorageImpl();
  raw::intrusive_ptr::incref(shared);
  auto storage = make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), shared->nbytes(),
      DataPtr(shared->mutable_data(), shared, &release_storage, Device(kCPU)), &cpu_allocator, shared->resizable());
  auto alias =
      at::detail::make_tensor<TensorImpl>(Storage(std::move(storage)), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}

// Make a storage that a CPU kernel has allocated the device's, in place.
void give_to_device(StorageImpl* storage, Device device) {
  if (storage->device().type() == kCUDA) return;
  auto& data = storage->_mutable_data_ptr_no_checks();
  void* pointer = data.get();
  const bool is_counted =
      !pointer || (data.get_deleter() == &deallocate && header_of(pointer)->device == device.index());
  if (is_counted) {
    auto deleter = data.get_deleter();
    data.release_context();
    storage->set_data_ptr_noswap(DataPtr(pointer, pointer, deleter, device));
  } else {  // made by another of the kernel's threads, or a constant
    const auto bytes = storage->nbytes();
    void* moved = allocate(bytes, device.index());
    memcpy(moved, pointer, bytes);
    storage->set_data_ptr_noswap(DataPtr(moved, moved, &deallocate, device));
  }
  storage->set_allocator(&device_allocator);
}

void give_to_device(const Tensor& tensor, Device device) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->_change_backend_component_keys(device);
  OpenedTensorImpl::set_device(impl, device);
}

// ---- The fallback

const void* memory_of(const Tensor& tensor) { return tensor.storage().data(); }

void tell_kernel(const std::string& name, int64_t device, at::TensorList read, at::TensorList written) {
  Pointers from, to;
  for (auto& tensor : read) from.push_back(memory_of(tensor));
  for (auto& tensor : written) to.push_back(memory_of(tensor));
  tell_kernel(name, device, from, to);
}

// One call of an operator: the device's tensors among its arguments, and the CPU tensors that stand for them.
struct Call {
  struct Argument {
    Tensor original, alias;
    bool is_written, is_view, is_index;
  };
  std::vector<Argument> arguments;
  std::vector<Tensor> host_tensors;  // that a CUDA kernel could not read
  Device device{kCUDA, -1};

  Tensor open(const Tensor& tensor, const at::Argument& as, bool in_list, const OperatorHandle& op) {
    const bool is_written = as.alias_info() && as.alias_info()->isWrite();
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      const bool is_number = tensor.dim() == 0 && !in_list && !is_written;  // goes along as an argument of the kernel
      if (tensor.is_cpu() && !is_number) host_tensors.push_back(tensor);
      return tensor;
    }
    if (device.index() < 0) device = tensor.device();
    TORCH_CHECK(device == tensor.device(), "Expected all tensors to be on the same device, but found at least two ",
                "devices, ", device, " and ", tensor.device(), "! (soft device, in ", op.operator_name(), ")");
    for (auto& argument : arguments)
      if (argument.original.is_same(tensor)) {
        argument.is_written |= is_written;
        return argument.alias;
      }
    const bool is_view = as.alias_info() && !is_written;
    arguments.push_back({tensor, cpu_alias(tensor), is_written, is_view, as.name() == "indices"});
    return arguments.back().alias;
  }

  bool has(const Tensor& alias) const {
    return std::any_of(arguments.begin(), arguments.end(), [&](auto& a) { return a.alias.is_same(alias); });
  }

  Tensor close(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& argument : arguments)
      if (argument.alias.is_same(result)) return argument.original;
    if (!result.is_cpu()) return result;
    for (auto& argument : arguments)
      if (argument.alias.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {  // a view
        result.unsafeGetTensorImpl()->set_storage_keep_dtype(argument.original.storage());
        give_to_device(result, device);
        return result;
      }
    for (auto& host : host_tensors)
      if (host.is_same(result)) return result;
    give_to_device(result.storage().unsafeGetStorageImpl(), device);
    give_to_device(result, device);
    return result;
  }

  void tell(const std::string& name, const std::vector<IValue>& results) const {
    std::vector<Tensor> read, written;
    for (auto& argument : arguments)
      if (!argument.is_view) (argument.is_written ? written : read).push_back(argument.original);
    for (auto& result : results)
      for (auto& tensor : result.isTensor() ? std::vector{result.toTensor()} :
                          result.isTensorList() ? result.toTensorVector() : std::vector<Tensor>())
        if (tensor.defined() && tensor.is_cuda()) written.push_back(tensor);
    tell_kernel(name, device.index(), read, written);
  }

  // What the kernel did to the shape or the storage of an `out=` tensor.
  void write_back() {
    for (auto& argument : arguments) {
      if (!argument.is_written) continue;
      const Tensor &original = argument.original, &alias = argument.alias;
      auto *from = alias.storage().unsafeGetStorageImpl(), *to = original.storage().unsafeGetStorageImpl();
      if (from->data() != to->data() || from->nbytes() != to->nbytes()) {
        if (from->_mutable_data_ptr_no_checks().get_deleter() != &release_storage) {
          give_to_device(from, device);
          to->set_data_ptr_noswap(std::move(from->_mutable_data_ptr_no_checks()));
        }
        to->set_nbytes(from->nbytes());
      }
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
          alias.storage_offset() != original.storage_offset()) {
        original.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      }
    }
  }
};

bool takes_host_tensors(const OperatorHandle& op) {  // CUDA's own take indices on the host
  static const std::set<std::string> names{"aten::index.Tensor",
                                           "aten::index_put_",
                                           "aten::index_put",
                                           "aten::_index_put_impl_",
                                           "aten::index.Tensor_out",
                                           "aten::_unsafe_index.Tensor",
                                           "aten::_copy_from",
                                           "aten::_copy_from_and_resize"};
  return names.count(toString(op.operator_name())) > 0;
}

// Whether the host waits in CUDA's own kernel: for the size or the number that it returns, or for a copy.
bool has_host_wait(const OperatorHandle& op, const Call& call, const torch::jit::Stack& stack) {
  static const std::set<std::string> always{"aten::_local_scalar_dense",
                                            "aten::bincount",
                                            "aten::equal",
                                            "aten::histc",
                                            "aten::masked_select",
                                            "aten::masked_select.out",
                                            "aten::nonzero",
                                            "aten::nonzero.out",
                                            "aten::_unique2",
                                            "aten::unique_consecutive",
                                            "aten::unique_dim",
                                            "aten::unique_dim_consecutive"};
  const auto name = toString(op.operator_name());
  if (always.count(name)) return true;
  if (name == "aten::repeat_interleave.Tensor") return stack.back().isNone();  // no output_size
  if (!takes_host_tensors(op)) return false;
  if (!call.host_tensors.empty()) return true;  // indices, which are copied
  if (name.find("index_put") == std::string::npos) return false;  // has a mask's indices counted by aten::nonzero
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].name() == "values" && !call.has(stack[stack.size() - arguments.size() + i].toTensor()))
      return false;  // a number of the host's is filled in where a mask says
  return std::any_of(call.arguments.begin(), call.arguments.end(), [](auto& argument) {  // a mask's indices are counted
    const auto type = argument.original.scalar_type();
    return argument.is_index && (type == at::kBool || type == at::kByte);
  });
}

void run_on_cpu(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  Call call;
  IValue* generator = nullptr;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    if (value.isTensor()) {
      value = call.open(value.toTensor(), argument, false, op);
    } else if (value.isTensorList()) {
      std::vector<Tensor> opened = value.toTensorVector();
      for (auto& tensor : opened) tensor = call.open(tensor, argument, true, op);
      value = List<Tensor>(opened);
    } else if (value.isOptionalTensorList()) {
      List<std::optional<Tensor>> opened;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        opened.push_back(tensor ? std::optional<Tensor>(call.open(*tensor, argument, true, op)) : std::nullopt);
      value = opened;
    } else if (value.isDevice() && value.toDevice().type() == kCUDA) {
      if (call.device.index() < 0) call.device = Device(kCUDA, DeviceGuard::index_of(value.toDevice()));
      value = Device(kCPU);
    } else if (argument.name() == "generator") {
      generator = &value;
    }
  }
  if (call.device.index() < 0) call.device = Device(kCUDA, current_device);
  TORCH_CHECK(call.host_tensors.empty() || call.arguments.empty() || takes_host_tensors(op),
              "Expected all tensors to be on the same device, but found at least two devices, ", call.device,
              " and cpu! (soft device, in ", op.operator_name(), ", a CPU tensor of shape ",
              call.host_tensors.empty() ? IntArrayRef{} : call.host_tensors[0].sizes(), ")");
  if (generator) {
    auto found = generator->isGenerator() ? generator->toGenerator() : default_generator(call.device.index());
    TORCH_CHECK(found.device().type() == kCUDA, "Expected a 'cuda' device type for generator but found '",
                found.device().type(), "'");
    *generator = static_cast<DeviceGenerator*>(found.unsafeGetGeneratorImpl())->inner;
  }
  const bool is_wait = is_watched() && has_host_wait(op, call, *stack);
  {
    KernelOf kernel(call.device.index());
    at::AutoDispatchBelowAutograd below;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  call.write_back();
  const size_t results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = call.close(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> closed = value.toTensorVector();
      for (auto& tensor : closed) tensor = call.close(tensor);
      value = List<Tensor>(closed);
    }
  }
  if (is_watched()) {
    call.tell(toString(op.operator_name()), {stack->end() - results, stack->end()});
    if (is_wait) tell_wait(toString(op.operator_name()), call.device.index());
  }
}

// ---- Operators that are not a kernel: memory, views and copies

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool> pin, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device ? device->index() : -1);
  return at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device ? device->index() : -1);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                           dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& tensor, IntArrayRef size, std::optional<MemoryFormat> format) {
  OnDevice guard(tensor.device().index());
  return at::native::resize_(tensor, size, format);
}

Tensor& set_empty(Tensor& tensor) {
  OnDevice guard(tensor.device().index());
  Storage storage(Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true);
  return tensor.set_(std::move(storage), 0, {0}, {});
}

Tensor& set_part(Tensor& tensor, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  OnDevice guard(tensor.device().index());
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

Tensor& set_storage(Tensor& tensor, Storage storage) {
  const int64_t elements = storage.nbytes() / tensor.dtype().itemsize();
  return tensor.set_(std::move(storage), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  if (tensor.is_same(source)) return tensor;
  return tensor.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void copy_on_cpu(Tensor to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::_ops::copy_::redispatch(DispatchKeySet(DispatchKey::CPU), to, from, false);
}

void tell_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  const auto device = to.is_cuda() ? to.device().index() : from.device().index();
  const std::vector<Tensor> read{from}, written{to};
  tell_kernel("aten::copy_", device, from.is_cuda() ? at::TensorList(read) : at::TensorList(),
              to.is_cuda() ? at::TensorList(written) : at::TensorList());
  if (to.is_cuda() == from.is_cuda()) return;
  if (!non_blocking)
    tell_wait(to.is_cuda() ? "blocking copy to the device" : "blocking copy to the host", device);
  else if (!is_pinned((to.is_cuda() ? from : to).const_data_ptr()))
    tell_wait("copy of host memory that is not pinned", device);
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  TORCH_CHECK((self.is_cuda() || self.is_cpu()) && (src.is_cuda() || src.is_cpu()), "soft device: copy between ",
              self.device(), " and ", src.device());
  const Tensor to = self.is_cuda() ? cpu_alias(self) : self, from = src.is_cuda() ? cpu_alias(src) : src;
  const auto device = self.is_cuda() ? self.device() : src.device();
  const StreamKey stream(device.index(), current_streams[device.index()]);
  if (is_watched() && self.numel() > 0) tell_copy(self, src, non_blocking);
  if (self.is_cuda() == src.is_cuda() || !strict) {
    copy_on_cpu(to, from);
    return self;
  }
  if (src.is_cpu()) check_read_of_host(Bytes(src), stream);
  finish_stream(stream);  // earlier copies of the stream come before this one
  const Tensor& host = self.is_cuda() ? src : self;
  if (!non_blocking || !is_pinned(host.const_data_ptr())) {  // CUDA waits for pageable memory
    copy_on_cpu(to, from);
    return self;
  }
  std::lock_guard<std::recursive_mutex> lock(queue_mutex);
  LateCopy late;
  late.number = ++last_number;
  if (self.is_cuda()) {
    copy_on_cpu(to, from);
    const Bytes bytes(from);
    const auto before = checksum(bytes.begin, bytes.end - bytes.begin);
    const auto hazard = c10::str("a host tensor of shape ", from.sizes(), " was changed while its copy to the device ",
                                 "was under way: wait for the copy first");
    late.host = from.storage();
    late.finish = [=] {
      if (checksum(bytes.begin, bytes.end - bytes.begin) != before) report(hazard);
    };
  } else {
    Tensor arrived = at::empty_like(to);
    copy_on_cpu(arrived, from);
    if (to.is_non_overlapping_and_dense()) memset(to.mutable_data_ptr(), 0xff, to.nbytes());
    late.host = self.storage();
    late.written_host = Bytes(self);
    late.finish = [to, arrived] { copy_on_cpu(to, arrived); };
  }
  queues[stream].copies.push_back(std::move(late));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy_(to, source, non_blocking);
}

void record_stream(Tensor& tensor, Stream stream) {
  softcuda::tell("use on stream", "", DeviceGuard::number_of(stream), int64_t(memory_of(tensor)));
}

int64_t choose_math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                              std::optional<double>, bool) {
  return 0;
}

void resize_storage(const Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  OnDevice guard(tensor.device().index());
  auto data = device_allocator.allocate(bytes);
  if (bytes && storage->nbytes()) memcpy(data.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("alias", &at::native::alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

TORCH_LIBRARY(softcuda, m) {
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) { return std::optional<at::Generator>(default_generator(device)); });
  m.def("resize_storage(Tensor tensor, int bytes) -> ()", &resize_storage);
  m.def("cpu_alias(Tensor tensor) -> Tensor", &cpu_alias);  // for kernels in Python
  m.def("tell_kernel(str name, Tensor[] read, Tensor[] written) -> ()",
        [](const std::string& name, at::TensorList read, at::TensorList written) {
          tell_kernel(name, written[0].device().index(), read, written);
        });
}

}  // namespace softcuda
