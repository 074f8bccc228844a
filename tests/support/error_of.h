#pragma once
/// What a call is refused with.

#include <exception>
#include <string>

namespace hvd::test {

/// The text of the `Expected` that `call` throws; of anything else, and of nothing, a text that
/// says so.
template <class Expected, class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("(another error) ") + error.what();
  }
  return "(no error)";
}

}  // namespace hvd::test
