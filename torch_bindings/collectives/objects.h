#pragma once
/// This file sends any object to other ranks: by its type's own rules, or as torch::save writes it.
/// All functions are collective over the process set. One thread at a time. They throw on all
/// ranks: InvalidArgument if a rank cannot write its object, Mismatch if ranks give different
/// types.
// Tested in tests/torch_bindings/optimizer/parameters_test.cc

#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "hvd/hvd.h"
#include "torch_bindings/platform/held_module.h"

#pragma GCC visibility push(default)
namespace hvd {

namespace detail {

/// Return the root's text, all ranks' texts. With a `failure` instead of a text, all ranks throw
/// InvalidArgument that has its words. `type`: what the text is of; ranks that say different ones
/// throw Mismatch, all of them.
std::string broadcast_text(std::string text, int root_rank, const ProcessSet& process_set,
                           const std::string& failure = {}, const std::string& type = {});
std::vector<std::string> allgather_text(const std::string& text, const ProcessSet& process_set,
                                        const std::string& failure = {},
                                        const std::string& type = {});
/// Returns the text of the exception now being handled, without LibTorch's stack of addresses;
/// never an empty one, which would say that nothing has failed. Call inside a `catch`.
std::string words_of_current_exception();

/// vector, deque, list, set, map and their kin.
template <class T>
concept Container =
    !std::is_same_v<T, std::string> && requires(T container, typename T::value_type element) {
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
template <class T>
inline constexpr bool kIsVariant = false;
template <class... Alternatives>
inline constexpr bool kIsVariant<std::variant<Alternatives...>> = true;
/// A view has a pointer to what another process does not have.
template <class T>
concept View = std::ranges::view<T> && std::ranges::borrowed_range<T>;

/// The type of a container's element while it is read: a map's has a constant key.
template <class T>
struct Readable {
  using Type = T;
};
template <class K, class V>
struct Readable<std::pair<const K, V>> {
  using Type = std::pair<K, V>;
};

/// Adds in words how write_object writes a T: types that are written alike have the same words.
/// `Outer`: those that it is part of.
template <class T, class... Outer>
void describe_type(std::string& words) {
  const auto add = [&words]<class Part>(std::type_identity<Part> /*part*/, const char* before) {
    words += before;
    describe_type<std::remove_cv_t<Part>, T, Outer...>(words);
  };
  if constexpr (std::is_same_v<T, std::string>) {
    words += "string";
  } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
    words += std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint";
    words += std::to_string(8 * sizeof(T));
  } else if constexpr ((std::is_same_v<T, Outer> || ...)) {
    words += c10::demangle(typeid(T).name());
  } else if constexpr (Container<T>) {
    add(std::type_identity<typename T::value_type>(), "list of ");
  } else if constexpr (IsOptional<T>::value) {
    add(std::type_identity<typename T::value_type>(), "optional ");
  } else if constexpr (kIsVariant<T>) {
    [&]<class... Alternatives>(std::type_identity<std::variant<Alternatives...>> /*type*/) {
      words += "(";
      (add(std::type_identity<Alternatives>(), " or "), ...);
      words += ")";
    }(std::type_identity<T>());
  } else if constexpr (TupleLike<T> && !std::is_trivially_copyable_v<T>) {
    [&]<std::size_t... kIndices>(std::index_sequence<kIndices...> /*all*/) {
      words += "(";
      (add(std::type_identity<std::tuple_element_t<kIndices, T>>(), kIndices == 0 ? "" : ", "),
       ...);
      words += ")";
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    words += c10::demangle(typeid(T).name());
  }
}

template <class T>
std::string words_of_type() {
  std::string words;
  describe_type<T>(words);
  return words;
}

/// Fills a module by `load`, which gets the device to read on. Each tensor stays on the device
/// where it is; a meta tensor, which is on none, goes where it is read.
void fill_in_place(torch::nn::Module& module,
                   const std::function<void(std::optional<at::Device>)>& load);

/// std types travel as their contents, everything else as torch::save writes it.
template <class T>
void write_object(std::ostream& out, const T& object) {
  static_assert(!View<T>,
                "a view (string_view, span) refers to memory of this process: give a "
                "string or a vector");
  if constexpr (std::is_same_v<T, std::string>) {
    write_object(out, object.size());
    out.write(object.data(), static_cast<std::streamsize>(object.size()));
  } else if constexpr (Container<T>) {
    write_object(out, static_cast<std::size_t>(object.size()));
    for (const typename T::value_type& element : object) write_object(out, element);
  } else if constexpr (IsOptional<T>::value) {
    write_object(out, object.has_value());
    if (object) write_object(out, *object);
  } else if constexpr (kIsVariant<T>) {
    write_object(out, object.index());
    std::visit([&out](const auto& held) { write_object(out, held); }, object);
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

/// Returns what write_object writes; if it throws, nothing, and why.
template <class T>
std::string written(const T& object, std::string& failure) {
  try {
    std::ostringstream out;
    write_object(out, object);
    return out.str();
  } catch (...) {
    failure = words_of_current_exception();
    return {};
  }
}

/// Throws InvalidArgument unless so many bytes, or items of a byte or more, are left.
void require_left(std::istream& in, std::size_t bytes);
/// Throws InvalidArgument if any are.
void require_end(std::istream& in);

template <class T>
void read_object(std::istream& in, T& object);

template <class Variant, std::size_t... kIndices>
void read_alternative(std::istream& in, Variant& object, std::size_t index,
                      std::index_sequence<kIndices...> /*all*/) {
  (void)((index == kIndices && (read_object(in, object.template emplace<kIndices>()), true)) ||
         ...);
}

template <class T>
void read_object(std::istream& in, T& object) {
  if constexpr (std::is_same_v<T, std::string>) {
    std::size_t size = 0;
    read_object(in, size);
    require_left(in, size);
    object.resize(size);
    in.read(object.data(), static_cast<std::streamsize>(size));
  } else if constexpr (Container<T>) {
    std::size_t size = 0;
    read_object(in, size);
    require_left(in, size);
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
  } else if constexpr (kIsVariant<T>) {
    std::size_t index = 0;
    read_object(in, index);
    read_alternative(in, object, index, std::make_index_sequence<std::variant_size_v<T>>());
  } else if constexpr (std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>) {
    require_left(in, sizeof object);
    in.read(reinterpret_cast<char*>(&object), sizeof object);
  } else if constexpr (TupleLike<T>) {
    std::apply([&in](auto&... elements) { (read_object(in, elements), ...); }, object);
  } else {
    std::string text;
    read_object(in, text);
    std::istringstream inner(text);
    if constexpr (HoldsModule<T>) {
      fill_in_place(held_module(object, "an object of another rank"),
                    [&](std::optional<at::Device> on) { torch::load(object, inner, on); });
    } else {
      torch::load(object, inner);
    }
  }
}

template <class T>
inline constexpr bool kHoldsModule = std::is_base_of_v<torch::detail::ModuleHolderIndicator, T>;
template <class T>
struct PointedModule {
  static constexpr bool kIsOne = false;
};
template <class M>
requires std::is_base_of_v<torch::nn::Module, M>
struct PointedModule<std::shared_ptr<M>> {
  static constexpr bool kIsOne = true;
  using Type = M;
};

/// Returns an object to read one like `object` into. torch::load fills tensors and modules where
/// they are, so it shares nothing with `object`, but for a module, which has to exist already.
template <class T>
T receiver(const T& object) {
  if constexpr (std::is_default_constructible_v<T> && !kHoldsModule<T> &&
                !PointedModule<T>::kIsOne) {
    return T{};
  } else {
    return object;
  }
}

/// Returns the same, also a module of its own, on the device of the given one.
template <class T>
T receiver_apart(const T& object) {
  if constexpr (kHoldsModule<T>) {
    return T(std::dynamic_pointer_cast<typename T::ContainedType>(object->clone()));
  } else if constexpr (PointedModule<T>::kIsOne) {
    using Module = typename PointedModule<T>::Type;
    if constexpr (std::is_default_constructible_v<Module>) {
      const auto apart = std::make_shared<Module>();
      const auto parameters = object ? object->parameters() : std::vector<at::Tensor>();
      if (!parameters.empty()) apart->to(parameters.front().device());
      return apart;
    } else {
      return std::dynamic_pointer_cast<Module>(object->clone());
    }
  } else {
    return receiver(object);
  }
}

}  // namespace detail

/// Returns the root's object, on every rank. `T`: what torch::save and torch::load can carry (a
/// module, held or by std::shared_ptr, is filled in place, and stays on this rank's device),
/// trivially copyable types, and std::string, containers, pair, tuple, array, optional and variant
/// of these. Throws on all ranks: InvalidArgument if the root cannot write its object, with the
/// reason; Mismatch if `T` is written differently, or the root is another, on some.
template <class T>
T broadcast_object(const T& object, int root_rank, const ProcessSet& process_set = {}) {
  static_assert(!std::is_base_of_v<torch::optim::Optimizer, T>,
                "an optimizer cannot be returned: call broadcast_optimizer_state()");
  std::string text, failure;
  if (rank() == root_rank) text = detail::written(object, failure);
  std::istringstream in(detail::broadcast_text(std::move(text), root_rank, process_set, failure,
                                               detail::words_of_type<T>()));
  T received = detail::receiver(object);
  detail::read_object(in, received);
  detail::require_end(in);
  return received;
}

/// Returns the objects of all ranks of the set, in rank order, on every rank. Throws on
/// all ranks: InvalidArgument if any cannot write its object, Mismatch as broadcast_object does.
template <class T>
std::vector<T> allgather_object(const T& object, const ProcessSet& process_set = {}) {
  std::string failure;
  const std::string mine = detail::written(object, failure);
  std::vector<T> objects;
  for (const auto& text :
       detail::allgather_text(mine, process_set, failure, detail::words_of_type<T>())) {
    std::istringstream in(text);
    T received = detail::receiver_apart(object);
    detail::read_object(in, received);
    detail::require_end(in);
    objects.push_back(std::move(received));
  }
  return objects;
}

}  // namespace hvd
#pragma GCC visibility pop
