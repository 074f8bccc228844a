#pragma once
/// The rendezvous over a store of the tests'.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "hvd/world.h"

namespace hvd::test {

template <class Store>
Rendezvous rendezvous_of(const std::shared_ptr<Store>& store, int rank, int size,
                         std::string name) {
  Rendezvous made;
  made.rank = rank;
  made.size = size;
  made.name = std::move(name);
  made.set = [store](const std::string& key, const Rendezvous::Value& value) {
    store->set(key, value);
  };
  made.get = [store](const std::string& key, std::chrono::milliseconds time) {
    return store->get(key, time);
  };
  made.add = [store](const std::string& key, std::int64_t amount) {
    return store->add(key, amount);
  };
  return made;
}

}  // namespace hvd::test
