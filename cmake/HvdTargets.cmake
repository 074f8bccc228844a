# Helpers that make the targets of this project alike.

# The sources below the current folder that belong to this build:
#   *_cuda.cc and *.cu only with the device code, *_none.cc (their null twins) only without.
#   hvd_sources(<out> <with device code: bool> <pattern>...)
function(hvd_sources out with_device)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${ARGN})
  if(with_device)
    list(FILTER sources EXCLUDE REGEX "_none\\.cc$")
  else()
    list(FILTER sources EXCLUDE REGEX "_cuda\\.cc$|\\.cu$")
  endif()
  set(${out} "${sources}" PARENT_SCOPE)
endfunction()

# Below the installation's prefix, the include root of this project's headers.
set(HVD_INSTALL_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}/hvd")

# What all libraries of the project have in common.
function(_hvd_library_properties target export_name)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${export_name})
  get_target_property(type ${target} TYPE)
  set(scope PUBLIC)
  if(type STREQUAL "INTERFACE_LIBRARY")
    set(scope INTERFACE)
  endif()
  target_compile_features(${target} ${scope} cxx_std_20)
  target_include_directories(${target} ${scope} $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${HVD_INSTALL_INCLUDEDIR}>)
endfunction()

# A floor of the project: hvd_library(<name> <source>...) makes hvd_<name>, a static library with all that is in it. The programs of the
# project that use internals link to that; hvd::<name> is what users link to: the same, or, with BUILD_SHARED_LIBS, hvd_shared_library().
function(hvd_library name)
  set(target hvd_${name})
  add_library(${target} STATIC ${ARGN})
  set_property(TARGET ${target} APPEND PROPERTY LINK_LIBRARIES hvd_build_flags)   # not a part of the link interface, hence not exported
  _hvd_library_properties(${target} ${name})
  if(BUILD_SHARED_LIBS OR NOT name STREQUAL "torch")   # its programs share its precompiled header
    hvd_hide(${target})
  endif()
  if(NOT BUILD_SHARED_LIBS AND NOT name STREQUAL "core")   # ops/CMakeLists.txt
    add_library(hvd::${name} ALIAS ${target})
  endif()
endfunction()

# The public headers say by a pragma what a library shows. Static ones are compiled likewise, so that a second build finds their objects in
# ccache.
function(hvd_hide target)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# A shared library of floors, where they are asked for: hvd_shared_library(<name> <file> <object>...) makes hvd_shared_<name>, lib<file>.so,
# and its alias hvd::<name>.
function(hvd_shared_library name file)
  set(target hvd_shared_${name})
  add_library(${target} SHARED ${ARGN})
  _hvd_library_properties(${target} ${name})
  add_library(hvd::${name} ALIAS ${target})
  # They find each other and LibTorch.
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${file} LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION}
                                             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
                                             INSTALL_RPATH "$ORIGIN" INSTALL_RPATH_USE_LINK_PATH ON)
  # LibTorch and threads call them until the process ends, also when the plugin that brought them is unloaded.
  target_link_options(${target} PRIVATE -Wl,-z,nodelete -Wl,--exclude-libs,libcrypto.a)
  set_property(TARGET ${target} APPEND PROPERTY LINK_LIBRARIES hvd_build_flags)
endfunction()

# A program of the project: hvd_program(<name> SOURCES <source>... LIBRARIES <target>...)
function(hvd_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} hvd_build_flags)
endfunction()

# Makes <torch/torch.h>, which costs 11 to 25 s per file, once: hvd_torch_precompiled(<name>) is a target whose precompiled header others of
# the same flags reuse.
function(hvd_torch_precompiled name)
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/${name}.cc" CONTENT "")   # written once
  add_library(${name} OBJECT "${CMAKE_CURRENT_BINARY_DIR}/${name}.cc")
  target_link_libraries(${name} PRIVATE hvd::libtorch hvd_ops hvd_build_flags)
  target_precompile_headers(${name} PRIVATE <torch/torch.h>)
endfunction()

# A program that uses LibTorch: shares the precompiled <torch/torch.h> of hvd::torch, or of the target after PRECOMPILED. GCC takes a
# precompiled header only under the same flags, so these programs are compiled with -fPIC as the library is, not with -fPIE.
function(hvd_torch_program name)
  cmake_parse_arguments(arg "" "PRECOMPILED" "SOURCES;LIBRARIES" ${ARGN})
  if(NOT arg_PRECOMPILED)
    set(arg_PRECOMPILED hvd_torch_pch)
  endif()
  hvd_program(${name} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES})
  target_link_libraries(${name} PRIVATE hvd_torch)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE -fPIC)
  if(TARGET ${arg_PRECOMPILED})
    target_precompile_headers(${name} REUSE_FROM ${arg_PRECOMPILED})
  endif()
  if(HVD_TORCH_CUDA_EXAMPLES AND TARGET hvd::torch_cuda)
    target_link_libraries(${name} PRIVATE hvd::torch_cuda)
  endif()
endfunction()
