#include "torch_bindings/checkpoint/checkpoint_parts.h"

#include <torch/torch.h>

#include <cstdint>

#include "hvd/base/text.h"
#include "hvd/errors.h"
#include "torch_bindings/collectives/objects.h"
#include "torch_bindings/files/archives.h"

namespace hvd::detail {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

void write_parts(OutputArchive& archive, std::span<const CheckpointPart> parts) {
  if (parts.empty()) return;
  OutputArchive all(archive.compilation_unit());
  all.write("size", c10::IValue(static_cast<std::int64_t>(parts.size())));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    all.write(formatted("type.{}", i), c10::IValue(parts[i].type()));
    OutputArchive one(archive.compilation_unit());
    if (!parts[i].generator().defined()) parts[i].save(one);
    all.write(formatted("state.{}", i), one);
  }
  archive.write("parts", all);
}

std::vector<InputArchive> find_parts(InputArchive& archive, std::span<const CheckpointPart> parts) {
  std::vector<InputArchive> found(parts.size());
  if (parts.empty()) return found;
  InputArchive all;
  if (!archive.try_read("parts", all))
    throw CheckpointError(
        formatted("it was saved without parts, and the program has {}", parts.size()));
  c10::IValue value;
  all.read("size", value);
  if (value.toInt() != static_cast<std::int64_t>(parts.size()))
    throw CheckpointError(
        formatted("it has {} parts, and the program {}", value.toInt(), parts.size()));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    all.read(formatted("type.{}", i), value);
    if (value.toStringRef() != parts[i].type())
      throw CheckpointError(formatted("its part {} is a {}, that of the program a {}", i,
                                      value.toStringRef(), parts[i].type()));
    all.read(formatted("state.{}", i), found[i]);
  }
  return found;
}

std::string PartsLoad::load(std::vector<InputArchive>& states) {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].generator().defined()) continue;
    try {
      OutputArchive before;
      parts_[i].save(before);
      before_.emplace_back(i, text_of(before));
      parts_[i].load(states[i]);
    } catch (...) {
      return formatted("its part {}, a {}, does not fit the one here: {}", i, parts_[i].type(),
                       words_of_current_exception());
    }
  }
  return "";
}

void PartsLoad::undo() {
  for (const auto& [i, text] : std::exchange(before_, {})) {
    InputArchive archive = archive_of(text);
    parts_[i].load(archive);
  }
}

}  // namespace hvd::detail
