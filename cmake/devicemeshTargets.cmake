# devicemesh_import(<name> <file> <include> <static libs> [GLOBAL]) makes the target
# devicemesh::<name> for a library file. The file may belong to an installation, to the source tree,
# or to a project that includes this repository. <static libs> are the libraries that a program links
# beside the static library, as linker flags (`rustc --print native-static-libs`).
function(devicemesh_import name file include static_libs)
  if(TARGET devicemesh::${name})
    return()
  endif()
  get_filename_component(file "${file}" ABSOLUTE)
  get_filename_component(include "${include}" ABSOLUTE)
  if(name STREQUAL "static")
    add_library(devicemesh::${name} STATIC IMPORTED ${ARGN})
    # A name without -l could be a target of the project.
    separate_arguments(libs UNIX_COMMAND "${static_libs}")
    set_target_properties(devicemesh::${name} PROPERTIES INTERFACE_LINK_LIBRARIES "${libs}")
  else()
    add_library(devicemesh::${name} SHARED IMPORTED ${ARGN})
  endif()
  set_target_properties(devicemesh::${name} PROPERTIES IMPORTED_LOCATION "${file}" INTERFACE_INCLUDE_DIRECTORIES "${include}")
endfunction()
