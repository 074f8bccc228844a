#pragma once
/// These functions take values apart that hold tensors: a tensor, and what is made of tensors by
/// optional, vector (and other lists), array, pair, tuple, map, torch::OrderedDict and
/// torch::data::Example, one within another. Everything else holds none. They are for
/// data_parallel() (whose replicas return no Example), prefetch_to_device(), checkpoint() and
/// DistributedDataParallel, and pure.
// Tested in tests/torch_bindings/replicas/data_parallel_structures_test.cc

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <algorithm>
#include <concepts>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/errors.h"

#pragma GCC visibility push(default)
namespace hvd::detail {

template <class T>
concept OptionalOfTensors = std::same_as<T, std::optional<typename T::value_type>>;
template <class T>
concept TupleOfTensors = requires {
  std::tuple_size<T>::value;
};
template <class T>
concept MapOfTensors = requires(const T& map, const typename T::key_type& key) {
  map.find(key)->second;
};
template <class T>
concept DictOfTensors = requires(T& dict, const std::string& key) {
  dict.find(key);
  dict.begin()->value();
  dict.begin()->key();
};
template <class T>
concept ExampleOfTensors = requires(T& example) {
  typename T::DataType;
  typename T::TargetType;
  example.data;
};
template <class T>
concept ListOfTensors =
    !MapOfTensors<T> && !DictOfTensors<T> && !std::is_convertible_v<T, std::string> &&
    requires(T & list, typename T::value_type& value) {
  list.push_back(value);
};

/// Calls `visit` with each tensor of `value`, in an order that stays while `value` does: with those
/// that are defined, or with all.
template <bool kAll = false, class T, class Visit>
void visit_tensors(T& value, const Visit& visit) {
  using Plain = std::remove_const_t<T>;
  if constexpr (std::same_as<Plain, at::Tensor>) {
    if (kAll || value.defined()) visit(value);
  } else if constexpr (OptionalOfTensors<Plain>) {
    if (value) visit_tensors<kAll>(*value, visit);
  } else if constexpr (TupleOfTensors<Plain>) {
    std::apply([&](auto&... members) { (visit_tensors<kAll>(members, visit), ...); }, value);
  } else if constexpr (MapOfTensors<Plain>) {
    for (auto& [key, member] : value) visit_tensors<kAll>(member, visit);
  } else if constexpr (DictOfTensors<Plain>) {
    for (auto& item : value) visit_tensors<kAll>(item.value(), visit);
  } else if constexpr (ExampleOfTensors<Plain>) {
    visit_tensors<kAll>(value.data, visit);
    if constexpr (requires { value.target; }) visit_tensors<kAll>(value.target, visit);
  } else if constexpr (ListOfTensors<Plain>) {
    for (auto&& member : value) visit_tensors<kAll>(member, visit);
  }
}

/// Throws InvalidArgument: replicas returned values that differ in `what`.
[[noreturn]] void refuse_to_join(const char* what);

/// Calls `visit` with the tensors that stand at the same place in all of `values`, of which there
/// is one at least, in the order of visit_tensors(*values[0]). Throws InvalidArgument if something
/// else than tensors is not the same in all.
template <class T, class Visit>
void visit_together(const std::vector<const T*>& values, const Visit& visit) {
  const auto each = [&]<class Member>(const auto& member_of, const Member* /*type*/) {
    std::vector<const Member*> members;
    for (const T* value : values) members.push_back(member_of(*value));
    visit_together(members, visit);
  };
  const T& first = *values.front();
  const auto same = [&](const char* what, const auto& of) {
    for (const T* value : values)
      if (of(*value) != of(first)) refuse_to_join(what);
  };
  if constexpr (std::same_as<T, at::Tensor>) {
    same("which tensors are undefined", [](const T& value) { return value.defined(); });
    std::vector<at::Tensor> tensors;
    for (const T* value : values) tensors.push_back(*value);
    if (first.defined()) visit(tensors);
  } else if constexpr (OptionalOfTensors<T>) {
    same("which optional values there are", [](const T& value) { return value.has_value(); });
    if (first) each([](const T& value) { return &*value; }, &*first);
  } else if constexpr (TupleOfTensors<T>) {
    [&]<std::size_t... kAt>(std::index_sequence<kAt...>) {
      (each([](const T& value) { return &std::get<kAt>(value); }, &std::get<kAt>(first)), ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (MapOfTensors<T>) {
    same("how many entries a map has", [](const T& value) { return value.size(); });
    for (const auto& [key, member] : first)
      each(
          [&key = key](const T& value) {
            const auto found = value.find(key);
            if (found == value.end()) refuse_to_join("the keys of a map");
            return &found->second;
          },
          &member);
  } else if constexpr (DictOfTensors<T>) {
    same("the keys of a dictionary", [](const T& value) { return value.keys(); });
    for (const auto& item : first)
      each([&item](const T& value) { return value.find(item.key()); }, &item.value());
  } else if constexpr (ListOfTensors<T>) {
    same("how many members a list has", [](const T& value) { return value.size(); });
    if constexpr (std::same_as<typename T::value_type, bool>) {
      same("what is no tensor", [](const T& value) { return value; });
    } else {
      std::vector<decltype(first.begin())> at;
      for (const T* value : values) at.push_back(value->begin());
      for (; at.front() != first.end();
           std::for_each(at.begin(), at.end(), [](auto& place) { ++place; })) {
        std::vector<const typename T::value_type*> members;
        for (const auto& place : at) members.push_back(&*place);
        visit_together(members, visit);
      }
    }
  } else {
    static_assert(std::equality_comparable<T>,
                  "what a replicated module returns beside tensors must be the same on all "
                  "replicas, so it must be comparable by ==");
    same("what is no tensor", [](const T& value) -> const T& { return value; });
  }
}

}  // namespace hvd::detail
#pragma GCC visibility pop
