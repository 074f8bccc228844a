# hvd_find_torch(<out>): the folder of a LibTorch (it has include/, lib/ and share/cmake/Torch), or empty. It looks, in this order, at
# HVD_TORCH (variable, then environment), where the project's own find_package(Torch) has found it or is told to look (Torch_DIR, and Torch_ROOT
# as variable and in the environment), CMAKE_PREFIX_PATH (both), HVD_TORCH_HINT, and, if it is as new as the tested one, what the python3 on
# PATH imports.
# As a script it prints what it finds: cmake -P HvdFindTorch.cmake
# hvd_torch_version(<folder> <out>): "2.11.0"
if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)   # elsewhere it would change what the project demands
  cmake_minimum_required(VERSION 3.25)
endif()

set(HVD_TORCH_TESTED 2.11)   # the version this was written and tested with

function(hvd_torch_version folder out)
  set(file "${folder}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${file}")   # before 2.10
    set(file "${folder}/include/torch/csrc/api/include/torch/version.h")
  endif()
  file(STRINGS "${file}" lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" lines "${lines}")
  list(JOIN lines "." version)
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# The folder that has include/, lib/ and share/cmake/Torch, or empty.
function(_hvd_torch_at out)
  foreach(folder IN LISTS ARGN)
    if(folder AND EXISTS "${folder}/include/torch/csrc/api/include/torch/torch.h" AND EXISTS "${folder}/lib/libtorch_cpu.so")
      get_filename_component(folder "${folder}" ABSOLUTE)
      set(${out} "${folder}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

function(hvd_find_torch out)
  foreach(wanted IN ITEMS "${HVD_TORCH}" "$ENV{HVD_TORCH}")
    if(wanted)
      _hvd_torch_at(found "${wanted}" "${wanted}/torch" "${wanted}/libtorch")
      if(NOT found)
        message(FATAL_ERROR "HVD_TORCH is '${wanted}', but there is no LibTorch: "
                            "expected include/torch/csrc/api/include/torch/torch.h and lib/libtorch_cpu.so in it.")
      endif()
      set(${out} "${found}" PARENT_SCOPE)
      return()
    endif()
  endforeach()

  # TorchConfig.cmake lies in <torch>/share/cmake/Torch; torch.utils.cmake_prefix_path is <torch>/share/cmake.
  set(candidates "")
  if(Torch_DIR)
    list(APPEND candidates "${Torch_DIR}/../../..")
  endif()
  foreach(root IN ITEMS "${Torch_ROOT}" "$ENV{Torch_ROOT}")
    if(root)
      list(APPEND candidates "${root}" "${root}/../..")
    endif()
  endforeach()
  string(REPLACE ":" ";" environment "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH environment)
    list(APPEND candidates "${prefix}" "${prefix}/../..")
  endforeach()
  list(APPEND candidates ${HVD_TORCH_HINT})
  _hvd_torch_at(found ${candidates})
  if(NOT found)
    find_program(HVD_PYTHON3 NAMES python3)
    mark_as_advanced(HVD_PYTHON3)
    if(HVD_PYTHON3)
      execute_process(
        COMMAND "${HVD_PYTHON3}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
        OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
      _hvd_torch_at(found "${folder}")
      if(found)   # nobody named this one, so an old one does not count
        hvd_torch_version("${found}" version)
        if(version VERSION_LESS HVD_TORCH_TESTED)
          set(found "")
        endif()
      endif()
    endif()
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  hvd_find_torch(found)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${found}")   # message() would write to the error stream
endif()
