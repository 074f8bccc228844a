#include "hvd/negotiation/values/signature.h"

#include <algorithm>
#include <cmath>

#include "hvd/base/text.h"

namespace hvd {

namespace {

template <class Enum>
Enum checked_enum(std::uint8_t value, Enum last) {
  if (value > static_cast<std::uint8_t>(last))
    throw WireError("signature: a number outside its enumeration");
  return static_cast<Enum>(value);
}

constexpr bool dims_after_first_only(OpKind kind) {
  return kind == OpKind::Allgather || kind == OpKind::Alltoall;
}

bool same_shape(OpKind kind, const Shape& a, const Shape& b) {
  if (a.size() != b.size()) return false;
  const auto from = static_cast<std::ptrdiff_t>(dims_after_first_only(kind) && !a.empty() ? 1 : 0);
  return std::equal(a.begin() + from, a.end(), b.begin() + from);
}

bool same_shape_at(std::size_t index, const Signature& a, const Signature& b) {
  return same_shape(a.kind, a.tensors[index].shape, b.tensors[index].shape);
}

bool same_dtype_at(std::size_t index, const Signature& a, const Signature& b) {
  return a.tensors[index].dtype == b.tensors[index].dtype;
}

/// Compares what two signatures say of the tensor at an index that both have.
using SameAt = bool (*)(std::size_t index, const Signature& a, const Signature& b);

/// Returns the first tensor of which they do not say the same; the smaller number of tensors where
/// there is none.
std::size_t first_difference(const Signature& a, const Signature& b, SameAt same_at) {
  const std::size_t common = std::min(a.tensors.size(), b.tensors.size());
  std::size_t index = 0;
  while (index < common && same_at(index, a, b)) ++index;
  return index;
}

bool same_dtypes(const Signature& a, const Signature& b) {
  return first_difference(a, b, same_dtype_at) == std::min(a.tensors.size(), b.tensors.size());
}

bool same_shapes(const Signature& a, const Signature& b) {
  return first_difference(a, b, same_shape_at) == std::max(a.tensors.size(), b.tensors.size());
}

constexpr bool may_have_splits(OpKind kind) {
  return kind == OpKind::Alltoall || kind == OpKind::Reducescatter;
}

/// Returns whether the splits are the same, as those of a Reducescatter must be on all ranks.
bool same_splits(const Signature& a, const Signature& b) {
  if (a.kind != OpKind::Reducescatter) return true;
  const auto same = [](const TensorSignature& one, const TensorSignature& other) {
    return one.splits == other.splits;
  };
  return std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(), same);
}

/// Returns the splits as text, of a group one list after the other.
std::string splits_text(const Signature& signature) {
  std::string text;
  for (const auto& tensor : signature.tensors)
    text += tensor.splits.empty() ? "by rows " : to_string(tensor.splits) + " ";
  return text.substr(0, text.size() - 1);
}

/// Returns the words about the tensor at `index`; about the number of tensors where they differ.
std::string tensor_text(const Signature& signature, std::size_t index) {
  if (signature.kind == OpKind::Control && index < signature.tensors.size())
    return formatted("ranks {}", to_string(signature.tensors[index].shape));
  if (index >= signature.tensors.size()) return formatted("{} tensors", signature.tensors.size());
  const auto& tensor = signature.tensors[index];
  const std::string text = formatted("{} {}", name_of(tensor.dtype), to_string(tensor.shape));
  return signature.tensors.size() == 1 ? text : formatted("tensor {} is {}", index, text);
}

std::string grouped(std::span<const int> ranks, std::span<const SharedSignature> signatures,
                    const std::function<std::string(const Signature&)>& describe) {
  std::vector<std::string> said;
  for (const auto& signature : signatures) said.push_back(describe(*signature));
  return grouped_by_rank(ranks, said);
}

/// A factor that is not a number is that on all ranks.
bool same_factors(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

struct Check {
  std::string_view what;
  std::function<bool(const Signature&, const Signature&)> same;
  std::function<std::string(const Signature&)>
      describe;              ///< empty: what is said of the first tensor that differs
  SameAt same_at = nullptr;  ///< of such a check: whether one tensor's is the same
};

const std::vector<Check>& checks() {
  static const std::vector<Check> kChecks{
      {"the data type", same_dtypes, {}, same_dtype_at},
      {"the operation", [](const Signature& a, const Signature& b) { return a.kind == b.kind; },
       [](const Signature& s) { return std::string(name_of(s.kind)); }},
      {"the shape", same_shapes, {}, same_shape_at},
      {"the scale factors",
       [](const Signature& a, const Signature& b) {
         return same_factors(a.prescale_factor, b.prescale_factor) &&
                same_factors(a.postscale_factor, b.postscale_factor);
       },
       [](const Signature& s) {
         return formatted("prescale {}, postscale {}", s.prescale_factor, s.postscale_factor);
       }},
      {"the reduce op", [](const Signature& a, const Signature& b) { return a.op == b.op; },
       [](const Signature& s) { return std::string(name_of(s.op)); }},
      {"the splits", same_splits, splits_text},
      {"the root rank", [](const Signature& a, const Signature& b) { return a.root == b.root; },
       [](const Signature& s) { return formatted("root {}", s.root); }},
      {"the device", [](const Signature& a, const Signature& b) { return a.device == b.device; },
       [](const Signature& s) { return std::string(name_of(s.device)); }},
  };
  return kChecks;
}

/// Returns the rows of tensor `index` that come to the rank at `place`.
std::int64_t rows_for(std::size_t place, std::size_t index, std::size_t ranks,
                      const std::function<const Signature&(std::size_t)>& said) {
  std::int64_t rows = 0;
  for (std::size_t from = 0; from < ranks; ++from) {
    const TensorSignature& tensor = said(from).tensors[index];
    rows += said(from).kind == OpKind::Alltoall ? tensor.splits.at(place) : tensor.shape.front();
  }
  return rows;
}

}  // namespace

void encode(Writer& writer, const Signature& signature) {
  writer.put(signature.kind).put(signature.op).put(signature.device);
  writer.put(signature.prescale_factor).put(signature.postscale_factor).put(signature.root);
  writer.put(static_cast<std::uint32_t>(signature.tensors.size()));
  for (const auto& tensor : signature.tensors) {
    writer.put(tensor.dtype);
    writer.put_list(std::span<const std::int64_t>(tensor.shape));
    if (may_have_splits(signature.kind))
      writer.put_list(std::span<const std::int64_t>(tensor.splits));
    if (dims_after_first_only(signature.kind)) writer.put(tensor.output_rows);
  }
}

Signature decode_signature(Reader& reader) {
  Signature signature;
  signature.kind = checked_enum(reader.get<std::uint8_t>(), OpKind::Control);
  signature.op = checked_enum(reader.get<std::uint8_t>(), ReduceOp::BitXor);
  signature.device = checked_enum(reader.get<std::uint8_t>(), DeviceKind::Cuda);
  signature.prescale_factor = reader.get<double>();
  signature.postscale_factor = reader.get<double>();
  signature.root = reader.get<int>();
  const auto tensors = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < tensors; ++i) {
    TensorSignature tensor;
    tensor.dtype = checked_enum(reader.get<std::uint8_t>(), DataType::Complex128);
    tensor.shape = reader.get_list<std::int64_t>();
    if (may_have_splits(signature.kind)) tensor.splits = reader.get_list<std::int64_t>();
    if (dims_after_first_only(signature.kind)) tensor.output_rows = reader.get<std::int64_t>();
    signature.tensors.push_back(std::move(tensor));
  }
  return signature;
}

bool has_possible_sizes(const Shape& shape) {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 48;
  std::int64_t elements = 1;
  for (const auto size : shape) {
    if (size < 0 || size > kMostElements / std::max<std::int64_t>(1, elements)) return false;
    elements *= std::max<std::int64_t>(1, size);
  }
  return true;
}

bool is_plausible(const Signature& signature, std::size_t ranks) {
  const OpKind kind = signature.kind;
  const bool by_rows =
      kind == OpKind::Allgather || kind == OpKind::Alltoall || kind == OpKind::Reducescatter;
  for (const auto& tensor : signature.tensors) {
    if (kind == OpKind::Control) continue;  // its shape is a list of ranks
    if (!has_possible_sizes(tensor.shape)) return false;
    if (by_rows && tensor.shape.empty()) return false;
    if (tensor.output_rows < -1) return false;
    const bool by_elements = kind == OpKind::Reducescatter && !tensor.splits.empty();
    if (kind != OpKind::Alltoall && !by_elements) continue;
    if (tensor.splits.size() != ranks) return false;
    std::int64_t left = by_elements ? element_count(tensor.shape) : tensor.shape.front();
    for (const auto rows : tensor.splits) {
      if (rows < 0 || rows > left) return false;
      left -= rows;
    }
    if (by_elements && left != 0) return false;
  }
  return true;
}

std::int64_t scattered_rows(std::int64_t rows, std::size_t size, std::size_t place) {
  const auto ranks = static_cast<std::int64_t>(size);
  return rows / ranks + (static_cast<std::int64_t>(place) < rows % ranks ? 1 : 0);
}

Status verdict(std::string_view name, std::span<const int> ranks,
               std::span<const SharedSignature> signatures) {
  const auto all_equal = std::all_of(signatures.begin(), signatures.end(), [&](const auto& other) {
    return other == signatures[0] || *other == *signatures[0];
  });
  if (all_equal) return {};
  for (const auto& check : checks()) {
    const auto same = [&](const auto& other) { return check.same(*signatures[0], *other); };
    if (std::all_of(signatures.begin(), signatures.end(), same)) continue;
    std::size_t index = signatures[0]->tensors.size();
    for (const auto& other : signatures)
      if (check.same_at != nullptr && !same(other))
        index = std::min(index, first_difference(*signatures[0], *other, check.same_at));
    const auto tensor = [index](const Signature& signature) {
      return tensor_text(signature, index);
    };
    return {Status::Code::Mismatch,
            formatted("{} '{}': {} differ{} between ranks: {}", name_of(signatures[0]->kind), name,
                      check.what, check.what.ends_with('s') ? "" : "s",
                      grouped(ranks, signatures, check.describe ? check.describe : tensor))};
  }
  return {};
}

Status verdict_on_outputs(std::string_view name, std::span<const int> ranks,
                          const std::function<const Signature&(std::size_t)>& said) {
  const Signature& first = said(0);
  if (first.kind != OpKind::Allgather && first.kind != OpKind::Alltoall) return {};
  for (std::size_t index = 0; index < first.tensors.size(); ++index) {
    bool fits = true;
    std::int64_t coming = -1;
    std::vector<std::string> texts;
    for (std::size_t place = 0; place < ranks.size(); ++place) {
      const std::int64_t room = said(place).tensors[index].output_rows;
      if (room < 0) {
        texts.emplace_back("no output given");
        continue;
      }
      if (coming < 0 || first.kind == OpKind::Alltoall)
        coming = rows_for(place, index, ranks.size(), said);
      fits = fits && room == coming;
      texts.push_back(formatted("{} rows come, and the output has {}", coming, room));
    }
    if (!fits)
      return {Status::Code::Mismatch,
              formatted("{} '{}': the output does not have as many rows as come: {}",
                        name_of(first.kind), name, grouped_by_rank(ranks, texts))};
  }
  return {};
}

std::string grouped_by_rank(std::span<const int> ranks, std::span<const std::string> said) {
  std::vector<std::pair<std::string_view, std::vector<int>>> groups;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& known) { return known.first == said[i]; });
    if (group == groups.end()) group = groups.insert(groups.end(), {said[i], {}});
    group->second.push_back(ranks[i]);
  }
  std::string text;
  for (const auto& [words, who] : groups)
    text += formatted("{}{} {}: {}", text.empty() ? "" : "; ", who.size() == 1 ? "rank" : "ranks",
                      rank_list(who), words);
  return text;
}

}  // namespace hvd
