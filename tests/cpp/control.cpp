/* ranks: 4 */
// The control plane in C++: barriers and bytes along the dimensions of a mesh (2, 2) and over the
// world, in both styles of errors.
#include "check.hpp"

#include <string>
#include <vector>

int main()
{
  const dm::World world = dm::World::init("cpu");
  dm::InitOptions options;
  options.world = world;
  const dm::Mesh mesh = dm::init("cpu", {{"dp", 2}, {"tp", 2}}, options);
  const std::int32_t me = world.rank(), row = me / 2, column = me % 2;
  const std::string nul("a\0b", 3);

  // Lengths differ, and a NUL is a byte like others.
  mesh.barrier("dp");
  CHECK((mesh.all_gather_bytes("tp", std::string(static_cast<std::size_t>(column), 'x')) == std::vector<std::string>{"", "x"}));
  CHECK((mesh.all_gather_bytes("dp", row == 0 ? nul : "row 1") == std::vector<std::string>{nul, "row 1"}));
  CHECK(mesh.broadcast_bytes("dp", "of rank " + std::to_string(me), 1) == "of rank " + std::to_string(2 + column));
  CHECK((world.all_gather_bytes(std::to_string(me)) == std::vector<std::string>{"0", "1", "2", "3"}));
  CHECK(world.broadcast_bytes(me == 3 ? "seed" : "", 3) == "seed");
  const dm::Mesh tp = mesh["tp"];
  tp.barrier();

  THROWS(dm::Status::invalid_argument, "root is 2", mesh.broadcast_bytes("tp", "x", 2));
  THROWS(dm::Status::invalid_argument, "say which one", mesh.barrier());
  THROWS(dm::Status::not_found, "nowhere", mesh.all_gather_bytes("nowhere", "x"));
  THROWS(dm::Status::mismatch, "root=1", mesh.broadcast_bytes("tp", "x", column));

  const dm::nothrow::World again = *dm::nothrow::World::init("cpu");
  CHECK((*again.all_gather_bytes("y") == std::vector<std::string>{"y", "y", "y", "y"}));
  REFUSED(dm::Status::invalid_argument, "root is -1", again.broadcast_bytes("y", -1));
  CHECK(again.barrier().has_value());
  return finish();
}
