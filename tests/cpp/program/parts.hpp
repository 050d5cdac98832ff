// What the files of the program hand to each other: meshes by type between those with exceptions,
// C handles to and from the one without.
#pragma once

#include <devicemesh.hpp>

// modern.cpp, of C++20: the sum over tp of values, by std::span.
#ifndef DM_NO_EXCEPTIONS
float sum_of(const dm::Mesh &mesh);
dm::Mesh own_communicator(const dm::World &world);
#endif

// quiet.cpp, without exceptions: the mesh's name of that index, or the error.
const char *quiet_name(dm_mesh *mesh, std::size_t index);
