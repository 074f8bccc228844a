# cmake --install: the libraries, hvd_bench and hvdrun, the package, and the public headers (HVD_CORE_HEADERS, HVD_TORCH_HEADERS) below
# include/hvd, which is an include root of its own: there they include each other as in the tree, and nothing of ours lies beside what
# others install.

set(_hvd_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/hvd")
set(_hvd_has_torch OFF)
set(_hvd_headers ${HVD_CORE_HEADERS})

install(TARGETS ${HVD_CORE_TARGETS} EXPORT hvd-targets)
install(EXPORT hvd-targets NAMESPACE hvd:: DESTINATION "${_hvd_package_dir}")
if(TARGET hvd_torch)
  set(_hvd_has_torch ON)
  list(APPEND _hvd_headers ${HVD_TORCH_HEADERS})
  install(TARGETS ${HVD_TORCH_TARGETS} EXPORT hvd-torch-targets)
  install(EXPORT hvd-torch-targets NAMESPACE hvd:: DESTINATION "${_hvd_package_dir}")
endif()
foreach(program IN ITEMS hvd_bench hvdrun)
  if(TARGET ${program})
    install(TARGETS ${program})
  endif()
endforeach()
if(TARGET hvdrun)
  install(FILES "${PROJECT_SOURCE_DIR}/tools/hvdrun/hvdrun.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1")
  install(FILES "${PROJECT_SOURCE_DIR}/tools/hvdrun/completion.bash" DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions"
          RENAME hvdrun)
endif()
foreach(header IN LISTS _hvd_headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES "${PROJECT_SOURCE_DIR}/${header}" DESTINATION "${HVD_INSTALL_INCLUDEDIR}/${folder}")
endforeach()

include(CMakePackageConfigHelpers)
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/hvd-config.cmake.in" "${PROJECT_BINARY_DIR}/hvd-config.cmake"
                              INSTALL_DESTINATION "${_hvd_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/hvd-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/hvd-config.cmake" "${PROJECT_BINARY_DIR}/hvd-config-version.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/HvdMpi.cmake" "${CMAKE_CURRENT_LIST_DIR}/HvdFindTorch.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/HvdLibTorch.cmake" "${CMAKE_CURRENT_LIST_DIR}/FindNCCL.cmake"
        DESTINATION "${_hvd_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
