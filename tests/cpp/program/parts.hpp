// The functions that the files of the program share. Files with exceptions pass each other
// dm::Mesh. The file without exceptions gets and gives C handles.
#pragma once

#include <devicemesh.hpp>

// In modern.cpp (C++20): the sum of values over tp, with std::span.
#ifndef DM_NO_EXCEPTIONS
float sum_of(const dm::Mesh &mesh);
dm::Mesh own_communicator(const dm::World &world);
#endif

// In quiet.cpp (without exceptions): the name of the dimension with that index, or the error.
const char *quiet_name(dm_mesh *mesh, std::size_t index);
