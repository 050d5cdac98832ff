# Below 1.0 a minor version may break the ABI, so 0.2 suits 0.2.x alone. From 1.0 on, a version
# suits its major version. The version itself stands in Cargo.toml alone; an installation has it in
# devicemeshPlaces.cmake.
if(EXISTS "${CMAKE_CURRENT_LIST_DIR}/devicemeshPlaces.cmake")
  include("${CMAKE_CURRENT_LIST_DIR}/devicemeshPlaces.cmake")
  set(PACKAGE_VERSION "${_devicemesh_version}")
else()
  file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../Cargo.toml" _devicemesh_line REGEX "^version = \"[0-9.]+\"" LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" PACKAGE_VERSION "${_devicemesh_line}")
endif()

# The part of a version that must be the same.
macro(_devicemesh_series version)
  if("${version}" MATCHES "^0+\\.([0-9]+)")
    set(_devicemesh_series "0.${CMAKE_MATCH_1}")
  elseif("${version}" MATCHES "^([0-9]+)")
    set(_devicemesh_series "${CMAKE_MATCH_1}")
  endif()
endmacro()

_devicemesh_series("${PACKAGE_VERSION}")
set(_devicemesh_ours "${_devicemesh_series}")
set(PACKAGE_VERSION_EXACT FALSE)
set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(PACKAGE_FIND_VERSION_RANGE)
  # A range says by itself what suits.
  if(NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION_MIN
     AND ((PACKAGE_FIND_VERSION_RANGE_MAX STREQUAL "INCLUDE" AND NOT PACKAGE_VERSION VERSION_GREATER PACKAGE_FIND_VERSION_MAX)
          OR (PACKAGE_FIND_VERSION_RANGE_MAX STREQUAL "EXCLUDE" AND PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION_MAX)))
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
elseif("${PACKAGE_FIND_VERSION}" STREQUAL "")
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
else()
  _devicemesh_series("${PACKAGE_FIND_VERSION}")
  if(_devicemesh_series STREQUAL _devicemesh_ours AND NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION)
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
    if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
      set(PACKAGE_VERSION_EXACT TRUE)
    endif()
  elseif(NOT _devicemesh_series STREQUAL _devicemesh_ours)
    # CMake prints this beside the version that was asked for.
    if(PACKAGE_FIND_VERSION VERSION_LESS PACKAGE_VERSION)
      string(APPEND PACKAGE_VERSION ", which is not compatible with ${_devicemesh_series}: see \"From 0.1 to 0.2\" in CHANGELOG.md")
    else()
      string(APPEND PACKAGE_VERSION ", which is older than the ${_devicemesh_series} that was asked for")
    endif()
  endif()
endif()

# The library is for 64-bit machines.
if(NOT "${CMAKE_SIZEOF_VOID_P}" STREQUAL "" AND NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(PACKAGE_VERSION_UNSUITABLE TRUE)
endif()
