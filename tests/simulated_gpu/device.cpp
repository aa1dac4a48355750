// A CUDA device in host memory. Its tensors are of the device cuda:0, and the CPU's kernels compute with them: an
// operator takes tensors of this device and numbers, or it raises, as CUDA's own do.
#include <ATen/core/TensorBody.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>

namespace {
using at::Tensor;
using c10::Storage;

const c10::Device GPU(c10::kCUDA, 0), HOST(c10::kCPU);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, GPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  // The base class gives no index, by which autograd finds the thread of a device.
  c10::Device getDevice() const override { return GPU; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(GPU); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  // All host memory is as good as pinned.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
};

// A tensor of a device with the sizes and the strides of another one, over this storage.
Tensor alias(const Tensor& tensor, c10::Device device, const Storage& storage) {
  auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto result = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return result;
}

// A storage of the device over the memory of another device's, which it keeps alive.
Storage over(const Storage& storage, c10::Device device) {
  auto* owner = new Storage(storage);
  c10::DataPtr data(storage.mutable_data(), owner, [](void* it) { delete static_cast<Storage*>(it); }, device);
  c10::Allocator* allocator = device.is_cuda() ? &memory : c10::GetCPUAllocator();
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, /*resizable=*/true);
}

Tensor on_host(const Tensor& tensor) { return alias(tensor, HOST, over(tensor.storage(), HOST)); }

// Calls `change` with each tensor of a value.
template <typename Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional(change(*tensor)) : tensor);
    value = changed;
  }
}

// How often the host has read memory of the device, for which it waits for a real GPU.
long reads = 0;
const std::set<std::string> READERS{"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"};

// Any operator: the CPU's kernel over the same memory.
void on_the_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::string& name = op.operator_name().name;
  reads += static_cast<long>(READERS.count(name));
  std::vector<std::pair<Tensor, Tensor>> pairs;  // each tensor of the device and its alias
  bool are_indices = false;
  auto to_host = [&](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cuda()) {
      for (auto& [ours, host] : pairs)
        if (ours.is_same(tensor)) return host;
      pairs.emplace_back(tensor, on_host(tensor));
      return pairs.back().second;
    }
    const bool may_mix = tensor.dim() == 0 || are_indices;
    TORCH_CHECK(may_mix, name, ": Expected all tensors to be on the same device, but one of sizes ", tensor.sizes(),
                " is on the CPU");
    return tensor;
  };
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    auto& argument = const_cast<c10::IValue&>(value);
    if (argument.isDevice()) argument = HOST;
    are_indices = argument.isOptionalTensorList();  // which CUDA's operators take from either device
    change_tensors(argument, to_host);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [ours, host] : pairs) {  // an operator may have given an argument another size, and so other memory
    auto* storage = ours.storage().unsafeGetStorageImpl();
    if (host.storage().data() != storage->data()) {
      Storage moved = over(host.storage(), GPU);
      storage->set_nbytes(moved.nbytes());
      storage->set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
    }
    ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
  }
  auto to_gpu = [&](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [ours, host] : pairs) {
      if (host.is_same(tensor)) return ours;
      if (host.storage().is_alias_of(tensor.storage())) return alias(tensor, GPU, ours.storage());  // a view
    }
    return alias(tensor, GPU, over(tensor.storage(), GPU));
  };
  for (auto& value : torch::jit::last(*stack, op.schema().returns().size()))
    change_tensors(const_cast<c10::IValue&>(value), to_gpu);
}

// torch's own `copy_` would call CUDA's library, and its `set_` is for each device another one.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  reads += source.is_cuda() && !self.is_cuda() && !non_blocking;
  Tensor to = self.is_cuda() ? on_host(self) : self, from = source.is_cuda() ? on_host(source) : source;
  to.copy_(from);
  return self;
}

Tensor& set(Tensor& self, Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  TORCH_CHECK(source.device_type() == c10::kCUDA, "set_: the storage is on another device");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  return self;
}
Tensor& set_storage(Tensor& self, Storage source) {
  return set(self, source, 0, static_cast<int64_t>(source.nbytes() / self.itemsize()), {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
}  // namespace

// torch's own `resize_` of a storage knows no GPU where it was built without CUDA.
extern "C" void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DataPtr data = memory.allocate(bytes);
  if (const size_t kept = std::min(bytes, storage->nbytes())) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

extern "C" long host_reads() { return reads; }

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)  // torch looks for this name
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  c10::SetAllocator(c10::kCUDA, &memory, /*priority=*/100);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", copy);
  library.impl("set_.source_Storage_storage_offset", set);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
}
