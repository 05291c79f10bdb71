// A stand-in for an accelerator, on torch's PrivateUse1 key: tests meet a device that is neither a CPU nor a GPU.
//
// Its memory is the host's, at addresses that the host cannot follow: to try ends in a segmentation fault. Each
// operation that torch does not compose of others runs on the CPU, on an alias of that memory, and is counted. A copy
// that need not be waited for happens as late as a stream may let it happen: to the device before the next operation,
// to the host at the next wait; until then the target is 0xAA.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace {

using c10::IntArrayRef;
using c10::ScalarType;
using c10::SymIntArrayRef;
using std::optional;

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
const c10::Device HERE(DEVICE, 0);

enum Mode { COMPLETE, NO_FLOAT64, FLOAT64_BECOMES_FLOAT32 };

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
int mode = COMPLETE;
std::map<std::string, int64_t> counts;

void count(const std::string &what) {
    Lock lock(mutex);
    ++counts[what];
}

// ---- memory --------------------------------------------------------------------------------------------------------

// Set in every address of the device, and in no address of the host: to follow one ends in a segmentation fault.
constexpr uintptr_t MARK = uintptr_t(1) << 52;

std::map<char *, size_t> pinned;

// The address of the host at which an address of the device is.
void *host_address(const void *address) { return (void *)((uintptr_t)address & ~MARK); }

void *new_memory(size_t bytes) {
    void *start = bytes ? aligned_alloc(64, (bytes + 63) & ~size_t(63)) : nullptr;
    TORCH_CHECK(start || !bytes, "out of memory");
    return start;
}

// The bytes that tensors hold, the most since the counts were reset, those at the reset, and each allocation's size.
size_t held = 0, peak = 0, held_at_reset = 0;
std::unordered_map<void *, size_t> sizes;

void release(void *start) {
    Lock lock(mutex);
    auto found = sizes.find(start);
    if (found != sizes.end()) {
        held -= found->second;
        sizes.erase(found);
    }
    free(host_address(start));
}

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void *start = new_memory(bytes);
        if (start) {
            Lock lock(mutex);
            start = (void *)((uintptr_t)start | MARK);
            sizes[start] = bytes;
            held += bytes;
            peak = std::max(peak, held);
        }
        return {start, start, &release, HERE};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *target, const void *source, size_t bytes) const override {
        memcpy(host_address(target), host_address(source), bytes);
    }
} device_memory;

void unpin(void *start) {
    Lock lock(mutex);
    pinned.erase((char *)start);
    free(start);
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void *start = new_memory(bytes);
        Lock lock(mutex);
        if (start) pinned[(char *)start] = bytes;
        return {start, start, &unpin, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
    void copy_data(void *target, const void *source, size_t bytes) const override { memcpy(target, source, bytes); }
} pinned_memory;

bool is_pinned(const void *address) {
    Lock lock(mutex);
    auto it = pinned.upper_bound((char *)address);
    return it != pinned.begin() && (--it, (char *)address < it->first + it->second);
}

bool here(const at::Tensor &tensor) { return tensor.defined() && tensor.device().type() == DEVICE; }

at::Tensor over(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor &like) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return tensor;
}

// A tensor of the CPU in the memory of one of the device. It can be resized, as outputs without elements are.
at::Tensor host_alias(const at::Tensor &tensor) {
    if (!here(tensor)) return tensor;
    c10::DataPtr start(host_address(tensor.storage().data_ptr().get()), c10::Device(c10::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(start),
                         c10::GetAllocator(c10::kCPU), true);
    auto host = over(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
    if (tensor.is_conj()) host._set_conj(true);
    if (tensor.is_neg()) host._set_neg(true);
    return host;
}

// ---- streams -------------------------------------------------------------------------------------------------------

std::vector<std::function<void()>> to_device, to_host;

void run(std::vector<std::function<void()>> &queue) {
    Lock lock(mutex);
    auto copies = std::move(queue);
    queue.clear();
    for (auto &copy : copies) copy();
}

void synchronize() {
    run(to_device);
    run(to_host);
}

void wait(const char *what) {
    count(std::string("wait for ") + what);
    synchronize();
}

// ---- what the device does by itself --------------------------------------------------------------------------------

void check_dtype(ScalarType dtype) {
    TORCH_CHECK_TYPE(mode != NO_FLOAT64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
                     "Cannot make a float64 tensor on this device, as it does not support float64");
}

at::Tensor empty(IntArrayRef size, optional<ScalarType> dtype, optional<c10::Layout>, optional<c10::Device>,
                 optional<bool>, optional<c10::MemoryFormat> format) {
    check_dtype(c10::dtype_or_default(dtype));
    return at::detail::empty_generic(size, &device_memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype, optional<c10::Layout>,
                         optional<c10::Device>, optional<bool>) {
    check_dtype(c10::dtype_or_default(dtype));
    return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor &source, const at::Tensor &target, bool non_blocking) {
    bool in = !here(source), out = !here(target);
    TORCH_CHECK(!in || !out, "neither tensor is on the device");
    check_dtype(in ? target.scalar_type() : source.scalar_type());
    if (source.numel() == 0) return target;
    bool lasting = in ? is_pinned(source.data_ptr()) : out && is_pinned(target.data_ptr());
    bool late = lasting && non_blocking;
    if (in) {
        count(lasting ? "copy to device, pinned" : "copy to device, pageable");
        if (lasting && !late) count("wait for a copy to the device");
    } else if (out) {
        count(lasting ? "copy to host, pinned" : "copy to host, pageable");
        if (!late) count("wait for a copy to the host");
    } else {
        count("copy on device");
    }
    if (in && late) {
        Lock lock(mutex);
        to_device.push_back([source, target] { host_alias(target).copy_(source); });
        return target;
    }
    run(to_device);
    if (out && late) {
        auto values = host_alias(source).clone();
        if (target.is_non_overlapping_and_dense()) memset(target.data_ptr(), 0xAA, target.nbytes());
        Lock lock(mutex);
        to_host.push_back([values, target] { at::Tensor(target).copy_(values); });
        return target;
    }
    if (out) synchronize();
    host_alias(target).copy_(host_alias(source));
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor &source, const at::Tensor &target) {
    if (target.sizes() != source.sizes()) target.resize_(source.sizes());
    return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor &tensor) {
    wait("item");
    return host_alias(tensor).item();
}

// Ascend's rule: a conversion to float64 warns and gives float32.
at::Tensor to_copy(const at::Tensor &tensor, optional<ScalarType> dtype, optional<c10::Layout> layout,
                   optional<c10::Device> device, optional<bool> pin, bool non_blocking,
                   optional<at::MemoryFormat> format) {
    bool stays = !device || device->type() == DEVICE;
    if (mode == FLOAT64_BECOMES_FLOAT32 && dtype == at::kDouble && stays) {
        TORCH_WARN_ONCE("Device do not support double dtype now, dtype cast replace with float.");
        count("float64 became float32");
        dtype = at::kFloat;
    }
    return at::native::_to_copy(tensor, dtype, layout, device, pin, non_blocking, format);
}

at::Tensor as_strided(const at::Tensor &tensor, SymIntArrayRef size, SymIntArrayRef stride,
                      optional<c10::SymInt> offset) {
    optional<int64_t> start;
    if (offset) start = offset->guard_int(__FILE__, __LINE__);
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             start);
}

at::Tensor view(const at::Tensor &tensor, SymIntArrayRef size) {
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor &tensor, SymIntArrayRef size, SymIntArrayRef stride) {
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             tensor.storage_offset());
}

void resize_storage(const c10::Storage &storage, size_t bytes) {
    auto fresh = device_memory.allocate(bytes);
    if (size_t kept = std::min(storage.nbytes(), bytes))
        device_memory.copy_data(fresh.get(), storage.data_ptr().get(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
}

const at::Tensor &resize(const at::Tensor &tensor, SymIntArrayRef size, optional<at::MemoryFormat>) {
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    if (tensor.sizes() == sizes) return tensor;
    size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), tensor.storage_offset());
    if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return tensor;
}

at::Tensor &set_part(at::Tensor &tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
    at::native::checkSetStorage(tensor, storage, offset, size, stride, false);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
    at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), size,
                                 stride.data() ? optional<IntArrayRef>(stride) : std::nullopt, false);
    return tensor;
}

at::Tensor &set_storage(at::Tensor &tensor, at::Storage storage) {
    int64_t elements = storage.nbytes() / tensor.itemsize(), one = 1;
    return set_part(tensor, storage, 0, IntArrayRef(&elements, 1), IntArrayRef(&one, 1));
}

at::Tensor &set_tensor(at::Tensor &tensor, const at::Tensor &source) {
    return set_part(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// ---- all other operations ------------------------------------------------------------------------------------------

// Calls `change` with each tensor of a value on the stack, and replaces it by what that returns.
template <class Change> void replace(c10::IValue &value, Change change) {
    if (value.isTensor()) {
        value = change(value.toTensor());
    } else if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for (const auto &tensor : value.toTensorVector()) list.push_back(change(tensor));
        value = list;
    } else if (value.isOptionalTensorList()) {
        c10::List<optional<at::Tensor>> list;
        for (optional<at::Tensor> tensor : value.toOptionalTensorList())
            list.push_back(tensor ? optional<at::Tensor>(change(*tensor)) : tensor);
        value = list;
    }
}

void kernel(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    static const std::set<std::string> WAITING{"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
                                               "aten::unique_consecutive"};
    const auto &schema = op.schema();
    const std::string &name = schema.name();
    const std::string full = name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
    count("op " + full);
    if (WAITING.count(name)) count("wait for " + name);
    run(to_device);

    std::vector<std::pair<at::Tensor, at::Tensor>> pairs; // tensors of the device, and their aliases
    bool indexes = name == "aten::index" || name == "aten::_index_put_impl_", elsewhere = false;
    for (auto &value : torch::jit::last(*stack, schema.arguments().size())) {
        auto &changed = const_cast<c10::IValue &>(value);
        replace(changed, [&](const at::Tensor &tensor) {
            if (!here(tensor)) {
                elsewhere |= tensor.defined() && tensor.dim() > 0;
                return tensor;
            }
            check_dtype(tensor.scalar_type());
            if (indexes && tensor.scalar_type() == at::kBool) count("wait for " + name);
            for (auto &[mine, its] : pairs)
                if (mine.is_same(tensor)) return its;
            pairs.emplace_back(tensor, host_alias(tensor));
            return pairs.back().second;
        });
        if (changed.isDevice()) changed = c10::Device(c10::kCPU);
        if (changed.isGenerator()) changed = at::detail::getDefaultCPUGenerator();
    }
    TORCH_CHECK(!elsewhere || pairs.empty() || indexes, "Expected all tensors to be on the same device, but ", full,
                " got tensors of the CPU too");
    {
        at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    for (auto &[mine, its] : pairs) {
        if (mine.sizes() == its.sizes()) continue;
        mine.resize_(its.sizes());
        host_alias(mine).copy_(its);
    }
    for (auto &value : torch::jit::last(*stack, schema.returns().size()))
        replace(const_cast<c10::IValue &>(value), [&](const at::Tensor &tensor) -> at::Tensor {
            if (!tensor.defined()) return tensor;
            // Ascend's norms take 16 and 32 bits.
            TORCH_CHECK_NOT_IMPLEMENTED(mode != FLOAT64_BECOMES_FLOAT32 || tensor.scalar_type() != at::kDouble ||
                                            name != "aten::linalg_vector_norm",
                                        "\"linalg_vector_norm\" not implemented for 'Double'");
            for (auto &[mine, its] : pairs)
                if (its.is_same(tensor)) return mine;
            for (auto &[mine, its] : pairs)
                if (tensor.numel() && tensor.storage().is_alias_of(its.storage()))
                    return over(mine.storage(), KEYS, tensor);
            auto result = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
            host_alias(result).copy_(tensor);
            return result;
        });
}

// ---- the interfaces of torch ---------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return DEVICE; }
    c10::Device exchangeDevice(c10::Device) const override { return HERE; }
    c10::Device getDevice() const override { return HERE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
    c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
    c10::Stream getNewStream(c10::Device, int) const override {
        static std::atomic<int> next{1};
        return c10::Stream(c10::Stream::UNSAFE, HERE, next++);
    }
    c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void destroyEvent(void *, const c10::DeviceIndex) const noexcept override {}
    void record(void **event, const c10::Stream &, const c10::DeviceIndex, const c10::EventFlag) const override {
        static int any;
        *event = &any;
    }
    void block(void *, const c10::Stream &) const override {}
    bool queryEvent(void *) const override { return synchronize(), true; }
    void synchronizeEvent(void *) const override { wait("event"); }
    bool queryStream(const c10::Stream &) const override { return synchronize(), true; }
    void synchronizeStream(const c10::Stream &) const override { wait("stream"); }
    void synchronizeDevice(const c10::DeviceIndex) const override { wait("device"); }
    void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override {}
    double elapsedTime(void *, void *, const c10::DeviceIndex) const override { return 0; }
};

struct Generator final : at::CPUGeneratorImpl {
    Generator() {
        device_ = HERE;
        key_set_ = KEYS;
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void *address) const override { return is_pinned(address); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory; }
    at::Device getDeviceFromPtr(void *) const override { return HERE; }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override {
        static at::Generator generator = at::make_generator<Generator>();
        return generator;
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        resize_storage(storage, bytes);
    }
} hooks;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(DEVICE, &device_memory)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", as_strided);
    m.impl("view", view);
    m.impl("_to_copy", to_copy);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("resize_", resize);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("set_.source_Storage_storage_offset", set_part);
    m.impl("set_.source_Storage", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
// Tensors that are conjugated or negated when they are read: a copy reads them, and torch has copied them for all else.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

} // namespace

// ---- what Python calls, by ctypes ----------------------------------------------------------------------------------

extern "C" {

void stand_in_begin(int chosen) {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    mode = chosen;
}

void stand_in_reset() {
    Lock lock(mutex);
    counts.clear();
    held_at_reset = peak = held;
}

// The most bytes that tensors have held since the reset, beyond what they held then.
size_t stand_in_peak() {
    Lock lock(mutex);
    return peak - held_at_reset;
}

// Writes a line for each count and its name if all of them fit, and returns the bytes of all lines.
size_t stand_in_counts(char *out, size_t size) {
    Lock lock(mutex);
    std::string text;
    for (auto &[name, times] : counts) text += std::to_string(times) + " " + name + "\n";
    if (text.size() <= size) memcpy(out, text.data(), text.size());
    return text.size();
}

void stand_in_synchronize() { wait("device"); }
}
