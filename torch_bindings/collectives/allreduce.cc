// Allreduce of tensors.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <sstream>
#include <utility>

#include "hvd/base/text.h"
#include "hvd/engine/engine.h"
#include "hvd/negotiation/values/signature.h"
#include "torch_bindings/collectives/agreement.h"
#include "torch_bindings/collectives/collectives.h"
#include "torch_bindings/collectives/encodings.h"
#include "torch_bindings/collectives/in_place.h"
#include "torch_bindings/collectives/operation.h"
#include "torch_bindings/collectives/small_calls.h"
#include "torch_bindings/collectives/tensors.h"

namespace hvd {

namespace {

using detail::Form;
using detail::Operation;
using Tensors = std::vector<at::Tensor>;

detail::GradientRule allreduce_rule(const AllreduceOptions& options) {
  return [options](const Tensors& gradients) {
    AllreduceOptions same = options;
    same.name = detail::gradient_name(options.name, gradients);
    return grouped_allreduce(gradients, same);
  };
}

// Compression that leaves out values: each rank encodes its own, one allgather brings all to all,
// and each rank adds them up in rank order, which gives all the same bits. Nothing is remembered.

/// Switches off what the caller's thread does to results: gradients, autocast.
struct PlainArithmetic {
  at::NoGradGuard no_gradient;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// Returns the vectors that stand for a tensor; itself, if it is not encoded.
Tensors encoded(const at::Tensor& tensor, const AllreduceOptions& options) {
  const Compression& way = options.compression;
  at::Tensor values = detail::dense_of(tensor).to(detail::encoded_type(tensor));
  if (options.prescale_factor != 1) values = values * options.prescale_factor;
  const at::Tensor flat = values.view({-1});
  if (!detail::is_encoded(way, tensor)) return {flat.to(tensor.scalar_type())};
  if (way.kind() == Compression::Kind::Int8) {
    const std::int64_t rest = flat.numel() % detail::kInt8Block;
    const at::Tensor blocks =
        rest == 0 ? flat : at::constant_pad_nd(flat, {0, detail::kInt8Block - rest});
    return {detail::encode_int8(blocks.view({-1, detail::kInt8Block})).view({-1})};
  }
  if (way.kind() == Compression::Kind::TopK) {
    auto [places, chosen] = detail::largest(flat, way.ratio());
    return {std::move(places), std::move(chosen)};
  }
  // Halko, Martinsson, Tropp 2011: the range of the matrix, by two steps from random columns.
  const at::Tensor matrix = values.view({values.size(0), -1});
  const auto rank = std::min<std::int64_t>({way.rank(), matrix.size(0), matrix.size(1)});
  at::Tensor right = detail::random_columns({matrix.size(1), rank}, 1).to(matrix.options());
  right = detail::orthonormal(matrix.t().mm(detail::orthonormal(matrix.mm(right))));
  const at::Tensor left = detail::orthonormal(matrix.mm(right));
  return {left.reshape({-1}), matrix.t().mm(left).reshape({-1})};
}

/// Returns what one rank's `parts` stand for, in the type in which they are added up.
at::Tensor decoded(const Tensors& parts, const at::Tensor& like, const Compression& way) {
  const auto type = detail::encoded_type(like);
  if (!detail::is_encoded(way, like)) return parts[0].to(type).view(like.sizes());
  if (way.kind() == Compression::Kind::Int8)
    return detail::decode_int8(parts[0].view({-1, detail::kInt8Row}), type)
        .view({-1})
        .narrow(0, 0, like.numel())
        .view(like.sizes());
  if (way.kind() == Compression::Kind::TopK)
    return at::zeros({like.numel()}, parts[1].options())
        .index_add_(0, parts[0], parts[1])
        .view(like.sizes());
  const std::int64_t rows = like.size(0), columns = like.numel() / rows;
  return detail::low_rank_product(parts[0].view({rows, -1}), parts[1].view({columns, -1}))
      .view(like.sizes());
}

/// Returns what has to be the same on all ranks, in lines: of the group, then of each tensor.
std::string terms_of(const Tensors& tensors, const AllreduceOptions& options) {
  std::string text = formatted("{} tensors by {}, {}, scales {} and {}\n", tensors.size(),
                               detail::words_of(options.compression), name_of(options.op),
                               options.prescale_factor, options.postscale_factor);
  for (const at::Tensor& tensor : tensors) text += detail::describe(tensor) + "\n";
  return text;
}
/// Throws Mismatch, on all ranks, if their terms differ: says the first line that does.
void check_terms(const Operation& operation, const std::string& name, std::span<const int> ranks) {
  const at::Tensor all = operation.received.front().cpu();
  const std::string text(static_cast<const char*>(all.const_data_ptr()), all.nbytes());
  std::vector<std::istringstream> terms;
  std::size_t begin = 0;
  for (const std::int64_t bytes : operation.rows->front()) {
    terms.emplace_back(text.substr(begin, static_cast<std::size_t>(bytes)));
    begin += static_cast<std::size_t>(bytes);
  }
  for (std::size_t line = 0;; ++line) {
    std::vector<std::string> said(terms.size());
    for (std::size_t i = 0; i < terms.size(); ++i) std::getline(terms[i], said[i]);
    if (std::ranges::adjacent_find(said, std::not_equal_to<>()) != said.end())
      throw Mismatch(
          formatted("{}: differs between ranks: {}",
                    detail::title("allreduce", name, line == 0 ? Tensors(1) : operation.given,
                                  line == 0 ? 0 : line - 1),
                    grouped_by_rank(ranks, said)));
    if (said.front().empty()) return;
  }
}

/// The parts of a tensor: their bytes, and types.
using Layout = std::vector<std::pair<std::int64_t, at::ScalarType>>;

/// Returns the bytes of all parts one after the other, each from a multiple of 8 on.
at::Tensor packed(const Tensors& tensors, const AllreduceOptions& options,
                  std::vector<Layout>& layouts) {
  Tensors pieces;
  for (const at::Tensor& tensor : tensors) {
    Layout& layout = layouts.emplace_back();
    for (const at::Tensor& part : encoded(tensor, options)) {
      const at::Tensor bytes = part.contiguous().view(at::kByte);
      layout.emplace_back(bytes.numel(), part.scalar_type());
      pieces.push_back(bytes);
      if (const std::int64_t rest = bytes.numel() % 8; rest != 0)
        pieces.push_back(at::zeros({8 - rest}, bytes.options()));
    }
  }
  return pieces.size() == 1 ? pieces.front() : at::cat(pieces);
}

/// Returns the results out of all ranks' parts.
Tensors sums(const Operation& operation, const AllreduceOptions& options,
             const std::vector<Layout>& layouts, std::size_t ranks) {
  const PlainArithmetic plain;
  const std::int64_t of_a_rank = operation.sent[1].numel();
  Tensors results;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    const at::Tensor& given = operation.given[i];
    at::Tensor sum;
    std::int64_t end = begin;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      Tensors parts;
      end = begin;
      for (const auto& [bytes, type] : layouts[i]) {
        parts.push_back(operation.received[1]
                            .narrow(0, static_cast<std::int64_t>(rank) * of_a_rank + end, bytes)
                            .view(type));
        end += (bytes + 7) / 8 * 8;
      }
      const at::Tensor values = decoded(parts, given, options.compression);
      sum = rank == 0 ? values.clone() : sum.add_(values);
    }
    begin = end;
    if (options.op == ReduceOp::Average) sum.div_(static_cast<std::int64_t>(ranks));
    if (options.postscale_factor != 1) sum.mul_(options.postscale_factor);
    results.push_back(sum.to(given.scalar_type()));
  }
  return results;
}

std::shared_ptr<Operation> lossy_allreduction(const Tensors& tensors,
                                              const AllreduceOptions& options, Form form) {
  detail::check_group(tensors, "allreduce", options.name, form);
  const at::Tensor& first = tensors.front();
  // before anything is put on a stream that cannot take it
  static_cast<void>(
      detail::stream_point(first, detail::title("allreduce", options.name, tensors, 0)));
  const AllgatherOptions gather{
      .name = options.name, .process_set = options.process_set, .deadline = options.deadline};
  auto operation = std::make_shared<Operation>();
  operation->given = tensors;
  operation->in_place = form == Form::InPlace;
  operation->submission = request(OpKind::Allgather, gather, detail::device_of(first));
  if (form == Form::Fresh && detail::needs_gradient(tensors))
    operation->backward = allreduce_rule(options);
  const PlainArithmetic plain;
  const std::string terms = terms_of(tensors, options);
  const at::Tensor said = at::empty({static_cast<std::int64_t>(terms.size())}, at::kByte);
  std::memcpy(said.mutable_data_ptr(), terms.data(), terms.size());
  std::vector<Layout> layouts;
  operation->add(said.to(first.device()), {}, "allreduce");
  operation->add(packed(tensors, options, layouts), {}, "allreduce");
  detail::allocate_rows(operation);
  operation->results.resize(operation->sent.size());
  operation->decode = [options, layouts = std::move(layouts),
                       ranks = options.process_set.ranks()](const Operation& done) {
    check_terms(done, options.name, ranks);
    return sums(done, options, layouts, ranks.size());
  };
  return operation;
}

std::shared_ptr<Operation> allreduction(const Tensors& tensors, const AllreduceOptions& options,
                                        Form form) {
  const bool adds = options.op == ReduceOp::Average || options.op == ReduceOp::Sum;
  if (adds && options.compression.needs_memory() && !tensors.empty() &&
      std::ranges::all_of(tensors, [](const at::Tensor& tensor) {
        return tensor.defined() && at::isFloatingType(tensor.scalar_type());
      }))
    return lossy_allreduction(tensors, options, form);
  return detail::operation_of_same_shapes(OpKind::Allreduce, tensors, options, form,
                                          options.compression, allreduce_rule);
}

}  // namespace

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (detail::may_run_small(tensor, options) && !detail::needs_gradient({tensor})) {
    SmallCall call = detail::small_call(OpKind::Allreduce, tensor, options);
    if (const auto output = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
        detail::run_small(call, output))
      return output;
  }
  return detail::start(allreduction({tensor}, options, Form::Fresh), After::Wait).wait().front();
}
at::Tensor allreduce_(at::Tensor tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (detail::may_run_small(tensor, options) &&
      !detail::changes_history(tensor, "allreduce", options.name)) {
    SmallCall call = detail::small_call(OpKind::Allreduce, tensor, options);
    if (detail::run_small_in_place(call, tensor)) return tensor;
  }
  return detail::run_in_place("allreduce", {tensor}, options, allreduction, allreduce_rule).front();
}
Handle<at::Tensor> allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(detail::start(allreduction({tensor}, options, Form::Fresh), After::Return));
}
Handle<at::Tensor> allreduce_async_(at::Tensor tensor, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::first(
      detail::start_in_place("allreduce", {tensor}, options, allreduction, allreduce_rule));
}

Tensors grouped_allreduce(const Tensors& tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(allreduction(tensors, options, Form::Fresh), After::Wait).wait();
}
Tensors grouped_allreduce_(Tensors tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  if (detail::run_small_in_place(tensors, options)) return tensors;
  return detail::run_in_place("allreduce", tensors, options, allreduction, allreduce_rule);
}
Handle<Tensors> grouped_allreduce_async(const Tensors& tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::start(allreduction(tensors, options, Form::Fresh), After::Return);
}
Handle<Tensors> grouped_allreduce_async_(Tensors tensors, const AllreduceOptions& options) {
  const WorldScope scope(options.world);
  return detail::start_in_place("allreduce", tensors, options, allreduction, allreduce_rule);
}

}  // namespace hvd
