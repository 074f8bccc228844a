#include "torch_bindings/files/checkpoint_reader.h"

#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "hvd/negotiation/values/unit_names.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd::detail {

namespace {

/// Bytes of a tensor that stays in the file at first: about what the file has for each besides.
constexpr std::size_t kLargeBytes = 256;
/// Bytes that are read and sent at once: enough for the speed of memory, few beside a model.
constexpr std::size_t kPortionBytes = std::size_t{256} << 10;

/// Bytes at the end of a file in which LibTorch looks for its directory: tensors that reach there
/// are read at once.
constexpr std::uint64_t kDirectorySearch = std::uint64_t{8} << 10;

/// An outline is these numbers: size of the file, number of extents, place and bytes of each; then
/// the rest of the file.
template <class T>
void append(std::string& text, const T& number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof number);
}
template <class T>
T take(const std::string& text, std::size_t& at) {
  T number{};
  std::memcpy(&number, text.data() + at, sizeof number);
  at += sizeof number;
  return number;
}

/// Places and bytes of the tensors that LibTorch stores as they are, in the file's order.
std::vector<std::uint64_t> large_tensors(const std::string& path, std::uint64_t size) {
  caffe2::serialize::PyTorchStreamReader reader(path);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
  for (const auto& name : reader.getAllRecords()) {
    const std::uint64_t bytes = reader.getRecordSize(name);
    const std::uint64_t place = reader.getRecordOffset(name);
    if (name.rfind("data/", 0) == 0 && bytes >= kLargeBytes &&
        place + bytes + kDirectorySearch <= size)
      found.emplace_back(place, bytes);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::uint64_t> numbers;
  for (const auto& [place, bytes] : found) numbers.insert(numbers.end(), {place, bytes});
  return numbers;
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_non_overlapping_and_dense();
}

/// Copies what `portion`, which lies `at` bytes behind the begin of a tensor's memory, has of
/// `from`, a view of that memory.
void copy_portion(const at::Tensor& to, const at::Tensor& from, std::int64_t at,
                  const at::Tensor& portion) {
  const auto first = static_cast<std::int64_t>(from.storage_offset() * from.element_size());
  const std::int64_t begin = std::max(first, at),
                     end = std::min(first + static_cast<std::int64_t>(from.nbytes()),
                                    at + portion.numel());
  if (begin < end)
    bytes_in_memory_order(to)
        .narrow(0, begin - first, end - begin)
        .copy_(portion.narrow(0, begin - at, end - begin));
}

}  // namespace

CheckpointFile::CheckpointFile(const std::string& path, bool all_at_once)
    : file_(path, O_RDONLY), size_(file_.size()) {
  if (size_ == 0) throw CheckpointError("it is empty");
  std::string portion(kPortionBytes, '\0');
  for (std::uint64_t at = 0; at < size_; at += portion.size())
    file_.read(at, portion.data(),
               static_cast<std::size_t>(std::min<std::uint64_t>(portion.size(), size_ - at)));
  if (!all_at_once) extents_ = large_tensors(path, size_);
}

std::string CheckpointFile::outline() const {
  std::string text;
  append(text, size_);
  append(text, extents_.size() / 2);
  for (const auto number : extents_) append(text, number);
  std::uint64_t at = 0;
  const auto add_rest = [&](std::uint64_t end) {
    const std::size_t had = text.size();
    text.resize(had + static_cast<std::size_t>(end - at));
    file_.read(at, text.data() + had, text.size() - had);
  };
  for (std::size_t i = 0; i < extents_.size(); i += 2) {
    add_rest(extents_[i]);
    at = extents_[i] + extents_[i + 1];
  }
  add_rest(size_);
  return text;
}

/// LibTorch reads each tensor by one call into its memory: those of large ones are answered without
/// reading. Throws if it did otherwise, as there would be tensors then whose values are neither
/// read nor known to be missing.
CheckpointReader::CheckpointReader(const std::string& outline, at::Device device) {
  std::size_t at = 0;
  const auto size = take<std::uint64_t>(outline, at);
  extents_.resize(take<std::size_t>(outline, at));
  std::unordered_map<std::uint64_t, std::size_t> by_place;
  std::vector<std::uint64_t> left_out{0};  // bytes before each extent
  for (std::size_t i = 0; i < extents_.size(); ++i) {
    extents_[i].place = take<std::uint64_t>(outline, at);
    extents_[i].bytes = static_cast<std::size_t>(take<std::uint64_t>(outline, at));
    by_place[extents_[i].place] = i;
    left_out.push_back(left_out.back() + extents_[i].bytes);
  }
  const auto read = [&](std::uint64_t place, void* to, std::size_t bytes) -> std::size_t {
    const auto whole = by_place.find(place);
    if (whole != by_place.end() && extents_[whole->second].bytes == bytes) {
      extents_[whole->second].memory = to;
      return bytes;
    }
    const auto next =
        std::lower_bound(extents_.begin(), extents_.end(), place,
                         [](const Extent& e, std::uint64_t p) { return e.place < p; });
    const std::uint64_t from =
        at + place - left_out[static_cast<std::size_t>(next - extents_.begin())];
    if (place >= size || from >= outline.size()) return 0;
    const auto count =
        std::min<std::size_t>(bytes, outline.size() - static_cast<std::size_t>(from));
    std::memcpy(to, outline.data() + from, count);
    return count;
  };
  archive_.load_from(
      read, [size] { return static_cast<std::size_t>(size); }, device);
  for (std::size_t i = 0; i < extents_.size(); ++i) {
    if (extents_[i].memory == nullptr)
      throw CheckpointError("it has a tensor that this version of LibTorch does not read");
    by_memory_[extents_[i].memory] = i;
  }
}

const CheckpointReader::Extent* CheckpointReader::unread(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) return nullptr;
  // want_all_but() reads them where they are
  if (tensor.is_conj() || tensor.is_neg() || tensor.is_quantized()) return nullptr;
  const auto found = by_memory_.find(tensor.storage().data());
  return found == by_memory_.end() || extents_[found->second].is_read ? nullptr
                                                                      : &extents_[found->second];
}

void CheckpointReader::want(const at::Tensor& tensor) {
  if (const Extent* const extent = unread(tensor)) const_cast<Extent*>(extent)->in_place = true;
}

void CheckpointReader::want(const at::Tensor& to, const at::Tensor& from) {
  if (const Extent* const extent = unread(from)) {
    const_cast<Extent*>(extent)->wants.push_back({to.detach(), from.detach()});
  } else {
    to.detach().copy_(from);
  }
}

void CheckpointReader::want_all_but(const std::vector<at::Tensor>& tensors) {
  std::map<const Extent*, std::set<const void*>> owners;
  std::map<const Extent*, std::size_t> references;  // to the storage
  for (const auto& tensor : tensors) {
    const Extent* const extent = unread(tensor);
    if (extent == nullptr) continue;
    owners[extent].insert(tensor.unsafeGetTensorImpl());
    references[extent] = tensor.storage().use_count();
  }
  for (auto& extent : extents_)
    if (!extent.is_read &&
        (!owners.contains(&extent) || references[&extent] > owners[&extent].size()))
      extent.in_place = true;
}

std::string CheckpointReader::read(const CheckpointFile* file, const ProcessSet* set) {
  if (extents_.empty()) return {};
  const at::NoGradGuard no_gradient;
  at::Tensor wanted = torch::zeros({static_cast<std::int64_t>(extents_.size())}, torch::kUInt8);
  for (std::size_t i = 0; i < extents_.size(); ++i)
    if (extents_[i].in_place || !extents_[i].wants.empty())
      wanted[static_cast<std::int64_t>(i)] = 1;
  if (set != nullptr)
    allreduce_(
        wanted,
        {.name = library_name("checkpoint/wanted"), .op = ReduceOp::Max, .process_set = *set});
  std::string failure;
  for (std::size_t i = 0; i < extents_.size(); ++i)
    if (wanted[static_cast<std::int64_t>(i)].item<std::int64_t>() != 0)
      read_extent(extents_[i], file, set, failure);
  return failure;
}

/// A rank goes on after a failure, so that nobody waits for it.
void CheckpointReader::read_extent(Extent& extent, const CheckpointFile* file,
                                   const ProcessSet* set, std::string& failure) {
  std::vector<Want> wants = std::exchange(extent.wants, {});
  const auto is_direct = [](const Want& want) {
    return is_dense(want.to) && is_dense(want.from) &&
           want.to.scalar_type() == want.from.scalar_type() &&
           want.to.sizes() == want.from.sizes() && want.to.strides() == want.from.strides();
  };
  const auto bytes = static_cast<std::int64_t>(extent.bytes);
  at::Tensor whole;
  const auto attempt = [&failure](const auto& call) {
    try {
      if (failure.empty()) call();
    } catch (...) {
      failure = words_of_current_exception();
    }
  };
  attempt([&] {
    if (extent.in_place) whole = torch::from_blob(extent.memory, {bytes}, torch::kUInt8);
    if (!whole.defined() && !std::all_of(wants.begin(), wants.end(), is_direct))
      whole = torch::empty({bytes}, torch::kUInt8);
  });
  const at::Tensor buffer =
      torch::empty({std::min(bytes, static_cast<std::int64_t>(kPortionBytes))}, torch::kUInt8);
  for (std::int64_t at = 0; at < bytes; at += buffer.numel()) {
    at::Tensor portion = buffer.narrow(0, 0, std::min(buffer.numel(), bytes - at));
    if (file != nullptr)
      attempt([&] {
        file->read(extent.place + static_cast<std::uint64_t>(at), portion.mutable_data_ptr(),
                   static_cast<std::size_t>(portion.numel()));
      });
    if (set != nullptr && set->size() > 1)
      broadcast_(portion, {.name = library_name("checkpoint/data"),
                           .root_rank = set->ranks().front(),
                           .process_set = *set});
    attempt([&] {
      if (whole.defined()) whole.narrow(0, at, portion.numel()).copy_(portion);
      for (const auto& want : wants)
        if (is_direct(want)) copy_portion(want.to, want.from, at, portion);
    });
  }
  attempt([&] {
    for (const auto& want : wants)
      if (!is_direct(want))
        want.to.copy_(torch::empty({0}, want.from.options())
                          .set_(whole.storage(), want.from.storage_offset(), want.from.sizes(),
                                want.from.strides()));
  });
  // from now on it may be somebody's, who changes it
  if (std::exchange(extent.in_place, false)) extent.is_read = true;
}

}  // namespace hvd::detail
