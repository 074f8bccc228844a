# hvd_build_flags: an interface library with what every file of this project is compiled with, and nobody else's.
# Also sets the language standard and ccache as the compiler launcher.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
endif()

add_library(hvd_build_flags INTERFACE)
target_compile_options(
  hvd_build_flags
  INTERFACE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;-Woverloaded-virtual;-Wcast-align;-Wvla>
    # Options are structs filled by designated initialisers; what is left out has its default.
    $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:-Wno-missing-field-initializers>
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wduplicated-cond;-Wlogical-op;-Wno-psabi>
    # False alarms of GCC 12 inside its own std::vector and std::string when it optimises (GCC bugs 105329, 105651, 105705).
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread;-Wno-array-bounds>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow>)
if(HVD_WARNINGS_AS_ERRORS)
  # Kernels have no stack frames, for any architecture.
  target_compile_options(hvd_build_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
                                                   $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror;-Xptxas=--warn-on-spills,--warn-on-local-memory-usage>)
endif()

if(HVD_SANITIZE)
  # -O1 -g1 after the build type's own flags: compiles 2.5 times faster under AddressSanitizer than -O2 -g, and stacks still have lines.
  set(flags -O1 -fsanitize=${HVD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1 -Wno-maybe-uninitialized)
  target_compile_options(hvd_build_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
  target_link_options(hvd_build_flags INTERFACE -fsanitize=${HVD_SANITIZE})
endif()

# pch_defines, time_macros: what ccache needs to take files compiled with a precompiled header. BASEDIR, NOHASHDIR: a second build beside the
# first finds what is compiled alike.
find_program(HVD_CCACHE ccache)
mark_as_advanced(HVD_CCACHE)
if(PROJECT_IS_TOP_LEVEL AND HVD_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
                                  "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${HVD_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CMAKE_CXX_COMPILER_LAUNCHER}")
endif()
