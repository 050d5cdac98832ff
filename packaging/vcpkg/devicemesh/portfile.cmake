# A port for vcpkg, as an overlay: vcpkg install devicemesh --overlay-ports=packaging/vcpkg
#
# It needs cargo on the PATH, because vcpkg has no Rust. DEVICEMESH_TARBALL in the environment names
# the tarball of `make dist`, which has all crates, so cargo needs no network. A port for vcpkg's own
# registry must call vcpkg_download_distfile with the tarball's address and SHA-512 instead. vcpkg's
# binary cache does not know the tarball. Without --binarysource=clear, vcpkg installs what it built
# from an earlier tarball of the same version. A program links devicemesh::devicemesh (dynamic
# triplets) or devicemesh::static (static triplets).
if(NOT EXISTS "$ENV{DEVICEMESH_TARBALL}")
  message(FATAL_ERROR "DEVICEMESH_TARBALL names no file: it is the tarball of the sources that `make dist` has made")
endif()
vcpkg_extract_source_archive(SOURCE_PATH ARCHIVE "$ENV{DEVICEMESH_TARBALL}")

# The debug and the release tree get the same binaries, so cargo builds them once, in one folder.
# Line tables would make the libraries four times as large.
set(ENV{CARGO_BUILD_JOBS} "${VCPKG_CONCURRENCY}")
set(ENV{CARGO_PROFILE_RELEASE_DEBUG} false)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DDEVICEMESH_INSTALL=ON -DDEVICEMESH_CARGO_FLAGS=--offline
          "-DDEVICEMESH_CARGO_TARGET_DIR=${CURRENT_BUILDTREES_DIR}/${TARGET_TRIPLET}-cargo")
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME devicemesh CONFIG_PATH lib/cmake/devicemesh)
# vcpkg_cmake_config_fixup has moved the package from lib/cmake/devicemesh to share/devicemesh. It
# leaves devicemeshPlaces.cmake as it was, whose paths start from the old folder.
set(places "${CURRENT_PACKAGES_DIR}/share/devicemesh/devicemeshPlaces.cmake")
vcpkg_replace_string("${places}" [["${_devicemesh_here}/../.."]] [["${_devicemesh_here}/../../lib"]])
vcpkg_replace_string("${places}" [["${_devicemesh_here}/../../../include"]] [["${_devicemesh_here}/../../include"]])
vcpkg_fixup_pkgconfig()
vcpkg_copy_tools(TOOL_NAMES devicemesh AUTO_CLEAN)

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share" "${CURRENT_PACKAGES_DIR}/share/doc")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE-APACHE" "${SOURCE_PATH}/LICENSE-MIT" "${SOURCE_PATH}/THIRD-PARTY-LICENSES")
