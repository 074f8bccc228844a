#pragma once
/// MpiApi is a table of the functions and handles of MPI that are used, which `open_mpi` (library.h) fills. Whoever calls MPI does so
/// through it, from any thread that may call MPI.
// Tested in tests/system/scripts/mpi_opened.sh

#include <mpi.h>

namespace hvd {

struct MpiApi {
  decltype(&::MPI_Init_thread) init_thread;
  decltype(&::MPI_Initialized) initialized;
  decltype(&::MPI_Query_thread) query_thread;
  decltype(&::MPI_Finalize) finalize;
  decltype(&::MPI_Finalized) finalized;
  decltype(&::MPI_Error_string) error_string;
  decltype(&::MPI_Comm_dup) comm_dup;
  decltype(&::MPI_Comm_free) comm_free;
  decltype(&::MPI_Comm_rank) comm_rank;
  decltype(&::MPI_Comm_size) comm_size;
  decltype(&::MPI_Comm_split_type) comm_split_type;
  decltype(&::MPI_Comm_set_errhandler) comm_set_errhandler;
  decltype(&::MPI_Comm_get_attr) comm_get_attr;
  decltype(&::MPI_Comm_set_attr) comm_set_attr;
  decltype(&::MPI_Comm_create_keyval) comm_create_keyval;
  decltype(&::MPI_Isend) isend;
  decltype(&::MPI_Issend) issend;
  decltype(&::MPI_Irecv) irecv;
  decltype(&::MPI_Recv) recv;
  decltype(&::MPI_Iprobe) iprobe;
  decltype(&::MPI_Improbe) improbe;
  decltype(&::MPI_Imrecv) imrecv;
  decltype(&::MPI_Mrecv) mrecv;
  decltype(&::MPI_Get_count) get_count;
  decltype(&::MPI_Test) test;
  decltype(&::MPI_Testall) testall;
  decltype(&::MPI_Testsome) testsome;
  decltype(&::MPI_Cancel) cancel;
  decltype(&::MPI_Request_free) request_free;
  decltype(&::MPI_Bcast) bcast;
  decltype(&::MPI_Iallgather) iallgather;
  decltype(&::MPI_Iallgatherv) iallgatherv;
  decltype(&::MPI_Ibarrier) ibarrier;
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
