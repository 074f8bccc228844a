# Finds LibTorch and makes, without its own CMake package, the targets
#   hvd::libtorch    libtorch_cpu and libc10: all that code for the host needs
#   hvd::c10_cuda    libc10_cuda on top: streams, events and the caching allocator; where torch has it
#   hvd::torch_cuda  libtorch_cuda on top, linked although no symbol of it is used: its kernels register when it is loaded
# Result: HVD_TORCH_DIR (empty when not found), HVD_TORCH_VERSION, HVD_TORCH_HAS_CUDA.
#
# Why not find_package(Torch): for a CUDA wheel it demands a CUDA toolkit, and it always pulls in libtorch_cuda with cuDNN, cuBLAS and
# the rest: 0.1 s and 350 MB more for every process, on machines without a GPU too; four of them started together on two cores take
# 2.8 s instead of 1.0. This file is installed, and find_package(hvd) uses it as well.

include("${CMAKE_CURRENT_LIST_DIR}/HvdFindTorch.cmake")

function(_hvd_torch_library target file)
  add_library(${target} SHARED IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${file}" IMPORTED_NO_SONAME OFF)
endfunction()

hvd_find_torch(HVD_TORCH_DIR)
set(HVD_TORCH_VERSION "")
set(HVD_TORCH_HAS_CUDA OFF)
if(HVD_TORCH_DIR)
  hvd_torch_version("${HVD_TORCH_DIR}" HVD_TORCH_VERSION)
  if(HVD_TORCH_VERSION VERSION_LESS HVD_TORCH_TESTED)
    message(WARNING "hvd is tested with LibTorch ${HVD_TORCH_TESTED}; the one in ${HVD_TORCH_DIR} is ${HVD_TORCH_VERSION}. "
                    "Set HVD_TORCH to another one if it does not compile.")
  endif()
  file(STRINGS "${HVD_TORCH_DIR}/share/cmake/Torch/TorchConfig.cmake" _hvd_old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(_hvd_old_abi)
    message(FATAL_ERROR "The LibTorch in ${HVD_TORCH_DIR} is built for the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0), which hvd does not "
                        "support. Set HVD_TORCH to one of the 'cxx11 ABI' kind (every wheel since 2.7 is).")
  endif()
  if(EXISTS "${HVD_TORCH_DIR}/lib/libc10_cuda.so")
    set(HVD_TORCH_HAS_CUDA ON)
  endif()
endif()

if(HVD_TORCH_DIR AND NOT TARGET hvd::libtorch)
  _hvd_torch_library(hvd_libc10 "${HVD_TORCH_DIR}/lib/libc10.so")
  _hvd_torch_library(hvd_libtorch_cpu "${HVD_TORCH_DIR}/lib/libtorch_cpu.so")
  # The wheel's libraries of CUDA lie beside torch; libtorch_cpu itself needs libcudart and libcupti of them. Its own RPATH finds them at
  # run time; the linker, which does not read it, is told where they are.
  file(GLOB _hvd_nvidia "${HVD_TORCH_DIR}/../nvidia/*/lib")
  set(_hvd_rpath_link "")
  foreach(folder IN LISTS _hvd_nvidia)
    get_filename_component(folder "${folder}" ABSOLUTE)
    list(APPEND _hvd_rpath_link "LINKER:-rpath-link,${folder}")
  endforeach()
  add_library(hvd::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(hvd::libtorch SYSTEM INTERFACE "${HVD_TORCH_DIR}/include" "${HVD_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(hvd::libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  target_link_libraries(hvd::libtorch INTERFACE hvd_libtorch_cpu hvd_libc10)
  target_link_options(hvd::libtorch INTERFACE ${_hvd_rpath_link})
  if(HVD_TORCH_HAS_CUDA)
    _hvd_torch_library(hvd_libc10_cuda "${HVD_TORCH_DIR}/lib/libc10_cuda.so")
    add_library(hvd::c10_cuda INTERFACE IMPORTED GLOBAL)
    target_link_libraries(hvd::c10_cuda INTERFACE hvd::libtorch hvd_libc10_cuda)
    add_library(hvd::torch_cuda INTERFACE IMPORTED GLOBAL)
    target_link_libraries(hvd::torch_cuda INTERFACE hvd::c10_cuda)
    target_link_options(hvd::torch_cuda INTERFACE
                        "LINKER:--push-state,--no-as-needed,${HVD_TORCH_DIR}/lib/libtorch_cuda.so,--pop-state")
  endif()
endif()
