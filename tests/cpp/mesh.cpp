/* ranks: 8 */
// A mesh in C++ on eight ranks: the two lines of the README, every view and every question, and
// which object owns what.
#include "check.hpp"

#include <array>
#include <string>
#include <unordered_set>
#include <vector>

using Ranks = std::vector<std::int32_t>;
using Sizes = std::vector<std::int32_t>;
using Lengths = std::vector<std::size_t>;
using Names = std::vector<std::string>;

static_assert(!std::is_copy_constructible_v<dm::Mesh> && !std::is_copy_assignable_v<dm::Mesh>);
static_assert(std::is_nothrow_move_constructible_v<dm::Mesh> && std::is_nothrow_move_assignable_v<dm::Mesh>);
static_assert(!std::is_copy_constructible_v<dm::World> && std::is_nothrow_move_constructible_v<dm::World>);
static_assert(sizeof(dm::Mesh) == sizeof(dm_mesh *) && sizeof(dm::World) == sizeof(dm_world *));
static_assert(std::is_nothrow_copy_constructible_v<dm::Error>);

static void two_lines()
{
  dm::Mesh mesh = dm::init("cpu", {{"replicate", 2}, {"shard", 4}});
  ncclComm_t comm = mesh.comm("shard");
  CHECK(comm != nullptr && comm == mesh["shard"].comm());
  const auto count = mesh.proc<decltype(&ncclCommCount)>("ncclCommCount");
  int ranks = 0;
  CHECK(count(comm, &ranks) == ncclSuccess && ranks == 4);
  CHECK(mesh.describe() == "DeviceMesh((replicate=2, shard=4), 'cpu', stride=(4, 1))");
  THROWS(dm::Status::not_found, "ncclNothing", mesh.proc<void (*)()>("ncclNothing"));
  const dm::World world = mesh["shard"].world();
  const dm::WorldInfo info = world.info();
  CHECK(info.rank == mesh.rank() && info.size == 8 && info.local_rank == info.rank && info.local_size == 8);
  CHECK(info.host == 0 && info.num_hosts == 1 && info.device == -1 && info.ccl_version > 0);
  CHECK(info.device_type == "cpu" && !info.library.empty());
  CHECK(dm::World::default_world("cpu").info().rank == info.rank);
  dm::WorldOptions named;
  named.device = 1;
  THROWS(dm::Status::invalid_argument, "device type cpu has none", dm::World::init("cpu", named));
  mesh.finalize();
}

// Every way to write the dimensions.
static void spellings(const dm::World &world)
{
  const std::string dp = "dp";
  const std::string_view tp = std::string_view("tp+").substr(0, 2);
  const int four = 4;
  const Sizes shape = {2, 4};
  const std::array<const char *, 2> names = {"dp", "tp"};
  const std::vector<dm::Dim> dims = {{"dp", 2}, {"tp", 4}};
  dm::InitOptions options;
  options.world = world;

  const dm::Mesh plain = dm::init("cpu", {{"dp", 2}, {"tp", 4}}, options);
  CHECK(plain == dm::init({{dp, 2u}, {tp, four}}, options));
  CHECK(plain == dm::init("cpu", {shape, names}, options));
  CHECK(plain == dm::init("cpu", {{2, 4}, {"dp", "tp"}}, options));
  CHECK(plain == dm::init(std::string("cpu"), dims, options));
  CHECK(plain == dm::init(nullptr, {shape, Names{"dp", "tp"}}, options));
  CHECK((dm::init("cpu", {2, 4}, options).dim_names() == Names{"dim_0", "dim_1"}));
  CHECK(dm::init("cpu", {{"all", 8}}, options).shape() == Sizes{8});
  CHECK(dm::init("cpu", {8}, options).ndim() == 1);
  CHECK(dm::init("cpu", {}, options).ndim() == 0);

  CHECK(plain({"tp", "dp"}) == plain(std::array<std::string_view, 2>{tp, dp}));
  CHECK(plain("tp") == plain["tp"] && plain.slice({dp}) == plain[dp] && plain[tp] == plain(tp));
  CHECK(plain({}).ndim() == 0 && plain({}).size() == 1);

  options.ranks = {7, 6, 5, 4, 3, 2, 1, 0};
  options.timeout = std::chrono::seconds(60);
  const dm::Mesh reversed = dm::init("cpu", {{"dp", 2}, {"tp", 4}}, options);
  CHECK(reversed.ranks() == options.ranks && reversed != plain);
  options.ranks.pop_back();
  THROWS(dm::Status::invalid_argument, "options.num_ranks is 7, but the shape (2, 4) has 8 ranks",
         dm::init("cpu", {{"dp", 2}, {"tp", 4}}, options));
  THROWS(dm::Status::invalid_argument, "3 names for 2 sizes", dm::init("cpu", {{2, 4}, {"a", "b", "c"}}));
  THROWS(dm::Status::invalid_argument, "1 names for 2 sizes", plain.reshape({{2, 4}, {"a"}}));
  THROWS(dm::Status::invalid_argument, "1 names for 2 sizes", plain.unflatten("tp", {{2, 2}, {"a"}}));
  world.barrier();
}

static void questions(const dm::Mesh &mesh)
{
  const std::int32_t rank = mesh.rank();
  const std::int32_t dp = rank / 4, cp = rank / 2 % 2, tp = rank % 2;
  CHECK(mesh.ndim() == 3 && mesh.dim_name(2) == "tp" && (mesh.dim_names() == Names{"dp", "cp", "tp"}));
  CHECK((mesh.shape() == Sizes{2, 2, 2}) && mesh.size() == 8 && mesh.size("cp") == 2);
  CHECK((mesh.coordinate() == Sizes{dp, cp, tp}) && mesh.local_rank("tp") == rank % 2);
  CHECK((mesh.ranks() == Ranks{0, 1, 2, 3, 4, 5, 6, 7}));
  CHECK((mesh.group_ranks("dp") == Ranks{rank % 4, rank % 4 + 4}));
  CHECK((mesh.replica_groups("dp") == Ranks{0, 4, 1, 5, 2, 6, 3, 7}));
  CHECK(mesh.translate_rank("dp", 1) == rank % 4 + 4);
  CHECK(mesh.neighbor("tp", 1) == (tp == 0 ? std::optional<std::int32_t>(1) : std::nullopt));
  CHECK(mesh.translate_world_rank("dp", rank) == dp && mesh.translate_world_rank("dp", rank % 4) == 0);
  CHECK(mesh.coordinate_of(rank) == mesh.coordinate() && (mesh.coordinate_of(6) == Sizes{1, 1, 0}));
  CHECK(mesh.neighbor("tp", 1, true) == 1 - tp);
  mesh.check("tp");
  mesh.check();
  CHECK(mesh.is_member() && mesh.device_type() == "cpu" && dm::version() == DEVICEMESH_VERSION);
  CHECK(mesh.submesh({"tp"}, 0).is_member() == (rank < 2));
  THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dm::Mesh().is_member());
  THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dm::Mesh().device_type());
  THROWS(dm::Status::invalid_argument, "index is 3, the mesh has 3 dimensions", mesh.dim_name(3));
  THROWS(dm::Status::not_found, "there are (dp, cp, tp)", mesh.size("pp"));
  THROWS(dm::Status::invalid_argument, "has 3 dimensions: say which one", mesh.comm());
  THROWS(dm::Status::invalid_argument, "not UTF-8", mesh.comm(std::string("dp\0tp", 5)));
  THROWS(dm::Status::invalid_argument, "not UTF-8", mesh[std::string_view("dp\0", 3)]);

  // The 16 rows are split over dp, then over tp. The columns are not split.
  const dm::LocalShard block = mesh.local_shard({dm::shard(0), dm::replicate(), dm::shard(0)}, {16, 3}, 5);
  CHECK((block.shape == Lengths{4, 3}) && (block.offset == Lengths{12, 0}));
  CHECK((mesh.local_shard({dm::shard(0, 1), dm::replicate(), dm::shard(0)}, {16}, 1).offset == Lengths{8}));
  THROWS(dm::Status::invalid_argument, "num_placements is 1, but DeviceMesh", mesh.local_shard({dm::shard(0)}, {16}));
  THROWS(dm::Status::invalid_argument, "tensor dimension 9", mesh.local_shard({dm::shard(0), dm::shard(9), dm::replicate()}, {16}));
}

static void views(const dm::Mesh &mesh)
{
  const dm::Mesh pair = mesh({"dp", "cp"}), flat = pair.flatten("dp_cp");
  CHECK(flat.ndim() == 1 && flat.size() == 4 && flat.dim_name(0) == "dp_cp");
  CHECK(mesh["dp_cp"].comm() == flat.comm() && mesh.root()({"dp_cp", "tp"}).ndim() == 2);
  dm::DimOptions own;
  own.own_comm = true;
  own.comm_name = "of its own";
  CHECK(pair.flatten("again").comm() == flat.comm() && pair.flatten("mine", own).comm() != flat.comm());
  CHECK(pair.flatten().dim_name(0) == "dp_cp");

  const dm::Mesh split = flat.unflatten("dp_cp", {{"outer", 2}, {"inner", 2, own}});
  CHECK((split.dim_names() == Names{"outer", "inner"}) && split.comm("outer") == mesh.comm("dp") && split.comm("inner") != mesh.comm("cp"));
  const dm::Mesh sparse = mesh.reshape({{"dp", 2}, {"ep", 4}});
  CHECK((sparse.shape() == Sizes{2, 4}) && sparse.comm("dp") == mesh.comm("dp"));
  const dm::Mesh beside = dm::Mesh::concatenate({mesh["dp"], sparse["ep"]});
  CHECK(beside == sparse && beside.hash() == sparse.hash());
  std::vector<dm::Mesh> parts;
  parts.push_back(mesh["tp"]);
  parts.push_back(mesh["dp"]);
  CHECK(dm::Mesh::concatenate(parts) == mesh({"tp", "dp"}));
  THROWS(dm::Status::invalid_argument, "at least one mesh", dm::Mesh::concatenate({}));

  const dm::Mesh second = mesh.slice_range("dp", 1, 1);
  if (mesh.rank() < 4) THROWS(dm::Status::not_member, "is not in", second.comm("tp"));
  else CHECK((second.ranks() == Ranks{4, 5, 6, 7}) && second.comm("tp") == mesh.comm("tp"));
  CHECK(mesh.submesh_count({"cp", "tp"}) == 2 && (mesh.submesh({"cp", "tp"}, 1).ranks() == Ranks{4, 5, 6, 7}));
  CHECK(mesh.submesh_count("tp") == 4 && (mesh.submesh("tp", 3).ranks() == Ranks{6, 7}));
  THROWS(dm::Status::invalid_argument, "4", mesh.submesh("tp", 4));
}

// Handles that are empty, moved from, moved to themselves, cloned, found by name, released and
// adopted.
static void owners(const dm::Mesh &mesh)
{
  dm::Mesh first = mesh.clone(), empty;
  CHECK(first == mesh && first.capi() != mesh.capi() && first.comm("tp") == mesh.comm("tp"));
  dm::Mesh second = std::move(first);
  CHECK(second == mesh && first.capi() == nullptr);
  dm::Mesh &itself = second;
  second = std::move(itself);
  CHECK(second == mesh);
  for (const dm::Mesh *dead : {&first, &empty}) {
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->comm("tp"));
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->ndim());
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->dim_name(0));
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->dim_names());
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->describe());
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->serialize());
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->clone());
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", (*dead)["tp"]);
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", *dead == mesh);
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->local_shard({dm::shard(0)}, {4}));
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->group([] {}));
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->register_as("nobody"));
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->abort());
    THROWS(dm::Status::invalid_handle, "not a live dm_mesh", dead->shrink("tp", {0}));
  }
  THROWS(dm::Status::invalid_handle, "not a live dm_world", dm::World().abort());
  {
    dm::InitOptions nowhere;
    const dm::World none;
    nowhere.world = none;
    THROWS(dm::Status::invalid_handle, "moved from", dm::init("cpu", {8}, nowhere));
  }
  THROWS(dm::Status::invalid_handle, "not a live dm_world", dm::World().rank());
  THROWS(dm::Status::invalid_handle, "not a live dm_world", dm::World().locations());

  dm_mesh *raw = second.release();
  CHECK(second.capi() == nullptr);
  second = dm::Mesh(raw);
  CHECK(second.capi() == raw && second == mesh);
  dm::nothrow::Mesh other(second.release());
  CHECK(other.equals(mesh).value());

  mesh["tp"].register_as("trainer");
  CHECK(dm::Mesh::lookup("trainer") == mesh["tp"]);
  dm::Mesh::unregister("trainer");
  THROWS(dm::Status::not_found, "trainer", dm::Mesh::lookup("trainer"));

  std::unordered_set<dm::Mesh> set;
  set.insert(mesh["tp"]);
  set.insert(mesh["cp"]);
  set.insert(mesh["tp"]);
  CHECK(set.size() == 2 && set.count(mesh["cp"]) == 1);
}

static void adopted(const dm::Mesh &mesh, const dm::World &world)
{
  const std::int32_t base = mesh.rank() / 2 * 2;
  dm::InitOptions options;
  options.world = world;
  options.ranks = {base, base + 1};
  const std::vector<ncclComm_t> comms = {mesh.comm("tp")};
  const dm::Mesh half = dm::Mesh::from_comms("cpu", {{"tp", 2}}, comms, options);
  CHECK(half.comm() == comms[0] && half == mesh["tp"]);
  CHECK(dm::Mesh::from_comms("cpu", {{"tp", 2}}, {comms[0]}).size() == 2);
  THROWS(dm::Status::invalid_argument, "1 communicators for 2 dimensions", dm::Mesh::from_comms("cpu", {{"a", 1}, {"b", 2}}, comms));
  THROWS(dm::Status::invalid_argument, "2 ranks", dm::Mesh::from_comms("cpu", {{"tp", 3}}, comms));
}

static void lazy(const dm::World &world)
{
  dm::InitOptions options;
  options.world = world;
  options.lazy = true;
  const dm::Mesh mesh = dm::init({{"dp", 2}, {"tp", 4, dm::DimOptions{true, nullptr, "lazy tensor parallel"}}}, options);
  if (mesh.rank() < 4) CHECK(mesh.comm("tp") != nullptr && mesh.comm("tp") == mesh.comm("tp"));
  world.barrier(std::chrono::minutes(1));
  mesh.finalize();
}

// A mesh is written as text and made again from it.
static void text(const dm::Mesh &mesh, const dm::World &world)
{
  dm::InitOptions options;
  options.world = world;
  const std::string written = mesh.serialize();
  const dm::Mesh again = dm::Mesh::deserialize(written, options), own = dm::Mesh::deserialize(written, options, {{true}, {}, {}});
  CHECK(again == mesh && again.comm("tp") == mesh.comm("tp"));
  CHECK(own == mesh && own.comm("dp") != mesh.comm("dp") && own.comm("tp") == mesh.comm("tp"));
  THROWS(dm::Status::invalid_argument, "not the text of a mesh", dm::Mesh::deserialize(written.substr(1), options));
  THROWS(dm::Status::invalid_argument, "text is NULL", dm::Mesh::deserialize(nullptr, options, {dm::DimOptions{true}}));
  THROWS(dm::Status::invalid_argument, "not the text of a mesh", dm::Mesh::deserialize("", options, {dm::DimOptions{true}}));
  THROWS(dm::Status::invalid_argument, "options.num_dim_options is 1, but the mesh has 3 dimensions",
         dm::Mesh::deserialize(written, options, {dm::DimOptions{true}}));
  options.ranks = {0};
  THROWS(dm::Status::invalid_argument, "ranks", dm::Mesh::deserialize(written, options));
}

// The locations of the ranks, and a plan from them.
static void places(const dm::World &world)
{
  const Names hosts = world.locations("h" + std::to_string(world.rank() % 2));
  CHECK((hosts == Names{"h0", "h1", "h0", "h1", "h0", "h1", "h0", "h1"}));
  const dm::Plan plan = dm::plan_ranks(hosts, {2, 4});
  CHECK((plan.ranks == Ranks{0, 2, 4, 6, 1, 3, 5, 7}) && plan.report.find("\"even\":true") != std::string::npos);
  CHECK((dm::plan_ranks(hosts, {2, 4}, {10, 1}).ranks != plan.ranks));
  dm::InitOptions options;
  options.world = world;
  options.ranks = plan.ranks;
  CHECK((dm::init({{"dp", 2}, {"tp", 4}}, options).submesh("tp", 1).ranks() == Ranks{1, 3, 5, 7}));
  CHECK(world.locations().size() == 8 && world.locations({}, std::chrono::minutes(1)) == world.locations());
  THROWS(dm::Status::invalid_argument, world.rank() == 3 ? "timeout_ms is -1" : "rank 3 refused its own dm_world_locations",
         world.locations({}, std::chrono::milliseconds(world.rank() == 3 ? -1 : 0)));
}

// A number that is no std::int32_t is refused, and not cut to a rank that exists.
static void large_numbers(const dm::World &world)
{
  dm::InitOptions options;
  options.world = world;
  const dm::Mesh mesh = dm::init({{"dp", 2}, {"tp", 4}}, options);
  const std::size_t large = std::size_t{1} << 32;
  const long low = -(1L << 32);
  std::vector<float> values(4);
  const auto status = dm::Status::invalid_argument;
  THROWS(status, "reduce: root is 4294967296, which does not fit into std::int32_t", mesh.reduce("tp", values, values, large));
  THROWS(status, "reduce: root is -4294967296", mesh.reduce("tp", values.data(), values.data(), 4, low));
  THROWS(status, "broadcast: root is 4294967296", mesh.broadcast("tp", values, large));
  THROWS(status, "broadcast: root is 4294967296", mesh.broadcast("tp", values, values, large));
  THROWS(status, "broadcast: root is 4294967296", mesh.broadcast("tp", values.data(), values.data(), 4, large));
  THROWS(status, "send: peer is 4294967296", mesh.send("tp", values, large));
  THROWS(status, "send: peer is 4294967296", mesh.send("tp", values.data(), 4, large));
  THROWS(status, "recv: peer is 4294967296", mesh.recv("tp", values, large));
  THROWS(status, "recv: peer is 9223372036854775807", mesh.recv("tp", values.data(), 4, SIZE_MAX));
  THROWS(status, "recv: peer is 4294967296", mesh.group([&] { mesh.recv("tp", values, large); }));
  THROWS(status, "broadcast_bytes: root is 4294967296", mesh.broadcast_bytes("tp", "", large));
  THROWS(status, "broadcast_bytes: root is 4294967296", world.broadcast_bytes("", large));
  THROWS(status, "slice_range: start is 4294967296", mesh.slice_range("tp", large, 1));
  THROWS(status, "slice_range: len is 4294967298", mesh.slice_range("tp", 0, large + 2));
  THROWS(status, "slice_range: step is 4294967297", mesh.slice_range("tp", 0, 1, large + 1));
  THROWS(status, "submesh: index is 4294967296", mesh.submesh("tp", large));
  THROWS(status, "coordinate_of: world_rank is 4294967296", mesh.coordinate_of(large));
  THROWS(status, "local_shard: world_rank is 4294967296", mesh.local_shard({dm::replicate(), dm::replicate()}, {4}, large));
  THROWS(status, "translate_rank: dim_rank is 4294967296", mesh.translate_rank("tp", large));
  THROWS(status, "translate_world_rank: world_rank is 4294967296", mesh.translate_world_rank("tp", large));
  THROWS(status, "neighbor: offset is 4294967297", mesh.neighbor("tp", large + 1, true));

  // All types of integers are taken, and enumerations that are integers in C.
  enum Stage { first, second };
  const std::uint8_t small = 1;
  CHECK(mesh.translate_rank("tp", 1L) == mesh.translate_rank("tp", small) && mesh.translate_rank("tp", second) == mesh.translate_rank("tp", std::size_t{1}));
  CHECK(mesh.neighbor("tp", std::int64_t{-1}, true) == mesh.neighbor("tp", 3u, true));
  mesh.finalize();
}

// The job goes on without the replica of rank 5.
static void shrunk(const dm::World &world)
{
  dm::InitOptions options;
  options.world = world;
  const dm::Mesh mesh = dm::init({{"dp", 4}, {"tp", 2}}, options);
  const dm::Mesh whole = dm::init({{"dp", 4}, {"tp", 2}}, options);
  const dm::Mesh third = dm::init({{"dp", 4}, {"tp", 2}}, options);
  THROWS(dm::Status::invalid_state, "no rank is lost", third.shrink("dp", std::vector<std::int32_t>()));
  THROWS(dm::Status::invalid_state, "no rank is lost", whole.shrink("dp"));
  THROWS(dm::Status::invalid_state, "no rank is lost", whole.shrink("dp", std::chrono::minutes(1)));
  const dm::Mesh fourth = dm::init({{"dp", 4}, {"tp", 2}}, options);
  const std::vector<dm::DimOptions> too_few(1), wishes(2);
  THROWS(dm::Status::invalid_argument, "num_dim_options is 1", fourth.shrink("dp", {}, {}, too_few));
  THROWS(dm::Status::invalid_state, "no rank is lost", fourth.shrink("dp", {}, std::chrono::minutes(1), wishes));
  if (world.rank() != 5) {
    const dm::Mesh rest = mesh.shrink("dp", {5});
    CHECK((rest.ranks() == Ranks{0, 1, 2, 3, 6, 7}));
    if (world.rank() == 4) THROWS(dm::Status::not_member, "is not in", rest.comm("tp"));
    else {
      std::vector<int> one = {1};
      rest.all_reduce("dp", one);
      CHECK(one[0] == 3);
    }
    THROWS(dm::Status::aborted, "", mesh.comm("tp"));
  }
  world.barrier();
}

// One rank asks for another mesh, and all ranks are told which.
static void disagreement(const dm::World &world)
{
  dm::InitOptions options;
  options.world = world;
  const bool odd = world.rank() == 6;
  THROWS(dm::Status::mismatch, "rank 6 called dm_init(shape=(4, 2)", dm::init("cpu", {{"dp", odd ? 4 : 2}, {"tp", odd ? 2 : 4}}, options));
}

static void ends(dm::Mesh mesh)
{
  const dm::Mesh view = mesh["tp"];
  mesh.finalize();
  THROWS(dm::Status::aborted, "finalized", mesh.comm("tp"));
  std::array<float, 1> value{1};
  THROWS(dm::Status::aborted, "finalized", view.all_reduce(nullptr, value));
  THROWS(dm::Status::aborted, "", mesh.finalize());
  mesh.abort();
  CHECK(view.size() == 2);
}

int main()
{
  return run([] {
    two_lines();
    const dm::World world = dm::World::init("cpu");
    CHECK(world.size() == 8);
    spellings(world);
    dm::InitOptions options;
    options.world = world;
    dm::Mesh mesh = dm::init("cpu", {{"dp", 2}, {"cp", 2}, {"tp", 2}}, options);
    questions(mesh);
    views(mesh);
    owners(mesh);
    adopted(mesh, world);
    lazy(world);
    text(mesh, world);
    places(world);
    disagreement(world);
    ends(std::move(mesh));
    large_numbers(world);
    shrunk(world);
    world.abort();
    THROWS(dm::Status::aborted, "", world.barrier());
  });
}
