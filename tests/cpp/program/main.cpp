// The C++17 file of a program of several standards, with and without exceptions;
// tests/test_cpp_header.py builds it.
#include "parts.hpp"

#include <cstdio>
#include <string>

int main()
{
  const dm::World world = dm::World::init("cpu");
  const dm::Mesh mesh = own_communicator(world);
  dm::Mesh view = mesh["tp"];
  const float sum = sum_of(view);
  const std::string good = quiet_name(mesh.capi(), 1), bad = quiet_name(view.capi(), 1);
  const bool fine = sum == 6 && good == "tp" && bad == "DM_STATUS_INVALID_ARGUMENT: index is 1, the mesh has 1 dimensions";
  if (!fine) std::printf("sum %g, %s, %s\n", static_cast<double>(sum), good.c_str(), bad.c_str());
  mesh.finalize();
  try {
    static_cast<void>(view.comm());
  } catch (const std::exception &error) {
    if (fine && std::string(error.what()).find("DM_STATUS_ABORTED: ") == 0) std::puts("fine");
  }
  return 0;
}
