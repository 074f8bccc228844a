# What every build needs: threads, fmt, libcrypto, MPI. HVD_MPI_ENVIRONMENT: cmake/mpi_env.sh as a list for the tests.

set(_hvd_setup "'bash cmake/setup.sh' installs all that hvd needs.")

find_package(Threads REQUIRED)

hvd_header_only_library(fmt::fmt-header-only fmt fmt/core.h FMT_HEADER_ONLY=1)
if(NOT TARGET fmt::fmt-header-only)
  message(FATAL_ERROR "hvd needs the library fmt (Debian and Ubuntu: apt-get install libfmt-dev). ${_hvd_setup}")
endif()

find_package(OpenSSL 3.0 COMPONENTS Crypto)
if(NOT TARGET OpenSSL::Crypto)
  message(FATAL_ERROR "hvd needs OpenSSL's libcrypto (Debian and Ubuntu: apt-get install libssl-dev). ${_hvd_setup}")
endif()

include(HvdLibraryName)
include(HvdMpi)
if(NOT MPI_CXX_FOUND)
  message(FATAL_ERROR "hvd needs MPI (Debian and Ubuntu: apt-get install libopenmpi-dev openmpi-bin). ${_hvd_setup}")
endif()
# HVD_MPI_NAME: by what name the library is opened when ranks meet through it (ops/mpi/api.cc).
if(NOT HVD_MPI_FILE)
  message(FATAL_ERROR "hvd needs MPI as a shared library, but finds ${_hvd_mpi_libraries}")
endif()
hvd_library_name("${HVD_MPI_FILE}" HVD_MPI_NAME)
set(HVD_MPI_NAME "${HVD_MPI_NAME}" CACHE INTERNAL "The name that MPI's library is opened by")

find_program(HVD_BASH bash REQUIRED)
mark_as_advanced(HVD_BASH)
execute_process(
  COMMAND "${HVD_BASH}" -c ". \"$1\" && env" bash "${CMAKE_CURRENT_LIST_DIR}/mpi_env.sh"
  OUTPUT_VARIABLE _hvd_environment)
string(REGEX MATCHALL "(OMPI|PRTE|PMIX)_[A-Za-z_]+=[^\n]*" HVD_MPI_ENVIRONMENT "${_hvd_environment}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/mpi_env.sh")
