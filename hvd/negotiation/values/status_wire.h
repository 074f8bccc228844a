#pragma once
/// The form in which a Status travels between ranks: its code u8, and its text. Functions without
/// state.

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "hvd/base/wire.h"
#include "hvd/errors.h"

namespace hvd {

inline void encode(Writer& writer, const Status& status) {
  writer.put(status.code()).put_string(status.text());
}

/// Reads a Status. A code that does not exist is a failure all the same: BackendError. Throws
/// WireError if the bytes end too early.
[[nodiscard]] inline Status decode_status(Reader& reader) {
  static_assert(sizeof(Status::Code) == 1 &&
                std::is_unsigned_v<std::underlying_type_t<Status::Code>>);
  const auto code = reader.get<Status::Code>();
  std::string text = reader.get_string();
  return {code <= Status::Code::Deadlock ? code : Status::Code::BackendError, std::move(text)};
}

}  // namespace hvd
