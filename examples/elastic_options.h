// The command line of elastic.cpp, and what its ranks say for examples/demo_elastic.py.
#pragma once

#include "digits.h"

#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using std::chrono::milliseconds;

struct Options {
  std::string data = DM_EXAMPLE_DATA;
  bool check = false;
  bool events = false;       // each rank says what happens to it, and when, for examples/demo_elastic.py
  int epochs = 20;
  milliseconds pause{0};     // after each step: it makes the training longer
  milliseconds timeout{0};   // of each collective; it is how long a stopped rank holds up the others
  milliseconds replace{0};   // how long to wait for a process that takes the place of a lost rank
  milliseconds silent{0};    // after which time a stopped rank is left out
};

Options options;
std::int32_t rank = -1;

// A line with the rank and the seconds of CLOCK_MONOTONIC, which all processes of a host share.
void say(const char *format, ...)
{
  if (!options.events) return;
  char words[1000];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(words, sizeof words, format, arguments);
  va_end(arguments);
  const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  std::printf("%.4f rank %d %s\n", now, static_cast<int>(rank), words);
  std::fflush(stdout);
}

void read_arguments(int argc, char **argv)
{
  for (int at = 1; at < argc; ++at) {
    const std::string option = argv[at];
    const auto number = [&] { return std::strtol(argv[++at], nullptr, 10); };
    const bool has_value = at + 1 < argc;
    if (option == "--check") options.check = true;
    else if (option == "--events") options.events = true;
    else if (option == "--data" && has_value) options.data = argv[++at];
    else if (option == "--epochs" && has_value) options.epochs = static_cast<int>(number());
    else if (option == "--pause" && has_value) options.pause = milliseconds(number());
    else if (option == "--timeout" && has_value) options.timeout = milliseconds(number());
    else if (option == "--replace" && has_value) options.replace = milliseconds(number());
    else if (option == "--silent" && has_value) options.silent = milliseconds(number());
    else fail("usage: elastic [--data digits.csv] [--check] [--events] [--epochs N] and in milliseconds [--pause N] [--timeout N] "
              "[--replace N] [--silent N], got " + option);
  }
}

// A number that is another one when any bit of a loss is.
unsigned long long digest(const std::vector<float> &losses)
{
  unsigned long long hash = 14695981039346656037ULL;  // FNV-1a
  for (const float loss : losses) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &loss, sizeof bits);
    hash = (hash ^ bits) * 1099511628211ULL;
  }
  return hash;
}

}  // namespace
