#pragma once
/// Room card: the same start on all ranks: parameters, optimizer state, any object. All functions are collective over the process
/// set. Errors: Mismatch where the ranks' models differ, naming what each sent; InvalidArgument for a bad root.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>
#include <torch/serialize.h>

#include <array>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/hvd.h"

namespace hvd {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Parameters and buffers of the root's module, on every rank, in place.
void broadcast_parameters(const torch::nn::Module& module, int root_rank, const ProcessSet& process_set = {});
/// In place; undefined tensors are passed over and must be so on all ranks.
void broadcast_parameters(const NamedTensors& tensors, int root_rank, const ProcessSet& process_set = {});
/// What `named_parameters()` of a module gives. A template, so that braces mean the list of pairs.
template <class Name>
void broadcast_parameters(const torch::OrderedDict<Name, at::Tensor>& tensors, int root_rank, const ProcessSet& process_set = {}) {
  broadcast_parameters(tensors.pairs(), root_rank, process_set);
}
template <class Module>
void broadcast_parameters(const torch::nn::ModuleHolder<Module>& module, int root_rank, const ProcessSet& process_set = {}) {
  broadcast_parameters(static_cast<const torch::nn::Module&>(*module), root_rank, process_set);
}

/// State (momenta, step counters...) and param-group options (learning rate, betas...) of the root's optimizer, bit for bit, on every
/// rank. The parameters are not touched, and `step()` is not called. The optimizer must support torch::save and torch::load.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank, const ProcessSet& process_set = {});

namespace detail {

std::string broadcast_text(std::string text, int root_rank, const ProcessSet& process_set);
std::vector<std::string> allgather_text(const std::string& text, const ProcessSet& process_set);

/// vector, deque, list, set, map and their kin.
template <class T>
concept Container = !std::is_same_v<T, std::string> && requires(T container, typename T::value_type element) {
  container.clear();
  container.size();
  container.insert(container.end(), std::move(element));
};
/// pair, tuple, array
template <class T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

/// What a container's element is while it is read: a map's has a constant key.
template <class T>
struct Readable {
  using Type = T;
};
template <class K, class V>
struct Readable<std::pair<const K, V>> {
  using Type = std::pair<K, V>;
};

/// std types travel as their contents, everything else as torch::save writes it.
template <class T>
void write_object(std::ostream& out, const T& object) {
  if constexpr (std::is_same_v<T, std::string>) {
    write_object(out, object.size());
    out.write(object.data(), static_cast<std::streamsize>(object.size()));
  } else if constexpr (Container<T>) {
    write_object(out, static_cast<std::size_t>(object.size()));
    for (const typename T::value_type& element : object) write_object(out, element);
  } else if constexpr (IsOptional<T>::value) {
    write_object(out, object.has_value());
    if (object) write_object(out, *object);
  } else if constexpr (std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>) {
    out.write(reinterpret_cast<const char*>(&object), sizeof object);
  } else if constexpr (TupleLike<T>) {
    std::apply([&out](const auto&... elements) { (write_object(out, elements), ...); }, object);
  } else {
    std::ostringstream inner;
    torch::save(object, inner);
    write_object(out, inner.str());
  }
}

template <class T>
void read_object(std::istream& in, T& object) {
  if constexpr (std::is_same_v<T, std::string>) {
    std::size_t size = 0;
    read_object(in, size);
    object.resize(size);
    in.read(object.data(), static_cast<std::streamsize>(size));
  } else if constexpr (Container<T>) {
    std::size_t size = 0;
    read_object(in, size);
    object.clear();
    for (std::size_t i = 0; i < size; ++i) {
      typename Readable<typename T::value_type>::Type element{};
      read_object(in, element);
      object.insert(object.end(), std::move(element));
    }
  } else if constexpr (IsOptional<T>::value) {
    bool has = false;
    read_object(in, has);
    object.reset();
    if (has) read_object(in, object.emplace());
  } else if constexpr (std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>) {
    in.read(reinterpret_cast<char*>(&object), sizeof object);
  } else if constexpr (TupleLike<T>) {
    std::apply([&in](auto&... elements) { (read_object(in, elements), ...); }, object);
  } else {
    std::string text;
    read_object(in, text);
    std::istringstream inner(text);
    torch::load(object, inner);
  }
}

template <class T>
inline constexpr bool kHoldsModule = std::is_base_of_v<torch::detail::ModuleHolderIndicator, T>;

/// What to read an object like `object` into. torch::load fills tensors and modules where they are, so it shares nothing with `object`,
/// but for a module, which has to exist already.
template <class T>
T receiver(const T& object) {
  if constexpr (std::is_default_constructible_v<T> && !kHoldsModule<T>) {
    return T{};
  } else {
    return object;
  }
}

}  // namespace detail

/// The root's object on every rank. `T`: what torch::save and torch::load can carry (a module is filled in place), trivially copyable
/// types, and std::string, containers, pair, tuple, array and optional of these.
template <class T>
T broadcast_object(const T& object, int root_rank, const ProcessSet& process_set = {}) {
  std::ostringstream out;
  if (rank() == root_rank) detail::write_object(out, object);
  std::istringstream in(detail::broadcast_text(out.str(), root_rank, process_set));
  T received = detail::receiver(object);
  detail::read_object(in, received);
  return received;
}

/// The objects of all ranks of the set, in rank order, on every rank.
template <class T>
std::vector<T> allgather_object(const T& object, const ProcessSet& process_set = {}) {
  std::ostringstream out;
  detail::write_object(out, object);
  std::vector<T> objects;
  for (const auto& text : detail::allgather_text(out.str(), process_set)) {
    std::istringstream in(text);
    T received = detail::receiver(object);
    if constexpr (detail::kHoldsModule<T>) received = T(std::dynamic_pointer_cast<typename T::ContainedType>(object->clone()));
    detail::read_object(in, received);
    objects.push_back(std::move(received));
  }
  return objects;
}

}  // namespace hvd
