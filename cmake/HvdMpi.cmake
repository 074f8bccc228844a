# hvd::mpi: the C interface of MPI for C++ code. Not MPI::MPI_CXX, which links Open MPI's libmpi_cxx as well: that is gone in version 5,
# while the library of the C interface has the same name in 4 and 5, so one program runs under both.
# hvd::mpi_headers: the same for those who do not link it; a program that calls MPI by itself is then linked with it, another is not.
# Installed: find_package(hvd) uses it too. Result: MPI_CXX_FOUND, MPIEXEC_EXECUTABLE, the two targets, and HVD_MPI_FILE, the library's.

set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI QUIET COMPONENTS CXX)
if(MPI_CXX_FOUND AND NOT TARGET hvd::mpi)
  set(_hvd_mpi_libraries ${MPI_CXX_LIBRARIES})
  list(FILTER _hvd_mpi_libraries EXCLUDE REGEX "mpi_cxx")
  add_library(hvd::mpi INTERFACE IMPORTED GLOBAL)
  target_include_directories(hvd::mpi SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
  target_compile_definitions(hvd::mpi INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
  target_link_libraries(hvd::mpi INTERFACE ${_hvd_mpi_libraries})

  set(_hvd_mpi_files ${_hvd_mpi_libraries})
  list(FILTER _hvd_mpi_files INCLUDE REGEX "/libmpi(ch)?(_[^/.]*)?\\.so[^/]*$")
  list(POP_FRONT _hvd_mpi_files HVD_MPI_FILE)
  add_library(hvd::mpi_headers INTERFACE IMPORTED GLOBAL)
  target_include_directories(hvd::mpi_headers SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
  target_compile_definitions(hvd::mpi_headers INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
  if(HVD_MPI_FILE)
    # One word, so that nothing comes between its parts.
    target_link_libraries(hvd::mpi_headers INTERFACE "-Wl,--push-state,--as-needed,${HVD_MPI_FILE},--pop-state")
    # hvd opens it by its name, and finds it as if it were linked.
    file(REAL_PATH "${HVD_MPI_FILE}" _hvd_mpi_folder)
    cmake_path(GET _hvd_mpi_folder PARENT_PATH _hvd_mpi_folder)
    if(NOT _hvd_mpi_folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
      target_link_options(hvd::mpi_headers INTERFACE "LINKER:-rpath,${_hvd_mpi_folder}")
    endif()
  endif()
endif()
