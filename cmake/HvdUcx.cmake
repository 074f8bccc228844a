# Whether the wire over UCX is built: HVD_HAVE_UCX, UCX_INCLUDE_DIR, UCX_VERSION. Only headers are needed: libucp is opened at run time.

find_path(UCX_INCLUDE_DIR ucp/api/ucp.h HINTS ${UCX_ROOT} ENV UCX_ROOT PATH_SUFFIXES include)
mark_as_advanced(UCX_INCLUDE_DIR)
set(HVD_HAVE_UCX OFF)
set(UCX_VERSION "")
if(UCX_INCLUDE_DIR)
  file(STRINGS "${UCX_INCLUDE_DIR}/ucp/api/ucp_version.h" _ucx_lines REGEX "#define UCP_API_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9;]" "" _ucx_lines "${_ucx_lines}")
  list(JOIN _ucx_lines "." UCX_VERSION)
  if(HVD_UCX AND UCX_VERSION VERSION_GREATER_EQUAL 1.10)
    set(HVD_HAVE_UCX ON)
  endif()
endif()
if(HVD_UCX AND NOT HVD_UCX STREQUAL "AUTO" AND NOT HVD_HAVE_UCX)
  message(FATAL_ERROR "HVD_UCX is ${HVD_UCX}, but the headers of UCX 1.10 or later were not found (Debian and Ubuntu: apt-get install "
                      "libucx-dev). Set UCX_ROOT to the folder with include/ucp.")
endif()
