# find_package(devicemesh): the targets devicemesh::devicemesh (shared) and devicemesh::static.
#
# Works from the source tree (devicemesh_DIR=<repository>/cmake, after `cargo build --release`) and from an installed prefix
# (<prefix>/lib/cmake/devicemesh). Nothing of NCCL or CUDA is needed to link.
get_filename_component(_devicemesh_here "${CMAKE_CURRENT_LIST_DIR}" REALPATH)
if(EXISTS "${_devicemesh_here}/../Cargo.toml")
  get_filename_component(_devicemesh_root "${_devicemesh_here}/.." REALPATH)
  set(_devicemesh_lib "${_devicemesh_root}/target/release")
else()
  get_filename_component(_devicemesh_root "${_devicemesh_here}/../../.." REALPATH)
  get_filename_component(_devicemesh_lib "${_devicemesh_here}/../.." REALPATH)
endif()
set(_devicemesh_include "${_devicemesh_root}/include")

foreach(_devicemesh_file "${_devicemesh_include}/devicemesh.h" "${_devicemesh_lib}/libdevicemesh.so")
  if(NOT EXISTS "${_devicemesh_file}")
    set(devicemesh_FOUND FALSE)
    set(devicemesh_NOT_FOUND_MESSAGE "${_devicemesh_file} is missing: run `cargo build --release` first")
    return()
  endif()
endforeach()

find_package(Threads REQUIRED)
if(NOT TARGET devicemesh::devicemesh)
  add_library(devicemesh::devicemesh SHARED IMPORTED)
  set_target_properties(devicemesh::devicemesh PROPERTIES
    IMPORTED_LOCATION "${_devicemesh_lib}/libdevicemesh.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_devicemesh_include}")
endif()
if(NOT TARGET devicemesh::static AND EXISTS "${_devicemesh_lib}/libdevicemesh.a")
  add_library(devicemesh::static STATIC IMPORTED)
  set_target_properties(devicemesh::static PROPERTIES
    IMPORTED_LOCATION "${_devicemesh_lib}/libdevicemesh.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_devicemesh_include}"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};m")
endif()
