#pragma once
/// This header is MPI's library, for those who put a world together. It is opened when ranks meet
/// through it, not linked: where nobody uses it, it need not be there. It stays open for as long as
/// the process. A program that is linked with MPI itself has one MPI together with hvd. One thread
/// at a time.
// Tested in tests/system/scripts/starts/mpi_opened.sh

#include <string>

#include "hvd/base/visible.h"

namespace hvd {

/// Opens MPI, or finds the one that this process has. Returns why it cannot be used, as a part of a
/// sentence; empty if it can.
HVD_BETWEEN_LIBRARIES std::string open_mpi();

/// Returns the MPI of this process in its own words, "Open MPI v4.1.4".
HVD_BETWEEN_LIBRARIES std::string mpi_library();

/// Returns whether somebody in this process has called MPI_Init, of whatever MPI. Opens nothing.
bool is_mpi_started();

}  // namespace hvd
