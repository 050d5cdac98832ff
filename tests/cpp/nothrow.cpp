/* ranks: 4 */
/* flags: -fno-exceptions */
// The Result style, in a program without exceptions.
#include "check.hpp"

#include <memory>
#include <string>
#include <vector>

using dm::Result;
using dm::Status;
using dm::nothrow::Mesh;
using dm::nothrow::World;

static_assert(std::is_same_v<decltype(std::declval<Mesh>()["tp"]), Result<Mesh>>);
static_assert(std::is_same_v<decltype(std::declval<Mesh>().comm("tp")), Result<ncclComm_t>>);
static_assert(std::is_same_v<decltype(std::declval<Mesh>().finalize()), Result<void>>);

static void results()
{
  const Result<int> good = 3, bad = dm::Error(Status::timeout, "too late");
  CHECK(good && good.value() == 3 && *good == 3 && good.value_or(5) == 3);
  CHECK(!bad && bad.value_or(5) == 5 && std::string(bad.error().what()) == "DM_STATUS_TIMEOUT: too late");
  CHECK(bad.error().message() == std::string("too late") && bad.error().ccl_result() == 0 && bad.error().os_error() == 0);
  const Result<std::string> text = Result<int>(4).transform([](int number) { return std::string(static_cast<std::size_t>(number), 'x'); });
  CHECK(*text == "xxxx" && text->size() == 4);
  const Result<int> chained = Result<int>(4).and_then([](int number) -> Result<int> {
    if (number > 3) return dm::Error(Status::mismatch, "more than 3");
    return number;
  });
  CHECK(!chained && chained.error().status() == Status::mismatch);
  CHECK(!Result<int>(bad).transform([](int) { return 1; }).has_value());
  Result<std::unique_ptr<int>> owner = std::make_unique<int>(7);
  const std::unique_ptr<int> taken = std::move(owner).value();
  CHECK(*taken == 7);
  const Result<void> nothing, failed = dm::Error(Status::store, "gone");
  CHECK(nothing && !failed && failed.error().status() == Status::store);
  nothing.value();
  int seen = 0;
  const Result<void> noted = Result<int>(4).transform([&](int number) { seen = number; });
  CHECK(noted && seen == 4 && !Result<int>(bad).transform([&](int) { seen = 0; }) && seen == 4);
  CHECK(*nothing.transform([] { return 5; }) == 5 && nothing.transform([&] { seen = 6; }) && seen == 6);
  CHECK(!failed.transform([&] { seen = 0; }) && failed.transform([] { return 5; }).error().status() == Status::store && seen == 6);
}

int main()
{
  results();

  Result<World> world = World::init("cpu");
  if (!world) {
    std::fprintf(stderr, "%s\n", world.error().what());
    return 1;
  }
  dm::InitOptions options;
  options.world = *world;
  Result<Mesh> made = dm::nothrow::init("cpu", {{"dp", 2}, {"tp", 2}}, options);
  if (!made) {
    std::fprintf(stderr, "%s\n", made.error().what());
    return 1;
  }
  const Mesh mesh = std::move(made).value();
  CHECK(*mesh.size() == 4 && *mesh.describe() == "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))");
  CHECK(mesh["tp"].and_then([](const Mesh &tp) { return tp.comm(); }).value() == *mesh.comm("tp"));
  std::vector<int> values = {1, 2}, four(4);
  CHECK(mesh.all_reduce("tp", values).has_value() && values[1] == 4);
  CHECK(mesh.all_gather("tp", values, four).has_value() && four[3] == 4);
  const Result<Mesh> flat = mesh.flatten();
  CHECK(flat && *flat->size() == 4);

  REFUSED(Status::not_found, "there are (dp, tp, dp_tp)", mesh.comm("pp"));
  REFUSED(Status::not_found, "pp", mesh["pp"]);
  REFUSED(Status::invalid_argument, "all_gather: recv has 2 elements", mesh.all_gather("tp", values, values));
  REFUSED(Status::invalid_argument, "3 names for 2 sizes", dm::nothrow::init("cpu", {{2, 2}, {"a", "b", "c"}}));
  REFUSED(Status::invalid_argument, "device_type", dm::nothrow::init("tpu", {{"dp", 4}}));
  REFUSED(Status::invalid_handle, "not a live dm_mesh", Mesh().rank());
  REFUSED(Status::invalid_handle, "not a live dm_mesh", Mesh().dim_names());
  REFUSED(Status::invalid_handle, "not a live dm_world", World().size());
  CHECK(dm::Error::last().status() == Status::invalid_handle);

  // The error has the code of the layer below: hostccl's ncclInvalidUsage.
  const Result<void> ended = mesh.group_end();
  CHECK(!ended && ended.error().status() == Status::invalid_state && ended.error().ccl_result() == ncclInvalidUsage);

  const Result<dm::Plan> plan = dm::nothrow::plan_ranks({"h0", "h1", "h0", "h1"}, {2, 2});
  CHECK(plan && plan->ranks == (std::vector<std::int32_t>{0, 2, 1, 3}) && plan->report.front() == '{' && plan->report.back() == '}');
  REFUSED(Status::invalid_argument, "has 4 ranks, but there are 2 locations", dm::nothrow::plan_ranks({"h0", "h1"}, {2, 2}));
  REFUSED(Status::invalid_argument, "1 weights of traffic for 2 dimensions", dm::nothrow::plan_ranks({"h0", "h1"}, {1, 2}, {1}));
  REFUSED(Status::invalid_argument, "a//b", dm::nothrow::plan_ranks({"a//b"}, {1}));
  // A string that is NULL reaches C as NULL, and not as the empty string.
  const char *const none = nullptr;
  REFUSED(Status::invalid_argument, "locations[0] is NULL", dm::nothrow::plan_ranks({none, "h1"}, {2}));
  REFUSED(Status::invalid_argument, "NULL", mesh.slice({none}));
  REFUSED(Status::invalid_argument, "NULL", mesh.reshape({{1, 4}, {none, "x"}}));

  CHECK(mesh.finalize().has_value() && world->barrier().has_value());
  REFUSED(Status::aborted, "finalized", mesh.comm("tp"));
  CHECK(dm::version() == dm_version() && std::string(dm::status_name(Status::ccl)) == "DM_STATUS_CCL");
  return finish();
}
