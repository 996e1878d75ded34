// A CUDA device without kernels for a CPU build of torch: enough for autograd, device guards and pinned memory, so that
// fake `cuda` tensors go wherever real ones do.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current = 0;

struct CudaGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device next) const override {
    c10::Device before = getDevice();
    current = next.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, current); }
  void setDevice(c10::Device next) const override { current = next.index(); }
  void uncheckedSetDevice(c10::Device next) const noexcept override { current = next.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, CudaGuard)
}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return kDevices; }
  Allocator* getPinnedMemoryAllocator() const override { return getCPUAllocator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
