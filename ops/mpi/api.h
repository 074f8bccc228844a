#pragma once
/// MpiApi is a table of the functions and handles of MPI that are used, which `open_mpi`
/// (library.h) fills. Whoever calls MPI does so through it, from any thread that may call MPI.
// Tested in tests/system/scripts/starts/mpi_opened.sh

#include <mpi.h>

/// X(name in the table, name in MPI) for each.
// clang-format off
#define HVD_MPI_FUNCTIONS(X) \
  X(init_thread, MPI_Init_thread) X(initialized, MPI_Initialized) \
  X(query_thread, MPI_Query_thread) X(finalize, MPI_Finalize) X(finalized, MPI_Finalized) \
  X(error_string, MPI_Error_string) X(comm_dup, MPI_Comm_dup) X(comm_free, MPI_Comm_free) \
  X(comm_rank, MPI_Comm_rank) X(comm_size, MPI_Comm_size) \
  X(comm_split_type, MPI_Comm_split_type) X(comm_set_errhandler, MPI_Comm_set_errhandler) \
  X(comm_get_attr, MPI_Comm_get_attr) X(comm_set_attr, MPI_Comm_set_attr) \
  X(comm_create_keyval, MPI_Comm_create_keyval) X(isend, MPI_Isend) X(issend, MPI_Issend) \
  X(irecv, MPI_Irecv) X(recv, MPI_Recv) X(iprobe, MPI_Iprobe) X(improbe, MPI_Improbe) \
  X(imrecv, MPI_Imrecv) X(mrecv, MPI_Mrecv) X(get_count, MPI_Get_count) X(test, MPI_Test) \
  X(testall, MPI_Testall) X(testsome, MPI_Testsome) X(cancel, MPI_Cancel) \
  X(request_free, MPI_Request_free) X(bcast, MPI_Bcast) X(iallgather, MPI_Iallgather) \
  X(iallgatherv, MPI_Iallgatherv)
// clang-format on

namespace hvd {

struct MpiApi {
#define HVD_FIELD(name, function) decltype(&::function) name;
  HVD_MPI_FUNCTIONS(HVD_FIELD)
#undef HVD_FIELD
  // What the macros of MPI's header stand for: with Open MPI, objects of the library.
  MPI_Comm comm_world;           ///< MPI_COMM_WORLD
  MPI_Comm comm_self;            ///< MPI_COMM_SELF
  MPI_Request request_null;      ///< MPI_REQUEST_NULL
  MPI_Info info_null;            ///< MPI_INFO_NULL
  MPI_Datatype byte_type;        ///< MPI_BYTE
  MPI_Datatype int_type;         ///< MPI_INT
  MPI_Errhandler errors_return;  ///< MPI_ERRORS_RETURN
};

namespace detail {
extern MpiApi mpi_api;
}

/// Returns the table. Requires that `open_mpi` has found no problem.
inline const MpiApi& mpi() { return detail::mpi_api; }

}  // namespace hvd
