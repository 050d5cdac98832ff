// Events in C++: a handler that is a lambda and may replace itself, a queue, and the counters.
#include "check.hpp"

#include <atomic>
#include <chrono>
#include <poll.h>
#include <string>
#include <thread>

using namespace std::chrono_literals;

int main()
{
  std::atomic<int> calls{0};
  dm::EventOptions options;
  options.slow = 1h;
  dm::Events events = dm::Events::open(options);
  dm::Events::set_handler(
      [&calls](const dm::Event &event) {
        CHECK(event.kind == dm::EventKind::joined && event.ranks.size() == 1 && event.dropped == 0);
        ++calls;
        dm::Events::set_handler({});
      },
      options);
  pollfd look = {events.fd(), POLLIN, 0};
  CHECK(!events.next() && poll(&look, 1, 0) == 0);

  dm::WorldOptions alone;
  alone.world_size = 1;
  dm::World world = dm::World::init("cpu", alone);
  CHECK(poll(&look, 1, 60000) == 1);
  const std::optional<dm::Event> joined = events.next(60s);
  CHECK(joined && joined->kind == dm::EventKind::joined && joined->rank == 0 && joined->world_size == 1 && joined->call == -1);
  CHECK(joined->message.rfind("rank 0 has joined a world of 1 ranks", 0) == 0 && joined->group.empty() && joined->waited_seconds < 0);
  const auto age = std::chrono::system_clock::now() - joined->time;
  CHECK(age > -1h && age < 1h);

  dm::InitOptions in_world;
  in_world.world = world;
  dm::Mesh mesh = dm::Mesh::init("cpu", {{"dp", 1}}, in_world);
  mesh.abort();
  const std::optional<dm::Event> aborted = events.next(60s);
  CHECK(aborted && aborted->kind == dm::EventKind::aborted && aborted->group == "mesh");
  for (int tries = 0; calls == 0 && tries < 60000; ++tries) std::this_thread::sleep_for(1ms);
  dm::Events::set_handler({});
  CHECK(calls == 1);

  THROWS(dm::Status::invalid_argument, "timeout_ms is -1", events.next(-1ms));
  options.slow = -1ms;
  THROWS(dm::Status::invalid_argument, "options.slow_ms is -1", dm::Events::open(options));
  CHECK(dm::World::metrics().find("# TYPE devicemesh_calls_begun_total counter\n") != std::string::npos);
  dm::nothrow::Events quiet;
  CHECK(quiet.next().error().status() == dm::Status::invalid_handle);
  return finish();
}
