// The front door: each call by the function of hvd/hvd.h that a user would call, grouped where
// there are several tensors.

#include "hvd/hvd.h"

#include <utility>

#include "tests/contract/endpoint.h"

namespace hvd::contract {

namespace {

std::vector<Buffer> buffers(const Call& call, bool outputs) {
  std::vector<Buffer> list;
  for (const Tensor& tensor : call.tensors)
    list.push_back(
        {outputs ? tensor.output : tensor.input, tensor.dtype, tensor.shape, call.device});
  return list;
}

Made made(Gathered gathered) { return {std::move(gathered.data), std::move(gathered.shape), {}}; }
Made made(Exchanged exchanged) {
  return {std::move(exchanged.data), std::move(exchanged.shape),
          std::move(exchanged.received_splits)};
}
template <class T>
Results results(std::vector<T> list) {
  Results all;
  for (auto& one : list) all.push_back(made(std::move(one)));
  return all;
}

AllreduceOptions allreduce_options(const Call& call) {
  return {call.name,          call.op, call.prescale, call.postscale, ProcessSet(call.set),
          Compression::none()};
}
ReducescatterOptions scatter_options(const Call& call) {
  return {call.name, call.op, call.prescale, call.postscale, ProcessSet(call.set)};
}
AllgatherOptions gather_options(const Call& call) { return {call.name, ProcessSet(call.set)}; }
AlltoallBufferOptions exchange_options(const Call& call) {
  return {call.name, call.splits, ProcessSet(call.set)};
}
BroadcastOptions broadcast_options(const Call& call) {
  return {call.name, call.root, ProcessSet(call.set)};
}

template <class T>
Wait one(Handle<T> handle) {
  return [handle = std::move(handle)] { return Results{made(handle.wait())}; };
}
template <class T>
Wait several(Handle<std::vector<T>> handle) {
  return [handle = std::move(handle)] { return results(handle.wait()); };
}
Wait nothing(Handle<void> handle) {
  return [handle = std::move(handle)] {
    handle.wait();
    return Results{};
  };
}

/// Of a call `into` memory that exists.
Buffer output_of(const Call& call) {
  Buffer output = buffers(call, true).front();
  if (!output.shape.empty()) output.shape.front() = call.tensors.front().output_rows;
  return output;
}
Wait start_into(const Call& call, const Buffer& input) {
  const Buffer output = output_of(call);
  if (call.kind == OpKind::Allgather)
    return nothing(allgather_into_async(output, input, gather_options(call)));
  if (call.kind == OpKind::Reducescatter)
    return nothing(reducescatter_into_async(output, input, scatter_options(call)));
  return [handle = alltoall_into_async(output, input, exchange_options(call))] {
    return Results{{{}, {}, handle.wait()}};
  };
}
Results run_into(const Call& call, const Buffer& input) {
  const Buffer output = output_of(call);
  if (call.kind == OpKind::Alltoall)
    return {{{}, {}, alltoall_into(output, input, exchange_options(call))}};
  call.kind == OpKind::Allgather ? allgather_into(output, input, gather_options(call))
                                 : reducescatter_into(output, input, scatter_options(call));
  return {};
}

template <class T, class Get>
Again again(PersistentHandle<T> made, Get get) {
  const auto op = std::make_shared<PersistentHandle<T>>(std::move(made));
  return {[op] { op->start(); }, [op, get] { return get(*op); }};
}
Again again(PersistentHandle<void> made) {
  return again(std::move(made), [](auto& op) {
    op.wait();
    return Results{};
  });
}

Buffer buffer_of(const Letter& letter) { return {letter.memory, letter.dtype, letter.shape}; }
PeerOptions options_of(const Letter& letter) { return {letter.peer, letter.tag}; }

/// The front door refuses buffers on a GPU whose results it would have to make: these go through
/// the engine, as tensors do.
bool is_for_tensors(const Call& call) {
  return call.device != Device() && !call.into && call.kind != OpKind::Allreduce &&
         call.kind != OpKind::Broadcast;
}

class FrontEndpoint final : public Endpoint {
 public:
  Wait start(const Call& call) override {
    if (is_for_tensors(call)) return tensors_->start(call);
    const auto inputs = buffers(call, false);
    if (call.into) return start_into(call, inputs[0]);
    const bool single = inputs.size() == 1;
    switch (call.kind) {
      case OpKind::Allreduce: {
        const auto outputs = buffers(call, true);
        return nothing(single ? allreduce_async(inputs[0], outputs[0], allreduce_options(call))
                              : grouped_allreduce_async(inputs, outputs, allreduce_options(call)));
      }
      case OpKind::Broadcast: return nothing(broadcast_async(inputs[0], broadcast_options(call)));
      case OpKind::Allgather:
        return single ? one(allgather_async(inputs[0], gather_options(call)))
                      : several(grouped_allgather_async(inputs, gather_options(call)));
      case OpKind::Reducescatter:
        return single ? one(reducescatter_async(inputs[0], scatter_options(call)))
                      : several(grouped_reducescatter_async(inputs, scatter_options(call)));
      default: return one(alltoall_async(inputs[0], exchange_options(call)));
    }
  }

  Results run(const Call& call) override {
    if (is_for_tensors(call)) return tensors_->run(call);
    const auto inputs = buffers(call, false);
    if (call.into) return run_into(call, inputs[0]);
    const bool single = inputs.size() == 1;
    switch (call.kind) {
      case OpKind::Allreduce: {
        const auto outputs = buffers(call, true);
        single ? allreduce(inputs[0], outputs[0], allreduce_options(call))
               : grouped_allreduce(inputs, outputs, allreduce_options(call));
        return {};
      }
      case OpKind::Broadcast: broadcast(inputs[0], broadcast_options(call)); return {};
      case OpKind::Allgather:
        return single ? Results{made(allgather(inputs[0], gather_options(call)))}
                      : results(grouped_allgather(inputs, gather_options(call)));
      case OpKind::Reducescatter:
        return single ? Results{made(reducescatter(inputs[0], scatter_options(call)))}
                      : results(grouped_reducescatter(inputs, scatter_options(call)));
      default: return {made(alltoall(inputs[0], exchange_options(call)))};
    }
  }

  Again describe(const Call& call) override {
    const Buffer input = buffers(call, false).front();
    if (call.kind == OpKind::Allreduce)
      return again(allreduce_init(input, buffers(call, true).front(), allreduce_options(call)));
    const Buffer output = output_of(call);
    if (call.kind == OpKind::Allgather)
      return again(allgather_init(output, input, gather_options(call)));
    if (call.kind == OpKind::Reducescatter)
      return again(reducescatter_init(output, input, scatter_options(call)));
    return again(alltoall_init(output, input, exchange_options(call)), [](auto& op) {
      return Results{{{}, {}, op.wait()}};
    });
  }

  int add_set(const std::vector<int>& ranks) override { return add_process_set(ranks).id(); }
  void remove_set(int set) override { remove_process_set(ProcessSet(set)); }
  int join(int set) override { return hvd::join(ProcessSet(set)); }
  void barrier(int set) override { hvd::barrier(ProcessSet(set)); }
  void send(const Letter& letter) override { hvd::send(buffer_of(letter), options_of(letter)); }
  int recv(const Letter& letter) override {
    return hvd::recv(buffer_of(letter), options_of(letter));
  }
  std::function<void()> start_send(const Letter& letter) override {
    return [handle = send_async(buffer_of(letter), options_of(letter))] { handle.wait(); };
  }
  std::function<int()> start_recv(const Letter& letter) override {
    return [handle = recv_async(buffer_of(letter), options_of(letter))] { return handle.wait(); };
  }
  std::shared_ptr<void> allocate_shared(std::size_t bytes) override {
    return hvd::allocate_shared(bytes);
  }
  void shutdown() override { hvd::shutdown(); }
  Engine& engine() override { return *hvd::engine(); }

 private:
  const std::unique_ptr<Endpoint> tensors_ = make_engine_door(engine(), nullptr);
};

}  // namespace

std::unique_ptr<Endpoint> make_front_door() { return std::make_unique<FrontEndpoint>(); }

}  // namespace hvd::contract
