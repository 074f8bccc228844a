# By what name a library is opened that is a file, a link to one, or a script of the linker's.
# Usage: cmake -DSCRATCH=<folder> -DREADELF=<program or empty> -DLIBRARY=<a shared library> -DNAME=<its name> -P library_name.cmake
cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/../cmake/HvdLibraryName.cmake")
file(REMOVE_RECURSE "${SCRATCH}")
file(MAKE_DIRECTORY "${SCRATCH}")

function(expect file name)
  hvd_library_name("${file}" found)
  if(NOT found STREQUAL name)
    message(FATAL_ERROR "${file} is opened as '${found}', not as '${name}'")
  endif()
endfunction()

file(WRITE "${SCRATCH}/libwheel.so" "INPUT(libmpi.so.40)")   # Open MPI's wheel
expect("${SCRATCH}/libwheel.so" libmpi.so.40)
file(WRITE "${SCRATCH}/libgroup.so" "/* GNU ld script */\nGROUP ( /usr/lib/libmpi.so.12 helper.a )\n")
expect("${SCRATCH}/libgroup.so" libmpi.so.12)
file(WRITE "${SCRATCH}/libplain.so.40.30.4" "no library at all")
file(CREATE_LINK "${SCRATCH}/libplain.so.40.30.4" "${SCRATCH}/libplain.so" SYMBOLIC)
expect("${SCRATCH}/libplain.so" libplain.so.40)   # readelf has nothing to say: what the file is called stands for it
set(CMAKE_READELF "${READELF}")
if(READELF)
  file(CREATE_LINK "${LIBRARY}" "${SCRATCH}/libanything.so" SYMBOLIC)
  expect("${SCRATCH}/libanything.so" "${NAME}")
endif()
