#pragma once
/// This is the front door of the core: it works on raw buffers and needs no LibTorch. All functions
/// throw NotInitialized before `init()` and may be called by any thread unless they say otherwise;
/// those marked collective must be called by all ranks. What the operations mean, and who learns of
/// which error: docs/semantics.md.
// Tested in tests/contract/endpoint_front.cc, tests/torch_bindings/collectives/world_test.cc

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/config.h"
#include "hvd/decisions.h"
#include "hvd/errors.h"
#include "hvd/options.h"
#include "hvd/result_bytes.h"
#include "hvd/stats.h"
#include "hvd/submission.h"
#include "hvd/types.h"
#include "hvd/world.h"

namespace hvd {
class Engine;
}  // namespace hvd

#pragma GCC visibility push(default)
namespace hvd {

// ------------------------------------------------------------------------------- life and topology

/// Starts the library with these knobs. Collective. Finds the other ranks as the environment says
/// (docs/configuration.md, "Starting ranks"): through MPI, or without it through a store of rank
/// 0's, on one host or several. Makes a world of one where no launcher has started this process. An
/// MPI that the program has initialised is adopted, and not finalised. Does nothing while the
/// library runs. Throws InvalidArgument for a wrong knob, or variables of a launcher that
/// contradict each other; Mismatch if the ranks' knobs differ; BackendError if MPI or the operating
/// system refuses, or if ranks that were announced are not to be found; RankFailed if a rank dies
/// meanwhile: on all ranks, if on one. It may then be called again, as after a world that has
/// failed. Where a rank has died, MPI cannot bring the others together any more; a store can, with
/// a process in its place, or fewer ranks by variables that the program has set. An MPI that is
/// adopted may have any thread level where all ranks share memory. Where they do not, its messages
/// and NCCL's ids need MPI_THREAD_SERIALIZED at least (BackendError on all ranks otherwise; with
/// HVD_WIRE=ucx the ids alone need it), and the program then calls no MPI of its own between
/// `init()` and `shutdown()`; MPI_THREAD_MULTIPLE lets it. MPI_Finalize without `shutdown()` does
/// what that does. A process that is forked from a rank is none: there the functions below throw
/// NotInitialized, and what ranks share is a private copy.
void init(const Config& config);
/// Starts the library with the environment's knobs: `init(Config::from_environment())`. Collective.
void init();
/// Ends the library. Collective, but returns while others go on: once what this rank has submitted
/// is over, and 0.3 s later at most. What then is still pending, as the others submit it no more,
/// fails with Shutdown, once each. A thread of the library goes on with what the others need of
/// this rank (not where MPI was started without MPI_THREAD_MULTIPLE: then it waits for them).
/// `init()` may follow again; it waits for the others, as does the end of the process. Does nothing
/// where the library does not run, or in a function given to `Handle::then` while another thread is
/// in it; `init()` there would wait for that thread, and that one for it, for 10 s. A process that
/// ends with status 0 and without it, by return from main() or exit(), does the same; one that ends
/// in another way, or by an exit() in a signal handler that has interrupted a function of the
/// library, waits for nobody, and the others get RankFailed.
void shutdown();
/// Ends the world at once, on all ranks: what is pending fails, and what is called later, with a
/// RankFailed that says "rank 1 called hvd::abort(): " and the reason, cut to about 2,000 bytes; of
/// several, and of other failures, the first stays. Not collective; waits for nobody. `shutdown()`
/// then returns at once on every rank, and `init()` may follow.
void abort(const std::string& reason);
/// Returns whether the library runs, and this process was not forked from a rank; inside of a
/// WorldScope whether its world was not left. Throws nothing.
bool is_initialized();

/// Returns this process's number among all ranks, from 0.
int rank();
/// Returns the number of all ranks.
int size();
/// Returns this process's number among the ranks of this host, from 0.
int local_rank();
/// Returns the number of ranks on this host.
int local_size();
/// Returns the number of this host, from 0.
int cross_rank();
/// Returns the number of hosts.
int cross_size();
/// Returns whether all hosts have the same number of ranks.
bool is_homogeneous();

/// Returns whether this build can use NCCL; throws nothing.
bool nccl_built();
/// Returns whether this build can use CUDA; throws nothing.
bool cuda_built();
/// Returns whether MPI may be called by several threads at once (MPI_THREAD_MULTIPLE).
bool mpi_threads_supported();
/// Returns one line on what this build can do and this run uses. Rank 0 prints it at `init()`.
std::string backend_description();

/// Returns the set of all ranks, whose id is 0.
ProcessSet global_process_set();
/// Returns the set that `Config::process_sets` made, from 1 on; 0 is the global one. Throws
/// InvalidArgument for an unknown id.
ProcessSet process_set(int id);
/// Makes a process set. Collective over all ranks, with the same list of distinct ranks on each;
/// throws Mismatch on all otherwise.
ProcessSet add_process_set(const std::vector<int>& ranks);
/// Removes a process set. Collective over all ranks. What is pending in the set fails with
/// InvalidArgument; its id is never used again. The global set stays: throws InvalidArgument for
/// it.
void remove_process_set(const ProcessSet& process_set);

/// Returns counters since `init()`, of this rank.
Stats stats();

/// Writes a timeline from now on, into one file of all ranks. Collective over all ranks, none of
/// which may have joined. It says when each tensor was submitted, agreed, launched and done, for
/// Perfetto and chrome://tracing (what the slices mean: hvd/timeline/timeline.h). The file is made
/// anew; it is valid JSON whenever its lock can be had (`flock -s FILE cp FILE COPY` while ranks
/// write), also when ranks are killed, unless within a call that writes, until another rank writes;
/// it grows to `Config::timeline_max_bytes` at most. Each host that does not see rank 0's file
/// writes one of its own. Throws InvalidArgument, on all ranks, if one cannot write `path` or a
/// timeline is being written already.
void start_timeline(const std::string& path, const TimelineOptions& options = {});
/// Ends this rank's part of the timeline; not collective. What it has to say is in the file when
/// this returns. Does nothing where there is no timeline. `shutdown()` does the same.
void stop_timeline();

// ------------------------------------------------------------------------------------- collectives

/// A Buffer is a contiguous tensor in memory that the caller keeps until the operation is done.
struct Buffer {
  void* data = nullptr;                ///< the first element; null only where there is none
  DataType dtype = DataType::Float32;  ///< the type of its elements
  Shape shape{};                       ///< the sizes of its dimensions
  Device device{};                     ///< where `data` is
  /// True if the bytes from its end to the next multiple of `kMemberAlignment` are unused and may
  /// be overwritten (see `allocate_on_device`).
  bool padded = false;
};

/// The options of operations on buffers.
template <>
struct OptionsOf<Buffer> {
  using Allreduce = AllreduceOptions;          ///< those of allreduce
  using Broadcast = BroadcastOptions;          ///< those of broadcast
  using Allgather = AllgatherOptions;          ///< those of allgather
  using Alltoall = AlltoallBufferOptions;      ///< those of alltoall
  using Reducescatter = ReducescatterOptions;  ///< those of reducescatter
  using Peer = PeerOptions;                    ///< those of send and recv
};
/// The same of several buffers.
template <>
struct OptionsOf<std::vector<Buffer>> : OptionsOf<Buffer> {};

/// A Handle stands for the result of an operation under way. Copies share it. It is owned by the
/// caller and may outlive `shutdown()`.
template <class T>
class Handle {
 public:
  /// Makes an empty handle, on which its functions throw InvalidArgument.
  Handle() = default;
  /// Makes the handle of an operation; for front ends. `result` is called once for each `wait()`,
  /// after the operation has ended well.
  Handle(std::shared_ptr<Engine> engine, std::shared_ptr<HandleState> pending,
         std::function<T()> result)
      : engine_(std::move(engine)), pending_(std::move(pending)), result_(std::move(result)) {}
  /// Blocks until the operation is done and returns what the plain form returns, or throws what it
  /// failed with. For tensors on a GPU until it is enqueued there: the caller's current stream then
  /// waits for it, and an error that the device meets later is the next operation's.
  T wait() const;
  /// Returns whether `wait()` would return, or throw, at once. Does a little driving, so that
  /// polling alone gets there. Of what was compressed there is a result after `wait()` only.
  [[nodiscard]] bool done() const;
  /// Polls until that is so, but for no longer than `time`, and returns whether it is. The
  /// operation goes on; where ranks wait for one another (Deadlock), this is no wait.
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds time) const;
  /// Has `function` called, once, when the operation has ended, well or not: at once if it has. It
  /// takes a `const Handle<T>&`, whose functions then return at once, or nothing; the result of
  /// what was compressed is there once it has called `wait()`. One thread of the process calls all
  /// such functions, one after the other; those of one operation in the order in which they were
  /// given. That thread holds no lock of the library: a function may submit and wait, but not for
  /// what another such function does, and its operations need names where the order of its calls
  /// may differ between ranks. What it throws is logged. An operation's memory that the library
  /// keeps (tensors, copies) ends with its last function, on a GPU no earlier than its work there.
  /// `shutdown()` has the functions of what it ends called, and waits for them for up to 10 s, but
  /// not in one of them; nothing is called in a process that was forked. Throws std::system_error
  /// if there can be no such thread.
  template <class Function>
  void then(Function function) const;
  /// Returns a handle of the same operation with another view of its result.
  template <class U, class View>
  Handle<U> map(View view) const {
    return {engine_, pending_,
            [result = result_, view = std::move(view)] { return view(result()); }};
  }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<HandleState> pending_;
  std::function<T()> result_;
};

/// Does what `handle.wait()` does.
template <class T>
T synchronize(const Handle<T>& handle) {
  return handle.wait();
}
/// Does what `handle.done()` does.
template <class T>
bool poll(const Handle<T>& handle) {
  return handle.done();
}

/// Combines `input` of all ranks into `output` on each; they may be one buffer. Those on the host
/// may overlap in part; the input is lost then, also by a call that fails. A wrong call throws
/// InvalidArgument or DuplicateName at once; ranks that disagree all get Mismatch at `wait()`.
Handle<void> allreduce_async(const Buffer& input, const Buffer& output,
                             const AllreduceOptions& options = {});
/// Does what `allreduce_async` does, and waits.
void allreduce(const Buffer& input, const Buffer& output, const AllreduceOptions& options = {});
/// Combines several tensors, all or nothing: they become ready together, travel together and fail
/// together. As many outputs as inputs.
Handle<void> grouped_allreduce_async(const std::vector<Buffer>& inputs,
                                     const std::vector<Buffer>& outputs,
                                     const AllreduceOptions& options = {});
/// Does what `grouped_allreduce_async` does, and waits.
void grouped_allreduce(const std::vector<Buffer>& inputs, const std::vector<Buffer>& outputs,
                       const AllreduceOptions& options = {});

/// Makes `buffer` of all ranks what `buffer` of the root is. Shapes and types must be equal.
Handle<void> broadcast_async(const Buffer& buffer, const BroadcastOptions& options = {});
/// Does what `broadcast_async` does, and waits.
void broadcast(const Buffer& buffer, const BroadcastOptions& options = {});

/// A Gathered is a result whose size is known only when all ranks have said theirs. It is on the
/// host: for buffers on a GPU the functions that return one, or an Exchanged, throw InvalidArgument
/// at the call. There the forms `_into` memory of the caller's work.
struct Gathered {
  ResultBytes data;  ///< its elements, in memory of its own
  Shape shape;       ///< its sizes; the first is that of all ranks' together
};
/// Concatenates all ranks' `input` along the first dimension, which may differ between ranks and be
/// 0. The others must be equal.
Handle<Gathered> allgather_async(const Buffer& input, const AllgatherOptions& options = {});
/// Does what `allgather_async` does, and waits.
Gathered allgather(const Buffer& input, const AllgatherOptions& options = {});

/// Concatenates each of several tensors, all or nothing.
Handle<std::vector<Gathered>> grouped_allgather_async(const std::vector<Buffer>& inputs,
                                                      const AllgatherOptions& options = {});
/// Does what `grouped_allgather_async` does, and waits.
std::vector<Gathered> grouped_allgather(const std::vector<Buffer>& inputs,
                                        const AllgatherOptions& options = {});

/// An Exchanged is what an alltoall brought this rank.
struct Exchanged {
  ResultBytes data;                           ///< its elements, in memory of its own
  Shape shape;                                ///< its sizes
  std::vector<std::int64_t> received_splits;  ///< rows that came from each rank of the set
};
/// Sends each rank its rows of `input`, in the order of the ranks, and returns what came for this
/// one, likewise. Rows beyond the sum of the splits are not sent.
Handle<Exchanged> alltoall_async(const Buffer& input, const AlltoallBufferOptions& options = {});
/// Does what `alltoall_async` does, and waits.
Exchanged alltoall(const Buffer& input, const AlltoallBufferOptions& options = {});

/// Combines `input` of all ranks (Average, Sum) and returns this rank's rows of the result: the
/// first `rows % size` ranks of the set get one row more than the others.
Handle<Gathered> reducescatter_async(const Buffer& input, const ReducescatterOptions& options = {});
/// Does what `reducescatter_async` does, and waits.
Gathered reducescatter(const Buffer& input, const ReducescatterOptions& options = {});
/// Combines several tensors, all or nothing, and returns this rank's rows of each.
Handle<std::vector<Gathered>> grouped_reducescatter_async(const std::vector<Buffer>& inputs,
                                                          const ReducescatterOptions& options = {});
/// Does what `grouped_reducescatter_async` does, and waits.
std::vector<Gathered> grouped_reducescatter(const std::vector<Buffer>& inputs,
                                            const ReducescatterOptions& options = {});

/// Does what `allgather` does, and writes the result to `output`: memory of the caller's, of the
/// input's type, device and dimensions beyond the first. Throws InvalidArgument at the call where
/// it cannot fit, and Mismatch on all ranks, at `wait()`, where some rank's output has more or
/// fewer rows than come; nothing is written then. Host buffers may overlap; the input is copied
/// first then.
Handle<void> allgather_into_async(const Buffer& output, const Buffer& input,
                                  const AllgatherOptions& options = {});
/// Does what `allgather_into_async` does, and waits.
void allgather_into(const Buffer& output, const Buffer& input,
                    const AllgatherOptions& options = {});
/// Does what `alltoall` does, and writes the rows to `output`, as `allgather_into_async` does.
/// `wait()` returns how many came from each rank.
Handle<std::vector<std::int64_t>> alltoall_into_async(const Buffer& output, const Buffer& input,
                                                      const AlltoallBufferOptions& options = {});
/// Does what `alltoall_into_async` does, and waits.
std::vector<std::int64_t> alltoall_into(const Buffer& output, const Buffer& input,
                                        const AlltoallBufferOptions& options = {});
/// Does what `reducescatter` does, and writes this rank's rows to `output`, as
/// `allgather_into_async` does.
Handle<void> reducescatter_into_async(const Buffer& output, const Buffer& input,
                                      const ReducescatterOptions& options = {});
/// Does what `reducescatter_into_async` does, and waits.
void reducescatter_into(const Buffer& output, const Buffer& input,
                        const ReducescatterOptions& options = {});

/// A PersistentWork is what a PersistentHandle stands for; for front ends. Its functions are called
/// by one thread at a time.
template <class T>
class PersistentWork {
 public:
  PersistentWork() = default;
  PersistentWork(const PersistentWork&) = delete;
  PersistentWork& operator=(const PersistentWork&) = delete;
  virtual ~PersistentWork() = default;
  /// Starts the operation, as `PersistentHandle::start()` does.
  virtual void start() = 0;
  /// Blocks until it is done, as `PersistentHandle::wait()` does.
  virtual T wait() = 0;
  /// Returns whether `wait()` would return at once, as `PersistentHandle::done()` does.
  virtual bool done() = 0;
};

/// A PersistentHandle stands for an operation that is described once (`allreduce_init` and the
/// others) and then started again and again, always on the same memory, as MPI-4's persistent
/// collectives are: what can be checked and looked up is so once. To the other ranks it is the
/// operation of its name: one rank may call the plain form under that name where another starts
/// this. Ranks may start several in different orders, and have several under way at once. Without a
/// name it gets one that stays its own, the same on all ranks that make such operations of one kind
/// and process set in the same order. `_init` is local and sends nothing; it throws InvalidArgument
/// for what this rank alone can see. One thread at a time may use it; its owner may move it.
///
/// Its end waits for nothing if it is not under way. If it is, on tensors it waits for nothing
/// either: the operation goes on and keeps their memory; on buffers it blocks until the operation
/// has ended or failed, as they are the caller's.
template <class T>
class PersistentHandle {
 public:
  /// Makes an empty one, whose functions throw InvalidArgument.
  PersistentHandle() = default;
  /// Makes the handle of such an operation; for front ends.
  explicit PersistentHandle(std::unique_ptr<PersistentWork<T>> work) : work_(std::move(work)) {}
  /// Starts the operation and returns, as the `_async` form does: the memory must not be changed or
  /// read before `wait()`. Throws what that form throws at the call (it is not under way then),
  /// InvalidArgument if it is under way already, if a tensor's memory, shape or strides are not
  /// those of `_init` any more, and if `shutdown()` and `init()` were called since, and
  /// NotInitialized after `shutdown()`.
  void start() { work().start(); }
  /// Blocks until the operation is done and returns what the form into the same memory returns, or
  /// throws what it failed with; either way it may be started again. Returns at once, with the last
  /// result if there is one, if it is not under way.
  T wait() { return work().wait(); }
  /// Returns whether `wait()` would return, or throw, at once: true also if it is not under way.
  /// Does a little driving, so that polling alone gets there.
  [[nodiscard]] bool done() const { return work().done(); }

 private:
  [[nodiscard]] PersistentWork<T>& work() const {
    if (!work_)
      throw InvalidArgument(
          "an empty PersistentHandle; assign what allreduce_init or another returns first");
    return *work_;
  }
  std::unique_ptr<PersistentWork<T>> work_;
};

/// Describes an allreduce of `input` into `output`, which may be the same buffer. The buffers'
/// memory must stay as long as it is started.
PersistentHandle<void> allreduce_init(const Buffer& input, const Buffer& output,
                                      const AllreduceOptions& options = {});
/// Describes an allreduce in place.
PersistentHandle<void> allreduce_init(const Buffer& buffer, const AllreduceOptions& options = {});
/// Describes a broadcast.
PersistentHandle<void> broadcast_init(const Buffer& buffer, const BroadcastOptions& options = {});
/// Describes what `allgather_into` does.
PersistentHandle<void> allgather_init(const Buffer& output, const Buffer& input,
                                      const AllgatherOptions& options = {});
/// Describes what `alltoall_into` does; `wait()` returns how many rows came from each rank.
PersistentHandle<std::vector<std::int64_t>> alltoall_init(
    const Buffer& output, const Buffer& input, const AlltoallBufferOptions& options = {});
/// Describes what `reducescatter_into` does.
PersistentHandle<void> reducescatter_init(const Buffer& output, const Buffer& input,
                                          const ReducescatterOptions& options = {});

/// Says that this rank has no more to give, and blocks. Until all ranks of the set have joined, its
/// values in allreduces count as zeros (an average still divides by the size of the set), and
/// operations that cannot do without it raise Joined on the others. Returns, on all ranks, the one
/// that joined last. Meanwhile submissions of this rank to the set throw Joined.
int join(const ProcessSet& process_set = {});
/// Does what `join` does without waiting: has said so when it returns.
Handle<int> join_async(const ProcessSet& process_set = {});

/// Blocks until all ranks of the set have called it.
void barrier(const ProcessSet& process_set = {});
/// Does what `barrier` does without waiting: what it returns is done when all have called either.
Handle<void> barrier_async(const ProcessSet& process_set = {});

/// Sends `buffer` to one rank, which receives it by recv with this tag: messages between two ranks
/// with one tag in the order in which they were sent. Returns when the buffer may be used again: of
/// up to 8 KiB (4 with many ranks) mostly at once, otherwise when it has been received. Throws
/// InvalidArgument at the call: no such rank, kAnyPeer, a negative tag, memory of a GPU; Mismatch
/// where it has waited for a recv of another type or number of elements, which is thrown there too;
/// Shutdown if the receiver has called `shutdown()` and has no recv for it, or this rank has; and
/// what ended the world. To itself too, if another thread receives, or a recv is pending.
void send(const Buffer& buffer, const PeerOptions& options);
/// Does what `send` does without waiting. The buffer must stay as it is until `wait()` returns; its
/// `owner` is kept until the operation is done.
Handle<void> send_async(const Buffer& buffer, const PeerOptions& options,
                        std::shared_ptr<void> owner = nullptr);
/// Receives the next message with this tag that the rank, or any, has sent, and returns that rank.
/// Throws as `send` does: Mismatch unless the message has the buffer's type and number of elements
/// (the message is gone then, and nothing is written), Shutdown if the rank, or all others, have
/// called `shutdown()` without sending it.
int recv(const Buffer& buffer, const PeerOptions& options = {});
/// Does what `recv` does without waiting. Any number may be pending; of those with one tag that a
/// message is for, the first gets it. The buffer's `owner` is kept until the operation is done.
Handle<int> recv_async(const Buffer& buffer, const PeerOptions& options = {},
                       std::shared_ptr<void> owner = nullptr);

/// Waits until all ranks have called it as often as this one has, or the time is over, and returns
/// the ranks that have not, ascending: none if all have come. The world lives on, and a rank that
/// was missed may still come; its call then counts with those of the others that have been over.
/// Ranks that have called `shutdown()` are not waited for. Throws what has ended the world. One
/// thread of a rank at a time.
std::vector<int> barrier_until(std::chrono::nanoseconds time);
/// Does the same, until that point in time at most.
template <class Clock, class Duration>
std::vector<int> barrier_until(const std::chrono::time_point<Clock, Duration>& time) {
  return barrier_until(std::chrono::ceil<std::chrono::nanoseconds>(time - Clock::now()));
}

/// Returns memory that all ranks of this host can work on in place (zeroed when new, 64-byte
/// aligned at least): a tensor in it needs no copies. Null where ranks do not share memory, where
/// the addresses that `Config::arena_bytes` reserves are used up, and once the world has failed:
/// tensors in other memory are copied. It is freed when the last copy of the pointer is gone, also
/// after `shutdown()`.
std::shared_ptr<void> allocate_shared(std::size_t bytes);
/// Returns memory of this rank's GPU in which such allreduces are made in place: neither packed nor
/// unpacked as far as the buffers of a group lie in it one after the other, each at the next
/// multiple of `kMemberAlignment` bytes, and either end there or are `padded`. It is uninitialised.
/// Null where an allreduce would not gain from it, or the GPU has no more. It belongs to whoever
/// holds the pointer.
std::shared_ptr<void> allocate_on_device(std::size_t bytes, Device device, DataType dtype,
                                         const AllreduceOptions& options = {});

// ---------------------------------------------------------------------- for front ends of the core

/// Returns the splits of an alltoall that gives none. Throws InvalidArgument if the rows cannot be
/// divided evenly.
std::vector<std::int64_t> even_splits(std::int64_t rows, int ranks, std::string_view name);
/// Returns the running engine. Throws NotInitialized.
std::shared_ptr<Engine> engine();
/// Blocks until the submission is done, and throws what it failed with.
void wait_for(Engine& engine, HandleState& pending);
/// Blocks until the submission is done or failed, or the time is over. Returns whether it is done.
bool wait_for(Engine& engine, HandleState& pending, std::chrono::nanoseconds time);
/// Returns whether the submission is done, failed included.
bool poll_for(Engine& engine, HandleState& pending);
/// Has `function` called when the submission is done, as `Handle::then` says.
void call_after(Engine& engine, HandleState& pending, std::function<void()> function);

template <class T>
T Handle<T>::wait() const {
  if (!pending_) throw InvalidArgument("wait() on an empty handle");
  hvd::wait_for(*engine_, *pending_);
  return result_();
}
template <class T>
bool Handle<T>::done() const {
  if (!pending_) throw InvalidArgument("done() on an empty handle");
  return poll_for(*engine_, *pending_);
}
template <class T>
bool Handle<T>::wait_for(std::chrono::nanoseconds time) const {
  if (!pending_) throw InvalidArgument("wait_for() on an empty handle");
  return hvd::wait_for(*engine_, *pending_, time);
}
template <class T>
template <class Function>
void Handle<T>::then(Function function) const {
  if (!pending_) throw InvalidArgument("then() on an empty handle");
  // which may be one that cannot be copied
  const auto shared = std::make_shared<Function>(std::move(function));
  if constexpr (std::is_invocable_v<Function&, const Handle&>) {
    call_after(*engine_, *pending_, [shared, handle = *this] { (*shared)(handle); });
  } else {
    static_assert(std::is_invocable_v<Function&>,
                  "then() takes a function of a const Handle<T>&, or of nothing");
    call_after(*engine_, *pending_, [shared] { (*shared)(); });
  }
}

}  // namespace hvd
#pragma GCC visibility pop
