/* ranks: 5 */
// dm::Mesh::recover: (dp=2, tp=2) loses rank 1, and rank 4 takes its place; in both styles.
#include "check.hpp"

#include <unistd.h>

using Ranks = std::vector<std::int32_t>;

int main()
{
  const dm::World world = dm::World::init("cpu");
  const std::int32_t me = world.rank();
  dm::InitOptions init;
  init.world = world;
  const dm::Mesh mesh = dm::init({{"dp", 2}, {"tp", 2}}, init);
  const dm::Recovery none = mesh.recovery();
  CHECK(none.epoch == 0 && none.previous_epoch == 0 && none.lost_ranks.empty() && none.joined_ranks.empty() && !none.has_joined);
  CHECK(none.new_coordinate == (me < 4 ? Ranks{me / 2, me % 2} : Ranks{}) && none.state_root.has_value() == (me < 4));
  dm::RecoverOptions options;
  options.dim = "dp";
  options.timeout = std::chrono::seconds(45);
  options.replace = std::chrono::seconds(30);
  if (me < 4) {
    const dm::Mesh all = mesh.flatten("all");
    THROWS(dm::Status::invalid_state, "nothing to recover", mesh.recover(options));
    dm::RecoverOptions wrong;
    wrong.silent = std::chrono::seconds(1);
    if (me == 2) THROWS(dm::Status::invalid_argument, "min_size is 0", mesh.recover(wrong));
    const dm::Mesh met = mesh.flatten("met");
    if (me == 1) _exit(0);
    THROWS(dm::Status::peer_lost, "rank 1", mesh.flatten("gone"));
  }
  options.has_state = true;
  options.dims = {dm::DimOptions(), dm::DimOptions()};
  // A refusal of rank 2 may stand as the first decision, so the first try may fail with it.
  dm::Result<dm::nothrow::Mesh> next = dm::nothrow::Mesh(mesh.clone().release()).recover(options);
  if (!next && me < 4) next = dm::nothrow::Mesh(mesh.clone().release()).recover(options);
  if (!next) return std::fprintf(stderr, "rank %d: %s\n", int(me), next.error().what()), 1;
  CHECK((next->ranks().value() == Ranks{0, 4, 2, 3}));
  const dm::Recovery told = next->recovery().value();
  CHECK(told.epoch > 0 && (told.lost_ranks == Ranks{1}) && (told.joined_ranks == Ranks{4}) && told.has_joined == (me == 4));
  CHECK(told.new_coordinate == (me == 4 ? Ranks{0, 1} : Ranks{me / 2, me % 2}) && told.old_coordinate.empty() == (me == 4));
  CHECK(told.state_root == (me == 4 || me == 3 ? 1 : 0));
  std::vector<int> one = {1};
  CHECK(next->all_reduce("all", one).has_value() && one[0] == 4);
  THROWS(dm::Status::aborted, "use the mesh that dm_recover gave", mesh.barrier("dp"));
  world.finalize();
  return finish();
}
