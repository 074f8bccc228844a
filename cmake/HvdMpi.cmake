# hvd::mpi: the C interface of MPI for C++ code. Not MPI::MPI_CXX, which links Open MPI's libmpi_cxx as well: that is gone in version 5,
# while the library of the C interface has the same name in 4 and 5, so one program runs under both.
# Installed: find_package(hvd) uses it too. Result: MPI_CXX_FOUND, MPIEXEC_EXECUTABLE and hvd::mpi.

set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND AND NOT TARGET hvd::mpi)
  set(_hvd_mpi_libraries ${MPI_CXX_LIBRARIES})
  list(FILTER _hvd_mpi_libraries EXCLUDE REGEX "mpi_cxx")
  add_library(hvd::mpi INTERFACE IMPORTED GLOBAL)
  target_include_directories(hvd::mpi SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
  target_compile_definitions(hvd::mpi INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
  target_link_libraries(hvd::mpi INTERFACE ${_hvd_mpi_libraries})
endif()
