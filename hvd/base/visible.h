#pragma once
/// Marks what one library of the project needs of another although it is no part of the public
/// interface. Where BUILD_SHARED_LIBS is set, all else is hidden that no public header declares
/// (those have a pragma for it).
// Tested in tests/package/run.sh

#define HVD_BETWEEN_LIBRARIES __attribute__((visibility("default")))
