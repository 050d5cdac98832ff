// The log in C++: a callback that is a lambda, which may replace itself, and the levels.
#include "check.hpp"

#include <string>
#include <string_view>
#include <vector>

int main()
{
  std::vector<std::string> lines;
  dm::World::set_log(dm::LogLevel::info, [&lines](dm::LogLevel level, std::string_view message) {
    CHECK(level == dm::LogLevel::info);
    lines.emplace_back(message);
  });
  dm::WorldOptions alone;
  alone.world_size = 1;
  dm::World world = dm::World::init("cpu", alone);
  CHECK(lines.size() == 1 && lines[0].rfind("rank 0: joined a world of 1 ranks in ", 0) == 0);

  int calls = 0;
  dm::World::set_log(dm::LogLevel::debug, [&calls](dm::LogLevel level, std::string_view message) {
    ++calls;
    CHECK(level == dm::LogLevel::debug && message.find("DM_STATUS_INVALID_ARGUMENT") != std::string_view::npos);
    dm::World::set_log(dm::LogLevel::off);
  });
  THROWS(dm::Status::invalid_argument, "level is 5", dm::World::set_log(static_cast<dm::LogLevel>(5)));
  THROWS(dm::Status::invalid_argument, "level is -1", dm::World::set_log(static_cast<dm::LogLevel>(-1)));
  CHECK(calls == 1 && lines.size() == 1);
  CHECK(std::string(dm::status_name(dm::Status::exhausted)) == "DM_STATUS_EXHAUSTED");
  world.finalize();
  return finish();
}
