#include "tests/support/gpu/nccl_world.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>

#include "tests/support/gpu/host_kernels.h"
#include "tests/support/sanitized.h"

namespace hvd::gpu::test {

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected " + what);
}

std::vector<std::byte> encoded(DataType dtype, const std::vector<double>& numbers) {
  if (is_complex(dtype))
    return encoded(dtype == DataType::Complex64 ? DataType::Float32 : DataType::Float64, numbers);
  std::vector<std::byte> bytes(numbers.size() * element_bytes(dtype));
  with_host_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Native;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto value = static_cast<T>(numbers[i]);
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
  });
  return bytes;
}

std::vector<double> decoded(DataType dtype, const std::vector<std::byte>& bytes) {
  if (is_complex(dtype))
    return decoded(dtype == DataType::Complex64 ? DataType::Float32 : DataType::Float64, bytes);
  std::vector<double> numbers(bytes.size() / element_bytes(dtype));
  with_host_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Native;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      T value;
      std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
      numbers[i] = static_cast<double>(value);
    }
  });
  return numbers;
}

Bytes IdExchange::give(int rank, const ProcessSetInfo& set, Bytes mine,
                       const std::atomic<bool>* failed, const std::function<void()>& pause) {
  std::unique_lock lock(mutex_);
  auto& given = given_[set.ranks];
  if (set.rank == 0) given.push_back(std::move(mine));
  arrived_.notify_all();
  const std::size_t turn = turns_[{rank, set.ranks}]++;
  while (given.size() <= turn) {
    if (failed != nullptr && *failed)
      throw std::runtime_error("the world failed during the exchange");
    if (!pause) arrived_.wait_for(lock, std::chrono::milliseconds(10));
    if (!pause) continue;
    lock.unlock();
    pause();
    lock.lock();
  }
  return given[turn];
}

BatchTraits Rank::traits(OpKind kind, DataType dtype, ReduceOp op) const {
  BatchTraits made;
  made.kind = kind;
  made.dtype = dtype;
  made.op = op;
  made.device = {DeviceKind::Cuda, rank};
  made.set = &set;
  return made;
}

Batch Rank::batch(const BatchTraits& traits, std::vector<Tensor>& tensors) {
  Batch made;
  made.traits = traits;
  made.ranks = traits.set->ranks;
  for (Tensor& tensor : tensors) {
    BatchMember member;
    member.name = tensor.name;
    member.count = static_cast<std::int64_t>(tensor.input.size() / element_bytes(traits.dtype));
    member.input = tensor.input.data();
    member.output = tensor.in_place ? tensor.input.data() : tensor.output.data();
    member.counts = tensor.counts;
    member.sends = tensor.sends;
    member.ready_event = tensor.ready_event;
    made.members.push_back(std::move(member));
  }
  return made;
}

void Rank::finish(Execution& execution) const {
  for (;;) {
    const Progress progress = execution.advance();
    if (progress == Progress::Done) return;
    if (world.failed) {
      backend->abort();
      throw std::runtime_error("another rank has failed");
    }
    if (progress != Progress::Idle) continue;
    if (world.baton() != nullptr) {
      std::this_thread::yield();
      world.pass(rank);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // many ranks on few cores
    }
  }
}

World::World(int ranks) {
  const FileDescriptor page(::memfd_create("abort word", MFD_CLOEXEC));
  if (::ftruncate(page.get(), AbortMark::kSharedBytes) != 0)
    throw std::runtime_error("no memory for the abort word");
  for (int rank = 0; rank < ranks; ++rank) {
    devices.push_back(std::make_unique<HostDevice>(cluster, rank));
    abort_pages_.push_back(
        std::make_unique<Mapping>(FileDescriptor(::dup(page.get())), AbortMark::kSharedBytes));
  }
}

World::~World() = default;

void World::run(const std::function<void(Rank&)>& body) {
  const std::size_t ranks = devices.size();
  std::vector<std::exception_ptr> errors(ranks);
  std::vector<bool> ended(ranks);
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body_of(static_cast<int>(rank), body);
      } catch (...) {
        errors[rank] = std::current_exception();
        failed = true;
      }
      const std::lock_guard lock(mutex);
      ended[rank] = true;
      changed.notify_all();
    });
  }
  {
    std::unique_lock lock(mutex);
    const auto all = [&] { return std::find(ended.begin(), ended.end(), false) == ended.end(); };
    constexpr int kSeconds = hvd::test::kSanitized ? 120 : 20;
    if (!changed.wait_for(lock, std::chrono::seconds(kSeconds), all)) {
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (!ended[rank])
          std::fprintf(stderr, "watchdog: rank %zu of %zu still runs after %d s %s\n", rank, ranks,
                       kSeconds, title.c_str());
      }
      std::abort();
    }
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    expect(devices[rank]->leaks().empty(), "no leaks, found " + devices[rank]->leaks());
    for (const int device : devices[rank]->contexts)
      expect(device == static_cast<int>(rank) || users_devices.contains(device),
             "no context of rank " + std::to_string(rank) + " on GPU " + std::to_string(device));
  }
  for (const auto& misuse : cluster.misuses()) expect(false, "no misuse, found " + misuse);
}

ProcessSetInfo World::everyone(int rank) const {
  ProcessSetInfo set;
  for (int r = 0; r < static_cast<int>(devices.size()); ++r) set.ranks.push_back(r);
  set.rank = rank;
  return set;
}

std::uint32_t* World::abort_word(int rank) const {
  return reinterpret_cast<std::uint32_t*>(
      abort_pages_[static_cast<std::size_t>(rank)]->bytes().data());
}

void World::set_schedule(const Schedule& schedule) {
  baton_.emplace(static_cast<int>(devices.size()), schedule.seed);
  cluster.order().one_host = false;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    devices[rank]->schedule = schedule;
    tables_.push_back(
        taking_turns(devices[rank]->table(), [this, rank] { pass(static_cast<int>(rank)); }));
  }
}

void World::pass(int rank) {
  devices[static_cast<std::size_t>(rank)]->go_on();
  baton_->pass(rank);
}

const GpuApi& World::table(int rank) const {
  const auto at = static_cast<std::size_t>(rank);
  return baton_ ? tables_[at] : devices[at]->table();
}

void World::body_of(int rank, const std::function<void(Rank&)>& body) {
  std::function<void()> pause;
  if (baton_) pause = [this, rank] { pass(rank); };
  const std::shared_ptr<Baton> turn(baton_ ? &*baton_ : nullptr, [rank](Baton* baton) {
    if (baton != nullptr) baton->leave(rank);
  });
  if (baton_) baton_->begin(rank);
  NcclOptions own = options;
  if (shares_abort_word) own.abort_word = abort_word(rank);
  if (!own.patience.interrupted) own.patience.interrupted = [this] { return failed.load(); };
  HostDevice& device = *devices[static_cast<std::size_t>(rank)];
  Rank self{*this, rank, everyone(rank), device, nullptr};
  self.backend = std::make_unique<NcclBackend>(
      table(rank), rank,
      [this, rank, pause](const ProcessSetInfo& set, Bytes mine) {
        return exchange_.give(rank, set, std::move(mine), &failed, pause);
      },
      std::move(own));
  body(self);
}

}  // namespace hvd::gpu::test
