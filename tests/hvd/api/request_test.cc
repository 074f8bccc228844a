/// Options become submissions and small calls: nothing that a user says is lost on the way.
#include <doctest/doctest.h>

#include "hvd/api/request.h"

namespace hvd::test {

TEST_CASE("request: every option reaches the submission and the small call") {
  const ProcessSet set(5);
  const AllreduceOptions all{.name = "a",
                             .op = ReduceOp::Max,
                             .prescale_factor = 2,
                             .postscale_factor = 3,
                             .process_set = set};
  const Submission submission = request(OpKind::Allreduce, all, {DeviceKind::Cuda, 1});
  CHECK(submission.kind == OpKind::Allreduce);
  CHECK(submission.name == "a");
  CHECK(submission.process_set == 5);
  CHECK(submission.op == ReduceOp::Max);
  CHECK(submission.prescale_factor == 2);
  CHECK(submission.postscale_factor == 3);
  CHECK(submission.device == Device{DeviceKind::Cuda, 1});
  CHECK(submission.tensors.empty());
  const SmallCall call = small_request(OpKind::Allreduce, all);
  CHECK(call.kind == OpKind::Allreduce);
  CHECK(call.name.data() == all.name.data());  // refers to it
  CHECK(call.process_set == 5);
  CHECK(call.op == ReduceOp::Max);
  CHECK(call.prescale_factor == 2);
  CHECK(call.postscale_factor == 3);

  const ReducescatterOptions scatter{.name = "s",
                                     .op = ReduceOp::Sum,
                                     .prescale_factor = 4,
                                     .postscale_factor = 5,
                                     .process_set = set};
  CHECK(request(OpKind::Reducescatter, scatter).op == ReduceOp::Sum);
  CHECK(request(OpKind::Reducescatter, scatter).prescale_factor == 4);
  CHECK(small_request(OpKind::Reducescatter, scatter).postscale_factor == 5);
  using std::chrono::seconds;
  CHECK(request(OpKind::Allreduce, AllreduceOptions{.deadline = seconds(3)}).deadline ==
        seconds(3));
  CHECK(small_request(OpKind::Allreduce, AllreduceOptions{.deadline = seconds(3)}).deadline ==
        seconds(3));
  CHECK(request(OpKind::Allgather, AllgatherOptions{.deadline = seconds(4)}).deadline ==
        seconds(4));
  CHECK(request(OpKind::Alltoall, AlltoallBufferOptions{.deadline = seconds(5)}).deadline ==
        seconds(5));
  CHECK(request(OpKind::Reducescatter, ReducescatterOptions{.deadline = seconds(6)}).deadline ==
        seconds(6));
  CHECK(small_request(OpKind::Broadcast, BroadcastOptions{.deadline = seconds(7)}).deadline ==
        seconds(7));
  CHECK(call_of(request(OpKind::Broadcast, BroadcastOptions{.deadline = seconds(7)})).deadline ==
        seconds(7));
  const BroadcastOptions broadcast{.name = "b", .root_rank = 7, .process_set = set};
  CHECK(request(OpKind::Broadcast, broadcast).root == 7);
  CHECK(small_request(OpKind::Broadcast, broadcast).root == 7);
}

TEST_CASE("request: options that say less leave the defaults") {
  const Submission usual;
  const ProcessSet set(5);
  const AlltoallBufferOptions exchange{.name = "x", .splits = {1, 2}, .process_set = set};
  const SetOptions barrier{{}, set};
  const AllgatherOptions gather{.name = "g", .process_set = set};
  for (const Submission& submission :
       {request(OpKind::Alltoall, exchange), request(OpKind::Barrier, barrier),
        request(OpKind::Allgather, gather)}) {
    CHECK(submission.process_set == 5);
    CHECK(submission.op == usual.op);
    CHECK(submission.prescale_factor == 1);
    CHECK(submission.postscale_factor == 1);
    CHECK(submission.root == usual.root);
    CHECK(submission.device == Device{});
    CHECK_FALSE(submission.on_stream);
  }
  CHECK(request(OpKind::Barrier, barrier).name.empty());
  CHECK(request(OpKind::Alltoall, exchange).name == "x");
}

}  // namespace hvd::test
