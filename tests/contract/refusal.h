#pragma once
/// Calls that are refused at once, on the rank that makes them alone, and leave nothing behind.

#include <string>
#include <vector>

#include "tests/contract/case.h"

namespace hvd::contract {

/// Some one rank makes the call, the others make none: it must throw InvalidArgument with all of
/// `words`, and the statistics and the numbering of unnamed calls must be as before. `duplicate`:
/// it must be a DuplicateName, and nothing of the sort otherwise.
void check_refused(Context& context, int culprit, const Call& call,
                   const std::vector<std::string>& words);
void check_refused_call(Context& context, int culprit, const std::function<void()>& call,
                        const std::vector<std::string>& words);
/// A type with an operation that docs/semantics.md does not have, named and unnamed, alone and in a
/// group.
void check_refused_pair(Context& context, OpKind kind, DataType dtype, ReduceOp op);

bool contains(const std::string& text, const std::string& word);

}  // namespace hvd::contract
