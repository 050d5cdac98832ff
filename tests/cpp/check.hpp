// Adds to tests/c/check.h for C++: THROWS and REFUSED check that a call throws, or that its Result
// fails, with this status and a message of one line that contains this text.
#pragma once

#include <devicemesh.hpp>

#include "check.h"

inline void failure_is(int line, const char *call, dm::Status expected, const std::string &text, const dm::Error &error)
{
  const std::string message = error.message(), full = error.what();
  const bool one_line = !message.empty() && message.find('\n') == std::string::npos;
  if (error.status() == expected && one_line && message.find(text) != std::string::npos &&
      full == std::string(dm::status_name(expected)) + ": " + message)
    return;
  ++failures;
  std::fprintf(stderr, "line %d: %s gives %s, expected %s and one line with \"%s\"\n", line, call, error.what(),
               dm::status_name(expected), text.c_str());
}

// Checks the Result of a nothrow function.
#define REFUSED(expected, text, call) \
  do { \
    const auto result_ = (call); \
    if (result_.has_value()) { \
      ++failures; \
      std::fprintf(stderr, "%s:%d: %s succeeds, expected %s\n", __FILE__, __LINE__, #call, dm::status_name(expected)); \
    } else { \
      failure_is(__LINE__, #call, expected, text, result_.error()); \
    } \
  } while (0)

#ifndef DM_NO_EXCEPTIONS
// Checks a function that throws.
#define THROWS(expected, text, call) \
  do { \
    try { \
      static_cast<void>(call); \
      ++failures; \
      std::fprintf(stderr, "%s:%d: %s succeeds, expected %s\n", __FILE__, __LINE__, #call, dm::status_name(expected)); \
    } catch (const dm::Error &error_) { \
      failure_is(__LINE__, #call, expected, text, error_); \
    } \
  } while (0)

// Runs a test program's body: an error that nobody expected is a failure, not a std::terminate.
template <class Body> int run(Body body)
{
  try {
    body();
  } catch (const std::exception &error) {
    ++failures;
    std::fprintf(stderr, "not expected: %s\n", error.what());
  }
  return finish();
}
#endif
