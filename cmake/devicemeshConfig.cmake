# find_package(devicemesh [0.2] [REQUIRED] [COMPONENTS shared static hostccl nccl])
#
#   devicemesh::devicemesh  libdevicemesh.so        component shared
#   devicemesh::static      libdevicemesh.a         component static
#   devicemesh::hostccl     libhostccl.so           component hostccl: NCCL's C API over host memory, with hostccl.h
#   devicemesh::nccl        where nccl.h is         component nccl: only when asked for; headers alone,
#                                                   never a library (devicemeshNccl.cmake)
#
# Without components, the package has those of the first three targets whose files exist. The package
# works in an installed prefix, also in one that was moved, and in the source tree
# (devicemesh_DIR=<repository>/cmake, after `cargo build --release`). Nothing of NCCL or CUDA is needed to link.
#
# The policies are set for this file alone: a project with an old cmake_minimum_required would leave
# IN_LIST (CMP0057) unknown.
cmake_policy(PUSH)
cmake_policy(VERSION 3.5...3.31)
get_filename_component(_devicemesh_here "${CMAKE_CURRENT_LIST_DIR}" REALPATH)
if(EXISTS "${_devicemesh_here}/devicemeshPlaces.cmake")
  include("${_devicemesh_here}/devicemeshPlaces.cmake")
  set(_devicemesh_remedy "this installation is incomplete: install it again")
else()
  # A relative folder counts from the repository, where cargo is called.
  set(_devicemesh_lib target)
  if(NOT "$ENV{CARGO_TARGET_DIR}" STREQUAL "")
    set(_devicemesh_lib "$ENV{CARGO_TARGET_DIR}")
  endif()
  get_filename_component(_devicemesh_lib "${_devicemesh_lib}/$ENV{CARGO_BUILD_TARGET}/release" ABSOLUTE
                         BASE_DIR "${_devicemesh_here}/..")
  set(_devicemesh_include "${_devicemesh_here}/../include")
  set(_devicemesh_shared_suffix "")
  file(READ "${_devicemesh_here}/../packaging/native-static-libs.txt" _devicemesh_static_libs)
  set(_devicemesh_remedy "run `cargo build --release` first")
endif()
include("${_devicemesh_here}/devicemeshTargets.cmake")

set(_devicemesh_shared_file "libdevicemesh.so${_devicemesh_shared_suffix}")
set(_devicemesh_static_file "libdevicemesh.a")
set(_devicemesh_hostccl_file "libhostccl.so${_devicemesh_shared_suffix}")
set(_devicemesh_shared_target devicemesh)
set(_devicemesh_static_target static)
set(_devicemesh_hostccl_target hostccl)
set(_devicemesh_missing "")
foreach(_devicemesh_part shared static hostccl)
  set(_devicemesh_file "${_devicemesh_lib}/${_devicemesh_${_devicemesh_part}_file}")
  if(EXISTS "${_devicemesh_file}")
    set(devicemesh_${_devicemesh_part}_FOUND TRUE)
    devicemesh_import(${_devicemesh_${_devicemesh_part}_target} "${_devicemesh_file}" "${_devicemesh_include}" "${_devicemesh_static_libs}")
  else()
    set(devicemesh_${_devicemesh_part}_FOUND FALSE)
    get_filename_component(_devicemesh_file "${_devicemesh_file}" ABSOLUTE)
    set(_devicemesh_${_devicemesh_part}_why "${_devicemesh_file} is missing: ${_devicemesh_remedy}")
  endif()
endforeach()

if("nccl" IN_LIST devicemesh_FIND_COMPONENTS)
  include("${_devicemesh_here}/devicemeshNccl.cmake")
endif()

# Without components the shared library is what makes the package.
set(_devicemesh_wanted "${devicemesh_FIND_COMPONENTS}")
if(NOT _devicemesh_wanted)
  set(_devicemesh_wanted shared)
  set(devicemesh_FIND_REQUIRED_shared TRUE)
endif()
set(devicemesh_FOUND TRUE)
foreach(_devicemesh_part IN LISTS _devicemesh_wanted)
  if(NOT _devicemesh_part MATCHES "^(shared|static|hostccl|nccl)$")
    set(_devicemesh_${_devicemesh_part}_why "there is no component ${_devicemesh_part}: shared, static, hostccl and nccl are all there are")
  endif()
  if(devicemesh_FIND_REQUIRED_${_devicemesh_part} AND NOT devicemesh_${_devicemesh_part}_FOUND)
    set(devicemesh_FOUND FALSE)
    list(APPEND _devicemesh_missing "${_devicemesh_${_devicemesh_part}_why}")
  endif()
endforeach()
if(NOT devicemesh_FOUND)
  string(REPLACE ";" "; " devicemesh_NOT_FOUND_MESSAGE "${_devicemesh_missing}")
endif()
cmake_policy(POP)
