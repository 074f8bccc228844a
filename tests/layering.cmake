# The rules between the floors: torch_bindings -> ops -> hvd (docs/architecture.md).
#   cmake -DROOT=<folder of the project> -P tests/layering.cmake
# prints every line that breaks one and fails if there is any.
cmake_minimum_required(VERSION 3.25)

# ---- The rules; all exceptions are here.
# What no file of a floor may include.
set(forbidden_hvd "^(mpi\\.h|mpi-ext\\.h|nccl\\.h|uc[pst]/|cuda|torch/|ATen/|c10/|ops/|torch_bindings/)")
set(forbidden_ops "^(torch/|ATen/|c10/|torch_bindings/|hvd/torch\\.h)")
# The front door of LibTorch users lies in hvd/ for its spelling, and only forwards.
set(front_doors "^hvd/torch\\.h$")
# In ops/, algorithms know the words of the core and nothing else of it; adapters, what they share and the files that assemble a world include what they need.
set(words_of_the_core "^hvd/(types|errors|routes|base/(process|text|threads|visible|waits|wire))\\.h$")
set(adapters "[_/](backend|transport|executions?|meeting)\\.(h|cc|cu)$|^ops/(host_ops|init|make_world|world|backends|wires|bootstrap[a-z_]*|rendezvous/[a-z_]+|p2p/(context|direct_memory)|shm/context|shm/pulled_blocks)\\.(h|cc)$")
# The one file that reads the environment.
set(environment_reader "^hvd/config\\.cc$")

set(found 0)
function(report file what)
  message("${file}: ${what}")
  math(EXPR count "${found} + 1")
  set(found ${count} PARENT_SCOPE)
endfunction()

foreach(floor IN ITEMS hvd ops torch_bindings)
  file(GLOB_RECURSE files RELATIVE "${ROOT}" "${ROOT}/${floor}/*.h" "${ROOT}/${floor}/*.cc" "${ROOT}/${floor}/*.cu")
  foreach(file IN LISTS files)
    file(READ "${ROOT}/${file}" text)
    string(REGEX REPLACE "//[^\n]*" "" text "${text}")
    string(REGEX REPLACE "/\\*([^*]|\\*+[^*/])*\\*+/" "" text "${text}")

    string(REGEX MATCHALL "#[ \t]*include[ \t]*[<\"][^>\"\n]+" lines "${text}")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^.*[<\"]" "" header "${line}")
      if(DEFINED forbidden_${floor} AND header MATCHES "${forbidden_${floor}}" AND NOT file MATCHES "${front_doors}")
        report("${file}" "includes ${header}; ${floor}/ must not")
      elseif(floor STREQUAL "ops" AND header MATCHES "^hvd/" AND NOT header MATCHES "${words_of_the_core}" AND NOT file MATCHES "${adapters}")
        report("${file}" "includes ${header}; in ops/ only adapters may (*_backend, *_transport, *_execution, the assembly of a world)")
      endif()
    endforeach()

    # The code proper: no texts. A call is a name that no other name, dot, arrow or type stands before.
    string(REGEX REPLACE "\"([^\"\\\n]|\\\\.)*\"" "\"\"" text "${text}")
    if(text MATCHES "[^A-Za-z0-9_](getenv|secure_getenv|setenv|unsetenv|putenv|environ)[^A-Za-z0-9_]" AND NOT file MATCHES
                                                                                                         "${environment_reader}")
      report("${file}" "uses ${CMAKE_MATCH_1}; only hvd/config.cc reads the environment")
    endif()
    # A class may have a member function abort() and call it by its bare name.
    set(bare "[^A-Za-z0-9_.>:]")
    string(REGEX REPLACE "\\.(cc|cu)$" ".h" header "${ROOT}/${file}")
    if(text MATCHES "(void|bool)[ \n]+abort[ ]*\\(")
      set(bare "$^")
    elseif(EXISTS "${header}")
      file(STRINGS "${header}" declared REGEX "(void|bool) +abort *\\(")
      if(declared)
        set(bare "$^")
      endif()
    endif()
    if(file STREQUAL "hvd/spawn.cc")   # its child, where there is no program to run
      string(REGEX REPLACE "::_exit\\(127\\)" "" text "${text}")
    endif()
    if(text MATCHES "([^A-Za-z0-9_.>:]|[^A-Za-z0-9_]std::|[^A-Za-z0-9_>]::)(exit|_exit|_Exit|quick_exit|terminate)[ ]*\\("
       OR text MATCHES "(${bare}|[^A-Za-z0-9_]std::|[^A-Za-z0-9_>]::)(abort)[ ]*\\(")
      report("${file}" "calls ${CMAKE_MATCH_2}(); a library leaves that to the program")
    endif()
  endforeach()
endforeach()

if(found GREATER 0)
  message(FATAL_ERROR "${found} violations of the layering rules")
endif()
