#include "hvd/errors.h"

namespace hvd {

void Status::raise() const {
  switch (code_) {
    case Code::Ok: return;
    case Code::Mismatch: throw Mismatch(text_);
    case Code::Joined: throw Joined(text_);
    case Code::RankFailed: throw RankFailed(text_);
    case Code::StallTimeout: throw StallTimeout(text_);
    case Code::Shutdown: throw Shutdown(text_);
    case Code::BackendError: break;
    case Code::InvalidArgument: throw InvalidArgument(text_);
    case Code::Deadlock: throw Deadlock(text_);
  }
  throw BackendError(text_);  // also where the code does not exist: never a success
}

Status status_of_current_exception() {
  try {
    throw;
  } catch (const Deadlock& error) {
    return {Status::Code::Deadlock, error.what()};
  } catch (const Mismatch& error) {
    return {Status::Code::Mismatch, error.what()};
  } catch (const Joined& error) {
    return {Status::Code::Joined, error.what()};
  } catch (const RankFailed& error) {
    return {Status::Code::RankFailed, error.what()};
  } catch (const StallTimeout& error) {
    return {Status::Code::StallTimeout, error.what()};
  } catch (const Shutdown& error) {
    return {Status::Code::Shutdown, error.what()};
  } catch (const InvalidArgument& error) {
    return {Status::Code::InvalidArgument, error.what()};
  } catch (const std::exception& error) {
    return {Status::Code::BackendError, error.what()};
  } catch (...) {
    return {Status::Code::BackendError, "an exception that is no std::exception"};
  }
}

}  // namespace hvd
