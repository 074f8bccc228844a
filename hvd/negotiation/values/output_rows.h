#pragma once
/// The check of an Allgather or Alltoall into memory that exists, beyond equal signatures: each rank's memory must have as many rows as
/// come to it, which follows from what all ranks send. A pure function: every rank finds the same.
// Tested in tests/contract/into_cases.cc

#include <functional>
#include <span>
#include <string_view>

#include "hvd/negotiation/values/signature.h"

namespace hvd {

/// Returns Ok, or a Mismatch whose text says how many rows come to each rank and how many its memory has. `ranks` are those of the process
/// set, all of which take part; `said(i)` is the signature of the i-th. Call it for signatures on which `verdict` is Ok.
Status verdict_on_outputs(std::string_view name, std::span<const int> ranks, const std::function<const Signature&(std::size_t)>& said);

}  // namespace hvd
