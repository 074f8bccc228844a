#pragma once
/// LogLevel is how much a line matters that the library prints.
// Tested in tests/hvd/config_test.cc

#pragma GCC visibility push(default)
namespace hvd {

/// LogLevel is what Config::log_level compares lines by, from the least important to none at all.
enum class LogLevel : unsigned char { Trace, Debug, Info, Warning, Error, Fatal, Off };

}  // namespace hvd
#pragma GCC visibility pop
