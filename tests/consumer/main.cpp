// Sums the ranks of a two-rank mesh.
#include <devicemesh.hpp>

#include <iostream>
#include <vector>

int main()
{
  try {
    dm::Mesh mesh = dm::init("cpu", {{"dp", 2}});
    std::vector<float> values{static_cast<float>(mesh.rank())};
    mesh.all_reduce("dp", values);
    std::cout << "sum " << values[0] << std::endl;
    mesh.finalize();
  } catch (const dm::Error &error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
