# cmake --install: libraries, headers under include/{hvd,ops,torch_bindings} so that they are included as in the tree, and the package.

set(_hvd_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/hvd")
set(_hvd_has_torch OFF)

install(TARGETS hvd_core hvd_ops EXPORT hvd-targets)
install(EXPORT hvd-targets NAMESPACE hvd:: DESTINATION "${_hvd_package_dir}")
set(_hvd_floors hvd ops)
if(TARGET hvd_torch)
  set(_hvd_has_torch ON)
  install(TARGETS hvd_torch EXPORT hvd-torch-targets)
  install(EXPORT hvd-torch-targets NAMESPACE hvd:: DESTINATION "${_hvd_package_dir}")
  list(APPEND _hvd_floors torch_bindings)
endif()
install(DIRECTORY ${_hvd_floors} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h" PATTERN "pch.h" EXCLUDE)

include(CMakePackageConfigHelpers)
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/hvd-config.cmake.in" "${PROJECT_BINARY_DIR}/hvd-config.cmake"
                              INSTALL_DESTINATION "${_hvd_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/hvd-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/hvd-config.cmake" "${PROJECT_BINARY_DIR}/hvd-config-version.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/HvdHeaderOnly.cmake" "${CMAKE_CURRENT_LIST_DIR}/HvdMpi.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/HvdFindTorch.cmake" "${CMAKE_CURRENT_LIST_DIR}/HvdLibTorch.cmake"
              "${CMAKE_CURRENT_LIST_DIR}/FindNCCL.cmake"
        DESTINATION "${_hvd_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
