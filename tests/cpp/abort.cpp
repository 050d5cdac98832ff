/* ranks: 2 */
// How meshes and worlds end in C++: abort() from another thread, a rank that leaves, and the
// default worlds. Also the codes of lower layers in an error.
#include "check.hpp"

#include <string>
#include <thread>
#include <vector>

int main()
{
  return run([] {
    dm::World world = dm::World::init("cpu");
    const std::int32_t rank = world.rank();
    dm::InitOptions options;
    options.world = world;
    dm::DimOptions own;
    own.own_comm = true;
    const dm::Mesh mesh = dm::init("cpu", {{"all", 2}}, options), other = dm::init("cpu", {{"all", 2, own}}, options);

    try {
      mesh.group_end();
      CHECK(false);
    } catch (const dm::Error &error) {
      CHECK(error.status() == dm::Status::invalid_state && error.ccl_result() == ncclInvalidUsage &&
            error.device_error() == 0 && error.os_error() == 0);
      const dm::Error copy = error;
      CHECK(copy.ccl_result() == ncclInvalidUsage && copy.message() == std::string(dm_last_error()));
      CHECK(dm::Error::last().what() == std::string(error.what()));
    }

    // Rank 0 waits in a call that rank 1 never makes, while rank 1 waits at the barrier.
    if (rank == 0) {
      std::thread blocked([&] {
        std::vector<float> nothing(4);
        THROWS(dm::Status::aborted, "aborted", other.recv("all", nothing, 1));
      });
      other.abort();
      blocked.join();
      other.abort();
    }
    world.barrier();
    std::vector<int> one = {1};
    mesh.all_reduce(nullptr, one);
    CHECK(one[0] == 2);

    // abort() of a view ends the whole root mesh. The view outlives it.
    const dm::Mesh default_mesh = dm::init("cpu", {{"all", 2}}), view = default_mesh["all"];
    dm::World::abort_default();
    THROWS(dm::Status::aborted, "aborted", view.comm());
    // The next mesh joins the default world anew.
    const dm::Mesh again = dm::init("cpu", {{"all", 2}});
    again.all_reduce(nullptr, one);
    CHECK(one[0] == 4);

    if (rank == 1) {
      world.abort();
      THROWS(dm::Status::aborted, "", world.barrier());
    } else {
      THROWS(dm::Status::peer_lost, "rank 1", world.barrier());
    }
    const dm::World moved = std::move(world);
    CHECK(moved.rank() == rank);
    THROWS(dm::Status::invalid_handle, "not a live dm_world", world.size());
  });
}
