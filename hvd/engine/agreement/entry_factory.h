#pragma once
/// Makes entries of submissions: checks them, finds their backends, and has these prepare the
/// tensors. Owns nothing; any thread, no lock: of the table it asks for process sets only.
// Tested in tests/hvd/engine/engine_test.cc, tests/contract/cases/local_error_cases.cc

#include <cstddef>
#include <memory>

#include "hvd/engine/core/ledger.h"
#include "hvd/engine/core/parts.h"

namespace hvd {

class EntryFactory {
 public:
  EntryFactory(const EngineParts& parts, const Negotiator& table) : parts_(parts), table_(table) {}

  /// Returns the entry of a submission that can be carried out. Throws InvalidArgument otherwise.
  [[nodiscard]] std::unique_ptr<Entry> make(Submission submission) const;
  /// Lets the backends make the inputs visible to the other ranks; copies where they must, and
  /// where an output overlaps a part of its input. Throws what a backend throws; what was prepared
  /// by then is to be released.
  void prepare(Entry& entry) const;
  /// Takes back what was prepared and will not be launched.
  void release(Entry& entry) const noexcept;
  /// Returns memory on a device for operations like this one: see Engine::allocate.
  [[nodiscard]] std::shared_ptr<void> allocate(const Submission& like, DataType dtype,
                                               std::size_t bytes) const;

 private:
  void check(const Submission& submission, const ProcessSetInfo& set) const;
  [[nodiscard]] static Signature signature_of(const Submission& submission);

  const EngineParts& parts_;
  const Negotiator& table_;
};

}  // namespace hvd
