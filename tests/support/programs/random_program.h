#pragma once
/// A program of collective operations, drawn from a seed: what every rank submits, in which order,
/// from which thread, and how it waits. Values only. The expectations are filled in by
/// expectations.h; it is run by program_runner.h.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hvd/types.h"
#include "tests/support/oracle/oracle.h"

namespace hvd::test {

enum class Place : std::uint8_t { Heap, Arena };

struct TensorDraw {
  DataType dtype = DataType::Float32;
  Shape shape;
  std::vector<std::int64_t> splits;
  bool present = true;
  bool in_place = false;  ///< the output is the input, where the operation has that
  bool allocated = true;  ///< Reducescatter: the output is asked for when it is needed
  Place place = Place::Heap;
};

/// What one rank submits for an operation.
struct Call {
  std::uint64_t value_seed = 0;  ///< of the operation: what the tensors hold
  OpKind kind = OpKind::Allreduce;
  std::string name;
  int set = 0;
  ReduceOp op = ReduceOp::Sum;
  double prescale = 1;
  double postscale = 1;
  int root = 0;
  std::vector<TensorDraw> tensors;
};

using Data = std::vector<std::byte>;

/// What a rank is to get.
struct Expected {
  enum class Kind : std::uint8_t { Result, Mismatch, InvalidArgument, DuplicateName, Joined };
  Kind kind = Kind::Result;
  std::vector<std::string> fragments;  ///< that the message has
  std::vector<std::shared_ptr<const oracle::Expected>>
      outputs;                ///< per tensor; null: they are not looked at
  std::vector<bool> present;  ///< per tensor
  std::vector<std::vector<std::int64_t>> rows;
  std::optional<std::int64_t> value;  ///< of Join and Control
};

struct Op {
  std::vector<std::optional<Call>> calls;  ///< by rank; none: the rank has no part in it
  std::vector<Expected> expected;          ///< by rank
};

struct Step {
  enum class Kind : std::uint8_t { Submit, SubmitAndWait, Refused, Wait, Poll, OpenGate, PassGate };
  Kind kind = Kind::Submit;
  std::size_t op = 0;  ///< in the phase
  Call refused = {};   ///< what is submitted wrongly
  Expected refusal = {};
};

/// Operations that are all waited for before the rank goes on to the next phase.
struct Phase {
  std::string what;
  std::vector<Op> ops;
  std::vector<std::vector<std::vector<Step>>>
      steps;  ///< by rank and thread; the last thread's run when the others have ended
};

struct SetDraw {
  std::vector<int> ranks;
  bool removed = false;
};

struct Program {
  std::uint64_t seed = 0;
  int size = 1;
  int domains = 1;
  std::uint64_t fusion_threshold = 0;
  std::uint32_t cache_capacity = 4096;
  unsigned cores = 2;
  std::vector<std::vector<int>> static_sets;
  std::vector<Phase> phases;
};

Program draw_program(std::uint64_t seed);
/// The world and the phases in a few lines, for a failure's report.
std::string describe(const Program& program);

}  // namespace hvd::test
