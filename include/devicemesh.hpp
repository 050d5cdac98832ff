/* libdevicemesh for C++17 and later: devicemesh.h with owners, containers, types and errors.
 * Header-only; needs nothing but the C header.
 *
 *     dm::Mesh mesh = dm::init("cuda", {{"replicate", 2}, {"shard", 4}});  // collective
 *     ncclComm_t comm = mesh.comm("shard");  // for mesh.proc<...>("ncclAllGather")(..., comm, ...)
 *     mesh.finalize();  // collective: ends the communicators; a destructor does not
 *
 * Two styles of errors, one set of functions
 *   dm::Mesh, dm::World, dm::init ...             give their value, and throw dm::Error.
 *   dm::nothrow::Mesh, ::World, ::init ...        give a dm::Result, and throw only
 *                                                 std::bad_alloc.
 * dm::Result has these members of std::expected: has_value, value, value_or, error, and_then,
 * transform, and the operators.
 * Without exceptions (-fno-exceptions, or DM_NO_EXCEPTIONS defined before the header) only the
 * second is there, and reading the value of a Result that has none prints the error and aborts.
 * Below, Returns<T> is T in the first style and Result<T> in the second.
 *
 * The comment of each function names a C function. The documentation of the C function in
 * devicemesh.h says what it does, whether it is local or collective, and which errors it has.
 *
 * Threads: as in C, everything may be called from several threads at once, on the same object too;
 * only moving, assigning and destroying an object need exclusive access to it, as in all of C++.
 * Two threads must not call along one dimension without an order of their own: their calls could
 * pair differently on different ranks. Calls that overlap fail with Status::mismatch, but results
 * before that may be mixed without an error. Give each thread a dimension with a name of its own
 * (flatten, reshape); docs/threads.md has the rules.
 *
 * Owners (Mesh, World, Events) are move-only; clone() of a mesh is cheap. An owner that is empty
 * or moved from has no live handle: calls on it give Status::invalid_handle. Views keep what they
 * need: they may outlive the mesh they came from, and the world.
 *
 * Contents. A line "// ---- name ----" begins each section.
 *   numbers of the C header   Status, Op, Dtype, LogLevel, LogCallback
 *   errors                    Error, Result, and the two styles of errors (detail::Throws, Gives,
 *                             Calls)
 *   arguments                 Int32, Span, Text, Texts, DimOptions, Dim, Dims, Placement
 *   the world                 Store, WorldOptions, WorldInfo, WorldRef, MeshRef, BasicWorld,
 *                             InitOptions
 *   collectives               DtypeOf; what the templates check of buffers, and groups
 *                             (detail::Collected)
 *   the mesh                  LocalShard, Plan, RecoverOptions, Recovery, and BasicMesh with these
 *                             groups of functions: making and owning, views, questions,
 *                             communicators, collectives, the work behind them
 *   events                    EventKind, Event, EventOptions, EventHandler, BasicEvents
 *   the two styles            World, Mesh, Events, init, plan_ranks; the same names in nothrow
 * Names in dm::detail are no part of the interface. */

#ifndef DEVICEMESH_HPP
#define DEVICEMESH_HPP

#include "devicemesh.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

/* DM_NO_EXCEPTIONS is the only macro of this header. The user defines it, or this header does so
   where the compiler has no exceptions. */
#if !defined(DM_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define DM_NO_EXCEPTIONS
#endif

namespace dm {

/* Files without exceptions get other names for the linker, because the bodies of their functions
 * differ. So both kinds of object files can be in one program. They hand C handles to each other:
 * capi(), release(). */
#ifdef DM_NO_EXCEPTIONS
inline namespace no_exceptions {
#endif

// ---- numbers of the C header ----

/// The outcome of a call: the DM_STATUS_ values. A newer library may give values that are not
/// listed here.
enum class Status : dm_status {
  ok = DM_STATUS_OK,
  invalid_argument = DM_STATUS_INVALID_ARGUMENT,
  invalid_handle = DM_STATUS_INVALID_HANDLE,
  not_found = DM_STATUS_NOT_FOUND,
  not_member = DM_STATUS_NOT_MEMBER,
  buffer_too_small = DM_STATUS_BUFFER_TOO_SMALL,
  mismatch = DM_STATUS_MISMATCH,
  timeout = DM_STATUS_TIMEOUT,
  store = DM_STATUS_STORE,
  ccl = DM_STATUS_CCL,
  device = DM_STATUS_DEVICE,
  library = DM_STATUS_LIBRARY,
  unsupported = DM_STATUS_UNSUPPORTED,
  aborted = DM_STATUS_ABORTED,
  peer_lost = DM_STATUS_PEER_LOST,
  internal = DM_STATUS_INTERNAL,
  exhausted = DM_STATUS_EXHAUSTED,
  invalid_state = DM_STATUS_INVALID_STATE,
};

/// A reduction: DM_SUM and so on, the values of ncclRedOp_t. avg is the sum divided by the number
/// of ranks, truncated for integers. It does not overflow on the host engine; NCCL makes the sum of
/// integers in their own type. max and min are NaN on the host engine where a rank has NaN; NCCL
/// ignores a NaN where another rank has a number.
enum class Op : dm_op { sum = DM_SUM, prod = DM_PROD, max = DM_MAX, min = DM_MIN, avg = DM_AVG };

/// The type of a buffer's elements: DM_INT8 and so on, the values of ncclDataType_t.
enum class Dtype : dm_dtype {
  int8 = DM_INT8,
  uint8 = DM_UINT8,
  int32 = DM_INT32,
  uint32 = DM_UINT32,
  int64 = DM_INT64,
  uint64 = DM_UINT64,
  float16 = DM_FLOAT16,
  float32 = DM_FLOAT32,
  float64 = DM_FLOAT64,
  bfloat16 = DM_BFLOAT16,
  float8e4m3 = DM_FLOAT8E4M3,
  float8e5m2 = DM_FLOAT8E5M2,
};

/// A level of the log: DM_LOG_OFF and so on. A record is logged when its level is at most the
/// level that is set.
enum class LogLevel : dm_log_level { off = DM_LOG_OFF, error = DM_LOG_ERROR, warn = DM_LOG_WARN, info = DM_LOG_INFO, debug = DM_LOG_DEBUG };

/// A function that gets the records of the log: the level, and one line that begins with the rank.
/// An exception that leaves it ends the program.
using LogCallback = std::function<void(LogLevel level, std::string_view message)>;

namespace detail {

/* A LogCallback behind dm_set_log. It stays for the whole program, because another thread may
 * still be in it. The list keeps it reachable for tools that look for leaks. */
struct LogBridge {
  LogCallback log;
  LogBridge *earlier;

  static void call(void *user_data, dm_log_level level, const char *message) noexcept
  {
    static_cast<LogBridge *>(user_data)->log(static_cast<LogLevel>(level), message);
  }

  static LogBridge *make(LogCallback &&log)
  {
    static std::atomic<LogBridge *> last{nullptr};
    LogBridge *made = new LogBridge{std::move(log), last.load()};
    while (!last.compare_exchange_weak(made->earlier, made)) {}
    return made;
  }
};

}  // namespace detail

/// The name of a status, for example "DM_STATUS_TIMEOUT". Static; see dm_status_name.
[[nodiscard]] inline const char *status_name(Status status) noexcept { return dm_status_name(static_cast<dm_status>(status)); }

/// The version of the loaded library: 10000 * major + 100 * minor + patch. See dm_version.
[[nodiscard]] inline std::uint32_t version() noexcept { return dm_version(); }

// ---- errors ----

/// An error: a status, one line with the values, and the codes of the layers below. It is thrown,
/// or held by a Result.
class Error : public std::runtime_error {
public:
  /// An error with these words; the codes are 0.
  Error(Status status, const std::string &message)
      : std::runtime_error(std::string(status_name(status)) + ": " + message), status_(status)
  {
  }

  /// The error of this thread's last failing call of the library; Status::ok and no message before
  /// any. See dm_last_error_info.
  [[nodiscard]] static Error last()
  {
    dm_error_info info = DM_ERROR_INFO_INIT;
    dm_last_error_info(&info);
    return last(info.status);
  }

  /// The error of a call that returned this status.
  [[nodiscard]] static Error last(dm_status status)
  {
    Error error(static_cast<Status>(status), dm_last_error());
    dm_error_info info = DM_ERROR_INFO_INIT;
    if (dm_last_error_info(&info) == DM_STATUS_OK) {
      error.ccl_result_ = info.ccl_result;
      error.device_error_ = info.device_error;
      error.os_error_ = info.os_error;
      if (info.num_ranks > 0 || info.num_lost > 0 || info.dim != nullptr) {
        const auto about = std::make_shared<About>();
        about->ranks.assign(info.ranks, info.ranks + info.num_ranks);
        about->lost_ranks.assign(info.lost_ranks, info.lost_ranks + info.num_lost);
        if (info.dim != nullptr) about->dim = info.dim;
        error.about_ = about;
      }
      error.waited_seconds_ = info.waited_seconds;
      error.call_ = info.call;
    }
    return error;
  }

  /// The status of the call.
  [[nodiscard]] Status status() const noexcept { return status_; }
  /// The communicator library's ncclResult_t, 0 when it was not involved.
  [[nodiscard]] std::int32_t ccl_result() const noexcept { return ccl_result_; }
  /// The device driver's code (CUresult), 0 when it was not involved.
  [[nodiscard]] std::int32_t device_error() const noexcept { return device_error_; }
  /// The errno, 0 when the operating system was not involved.
  [[nodiscard]] std::int32_t os_error() const noexcept { return os_error_; }
  /// The world ranks that the error is about, in ascending order.
  [[nodiscard]] const std::vector<std::int32_t> &ranks() const noexcept { return about().ranks; }
  /// The ranks among ranks() that are lost.
  [[nodiscard]] const std::vector<std::int32_t> &lost_ranks() const noexcept { return about().lost_ranks; }
  /// The dimension along which the call was made; empty for a call that has none.
  [[nodiscard]] const std::string &dim() const noexcept { return about().dim; }
  /// How long the call waited for other ranks, in seconds; negative when it did not wait.
  [[nodiscard]] double waited_seconds() const noexcept { return waited_seconds_; }
  /// The number of the collective call, as the message shows it; -1 when it has none.
  [[nodiscard]] std::int64_t call() const noexcept { return call_; }
  /// The library's line alone; what() has the name of the status before it. Lives as long as the
  /// error.
  [[nodiscard]] const char *message() const noexcept { return what() + std::strlen(status_name(status_)) + 2; }

private:
  // Shared, so that a copy of an error cannot fail.
  struct About {
    std::vector<std::int32_t> ranks, lost_ranks;
    std::string dim;
  };
  [[nodiscard]] const About &about() const noexcept
  {
    static const About nothing;
    return about_ ? *about_ : nothing;
  }

  Status status_;
  std::int32_t ccl_result_ = 0, device_error_ = 0, os_error_ = 0;
  double waited_seconds_ = -1;
  std::int64_t call_ = -1;
  std::shared_ptr<const About> about_;
};

namespace detail {

[[noreturn]] inline void raise(const Error &error)
{
#ifdef DM_NO_EXCEPTIONS
  std::fprintf(stderr, "dm::Result without a value: %s\n", error.what());
  std::abort();
#else
  throw error;
#endif
}

}  // namespace detail

/// A value or an Error. The members are some of those of std::expected, and do the same. Reading
/// the value where there is none throws the Error.
template <class T> class [[nodiscard]] Result {
public:
  /// The type of the value.
  using value_type = T;
  /// The type of the error.
  using error_type = Error;

  /// Success.
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  /// Failure.
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  /// Whether there is a value. Mind Result<bool>: this is not the value.
  [[nodiscard]] bool has_value() const noexcept { return state_.index() == 0; }
  /// Returns has_value().
  [[nodiscard]] explicit operator bool() const noexcept { return has_value(); }

  /// The value.
  [[nodiscard]] T &value() & { return require(), *std::get_if<0>(&state_); }
  /// The value.
  [[nodiscard]] const T &value() const & { return require(), *std::get_if<0>(&state_); }
  /// The value, to be moved from.
  [[nodiscard]] T &&value() && { return require(), std::move(*std::get_if<0>(&state_)); }
  /// Returns value().
  [[nodiscard]] T &operator*() & { return value(); }
  /// Returns value().
  [[nodiscard]] const T &operator*() const & { return value(); }
  /// Returns value().
  [[nodiscard]] T &&operator*() && { return std::move(*this).value(); }
  /// A member of the value, as value().
  [[nodiscard]] T *operator->() { return &value(); }
  /// A member of the value, as value().
  [[nodiscard]] const T *operator->() const { return &value(); }
  /// The value; `otherwise` where there is none.
  template <class U> [[nodiscard]] T value_or(U &&otherwise) const &
  {
    return has_value() ? value() : static_cast<T>(std::forward<U>(otherwise));
  }
  /// The value, moved; `otherwise` where there is none.
  template <class U> [[nodiscard]] T value_or(U &&otherwise) &&
  {
    return has_value() ? std::move(*this).value() : static_cast<T>(std::forward<U>(otherwise));
  }

  /// The error; there must be one.
  [[nodiscard]] const Error &error() const { return std::get<1>(state_); }

  /// next(value), which is a Result too; the error goes through.
  template <class Next> auto and_then(Next &&next) && -> std::invoke_result_t<Next, T &&>
  {
    if (!has_value()) return error();
    return std::forward<Next>(next)(std::move(*this).value());
  }
  /// Calls next(value) and gives a Result of what it returns; Result<void> where it returns
  /// nothing. Without a value it gives the error.
  template <class Next> auto transform(Next &&next) && -> Result<std::invoke_result_t<Next, T &&>>
  {
    if (!has_value()) return error();
    if constexpr (std::is_void_v<std::invoke_result_t<Next, T &&>>) {
      std::forward<Next>(next)(std::move(*this).value());
      return {};
    } else {
      return std::forward<Next>(next)(std::move(*this).value());
    }
  }

private:
  void require() const
  {
    if (!has_value()) detail::raise(error());
  }

  std::variant<T, Error> state_;
};

/// Success without a value, or an Error.
template <> class [[nodiscard]] Result<void> {
public:
  /// No value.
  using value_type = void;
  /// The type of the error.
  using error_type = Error;

  /// Success.
  Result() = default;
  /// Failure.
  Result(Error error) : error_(std::move(error)) {}

  /// Whether it is success.
  [[nodiscard]] bool has_value() const noexcept { return !error_.has_value(); }
  /// Returns has_value().
  [[nodiscard]] explicit operator bool() const noexcept { return has_value(); }
  /// Throws the error, if there is one.
  void value() const
  {
    if (error_) detail::raise(*error_);
  }
  /// Calls value().
  void operator*() const { value(); }
  /// The error; there must be one.
  [[nodiscard]] const Error &error() const { return error_.value(); }

  /// next(), which is a Result too; the error goes through.
  template <class Next> auto and_then(Next &&next) const -> std::invoke_result_t<Next>
  {
    if (error_) return *error_;
    return std::forward<Next>(next)();
  }
  /// Calls next() and gives a Result of what it returns; Result<void> where it returns nothing.
  /// Where there is an error it gives the error.
  template <class Next> auto transform(Next &&next) const -> Result<std::invoke_result_t<Next>>
  {
    if (error_) return *error_;
    if constexpr (std::is_void_v<std::invoke_result_t<Next>>) {
      std::forward<Next>(next)();
      return {};
    } else {
      return std::forward<Next>(next)();
    }
  }

private:
  std::optional<Error> error_;
};

namespace detail {

#ifndef DM_NO_EXCEPTIONS
// Functions give the value and throw the error.
struct Throws {
  template <class T> using Returns = T;
  template <class T> [[noreturn]] static T failure(const Error &error) { raise(error); }
};
#endif

// Functions give a Result.
struct Gives {
  template <class T> using Returns = Result<T>;
  template <class T> static Result<T> failure(const Error &error) { return Result<T>(error); }
};

// How many groups this thread has begun by group_start() outside of group(). Their operations run
// at group_end().
inline std::size_t &raw_groups() noexcept
{
  static thread_local std::size_t count = 0;
  return count;
}

// An abort ends the groups that its thread has open, or on cuda all later operations of the thread.
inline dm_status aborted(dm_status status) noexcept
{
  if (status == DM_STATUS_OK) raw_groups() = 0;
  return status;
}

// The number of operations that the groups of group() have collected on this thread. Defined behind
// Collected.
inline std::size_t collected_operations() noexcept;

// The error of a call that would wait, or end, without the operations that this thread has
// collected; nothing where there are none. The library does not know of them. tell() makes the call
// with a timeout that the library refuses, so that the other ranks learn of the refusal. Their error
// names that timeout, and not the group.
template <class Tell> std::optional<Error> inside_group(const char *call, Tell tell)
{
  const std::size_t count = collected_operations();
  if (count == 0) return std::nullopt;
  tell();
  return Error(Status::invalid_state, std::string(call) + ": this thread has not left group(); " +
                                          (count == 1 ? "1 operation is" : std::to_string(count) + " operations are") +
                                          " queued in it and not done: leave the group first");
}

// The functions of both styles are made of this: a status becomes a return value.
template <class Style> struct Calls {
  template <class T> using Returns = typename Style::template Returns<T>;

  template <class T> static Returns<T> give(dm_status status, T value)
  {
    if (status != DM_STATUS_OK) return Style::template failure<T>(Error::last(status));
    return Returns<T>(std::move(value));
  }

  static Returns<void> done(dm_status status)
  {
    if (status != DM_STATUS_OK) return Style::template failure<void>(Error::last(status));
    return Returns<void>();
  }

  // An error that this header finds before it calls the library.
  template <class T> static Returns<T> fail(Status status, const std::string &message)
  {
    return Style::template failure<T>(Error(status, message));
  }

  // A list or a text of a length that the library says: most fit the first time.
  template <class List, class Query> static dm_status fill(List &list, std::size_t guess, Query query)
  {
    std::size_t length = 0;
    list.resize(guess);
    dm_status status = query(list.data(), list.size(), &length);
    while (status == DM_STATUS_BUFFER_TOO_SMALL) {
      list.resize(length);
      status = query(list.data(), list.size(), &length);
    }
    list.resize(status == DM_STATUS_OK ? length : 0);
    return status;
  }

  template <class T, class Query> static Returns<std::vector<T>> list(Query query)
  {
    std::vector<T> values;
    const dm_status status = fill(values, 16, query);
    return give(status, std::move(values));
  }

  template <class Query> static Returns<std::string> text(Query query)
  {
    std::string value;
    const dm_status status = fill(value, 256, query);
    if (!value.empty()) value.pop_back();  // the NUL
    return give(status, std::move(value));
  }

  // The bytes that a call of the control plane gives, for each rank or for the root alone.
  template <class Call> static dm_status buffers(std::vector<std::string> &values, Call call)
  {
    dm_buffers *given = nullptr;
    const dm_status status = call(&given);
    if (status != DM_STATUS_OK) return status;
    struct Free {
      void operator()(dm_buffers *buffers) const noexcept { dm_buffers_free(buffers); }
    };
    const std::unique_ptr<dm_buffers, Free> held(given);
    values.resize(dm_buffers_count(given));
    for (std::size_t at = 0; at < values.size(); ++at) {
      const void *data = nullptr;
      std::size_t length = 0;
      if (const dm_status got = dm_buffers_get(given, at, &data, &length); got != DM_STATUS_OK) return got;
      values[at].assign(static_cast<const char *>(data), length);
    }
    return DM_STATUS_OK;
  }

  // The error of a call that gives bytes, as inside_group() gives it. call has a timeout that the
  // library refuses.
  template <class Call> static std::optional<Error> bytes_inside_group(const char *name, Call call)
  {
    return inside_group(name, [&] {
      dm_buffers *given = nullptr;
      return call(&given);
    });
  }

  // All values of a call that gives the bytes of each rank.
  template <class Call> static Returns<std::vector<std::string>> bytes_of_all(Call call)
  {
    std::vector<std::string> values;
    const dm_status status = buffers(values, call);
    return give(status, std::move(values));
  }

  // The one value of a call that gives the bytes of the root.
  template <class Call> static Returns<std::string> bytes_of_root(Call call)
  {
    std::vector<std::string> values;
    const dm_status status = buffers(values, call);
    return give(status, values.empty() ? std::string() : std::move(values.front()));
  }
};

}  // namespace detail

// ---- arguments: what braces, strings and containers become ----

/// A rank, an index or a number of steps, from any type of integers. A number that does not fit
/// into std::int32_t gives Status::invalid_argument. It is not cut to its low bits, which would be
/// another rank. An argument, not to be kept.
class Int32 {
public:
  /// This number.
  template <class Integer,
            std::enable_if_t<std::is_convertible_v<Integer, std::int32_t> && !std::is_floating_point_v<Integer>, int> = 0>
  constexpr Int32(const Integer &number) noexcept : number_(wide(number))
  {
  }

  /// The number; the closest one where it does not fit.
  [[nodiscard]] constexpr std::int32_t value() const noexcept
  {
    return static_cast<std::int32_t>(number_ < INT32_MIN ? INT32_MIN : number_ > INT32_MAX ? INT32_MAX : number_);
  }
  /// Whether it fits into std::int32_t.
  [[nodiscard]] constexpr bool fits() const noexcept { return number_ >= INT32_MIN && number_ <= INT32_MAX; }
  /// The error of a call that has this number as its argument of that name.
  [[nodiscard]] std::string problem(const char *call, const char *name) const
  {
    return std::string(call) + ": " + name + " is " + std::to_string(number_) + ", which does not fit into std::int32_t";
  }

private:
  template <class Integer> static constexpr std::int64_t wide(const Integer &number) noexcept
  {
    if constexpr (std::is_enum_v<Integer>) {
      return wide(static_cast<std::underlying_type_t<Integer>>(number));
    } else if constexpr (std::is_integral_v<Integer>) {
      return number > 0 && static_cast<std::uint64_t>(number) > INT64_MAX ? INT64_MAX : static_cast<std::int64_t>(number);
    } else {
      return static_cast<std::int64_t>(number);
    }
  }

  std::int64_t number_;
};

/// A view of contiguous elements, from any container with data() and size() (std::vector,
/// std::array, std::span), an array, a pointer and a length, or braces. It is the same in every
/// standard, so files of C++17 and C++20 go into one program. An argument, not to be kept.
template <class T> class Span {
public:
  /// The type of the elements, without const.
  using value_type = std::remove_const_t<T>;

  /// No elements.
  constexpr Span() noexcept = default;
  /// size elements from data on.
  constexpr Span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
  /// The elements of a container or array.
  template <class Container, class Element = std::remove_pointer_t<decltype(std::data(std::declval<Container &>()))>,
            std::enable_if_t<std::is_convertible_v<Element (*)[], T (*)[]>, int> = 0>
  constexpr Span(Container &&container) noexcept : data_(std::data(container)), size_(std::size(container))
  {
  }
  // GCC would warn of data_(values.begin()), and precompiled headers forget pragmas against
  // warnings.
  /// {a, b, c}, where the elements are const. As an argument the list lives as long as the call.
  constexpr Span(std::initializer_list<value_type> values) noexcept : Span(values.begin(), values.size()) {}

  /// A pointer to the first element.
  [[nodiscard]] constexpr T *data() const noexcept { return data_; }
  /// The number of elements.
  [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
  /// Whether there are none.
  [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
  /// A pointer to the first element.
  [[nodiscard]] constexpr T *begin() const noexcept { return data_; }
  /// A pointer past the last element.
  [[nodiscard]] constexpr T *end() const noexcept { return data_ + size_; }
  /// An element; index is less than size().
  [[nodiscard]] constexpr T &operator[](std::size_t index) const { return data_[index]; }

private:
  T *data_ = nullptr;
  std::size_t size_ = 0;
};

/// A string for the library, which wants a NUL at its end: from a C string or std::string without
/// a copy, from a std::string_view with one. nullptr is C's NULL. An argument, not to be kept.
///
/// A string with a NUL in it is passed as invalid UTF-8, so that the library refuses it. C would
/// cut the string at the NUL.
class Text {
public:
  /// NULL.
  Text() noexcept = default;
  /// NULL.
  Text(std::nullptr_t) noexcept {}
  /// A C string, or NULL.
  Text(const char *text) noexcept : given_(text) {}
  /// The string itself, which must live as long as this.
  Text(const std::string &text) : given_(text.c_str())
  {
    if (text.find('\0') != std::string::npos) keep(text);
  }
  /// A copy.
  Text(std::string_view text) { keep(text); }

  Text(const Text &) = delete;
  Text &operator=(const Text &) = delete;

  /// The C string. It is NULL where this was made of nullptr.
  [[nodiscard]] const char *c_str() const noexcept { return given_; }
  /// A copy. NULL gives the empty string.
  [[nodiscard]] std::string string() const { return given_ != nullptr ? given_ : ""; }

private:
  void keep(std::string_view text)
  {
    for (const char byte : text)
      if (byte == '\0') copy_ += "\xC0\x80";
      else copy_ += byte;
    given_ = copy_.c_str();
  }

  const char *given_ = nullptr;
  std::string copy_;
};

/// Strings for the library: {"dp", "tp"}, one string, or a container of what a Text is made of.
class Texts {
public:
  /// None.
  Texts() = default;
  /// These.
  Texts(std::initializer_list<Text> texts) { copy(texts); }
  /// This one.
  Texts(const char *text) : Texts({Text(text)}) {}
  /// This one.
  Texts(const std::string &text) : Texts({Text(text)}) {}
  /// This one.
  Texts(std::string_view text) : Texts({Text(text)}) {}
  /// The texts of a container.
  template <class Container, class Element = decltype(*std::begin(std::declval<const Container &>())),
            std::enable_if_t<!std::is_convertible_v<const Container &, std::string_view> && std::is_convertible_v<Element, Text>, int> = 0>
  Texts(const Container &texts)
  {
    copy(texts);
  }

  Texts(const Texts &) = delete;
  Texts &operator=(const Texts &) = delete;

  /// The C strings; NULL when there are none. A string is NULL where its Text was made of nullptr.
  [[nodiscard]] const char *const *data() const noexcept { return pointers_.empty() ? nullptr : pointers_.data(); }
  /// How many there are.
  [[nodiscard]] std::size_t size() const noexcept { return pointers_.size(); }

private:
  template <class Container> void copy(const Container &texts)
  {
    std::vector<bool> is_null;
    for (const auto &text : texts) {
      const Text &one = text;
      strings_.push_back(one.string());
      is_null.push_back(one.c_str() == nullptr);
    }
    for (std::size_t at = 0; at < strings_.size(); ++at) pointers_.push_back(is_null[at] ? nullptr : strings_[at].c_str());
  }

  std::vector<std::string> strings_;
  std::vector<const char *> pointers_;
};

/// Options of one dimension's communicator: dm_dim_options.
struct DimOptions {
  /// Never share this dimension's communicator with one over the same ranks (DM_DIM_OWN_COMM).
  bool own_comm = false;
  /// nullptr or an ncclConfig_t, copied by the call.
  const void *nccl_config = nullptr;
  /// The communicator's name in the library's logs. Empty: "mesh_" and the dimension's name.
  std::string comm_name = {};

  /// The struct of C. It borrows from this object. A comm_name with a NUL within becomes bytes that
  /// are not UTF-8, so the library refuses the name instead of taking the part before the NUL.
  [[nodiscard]] dm_dim_options capi() const noexcept
  {
    dm_dim_options options = DM_DIM_OPTIONS_INIT;
    options.flags = own_comm ? DM_DIM_OWN_COMM : 0;
    options.nccl_config = nccl_config;
    const bool has_nul = comm_name.find('\0') != std::string::npos;
    options.comm_name = comm_name.empty() ? nullptr : has_nul ? "\xC0\x80" : comm_name.c_str();
    return options;
  }
};

/// One dimension of a mesh: its name, its size in ranks, and the options of its communicator.
struct Dim {
  /// The dimension's name.
  std::string name;
  /// How many ranks lie along the dimension.
  std::int64_t size;
  /// The options of its communicator.
  DimOptions options;

  /// {"tp", 8}, or {"tp", 8, options}; the size is of any type of integers.
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  Dim(const Text &dim_name, Integer dim_size, DimOptions dim_options = {})
      : name(dim_name.string()),
        size(dim_size > 0 && static_cast<std::uint64_t>(dim_size) > INT64_MAX ? INT64_MAX : static_cast<std::int64_t>(dim_size)),
        options(std::move(dim_options))
  {
  }
};

namespace detail {

// The options of one call. They borrow from dims.
inline dm_call_options call_options(std::chrono::milliseconds timeout, const dm_dim_options *dims = nullptr,
                                    std::size_t num_dims = 0) noexcept
{
  dm_call_options options = DM_CALL_OPTIONS_INIT;
  options.timeout_ms = timeout.count();
  options.dim_options = dims;
  options.num_dim_options = num_dims;
  return options;
}

}  // namespace detail

/// The dimensions of a mesh, the last one the fastest: {{"dp", 2}, {"tp", 4}}, a std::vector<Dim>,
/// {sizes, names}, or sizes alone, {2, 4}, where the call does not need names.
class Dims {
public:
  /// No dimension.
  Dims() = default;
  /// {{"dp", 2}, {"tp", 4}}
  Dims(std::initializer_list<Dim> dims) { copy(dims.begin(), dims.size()); }
  /// A list that was made at run time.
  Dims(const std::vector<Dim> &dims) { copy(dims.data(), dims.size()); }
  /// Sizes and as many names. Without names, the dimensions of a new root mesh are dim_0, dim_1 and
  /// so on. Mesh::unflatten and Mesh::reshape need names.
  Dims(Span<const std::int32_t> shape, const Texts &names = {}) : sizes_(shape.begin(), shape.end()), options_(shape.size())
  {
    for (std::size_t at = 0; at < names.size(); ++at) names_.push_back(Text(names.data()[at]).string());
    point();
    for (std::size_t at = 0; at < names.size(); ++at)
      if (names.data()[at] == nullptr) pointers_[at] = nullptr;
  }
  /// {2, 4}, without names.
  Dims(std::initializer_list<std::int32_t> shape) : Dims(Span<const std::int32_t>(shape)) {}

  Dims(const Dims &) = delete;
  Dims &operator=(const Dims &) = delete;

  /// The number of dimensions.
  [[nodiscard]] std::size_t size() const noexcept { return sizes_.size(); }
  /// Their sizes.
  [[nodiscard]] const std::int32_t *sizes() const noexcept { return sizes_.data(); }
  /// Their names; NULL when they have none.
  [[nodiscard]] const char *const *names() const noexcept { return pointers_.empty() ? nullptr : pointers_.data(); }
  /// Their options; NULL when all are the defaults.
  [[nodiscard]] const dm_dim_options *options() const noexcept
  {
    for (const dm_dim_options &one : c_options_)
      if (one.flags != 0 || one.nccl_config != nullptr || one.comm_name != nullptr) return c_options_.data();
    return nullptr;
  }
  /// Options for the call that makes them. They borrow from this object.
  [[nodiscard]] dm_call_options call(std::chrono::milliseconds timeout) const noexcept
  {
    const dm_dim_options *const given = options();
    return detail::call_options(timeout, given, given != nullptr ? size() : 0);
  }

  /// An error that C cannot see: another number of names than of sizes, or a size that is no
  /// std::int32_t. Empty when there is none.
  [[nodiscard]] std::string problem() const
  {
    if (!too_large_.empty()) return too_large_;
    if (names_.empty() || names_.size() == sizes_.size()) return {};
    return std::to_string(names_.size()) + " names for " + std::to_string(sizes_.size()) + " sizes";
  }

private:
  void copy(const Dim *dims, std::size_t count)
  {
    for (const Dim *dim = dims; dim != dims + count; ++dim) {
      if (dim->size < INT32_MIN || dim->size > INT32_MAX)
        too_large_ = "the size of dimension " + dim->name + " is " + std::to_string(dim->size) + ", which is no number of ranks";
      sizes_.push_back(static_cast<std::int32_t>(dim->size));
      names_.push_back(Text(dim->name).string());
      options_.push_back(dim->options);
    }
    point();
  }

  void point()
  {
    for (const std::string &name : names_) pointers_.push_back(name.c_str());
    for (const DimOptions &options : options_) c_options_.push_back(options.capi());
  }

  std::vector<std::int32_t> sizes_;
  std::string too_large_;
  std::vector<std::string> names_;
  std::vector<DimOptions> options_;
  std::vector<const char *> pointers_;
  std::vector<dm_dim_options> c_options_;
};

/// Says what a mesh dimension does with a tensor. replicate() and shard() make one. See
/// Mesh::local_shard.
using Placement = dm_placement;

/// Every rank along the mesh dimension holds the same.
[[nodiscard]] constexpr Placement replicate() noexcept { return DM_PLACEMENT_REPLICATE; }

/// Every rank along the mesh dimension holds a part of a sum that is still to be made, of the
/// whole shape.
[[nodiscard]] constexpr Placement partial() noexcept { return DM_PLACEMENT_PARTIAL; }

/// The mesh dimension splits this dimension of the tensor. Where several do, those of lower order
/// split first.
[[nodiscard]] constexpr Placement shard(std::int32_t tensor_dim, std::int32_t order = 0) noexcept
{
  return DM_PLACEMENT_SHARD(tensor_dim, order);
}

// ---- the world ----

/// Makes any key-value service of the caller (JAX's, MPI's, etcd ...) the store in which the ranks
/// meet. See dm_store_callbacks.
///
/// The functions may be called from any thread of this process, and from several at once. set(),
/// get() and add() return 0 for success, and get() returns not_yet when the key did not come in
/// time. Any other number says that the service is broken: the call that needed it fails at once
/// with Status::store, and the message has the number. A function that throws counts as returning
/// -1.
class Store {
public:
  /// get() returns this value when the key did not come in time (DM_STORE_NOT_YET).
  static constexpr std::int32_t not_yet = DM_STORE_NOT_YET;

  virtual ~Store() = default;
  /// Stores value under key, replacing what was there.
  virtual std::int32_t set(std::string_view key, std::string_view value) = 0;
  /// Waits for key, timeout at most (0 looks once), and writes its value to value. Returns not_yet
  /// when the key did not come in time.
  virtual std::int32_t get(std::string_view key, std::chrono::milliseconds timeout, std::string &value) = 0;
  /// Adds amount to the integer under key (0 when there is none), atomically over all ranks, and
  /// writes the sum. The integer is the value of the key, in decimal digits: get() gives it, and
  /// remove() removes it.
  virtual std::int32_t add(std::string_view key, std::int64_t amount, std::int64_t &sum) = 0;
  /// Stores value under key if the value there is the expected one, atomically over all ranks, and
  /// writes the value that stands then. An empty expected value means that the key is not there.
  /// See dm_store_callbacks.
  virtual std::int32_t compare_set(std::string_view key, std::string_view expected, std::string_view value, std::string &stands)
  {
    static_cast<void>(key), static_cast<void>(expected), static_cast<void>(value), static_cast<void>(stands);
    return -1;
  }
  /// Whether compare_set() works, on all ranks or on none. Only then can a job over this store
  /// recover (recover()). World::init asks this before it does anything else, and what it throws
  /// comes out of World::init.
  [[nodiscard]] virtual bool has_compare_set() const { return false; }
  /// Removes key; a key that is not there is no error. An implementation that does nothing leaves
  /// everything that the library has stored.
  virtual std::int32_t remove(std::string_view key)
  {
    (void)key;
    return 0;
  }
};

/// Whether a process joins a running job in the place of a lost rank, or a new world. See
/// dm_world_options.join.
enum class JoinWay : std::uint32_t {
  automatic = DM_JOIN_AUTO,
  fresh = DM_JOIN_NEW,
  running = DM_JOIN_RUNNING,
};

/// How to join a world: dm_world_options. A field that is not set has its default.
struct WorldOptions {
  /// An offline world (DM_WORLD_OFFLINE): layouts and plans of any rank of any world, on one
  /// machine, without rendezvous and communicators.
  bool offline = false;
  /// Number of ranks. 0: rank, world size and local rank come from the launcher's environment.
  std::int32_t world_size = 0;
  /// This process's rank, used when world_size is given.
  std::int32_t rank = 0;
  /// This process's rank on its host, used when world_size is given. It may stay 0 on all ranks:
  /// the library then finds the local ranks itself.
  std::int32_t local_rank = 0;
  /// The index of the device on which communicators are made (DM_WORLD_DEVICE). Negative: the
  /// thread's current device, or that of the local rank.
  std::int32_t device = -1;
  /// How long the joining may wait, and after it each call that has no timeout of its own. 0: ten
  /// minutes.
  std::chrono::milliseconds timeout{0};
  /// "env://" (also when empty), "tcp://host:port" or "file:///path".
  std::string init_method = {};
  /// A communicator library by path or SONAME; empty: DM_CCL_LIBRARY, else the usual one of the
  /// device type.
  std::string ccl_library = {};
  /// The caller's own store; the world holds it until it is gone.
  std::shared_ptr<Store> store = nullptr;
  /// nullptr, or the place for a token. dm_world_abort of another thread with this token ends the
  /// joining (see dm_world_options).
  dm_world **joining_out = nullptr;
  /// Whether this process joins a running job.
  JoinWay join = JoinWay::automatic;
};

/// Which rank a process is in a world, where it runs, and which library makes its communicators.
/// See dm_world_info.
struct WorldInfo {
  /// This process's rank in the world.
  std::int32_t rank = 0;
  /// The number of ranks in the world.
  std::int32_t size = 0;
  /// This rank's number among the ranks of its host.
  std::int32_t local_rank = 0;
  /// The number of ranks on this host.
  std::int32_t local_size = 0;
  /// The number of this host, in the order of the lowest rank on each.
  std::int32_t host = 0;
  /// The number of hosts.
  std::int32_t num_hosts = 0;
  /// The index of this rank's device; -1 where the library has chosen none (cpu, offline, RCCL).
  std::int32_t device = -1;
  /// The version of the communicator library, as ncclGetVersion gives it; 0 in an offline world.
  std::int32_t ccl_version = 0;
  /// "cuda" or "cpu".
  std::string device_type = {};
  /// The communicator library by path, SONAME or name; empty in an offline world.
  std::string library = {};
  /// The epoch in which this process is; 0 until a recovery has given a mesh.
  std::int64_t epoch = 0;
  /// The number of processes that have joined the world under this rank before this one.
  std::int64_t ticket = 0;
};

template <class Style> class BasicWorld;
template <class Style> class BasicMesh;

/// A world as an argument: borrowed, for the call. Made from a World or a C handle.
class WorldRef {
public:
  /// The process's default world.
  WorldRef(dm_world *world = nullptr) noexcept : world_(world) {}
  /// This one.
  template <class Style> WorldRef(const BasicWorld<Style> &world) noexcept : world_(world.capi()), gone_(world.capi() == nullptr) {}
  /// The C handle.
  [[nodiscard]] dm_world *capi() const noexcept { return world_; }
  /// Whether it was made from a World that is empty or was moved from, which names no world.
  [[nodiscard]] bool gone() const noexcept { return gone_; }

private:
  dm_world *world_;
  bool gone_ = false;
};

/// A mesh as an argument: borrowed, for the call. Made from a Mesh or a C handle.
class MeshRef {
public:
  /// This handle.
  MeshRef(const dm_mesh *mesh) noexcept : mesh_(mesh) {}
  /// This one.
  template <class Style> MeshRef(const BasicMesh<Style> &mesh) noexcept : mesh_(mesh.capi()) {}
  /// The C handle.
  [[nodiscard]] const dm_mesh *capi() const noexcept { return mesh_; }

private:
  const dm_mesh *mesh_;
};

namespace detail {

// A Store as dm_store_callbacks; user_data is a shared_ptr of its own.
struct StoreBridge {
  using Held = std::shared_ptr<Store>;

  // Throws what has_compare_set() throws.
  static dm_store_callbacks callbacks(Held *held)
  {
    dm_store_callbacks callbacks = DM_STORE_CALLBACKS_INIT;
    callbacks.user_data = held;
    callbacks.set = [](void *data, const char *key, const void *value, std::size_t length) -> std::int32_t {
      return caught([&] { return of(data).set(key, {static_cast<const char *>(value), length}); });
    };
    callbacks.get = [](void *data, const char *key, void *value, std::size_t capacity, std::size_t *length_out,
                       std::int64_t timeout_ms) -> std::int32_t {
      return caught([&] {
        std::string found;
        const std::int32_t result = of(data).get(key, std::chrono::milliseconds(timeout_ms), found);
        if (result == 0) copy(found, value, capacity, length_out);
        return result;
      });
    };
    callbacks.add = [](void *data, const char *key, std::int64_t amount, std::int64_t *sum) -> std::int32_t {
      return caught([&] { return of(data).add(key, amount, *sum); });
    };
    if ((*held)->has_compare_set()) {
      callbacks.compare_set = [](void *data, const char *key, const void *expected, std::size_t expected_length, const void *value,
                                 std::size_t length, void *stands, std::size_t capacity, std::size_t *length_out) -> std::int32_t {
        return caught([&] {
          std::string found;
          const std::string_view wanted{static_cast<const char *>(expected), expected_length};
          const std::int32_t result = of(data).compare_set(key, wanted, {static_cast<const char *>(value), length}, found);
          if (result == 0) copy(found, stands, capacity, length_out);
          return result;
        });
      };
    }
    callbacks.remove = [](void *data, const char *key) -> std::int32_t { return caught([&] { return of(data).remove(key); }); };
    callbacks.drop = [](void *data) { delete static_cast<Held *>(data); };
    return callbacks;
  }

private:
  static Store &of(void *data) { return **static_cast<Held *>(data); }

  static void copy(const std::string &found, void *value, std::size_t capacity, std::size_t *length_out) noexcept
  {
    *length_out = found.size();
    if (const std::size_t fits = found.size() < capacity ? found.size() : capacity; fits > 0) std::memcpy(value, found.data(), fits);
  }

  template <class Body> static std::int32_t caught(Body body) noexcept
  {
#ifdef DM_NO_EXCEPTIONS
    return body();
#else
    try {
      return body();
    } catch (...) {
      return -1;
    }
#endif
  }
};

}  // namespace detail

/// This process's place in the job: its rank, the store in which the ranks meet, the device, and
/// the communicator library. See dm_world.
template <class Style> class BasicWorld {
  using Calls = detail::Calls<Style>;

public:
  /// T, or Result<T>.
  template <class T> using Returns = typename Style::template Returns<T>;

  /// Empty.
  BasicWorld() noexcept = default;
  /// Takes over a C handle.
  explicit BasicWorld(dm_world *world) noexcept : world_(world) {}

  /// Joins the job. Collective over the world, unless offline. device_type is "cuda", "cpu", or
  /// nullptr for what this machine has. See dm_world_init.
  [[nodiscard]] static Returns<BasicWorld> init(const Text &device_type = {}, const WorldOptions &options = {})
  {
    const Text init_method(options.init_method), ccl_library(options.ccl_library);
    std::unique_ptr<std::shared_ptr<Store>> store;
    dm_store_callbacks callbacks;
    dm_world_options join = DM_WORLD_OPTIONS_INIT;
    join.flags = (options.offline ? DM_WORLD_OFFLINE : 0u) | (options.device >= 0 ? DM_WORLD_DEVICE : 0u);
    join.world_size = options.world_size;
    join.rank = options.rank;
    join.local_rank = options.local_rank;
    join.device = options.device >= 0 ? options.device : 0;
    join.timeout_ms = options.timeout.count();
    join.init_method = options.init_method.empty() ? nullptr : init_method.c_str();
    join.ccl_library = options.ccl_library.empty() ? nullptr : ccl_library.c_str();
    if (options.store) {
      store = std::make_unique<std::shared_ptr<Store>>(options.store);
      callbacks = detail::StoreBridge::callbacks(store.get());
      join.store = &callbacks;
    }
    join.joining_out = options.joining_out;
    join.join = static_cast<std::uint32_t>(options.join);
    dm_world *world = nullptr;
    const dm_status status = dm_world_init(device_type.c_str(), &join, &world);
    if (status == DM_STATUS_OK) static_cast<void>(store.release());  // the library drops it when the world is gone
    return Calls::give(status, BasicWorld(world));
  }

  /// The default world, which init() of a mesh joins by itself. Where this process is not in it
  /// yet, the call joins it first, and is collective over the world. timeout bounds the joining; 0:
  /// ten minutes. See dm_default_world.
  [[nodiscard]] static Returns<BasicWorld> default_world(const Text &device_type = {}, std::chrono::milliseconds timeout = {})
  {
    dm_world *world = nullptr;
    const dm_status status = dm_default_world(device_type.c_str(), timeout.count(), &world);
    return Calls::give(status, BasicWorld(world));
  }

  /// Which rank this process is in the world, where it runs, and its device. Local. See
  /// dm_world_get_info.
  [[nodiscard]] Returns<WorldInfo> info() const
  {
    dm_world_info raw = DM_WORLD_INFO_INIT;
    WorldInfo info;
    const dm_status status = dm_world_get_info(capi(), &raw);
    if (status == DM_STATUS_OK) {
      info = {raw.rank,      raw.size,   raw.local_rank,  raw.local_size,  raw.host,
              raw.num_hosts, raw.device, raw.ccl_version, raw.device_type, raw.library, raw.epoch, raw.ticket};
    }
    return Calls::give(status, std::move(info));
  }

  /// This process's rank, 0 to size() - 1. Local. See dm_world_rank.
  [[nodiscard]] Returns<std::int32_t> rank() const
  {
    std::int32_t rank = 0;
    const dm_status status = dm_world_rank(capi(), &rank);
    return Calls::give(status, rank);
  }

  /// The number of ranks. Local. See dm_world_size.
  [[nodiscard]] Returns<std::int32_t> size() const
  {
    std::int32_t size = 0;
    const dm_status status = dm_world_size(capi(), &size);
    return Calls::give(status, size);
  }

  /// The number of processes that wait to join the running job. Local, and cheap enough for every
  /// step. See dm_waiting.
  [[nodiscard]] Returns<std::int32_t> waiting() const
  {
    std::int32_t count = 0;
    const dm_status status = dm_waiting(capi(), &count);
    return Calls::give(status, count);
  }

  /// Returns when every rank of the world has called it. Collective over the world. 0: the world's
  /// timeout. See dm_world_barrier.
  Returns<void> barrier(std::chrono::milliseconds timeout = {}) const
  {
    if (const auto error = detail::inside_group("barrier", [&] { return dm_world_barrier(capi(), -1); }))
      return Style::template failure<void>(*error);
    return Calls::done(dm_world_barrier(capi(), timeout.count()));
  }

  /// The bytes that each rank of the world gives, in rank order: 8 MiB at most of each, and 64 MiB
  /// of all. Collective over the world. 0: the world's timeout. See dm_world_all_gather_bytes.
  [[nodiscard]] Returns<std::vector<std::string>> all_gather_bytes(std::string_view data, std::chrono::milliseconds timeout = {}) const
  {
    const auto gather = [&](std::int64_t limit) {
      return [&, limit](dm_buffers **out) { return dm_world_all_gather_bytes(capi(), data.data(), data.size(), limit, out); };
    };
    if (const auto error = Calls::bytes_inside_group("all_gather_bytes", gather(-1)))
      return Style::template failure<std::vector<std::string>>(*error);
    return Calls::bytes_of_all(gather(timeout.count()));
  }

  /// The bytes that world rank root gives, 8 MiB at most; data counts on the root only. Collective
  /// over the world. See dm_world_broadcast_bytes.
  [[nodiscard]] Returns<std::string> broadcast_bytes(std::string_view data, Int32 root, std::chrono::milliseconds timeout = {}) const
  {
    if (!root.fits()) return Calls::template fail<std::string>(Status::invalid_argument, root.problem("broadcast_bytes", "root"));
    const auto broadcast = [&](std::int64_t limit) {
      return [&, limit](dm_buffers **out) { return dm_world_broadcast_bytes(capi(), data.data(), data.size(), root.value(), limit, out); };
    };
    if (const auto error = Calls::bytes_inside_group("broadcast_bytes", broadcast(-1))) return Style::template failure<std::string>(*error);
    return Calls::bytes_of_root(broadcast(timeout.count()));
  }

  /// Where every rank of the world is, in rank order, for plan_ranks(). Collective over the world.
  /// location is this rank's, "rack1/host3/nvl0"; nullptr: the name of its host. timeout 0: the
  /// world's. See dm_world_locations.
  [[nodiscard]] Returns<std::vector<std::string>> locations(const Text &location = {}, std::chrono::milliseconds timeout = {}) const
  {
    std::int32_t ranks = 0;
    const char *const *paths = nullptr;
    if (const auto error = detail::inside_group("locations", [&] { return dm_world_locations(capi(), nullptr, -1, &paths); }))
      return Style::template failure<std::vector<std::string>>(*error);
    std::vector<std::string> locations;
    dm_status status = dm_world_size(capi(), &ranks);
    if (status == DM_STATUS_OK) status = dm_world_locations(capi(), location.c_str(), timeout.count(), &paths);
    if (status == DM_STATUS_OK) locations.assign(paths, paths + ranks);
    return Calls::give(status, std::move(locations));
  }

  /// Ends this rank's part in the world, without waiting for other ranks, and wakes its blocked
  /// calls. Local, from any thread. See dm_world_abort.
  Returns<void> abort() const
  {
    return Calls::done(detail::aborted(dm_world_abort(capi())));
  }

  /// Aborts the default worlds, which init() of a mesh joins by itself. See dm_default_world_abort.
  static Returns<void> abort_default() { return Calls::done(detail::aborted(dm_default_world_abort())); }

  /// Ends the world in order, with all its meshes. Collective over the world. 0: the world's
  /// timeout. See dm_world_finalize.
  Returns<void> finalize(std::chrono::milliseconds timeout = {}) const
  {
    if (const auto error = detail::inside_group("finalize", [&] { return dm_world_finalize(capi(), -1); }))
      return Style::template failure<void>(*error);
    return Calls::done(dm_world_finalize(capi(), timeout.count()));
  }

  /// Ends the default worlds in order; the next init() of a mesh joins anew. Collective over them.
  /// See dm_default_world_finalize.
  static Returns<void> finalize_default(std::chrono::milliseconds timeout = {})
  {
    if (const auto error = detail::inside_group("finalize_default", [] { return dm_default_world_finalize(-1); }))
      return Style::template failure<void>(*error);
    return Calls::done(dm_default_world_finalize(timeout.count()));
  }

  /// Makes the NCCL that is linked into this program the library of device type cuda. Local,
  /// before anything of that type. See dm_set_ccl_resolver.
  static Returns<void> set_ccl_resolver(void *(*resolve)(void *user_data, const char *name), void *user_data = nullptr)
  {
    return Calls::done(dm_set_ccl_resolver(resolve, user_data));
  }

  /// Sets what the library logs, and where: an empty log stands for lines on stderr. Local, for the
  /// whole process. Each log stays until the program ends. See dm_set_log.
  static Returns<void> set_log(LogLevel level, LogCallback log = {})
  {
    const dm_log_level number = static_cast<dm_log_level>(level);
    if (!log) return Calls::done(dm_set_log(number, nullptr, nullptr));
    return Calls::done(dm_set_log(number, &detail::LogBridge::call, detail::LogBridge::make(std::move(log))));
  }

  /// The counters of this process as text for Prometheus. Local. See dm_metrics.
  [[nodiscard]] static Returns<std::string> metrics()
  {
    return Calls::text([](char *text, std::size_t capacity, std::size_t *length) { return dm_metrics(text, capacity, length); });
  }

  /// The C handle, borrowed. An empty world has none, which is NULL.
  [[nodiscard]] dm_world *capi() const noexcept { return world_.get(); }
  /// Gives the C handle away, to be freed with dm_world_free.
  [[nodiscard]] dm_world *release() noexcept { return world_.release(); }

private:
  struct Free {
    /// Frees the handle.
    void operator()(dm_world *world) const noexcept { dm_world_free(world); }
  };
  std::unique_ptr<dm_world, Free> world_;
};

/// Options of a mesh: dm_init_options. A field that is not set has its default. The options of
/// single dimensions are in Dim.
struct InitOptions {
  /// Make a dimension's communicator at its first use (DM_INIT_LAZY).
  bool lazy = false;
  /// For from_comms: the library destroys the communicators with the mesh (DM_INIT_OWN_COMMS).
  bool own_comms = false;
  /// The world of the mesh. The default is the process's default world of the device type, which is
  /// joined from the environment at first use.
  WorldRef world = {};
  /// The n distinct world ranks of the mesh, row-major in its shape. Empty: 0 to n - 1.
  std::vector<std::int32_t> ranks = {};
  /// How long each collective call of the mesh may take. 0: as long as the world's.
  std::chrono::milliseconds timeout{0};

  /// The struct of C, without options of single dimensions. It borrows from this object.
  [[nodiscard]] dm_init_options capi() const noexcept
  {
    dm_init_options options = DM_INIT_OPTIONS_INIT;
    options.flags = (lazy ? DM_INIT_LAZY : 0u) | (own_comms ? DM_INIT_OWN_COMMS : 0u);
    options.world = world.capi();
    options.ranks = ranks.empty() ? nullptr : ranks.data();
    options.num_ranks = ranks.size();
    options.timeout_ms = timeout.count();
    return options;
  }
};

// ---- collectives: what they need to know of buffers ----

/// Its member value is the Dtype of a C++ type. This header has it for integers of 1, 4 and 8
/// bytes, std::byte, float and double, and for CUDA's __half and __nv_bfloat16 when their headers
/// come before this one. A program adds another type of the same size and meaning by template <>
/// struct dm::DtypeOf<Half> { static constexpr dm::Dtype value = dm::Dtype::float16; };
template <class T, class Enable = void> struct DtypeOf {};

/// Integers of 1, 4 and 8 bytes.
template <class T>
struct DtypeOf<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool> &&
                                   (sizeof(T) == 1 || sizeof(T) == 4 || sizeof(T) == 8)>> {
  /// Its Dtype.
  static constexpr Dtype value = sizeof(T) == 1   ? (std::is_signed_v<T> ? Dtype::int8 : Dtype::uint8)
                                 : sizeof(T) == 4 ? (std::is_signed_v<T> ? Dtype::int32 : Dtype::uint32)
                                                  : (std::is_signed_v<T> ? Dtype::int64 : Dtype::uint64);
};
/// std::byte.
template <> struct DtypeOf<std::byte> {
  /// Its Dtype.
  static constexpr Dtype value = Dtype::uint8;
};
/// float.
template <> struct DtypeOf<float> {
  /// Its Dtype.
  static constexpr Dtype value = Dtype::float32;
};
/// double.
template <> struct DtypeOf<double> {
  /// Its Dtype.
  static constexpr Dtype value = Dtype::float64;
};
#ifdef __CUDA_FP16_TYPES_EXIST__
template <> struct DtypeOf<__half> {
  static constexpr Dtype value = Dtype::float16;
};
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
template <> struct DtypeOf<__nv_bfloat16> {
  static constexpr Dtype value = Dtype::bfloat16;
};
#endif

namespace detail {

// The type itself, where it is not to be deduced.
template <class T> struct Identity {
  using type = T;
};
template <class T> using Same = typename Identity<T>::type;

// Selects a template for arguments that become an Int32. Because the type is deduced, a literal 0
// is taken as a rank, and not as the stream of another overload.
template <class Rank> using IfInt32 = std::enable_if_t<std::is_convertible_v<Rank, Int32>, int>;

template <class T, class = void> struct HasDtype : std::false_type {};
template <class T> struct HasDtype<T, std::void_t<decltype(DtypeOf<T>::value)>> : std::true_type {};

// The bytes of one element; 0 for a number that is no Dtype.
constexpr std::size_t size_of(Dtype dtype) noexcept
{
  switch (dtype) {
  case Dtype::int8:
  case Dtype::uint8:
  case Dtype::float8e4m3:
  case Dtype::float8e5m2: return 1;
  case Dtype::float16:
  case Dtype::bfloat16: return 2;
  case Dtype::int32:
  case Dtype::uint32:
  case Dtype::float32: return 4;
  case Dtype::int64:
  case Dtype::uint64:
  case Dtype::float64: return 8;
  }
  return 0;
}

template <class T> constexpr dm_dtype dtype() noexcept
{
  static_assert(!std::is_const_v<T>, "the receiving buffer is const");
  static_assert(HasDtype<T>::value, "no dm::Dtype belongs to this element type: specialise dm::DtypeOf for it");
  static_assert(sizeof(T) == size_of(DtypeOf<T>::value),
                "dm::DtypeOf of this type is a Dtype of another size, so only a part of each element would be sent: send its bytes, "
                "dm::Span<std::byte>, with their number");
  static_assert(std::is_trivially_copyable_v<T>, "elements of this type cannot be sent as bytes: it is not trivially copyable");
  return static_cast<dm_dtype>(DtypeOf<T>::value);
}

// The element of a container, const where it can only be read; no type where there is none.
template <class Container> using ElementOf = std::remove_pointer_t<decltype(std::data(std::declval<Container &>()))>;

template <class Container> inline constexpr bool is_braced_list = false;
template <class T> inline constexpr bool is_braced_list<std::initializer_list<T>> = true;

// Whether an argument of this deduced type is a temporary that owns its elements, so that they end
// with the call. Views do not own theirs: they give the same elements when they are const. A list in
// braces is no owner either, but its elements end with the call.
template <class Container, class Plain = std::remove_const_t<Container>>
inline constexpr bool is_temporary =
    !std::is_lvalue_reference_v<Container> &&
    (is_braced_list<Plain> || (!std::is_const_v<ElementOf<Plain>> && std::is_const_v<ElementOf<const Plain>>));

// The buffers that a collective reads and writes, as spans of one type of element.
template <class Container> using Sent = Span<const std::remove_cv_t<ElementOf<Container>>>;
template <class Container> using Received = Span<ElementOf<Container>>;

// These check the deduced types of a call's buffers. A buffer that is read and written is Recv.
template <class Recv> constexpr void check_received() noexcept
{
  static_assert(!std::is_void_v<ElementOf<Recv>>, "std::vector<bool> holds bits, not elements in memory: use std::vector<std::uint8_t>");
  static_assert(!std::is_const_v<ElementOf<Recv>>, "the receiving buffer is const");
  static_assert(!is_temporary<Recv>, "the receiving buffer is a temporary, so the result would be lost: give it a name");
}

template <class Send, class Recv> constexpr void check_types() noexcept
{
  check_received<Recv>();
  static_assert(!std::is_void_v<ElementOf<Send>>, "std::vector<bool> holds bits, not elements in memory: use std::vector<std::uint8_t>");
  static_assert(std::is_same_v<std::remove_cv_t<ElementOf<Send>>, ElementOf<Recv>>, "the buffers have different types of elements");
}

// Groups. What an operation works on, as far as a group checks it when it takes the operation in.
struct Operands {
  const char *call;
  const void *send;
  void *recv;
  std::size_t send_bytes, recv_bytes;  // of the whole buffers; 0 for one that is not used
  std::ptrdiff_t in_place;             // the bytes from the beginning of send to that of recv when it is done in place
  const char *member;                  // "root" or "peer", or nullptr
  std::int32_t rank;                   // of that member
  dm_op op;
  const void *stream;
  bool host_only = false;  // whether only host memory can be worked on in place
};

// The operations that mesh.group() has collected on this thread. They are issued together when its
// callback has returned, and dropped when it has not: a library's group cannot be given up once an
// operation is in it.
//
// Files without exceptions have a list of their own (another inline namespace). Their operations
// join the library's group at once.
class Collected {
public:
  // The innermost group of this thread; nullptr outside of all.
  static Collected *&innermost() noexcept
  {
    static thread_local Collected *open = nullptr;
    return open;
  }

  // Whether an operation of this thread runs later, at the end of a group.
  static bool is_open() noexcept { return innermost() != nullptr || raw_groups() > 0; }

  Collected() = default;
  Collected(const Collected &) = delete;
  Collected &operator=(const Collected &) = delete;
  // A callback that was left by an exception: nothing of it runs.
  ~Collected()
  {
    if (mesh_ != nullptr) leave();
    dm_free(own_);
  }

  // Begins the group here and in the library. The library's group takes the calls that the program
  // makes on raw communicators. It is begun twice, so that end() can tell whether it is open still.
  dm_status begin(const dm_mesh *mesh) noexcept
  {
    // A handle of its own, so that the group can be ended when the callback has freed the mesh.
    if (const dm_status status = dm_clone(mesh, &own_); status != DM_STATUS_OK) return status;
    if (const dm_status status = dm_group_start(own_); status != DM_STATUS_OK) return status;
    if (const dm_status status = dm_group_start(own_); status != DM_STATUS_OK) {
      dm_group_end(own_);
      return status;
    }
    mesh_ = own_;
    is_doubled_ = true;
    outer_ = std::exchange(innermost(), this);
    return DM_STATUS_OK;
  }

  // Ends it after a callback that returned. Issues the operations, or hands them to the outer
  // group. Returns the error, or nothing.
  std::optional<Error> end()
  {
    if (starts_ > 0) refuse(Error(Status::invalid_state, "group: its callback has called group_start() without group_end()"));
    if (const dm_status status = still_open(); status != DM_STATUS_OK)
      refuse(status == DM_STATUS_INVALID_STATE
                 ? Error(Status::aborted, "group: an abort or a recovery in its callback has ended it, so none of its operations ran")
                 : Error::last(status));
    std::optional<Error> failure = refused_;
    if (!failure && outer_ != nullptr) {
      // One insertion gets its memory before it moves anything, so that without memory the outer
      // group gets none of the operations.
      outer_->operations_.insert(outer_->operations_.end(), std::make_move_iterator(operations_.begin()),
                                 std::make_move_iterator(operations_.end()));
    } else if (!failure) {
      failure = issue();
    }
    const dm_status status = leave();
    if (!failure && status != DM_STATUS_OK) failure = Error::last(status);
    return failure;
  }

  // Takes an operation in, or says what is wrong with it; then none of the group will run.
  template <class Issue> std::optional<Error> add(const dm_mesh *mesh, const Text &dim, const Operands &operands, Issue issue)
  {
    // The communicator of a lazy mesh is made here, as the operation itself would do.
    ncclComm_t comm = nullptr;
    if (const dm_status status = dm_get_comm(mesh, dim.c_str(), &comm); status != DM_STATUS_OK) return refuse(Error::last(status));
    if (const std::string problem = wrong(mesh, dim, operands); !problem.empty())
      return refuse(Error(Status::invalid_argument, operands.call + (": " + problem)));
    operations_.push_back({mesh, dim.c_str() == nullptr ? std::optional<std::string>() : dim.string(), std::move(issue)});
    return std::nullopt;
  }

  // Counts group_start() in the callback.
  void started() noexcept { ++starts_; }
  // Counts group_end() in the callback; false when it has no group_start() there.
  bool ended() noexcept { return starts_ > 0 && starts_-- > 0; }

  // The operations in all groups of this thread.
  static std::size_t count() noexcept
  {
    std::size_t count = 0;
    for (const Collected *group = innermost(); group != nullptr; group = group->outer_) count += group->operations_.size();
    return count;
  }

  // Notes what was refused first.
  std::optional<Error> refuse(Error error)
  {
    if (!refused_) refused_ = error;
    return error;
  }

private:
  struct Operation {
    const dm_mesh *mesh;
    std::optional<std::string> dim;
    std::function<dm_status(const dm_mesh *, const char *)> issue;

    const char *name() const noexcept { return dim ? dim->c_str() : nullptr; }
  };

  // The library would refuse these when the operation is issued. In a group that is too late for
  // the operations before it.
  static std::string wrong(const dm_mesh *mesh, const Text &dim, const Operands &operands)
  {
    std::int32_t ranks = 0;
    dm_size(mesh, dim.c_str(), &ranks);
    if (operands.member != nullptr && (operands.rank < 0 || operands.rank >= ranks))
      return std::string(operands.member) + " is " + std::to_string(operands.rank) + ", but dimension " + dim.string() +
             " has ranks 0 to " + std::to_string(ranks - 1);
    if (operands.op < DM_SUM) return "op is " + std::to_string(operands.op) + ", not one of 0 to 4 nor made by ncclRedOpCreatePreMulSum";
    if (operands.send_bytes > PTRDIFF_MAX || operands.recv_bytes > PTRDIFF_MAX) return "the buffers are larger than memory can be";
    if (operands.send == nullptr && operands.send_bytes > 0) return "send is NULL, but there are elements to send";
    if (operands.recv == nullptr && operands.recv_bytes > 0) return "recv is NULL, but there are elements to receive";
    const std::uintptr_t send = reinterpret_cast<std::uintptr_t>(operands.send), recv = reinterpret_cast<std::uintptr_t>(operands.recv);
    const bool apart = operands.send_bytes == 0 || operands.recv_bytes == 0 || send + operands.send_bytes <= recv ||
                       recv + operands.recv_bytes <= send;
    const bool in_place =
        recv - send == static_cast<std::uintptr_t>(operands.in_place) && (!operands.host_only || ranks == 1 || on_cpu(mesh));
    if (!apart && !in_place) return "send and recv overlap, but are not in place exactly: let them lie apart";
    return operands.stream != nullptr && on_cpu(mesh) ? "stream is given, but device type cpu has no streams: pass nullptr" : std::string();
  }

  // Whether the mesh has device type cpu.
  static bool on_cpu(const dm_mesh *mesh) noexcept
  {
    const char *const type = dm_device_type(mesh);
    return type != nullptr && std::strcmp(type, "cpu") == 0;
  }

  // Ends the inner one of the library's two groups, which runs nothing. This fails where an abort
  // on this thread has ended all groups of the thread. Operations would then run one by one.
  dm_status still_open() noexcept { return std::exchange(is_doubled_, false) ? dm_group_end(mesh_) : DM_STATUS_OK; }

  std::optional<Error> issue()
  {
    // A mesh that was freed in the callback must not be noticed when a part is under way.
    for (const Operation &operation : operations_) {
      std::int32_t rank = 0;
      const dm_status status = dm_get_local_rank(operation.mesh, operation.name(), &rank);
      if (status != DM_STATUS_OK) return Error::last(status);
    }
    bool is_streamed = false;  // whether the library has an operation that it cannot drop any more
    for (const Operation &operation : operations_) {
      const dm_status status = operation.issue(operation.mesh, operation.name());
      if (status == DM_STATUS_OK) {
        is_streamed = is_streamed || !on_cpu(operation.mesh);
        continue;
      }
      const Error error = Error::last(status);
      // NCCL runs nothing of a group in which it has refused an operation itself. Where libdevicemesh
      // has refused it, NCCL would run the operations before it, so their meshes end.
      if (is_streamed && error.ccl_result() == 0)
        for (const Operation &each : operations_) dm_abort(each.mesh);
      return error;
    }
    return std::nullopt;
  }

  // The outer group lacks an operation that this group has refused. So the outer group fails, too,
  // also where its callback ignores the error. A copy of an Error cannot fail.
  dm_status leave() noexcept
  {
    innermost() = outer_;
    if (refused_ && outer_ != nullptr) outer_->refuse(*refused_);
    for (; starts_ > 0; --starts_) dm_group_end(mesh_);
    still_open();
    return dm_group_end(std::exchange(mesh_, nullptr));
  }

  dm_mesh *own_ = nullptr;
  const dm_mesh *mesh_ = nullptr;  // while the library's group is open
  Collected *outer_ = nullptr;
  std::size_t starts_ = 0;
  bool is_doubled_ = false;  // whether the library's group was begun twice, and the inner one is open
  std::vector<Operation> operations_;
  std::optional<Error> refused_;
};

inline std::size_t collected_operations() noexcept { return Collected::count(); }

}  // namespace detail

// ---- the mesh ----

/// One rank's block of a tensor: element i of it along dimension d is element offset[d] + i of the
/// tensor.
struct LocalShard {
  /// The size of the block along each dimension of the tensor.
  std::vector<std::size_t> shape;
  /// Where the block begins along each dimension of the tensor.
  std::vector<std::size_t> offset;
};

/// How a job recovers from lost ranks: dm_recover_options. A field that is not set has its default.
struct RecoverOptions {
  /// The dimension of replicas; empty: the outermost one. An index of it that cannot be filled is
  /// left out with all its ranks.
  std::string dim = {};
  /// How long the call may take. 0: as long as the mesh's calls. A rank that is not in the mesh
  /// waits without a limit.
  std::chrono::milliseconds timeout{0};
  /// How long to wait for processes that can take the places of lost ranks, once all living ranks
  /// are here.
  std::chrono::milliseconds replace{0};
  /// After which time the ranks are left out that are not known to be lost and have not called. 0:
  /// never. It needs min_size.
  std::chrono::milliseconds silent{0};
  /// The least size of dim with which the job goes on. 0: 1.
  std::int32_t min_size = 0;
  /// This rank, which has joined, has received the state of the training (DM_RECOVER_HAS_STATE).
  bool has_state = false;
  /// The job goes on also where no rank that is left has the state of some shard
  /// (DM_RECOVER_ANY_STATE).
  bool any_state = false;
  /// The outermost dimension may get more indices, when new processes fill them (DM_RECOVER_GROW).
  bool grow = false;
  /// The options of the dimensions; empty: those that the dimensions had.
  std::vector<DimOptions> dims = {};
  /// The greatest size of the outermost dimension with grow. 0: no limit.
  std::int32_t max_size = 0;
};

/// What a recovery has come to: dm_recovery.
struct Recovery {
  /// The epoch of the mesh; the job starts in epoch 0.
  std::int64_t epoch = 0;
  /// The epoch of the mesh that this rank had before; -1 where it had none.
  std::int64_t previous_epoch = 0;
  /// The world ranks that were lost or left out since that epoch, in ascending order.
  std::vector<std::int32_t> lost_ranks = {};
  /// The world ranks of the mesh that need the state, in ascending order.
  std::vector<std::int32_t> joined_ranks = {};
  /// This rank's coordinate in the mesh before; empty where it had none.
  std::vector<std::int32_t> old_coordinate = {};
  /// This rank's coordinate in the new mesh; empty where it is not in it.
  std::vector<std::int32_t> new_coordinate = {};
  /// The rank along the dimension of replicas that has the state of this rank's shard, if any has.
  std::optional<std::int32_t> state_root = {};
  /// Whether this rank is one of joined_ranks.
  bool has_joined = false;
};

/// The result of plan_ranks(): ranks for InitOptions::ranks, and one line of JSON that says why
/// (dm_plan_ranks describes it).
struct Plan {
  /// World ranks, row-major in the shape that was asked for.
  std::vector<std::int32_t> ranks;
  /// One line of JSON.
  std::string report;
};

/// One rank's immutable view of a mesh: shape, names, ranks, communicators. See dm_mesh.
///
/// Where a function takes dim, a mesh of one dimension may be asked with nullptr.
template <class Style> class BasicMesh {
  using Calls = detail::Calls<Style>;

public:
  /// T, or Result<T>.
  template <class T> using Returns = typename Style::template Returns<T>;

  // ---- making and owning ----

  /// Empty.
  BasicMesh() noexcept = default;
  /// Takes over a C handle.
  explicit BasicMesh(dm_mesh *mesh) noexcept : mesh_(mesh) {}

  /// Makes a mesh: every dimension of this rank gets a ready communicator. Collective over the
  /// world. device_type is "cuda", "cpu", or nullptr for that of options.world. See dm_init.
  [[nodiscard]] static Returns<BasicMesh> init(const Text &device_type, const Dims &dims, const InitOptions &options = {})
  {
    return make(dims, options, [&](const dm_init_options &wishes, dm_mesh **mesh) {
      return dm_init(device_type.c_str(), dims.sizes(), dims.size(), dims.names(), &wishes, mesh);
    });
  }

  /// Makes a mesh over communicators that exist, one per dimension, in their order. Local. See
  /// dm_from_comms.
  [[nodiscard]] static Returns<BasicMesh> from_comms(const Text &device_type, const Dims &dims, Span<const ncclComm_t> comms,
                                                     const InitOptions &options = {})
  {
    if (comms.size() != dims.size())
      return invalid<BasicMesh>(std::to_string(comms.size()) + " communicators for " + std::to_string(dims.size()) + " dimensions");
    return make(dims, options, [&](const dm_init_options &wishes, dm_mesh **mesh) {
      return dm_from_comms(device_type.c_str(), dims.sizes(), dims.size(), dims.names(), comms.data(), &wishes, mesh);
    });
  }

  /// Makes the mesh that a text of serialize() describes. Collective over the world, each rank with
  /// a text of the same mesh. dim_options is empty, or has one element for each dimension of the
  /// text. See dm_deserialize.
  [[nodiscard]] static Returns<BasicMesh> deserialize(const Text &text, const InitOptions &options = {},
                                                      Span<const DimOptions> dim_options = {})
  {
    if (options.world.gone()) return no_world();
    dm_init_options wishes = options.capi();
    std::vector<dm_dim_options> dims;
    for (const DimOptions &one : dim_options) dims.push_back(one.capi());
    wishes.dim_options = dims.empty() ? nullptr : dims.data();
    wishes.num_dim_options = dims.size();
    return view([&](dm_mesh **mesh) { return dm_deserialize(text.c_str(), &wishes, mesh); });
  }

  /// The view that was registered under this name in this process. Local. See dm_lookup.
  [[nodiscard]] static Returns<BasicMesh> lookup(const Text &name)
  {
    return view([&](dm_mesh **mesh) { return dm_lookup(name.c_str(), mesh); });
  }

  /// Another handle of the same view; costs no communicator. Local. See dm_clone.
  [[nodiscard]] Returns<BasicMesh> clone() const
  {
    return view([&](dm_mesh **mesh) { return dm_clone(capi(), mesh); });
  }

  /// The C handle, borrowed, for calls of the C functions. An empty mesh has none, which is NULL.
  [[nodiscard]] dm_mesh *capi() const noexcept { return mesh_.get(); }
  /// Gives the C handle away, to be freed with dm_free.
  [[nodiscard]] dm_mesh *release() noexcept { return mesh_.release(); }

  // ---- views ----

  /// The view of one dimension, as slice().
  [[nodiscard]] Returns<BasicMesh> operator[](const Text &dim) const
  {
    const char *name = dim.c_str();
    return view([&](dm_mesh **mesh) { return dm_slice(capi(), &name, 1, mesh); });
  }

  /// The view of several dimensions, mesh({"dp", "tp"}), as slice().
  [[nodiscard]] Returns<BasicMesh> operator()(const Texts &dims) const { return slice(dims); }

  /// A view of the named dimensions, in this order; it shares the communicators. Local. See
  /// dm_slice.
  [[nodiscard]] Returns<BasicMesh> slice(const Texts &dims) const
  {
    return view([&](dm_mesh **mesh) { return dm_slice(capi(), dims.data(), dims.size(), mesh); });
  }

  /// One dimension out of all of this view's, with a communicator. Collective over the root mesh.
  /// name nullptr joins their names with "_". timeout 0: the mesh's. See dm_flatten.
  [[nodiscard]] Returns<BasicMesh> flatten(const Text &name = {}, const DimOptions &options = {},
                                           std::chrono::milliseconds timeout = {}) const
  {
    const dm_dim_options dim = options.capi();
    const dm_call_options wishes = detail::call_options(timeout, &dim, 1);
    return view([&](dm_mesh **mesh) { return dm_flatten(capi(), name.c_str(), &wishes, mesh); });
  }

  /// The view with dim replaced by these, which have names, whose sizes multiply to its size, and
  /// each of which gets a communicator. Collective over the root mesh. See dm_unflatten.
  [[nodiscard]] Returns<BasicMesh> unflatten(const Text &dim, const Dims &dims, std::chrono::milliseconds timeout = {}) const
  {
    if (const std::string problem = dims.problem(); !problem.empty()) return invalid<BasicMesh>(problem);
    const dm_call_options wishes = dims.call(timeout);
    return view([&](dm_mesh **mesh) { return dm_unflatten(capi(), dim.c_str(), dims.sizes(), dims.size(), dims.names(), &wishes, mesh); });
  }

  /// All ranks of this view in another shape. Its dimensions have names, and each of them gets a
  /// communicator. Collective over the root mesh. See dm_reshape.
  [[nodiscard]] Returns<BasicMesh> reshape(const Dims &dims, std::chrono::milliseconds timeout = {}) const
  {
    if (const std::string problem = dims.problem(); !problem.empty()) return invalid<BasicMesh>(problem);
    const dm_call_options wishes = dims.call(timeout);
    return view([&](dm_mesh **mesh) { return dm_reshape(capi(), dims.sizes(), dims.size(), dims.names(), &wishes, mesh); });
  }

  /// The view that keeps only len indices of dim: start, start + step ... Collective over the root
  /// mesh. See dm_slice_range.
  [[nodiscard]] Returns<BasicMesh> slice_range(const Text &dim, Int32 start, Int32 len, Int32 step = 1,
                                                const DimOptions &options = {}, std::chrono::milliseconds timeout = {}) const
  {
    if (!start.fits()) return invalid<BasicMesh>(start.problem("slice_range", "start"));
    if (!len.fits()) return invalid<BasicMesh>(len.problem("slice_range", "len"));
    if (!step.fits()) return invalid<BasicMesh>(step.problem("slice_range", "step"));
    const dm_dim_options left = options.capi();
    const dm_call_options wishes = detail::call_options(timeout, &left, 1);
    return view([&](dm_mesh **mesh) { return dm_slice_range(capi(), dim.c_str(), start.value(), len.value(), step.value(), &wishes, mesh); });
  }

  /// Views of one root mesh side by side, concatenate({a, b}): a view with the dimensions of all
  /// of them. Local. See dm_concatenate.
  [[nodiscard]] static Returns<BasicMesh> concatenate(Span<const MeshRef> meshes)
  {
    std::vector<const dm_mesh *> handles;
    for (const MeshRef &mesh : meshes) handles.push_back(mesh.capi());
    return view([&](dm_mesh **mesh) { return dm_concatenate(handles.data(), handles.size(), mesh); });
  }

  /// Concatenates the meshes of a std::vector<Mesh> or another container.
  template <class Container,
            std::enable_if_t<std::is_convertible_v<decltype(*std::begin(std::declval<const Container &>())), MeshRef>, int> = 0>
  [[nodiscard]] static Returns<BasicMesh> concatenate(const Container &meshes)
  {
    const std::vector<MeshRef> handles(std::begin(meshes), std::end(meshes));
    return concatenate(Span<const MeshRef>(handles));
  }

  /// The root mesh: the one that init(), deserialize(), from_comms(), shrink() or recover() made.
  /// Local. See dm_root.
  [[nodiscard]] Returns<BasicMesh> root() const
  {
    return view([&](dm_mesh **mesh) { return dm_root(capi(), mesh); });
  }

  /// How many parallel copies of these dimensions there are over the ranks of the root mesh.
  /// Local. See dm_submesh_count.
  [[nodiscard]] Returns<std::int32_t> submesh_count(const Texts &dims) const
  {
    std::int32_t count = 0;
    const dm_status status = dm_submesh_count(capi(), dims.data(), dims.size(), &count);
    return Calls::give(status, count);
  }

  /// One of the parallel copies of these dimensions, by its index. Local. See dm_submesh.
  [[nodiscard]] Returns<BasicMesh> submesh(const Texts &dims, Int32 index) const
  {
    if (!index.fits()) return invalid<BasicMesh>(index.problem("submesh", "index"));
    return view([&](dm_mesh **mesh) { return dm_submesh(capi(), dims.data(), dims.size(), index.value(), mesh); });
  }

  // ---- questions ----

  /// The number of dimensions. Local. See dm_ndim.
  [[nodiscard]] Returns<std::size_t> ndim() const
  {
    // 0 may also mean that the handle is not live: shape() tells.
    const std::size_t ndim = dm_ndim(capi());
    std::size_t length = 0;
    const dm_status status = ndim > 0 ? DM_STATUS_OK : dm_shape(capi(), nullptr, 0, &length);
    return Calls::give(status, ndim);
  }

  /// The name of the dimension at that index. Local. See dm_dim_name.
  [[nodiscard]] Returns<std::string> dim_name(std::size_t index) const
  {
    const char *name = dm_dim_name(capi(), index);
    if (name != nullptr) return Returns<std::string>(name);
    std::size_t ndim = 0;
    const dm_status status = dm_shape(capi(), nullptr, 0, &ndim);
    if (status != DM_STATUS_OK && status != DM_STATUS_BUFFER_TOO_SMALL) return Calls::give(status, std::string());
    return invalid<std::string>("index is " + std::to_string(index) + ", the mesh has " + std::to_string(ndim) + " dimensions");
  }

  /// The names of the dimensions. Local.
  [[nodiscard]] Returns<std::vector<std::string>> dim_names() const
  {
    std::vector<std::string> names;
    for (std::size_t at = 0; const char *name = dm_dim_name(capi(), at); ++at) names.emplace_back(name);
    std::size_t length = 0;
    const dm_status status = names.empty() ? dm_shape(capi(), nullptr, 0, &length) : DM_STATUS_OK;
    return Calls::give(status, std::move(names));
  }

  /// The sizes of the dimensions. Local. See dm_shape.
  [[nodiscard]] Returns<std::vector<std::int32_t>> shape() const
  {
    return Calls::template list<std::int32_t>(
        [&](std::int32_t *sizes, std::size_t capacity, std::size_t *length) { return dm_shape(capi(), sizes, capacity, length); });
  }

  /// The size of a dimension in ranks. With nullptr it is the number of ranks of the view. Local.
  /// See dm_size.
  [[nodiscard]] Returns<std::int32_t> size(const Text &dim = {}) const
  {
    std::int32_t size = 0;
    const dm_status status = dm_size(capi(), dim.c_str(), &size);
    return Calls::give(status, size);
  }

  /// "cuda" or "cpu": where the buffers of the mesh's collectives lie. Local. See dm_device_type.
  [[nodiscard]] Returns<std::string> device_type() const
  {
    const char *const type = dm_device_type(capi());
    return Calls::give(type != nullptr ? DM_STATUS_OK : DM_STATUS_INVALID_HANDLE, std::string(type != nullptr ? type : ""));
  }

  /// Whether this process's rank is in the view, also when the mesh has ended. Local. See
  /// dm_is_member.
  [[nodiscard]] Returns<bool> is_member() const
  {
    bool member = false;
    const dm_status status = dm_is_member(capi(), &member);
    return Calls::give(status, member);
  }

  /// This process's rank in the world, whether or not it is in the mesh. Local. See dm_rank.
  [[nodiscard]] Returns<std::int32_t> rank() const
  {
    std::int32_t rank = 0;
    const dm_status status = dm_rank(capi(), &rank);
    return Calls::give(status, rank);
  }

  /// This rank's coordinate along a dimension, which is its rank in the dimension's communicator.
  /// Local. See dm_get_local_rank.
  [[nodiscard]] Returns<std::int32_t> local_rank(const Text &dim = {}) const
  {
    std::int32_t rank = 0;
    const dm_status status = dm_get_local_rank(capi(), dim.c_str(), &rank);
    return Calls::give(status, rank);
  }

  /// This rank's coordinate, one number per dimension. Local. See dm_get_coordinate.
  [[nodiscard]] Returns<std::vector<std::int32_t>> coordinate() const
  {
    return Calls::template list<std::int32_t>([&](std::int32_t *coordinate, std::size_t capacity, std::size_t *length) {
      return dm_get_coordinate(capi(), coordinate, capacity, length);
    });
  }

  /// The coordinate of a world rank that is in the view, one number per dimension. Local. See
  /// dm_coordinate_of.
  [[nodiscard]] Returns<std::vector<std::int32_t>> coordinate_of(Int32 world_rank) const
  {
    if (!world_rank.fits()) return invalid<std::vector<std::int32_t>>(world_rank.problem("coordinate_of", "world_rank"));
    return Calls::template list<std::int32_t>([&](std::int32_t *coordinate, std::size_t capacity, std::size_t *length) {
      return dm_coordinate_of(capi(), world_rank.value(), coordinate, capacity, length);
    });
  }

  /// The world ranks of the view, row-major in its shape. Local. See dm_ranks.
  [[nodiscard]] Returns<std::vector<std::int32_t>> ranks() const
  {
    return Calls::template list<std::int32_t>(
        [&](std::int32_t *ranks, std::size_t capacity, std::size_t *length) { return dm_ranks(capi(), ranks, capacity, length); });
  }

  /// The world ranks of this rank's group along a dimension, in the order of its communicator.
  /// Local. See dm_group_ranks.
  [[nodiscard]] Returns<std::vector<std::int32_t>> group_ranks(const Text &dim = {}) const
  {
    return Calls::template list<std::int32_t>([&](std::int32_t *ranks, std::size_t capacity, std::size_t *length) {
      return dm_group_ranks(capi(), dim.c_str(), ranks, capacity, length);
    });
  }

  /// All groups along a dimension, as XLA wants them: shape [groups, size(dim)], row-major. Local.
  /// See dm_replica_groups.
  [[nodiscard]] Returns<std::vector<std::int32_t>> replica_groups(const Text &dim = {}) const
  {
    return Calls::template list<std::int32_t>([&](std::int32_t *ranks, std::size_t capacity, std::size_t *length) {
      return dm_replica_groups(capi(), dim.c_str(), ranks, capacity, length);
    });
  }

  /// Whether two views have the same ranks, shape, names and device type. Local. See dm_equal;
  /// with exceptions there is == too.
  [[nodiscard]] Returns<bool> equals(MeshRef other) const
  {
    bool equal = false;
    const dm_status status = dm_equal(capi(), other.capi(), &equal);
    return Calls::give(status, equal);
  }

  /// A hash of what equals() compares, with one release the same on every rank and machine. Local.
  /// See dm_hash; with exceptions there is std::hash too.
  [[nodiscard]] Returns<std::uint64_t> hash() const
  {
    std::uint64_t hash = 0;
    const dm_status status = dm_hash(capi(), &hash);
    return Calls::give(status, hash);
  }

  /// The world that the mesh is in, also one that init() joined by itself. Local. See dm_get_world.
  [[nodiscard]] Returns<BasicWorld<Style>> world() const
  {
    dm_world *world = nullptr;
    const dm_status status = dm_get_world(capi(), &world);
    return Calls::give(status, BasicWorld<Style>(world));
  }

  /// DeviceMesh((dp=2, tp=4), 'cuda', stride=(4, 1)). Local. See dm_describe.
  [[nodiscard]] Returns<std::string> describe() const
  {
    return Calls::text([&](char *text, std::size_t capacity, std::size_t *length) { return dm_describe(capi(), text, capacity, length); });
  }

  /// The view as one line of JSON, for deserialize() in another run or language. Local. See
  /// dm_serialize.
  [[nodiscard]] Returns<std::string> serialize() const
  {
    return Calls::text([&](char *text, std::size_t capacity, std::size_t *length) { return dm_serialize(capi(), text, capacity, length); });
  }

  /// The world rank of the rank that is dim_rank along dim, in this rank's group. Local. See
  /// dm_translate_rank.
  [[nodiscard]] Returns<std::int32_t> translate_rank(const Text &dim, Int32 dim_rank) const
  {
    if (!dim_rank.fits()) return invalid<std::int32_t>(dim_rank.problem("translate_rank", "dim_rank"));
    std::int32_t rank = 0;
    const dm_status status = dm_translate_rank(capi(), dim.c_str(), dim_rank.value(), &rank);
    return Calls::give(status, rank);
  }

  /// The rank along dim of a world rank in this rank's group, for send(), recv() and roots. Local.
  /// See dm_translate_world_rank.
  [[nodiscard]] Returns<std::int32_t> translate_world_rank(const Text &dim, Int32 world_rank) const
  {
    if (!world_rank.fits()) return invalid<std::int32_t>(world_rank.problem("translate_world_rank", "world_rank"));
    std::int32_t rank = 0;
    const dm_status status = dm_translate_world_rank(capi(), dim.c_str(), world_rank.value(), &rank);
    return Calls::give(status, rank);
  }

  /// The rank along dim that lies offset steps from this rank, for send() and recv(); no value
  /// past the edge, unless wrap is true. Local. See dm_neighbor.
  [[nodiscard]] Returns<std::optional<std::int32_t>> neighbor(const Text &dim, Int32 offset, bool wrap = false) const
  {
    if (!offset.fits()) return invalid<std::optional<std::int32_t>>(offset.problem("neighbor", "offset"));
    std::int32_t rank = DM_RANK_NONE;
    const dm_status status = dm_neighbor(capi(), dim.c_str(), offset.value(), wrap, &rank);
    return Calls::give(status, rank == DM_RANK_NONE ? std::optional<std::int32_t>() : std::optional<std::int32_t>(rank));
  }

  /// The block of a tensor that a rank holds (-1: this one), with a placement per mesh dimension:
  /// local_shard({dm::shard(0), dm::replicate()}, {16, 32}). Local. See dm_local_shard.
  [[nodiscard]] Returns<LocalShard> local_shard(Span<const Placement> placements, Span<const std::size_t> tensor_shape,
                                                Int32 world_rank = -1) const
  {
    if (!world_rank.fits()) return invalid<LocalShard>(world_rank.problem("local_shard", "world_rank"));
    LocalShard block{std::vector<std::size_t>(tensor_shape.size()), std::vector<std::size_t>(tensor_shape.size())};
    const dm_status status = dm_local_shard(capi(), placements.data(), placements.size(), tensor_shape.data(),
                                            tensor_shape.size(), world_rank.value(), block.shape.data(), block.offset.data());
    return Calls::give(status, std::move(block));
  }

  // ---- communicators ----

  /// The raw communicator of this rank's group along a dimension, borrowed: it is valid until the
  /// mesh has ended (finalize(), abort(), shrink(), or the end of its world). Local; on a lazy mesh
  /// the first call is collective over the group. See dm_get_comm.
  [[nodiscard]] Returns<ncclComm_t> comm(const Text &dim = {}) const
  {
    ncclComm_t comm = nullptr;
    const dm_status status = dm_get_comm(capi(), dim.c_str(), &comm);
    return Calls::give(status, comm);
  }

  /// A function of the library that made the communicators:
  /// mesh.proc<decltype(&ncclAllReduce)>("ncclAllReduce"). Local. See dm_get_proc.
  template <class Function> [[nodiscard]] Returns<Function> proc(const Text &symbol) const
  {
    void *address = nullptr;
    const dm_status status = dm_get_proc(capi(), symbol.c_str(), &address);
    return Calls::give(status, function<Function>(address));
  }

  /// A function of the library that meshes of a device type will get, before there is one:
  /// device_proc<decltype(&ncclMemAlloc)>("cuda", "ncclMemAlloc"). Local. See dm_get_device_proc.
  template <class Function> [[nodiscard]] static Returns<Function> device_proc(const Text &device_type, const Text &symbol)
  {
    void *address = nullptr;
    const dm_status status = dm_get_device_proc(device_type.c_str(), symbol.c_str(), &address);
    return Calls::give(status, function<Function>(address));
  }

  /// The asynchronous error of dim's communicator; success while it works, and before it is made.
  /// nullptr: the first error among the communicators of the mesh whose ranks are all in this view,
  /// those of flattened dimensions too. It waits for no rank. Local. See dm_check.
  Returns<void> check(const Text &dim = {}) const { return Calls::done(dm_check(capi(), dim.c_str())); }

  /// Returns when the work on the stream (a cudaStream_t; NULL on cpu) is done and the communicator
  /// of dim has not failed. With dim nullptr the wait covers the communicators that check(nullptr)
  /// covers, and all ranks of the view. Local. timeout 0: the mesh's. A lost rank, a failed
  /// communicator and the deadline end the wait. See dm_stream_wait.
  Returns<void> stream_wait(const Text &dim, void *stream, std::chrono::milliseconds timeout = {}) const
  {
    if (const auto error = detail::inside_group("stream_wait", [] {})) return Style::template failure<void>(*error);
    return Calls::done(dm_stream_wait(capi(), dim.c_str(), stream, timeout.count()));
  }

  /// Returns when every rank of this rank's group along dim has called it; it does not wait for
  /// work on devices. Collective over the group. 0: the mesh's timeout. See dm_barrier.
  Returns<void> barrier(const Text &dim = {}, std::chrono::milliseconds timeout = {}) const
  {
    if (const auto error = detail::inside_group("barrier", [&] { return dm_barrier(capi(), dim.c_str(), -1); }))
      return Style::template failure<void>(*error);
    return Calls::done(dm_barrier(capi(), dim.c_str(), timeout.count()));
  }

  /// The bytes that each rank of this rank's group along dim gives, in rank order: 8 MiB at most of
  /// each, and 64 MiB of all. They travel through the store. Collective over the group. 0: the
  /// mesh's timeout. See dm_all_gather_bytes.
  [[nodiscard]] Returns<std::vector<std::string>> all_gather_bytes(const Text &dim, std::string_view data,
                                                                   std::chrono::milliseconds timeout = {}) const
  {
    const auto gather = [&](std::int64_t limit) {
      return [&, limit](dm_buffers **out) { return dm_all_gather_bytes(capi(), dim.c_str(), data.data(), data.size(), limit, out); };
    };
    if (const auto error = Calls::bytes_inside_group("all_gather_bytes", gather(-1)))
      return Style::template failure<std::vector<std::string>>(*error);
    return Calls::bytes_of_all(gather(timeout.count()));
  }

  /// The bytes that the rank root along dim gives, 8 MiB at most; data counts on the root only.
  /// Collective over this rank's group along dim. See dm_broadcast_bytes.
  [[nodiscard]] Returns<std::string> broadcast_bytes(const Text &dim, std::string_view data, Int32 root,
                                                     std::chrono::milliseconds timeout = {}) const
  {
    if (!root.fits()) return invalid<std::string>(root.problem("broadcast_bytes", "root"));
    const auto broadcast = [&](std::int64_t limit) {
      return [&, limit](dm_buffers **out) {
        return dm_broadcast_bytes(capi(), dim.c_str(), data.data(), data.size(), root.value(), limit, out);
      };
    };
    if (const auto error = Calls::bytes_inside_group("broadcast_bytes", broadcast(-1))) return Style::template failure<std::string>(*error);
    return Calls::bytes_of_root(broadcast(timeout.count()));
  }

  /// Ends the root mesh on this rank, without waiting for other ranks, and wakes every call that is
  /// blocked in it. Local, from any thread. See dm_abort.
  Returns<void> abort() const { return Calls::done(detail::aborted(dm_abort(capi()))); }

  /// Waits for outstanding work and destroys the communicators of the root mesh. Collective over
  /// it. timeout 0: the mesh's. See dm_finalize.
  Returns<void> finalize(std::chrono::milliseconds timeout = {}) const
  {
    const auto end = [&](std::chrono::milliseconds limit) {
      const dm_call_options wishes = detail::call_options(limit);
      return dm_finalize(capi(), &wishes);
    };
    if (const auto error = detail::inside_group("finalize", [&] { return end(std::chrono::milliseconds(-1)); }))
      return Style::template failure<void>(*error);
    return Calls::done(end(timeout));
  }

  /// The world ranks of this view that are known to be lost by now. Local. See dm_lost_ranks.
  [[nodiscard]] Returns<std::vector<std::int32_t>> lost_ranks() const
  {
    return Calls::template list<std::int32_t>(
        [&](std::int32_t *ranks, std::size_t capacity, std::size_t *length) { return dm_lost_ranks(capi(), ranks, capacity, length); });
  }

  /// The mesh without the indices along dim that hold a lost rank, for going on after ranks have
  /// died. The ranks that are left agree on who is lost. Collective over them; it ends the root
  /// mesh also when it fails. The new mesh inherits the options of this one. See dm_shrink.
  [[nodiscard]] Returns<BasicMesh> shrink(const Text &dim) const { return shrink(dim, std::chrono::milliseconds()); }

  /// Shrinks within that time: mesh.shrink("dp", 30s).
  template <class Rep, class Period,
            std::enable_if_t<std::is_convertible_v<std::chrono::duration<Rep, Period>, std::chrono::milliseconds>, int> = 0>
  [[nodiscard]] Returns<BasicMesh> shrink(const Text &dim, std::chrono::duration<Rep, Period> timeout) const
  {
    return shrink(dim, Span<const std::int32_t>(), timeout);
  }

  /// Shrinks where the caller knows the lost ranks: mesh.shrink("dp", {5}). The list is equal on
  /// all ranks that are left. When it is empty, they agree on who is lost. dim_options is empty for
  /// the inherited options, or has one element for each dimension of the mesh.
  [[nodiscard]] Returns<BasicMesh> shrink(const Text &dim, Span<const std::int32_t> lost_ranks, std::chrono::milliseconds timeout = {},
                                          Span<const DimOptions> dim_options = {}) const
  {
    std::vector<dm_dim_options> dims;
    for (const DimOptions &one : dim_options) dims.push_back(one.capi());
    const dm_call_options wishes = detail::call_options(timeout, dims.empty() ? nullptr : dims.data(), dims.size());
    return view([&](dm_mesh **mesh) { return dm_shrink(capi(), dim.c_str(), lost_ranks.data(), lost_ranks.size(), &wishes, mesh); });
  }

  /// The mesh with which the job goes on after ranks were lost: in its full shape where spares take
  /// the places of the lost ranks, and smaller along options.dim where they cannot. Collective over
  /// the ranks of the world that live; it ends all meshes of the world. A rank that is not in the
  /// mesh waits in the call until it gets a place. recovery() of the result says more. See
  /// dm_recover.
  [[nodiscard]] Returns<BasicMesh> recover(const RecoverOptions &options = {}) const
  {
    std::vector<dm_dim_options> dims;
    for (const DimOptions &each : options.dims) dims.push_back(each.capi());
    const Text dim(options.dim);
    dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
    wishes.flags = (options.has_state ? std::uint32_t(DM_RECOVER_HAS_STATE) : 0U) | (options.any_state ? std::uint32_t(DM_RECOVER_ANY_STATE) : 0U) |
                   (options.grow ? std::uint32_t(DM_RECOVER_GROW) : 0U);
    wishes.max_size = options.max_size;
    wishes.min_size = options.min_size;
    wishes.dim = options.dim.empty() ? nullptr : dim.c_str();
    wishes.timeout_ms = options.timeout.count();
    wishes.replace_ms = options.replace.count();
    wishes.silent_ms = options.silent.count();
    wishes.dim_options = dims.empty() ? nullptr : dims.data();
    wishes.num_dim_options = dims.size();
    return view([&](dm_mesh **mesh) { return dm_recover(capi(), &wishes, mesh, nullptr); });
  }

  /// What the recovery that made this mesh has come to. Local. See dm_get_recovery.
  [[nodiscard]] Returns<Recovery> recovery() const
  {
    dm_recovery raw = DM_RECOVERY_INIT;
    Recovery told;
    const dm_status status = dm_get_recovery(capi(), &raw);
    if (status == DM_STATUS_OK) {
      const auto list = [](const std::int32_t *first, std::size_t count) {
        return first == nullptr ? std::vector<std::int32_t>() : std::vector<std::int32_t>(first, first + count);
      };
      told.epoch = raw.epoch;
      told.previous_epoch = raw.previous_epoch;
      told.lost_ranks = list(raw.lost_ranks, raw.num_lost);
      told.joined_ranks = list(raw.joined_ranks, raw.num_joined);
      told.old_coordinate = list(raw.old_coordinate, raw.ndim);
      told.new_coordinate = list(raw.new_coordinate, raw.ndim);
      if (raw.state_root != DM_RANK_NONE) told.state_root = raw.state_root;
      told.has_joined = raw.has_joined != 0;
    }
    return Calls::give(status, std::move(told));
  }

  /// Keeps this view under a name, for lookup(). Local. See dm_register.
  Returns<void> register_as(const Text &name) const { return Calls::done(dm_register(capi(), name.c_str())); }

  /// Removes a name that register_as() gave. Local. See dm_unregister.
  static Returns<void> unregister(const Text &name) { return Calls::done(dm_unregister(name.c_str())); }

  // ---- collectives ----
  //
  // Each collective comes in two forms: over containers, arrays and spans, whose sizes are checked
  // on this rank before anything is sent (Status::invalid_argument), and over pointers with a
  // count. all_to_allv, all_gatherv and reduce_scatterv have only the first form: make a span of a
  // pointer by Span(pointer, size). The buffers lie in device memory on cuda, and in host memory on
  // cpu. The type of the elements gives the Dtype (DtypeOf). stream is a cudaStream_t on cuda,
  // where the call returns when the work is enqueued; on cpu it is nullptr. Each call is collective
  // over this rank's group along dim. When the element type is known only at run time, call the C
  // functions with capi().

  /// Reduces over all ranks of dim; recv has as many elements as send, and may be the same. See
  /// dm_all_reduce.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> all_reduce(const Text &dim, Send &&send, Recv &&recv, Op op = Op::sum, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("all_reduce");
    const S from(send);
    const R to(recv);
    if (to.size() != from.size()) return sizes("all_reduce", "recv", to.size(), from.size());
    return all_reduce(dim, from.data(), to.data(), from.size(), op, stream);
  }
  /// All-reduces buffer in place.
  template <class Buffer, class R = detail::Received<Buffer>>
  Returns<void> all_reduce(const Text &dim, Buffer &&buffer, Op op = Op::sum, void *stream = nullptr) const
  {
    detail::check_received<Buffer>();
    return all_reduce(dim, buffer, buffer, op, stream);
  }
  /// All-reduces count elements at send into recv.
  template <class T>
  Returns<void> all_reduce(const Text &dim, const T *send, detail::Same<T> *recv, std::size_t count, Op op = Op::sum,
                           void *stream = nullptr) const
  {
    return operate(dim, {"all_reduce", send, recv, bytes<T>(count), bytes<T>(count), 0, nullptr, 0, static_cast<dm_op>(op), stream},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_all_reduce(mesh, name, send, recv, count, detail::dtype<T>(), static_cast<dm_op>(op), stream);
                   });
  }

  /// Reduces over all ranks of dim to its rank root; recv is looked at there only, and has as many
  /// elements as send. See dm_reduce.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> reduce(const Text &dim, Send &&send, Recv &&recv, Int32 root, Op op = Op::sum, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("reduce");
    const S from(send);
    const R to(recv);
    std::int32_t rank = 0;
    if (const dm_status status = dm_get_local_rank(capi(), dim.c_str(), &rank); status != DM_STATUS_OK) return refused(Error::last(status));
    if (rank == root.value() && to.size() != from.size()) return sizes("reduce", "recv", to.size(), from.size());
    return reduce(dim, from.data(), to.data(), from.size(), root, op, stream);
  }
  /// Reduces count elements at send into the root's recv, which may be nullptr on the other ranks.
  template <class T>
  Returns<void> reduce(const Text &dim, const T *send, detail::Same<T> *recv, std::size_t count, Int32 root, Op op = Op::sum,
                       void *stream = nullptr) const
  {
    if (!root.fits()) return refused(root.problem("reduce", "root"));
    const std::int32_t member = root.value();
    const bool is_root = place(dim).rank == static_cast<std::size_t>(member);
    const std::size_t received = is_root ? bytes<T>(count) : 0;
    return operate(dim, {"reduce", send, recv, bytes<T>(count), received, 0, "root", member, static_cast<dm_op>(op), stream},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_reduce(mesh, name, send, recv, count, detail::dtype<T>(), static_cast<dm_op>(op), member, stream);
                   });
  }

  /// Copies buffer from the rank root of dim to all its ranks, in place. See dm_broadcast.
  template <class Buffer, class R = detail::Received<Buffer>>
  Returns<void> broadcast(const Text &dim, Buffer &&buffer, Int32 root, void *stream = nullptr) const
  {
    detail::check_received<Buffer>();
    return broadcast(dim, buffer, buffer, root, stream);
  }
  /// Broadcasts the root's send to every rank's recv. send is used on the root only, where both
  /// have one size.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> broadcast(const Text &dim, Send &&send, Recv &&recv, Int32 root, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("broadcast");
    const S from(send);
    const R to(recv);
    std::int32_t rank = 0;
    if (const dm_status status = dm_get_local_rank(capi(), dim.c_str(), &rank); status != DM_STATUS_OK) return refused(Error::last(status));
    if (rank == root.value() && to.size() != from.size()) return sizes("broadcast", "recv", to.size(), from.size());
    return broadcast(dim, from.data(), to.data(), to.size(), root, stream);
  }
  /// Broadcasts count elements at the root's send.
  template <class T, class Rank, detail::IfInt32<Rank> = 0>
  Returns<void> broadcast(const Text &dim, T *send, T *recv, std::size_t count, const Rank &root, void *stream = nullptr) const
  {
    return broadcast(dim, static_cast<const T *>(send), recv, count, root, stream);
  }
  /// Broadcasts count elements at the root's send, which may be nullptr on the other ranks.
  template <class T, class Rank, detail::IfInt32<Rank> = 0>
  Returns<void> broadcast(const Text &dim, const detail::Same<T> *send, T *recv, std::size_t count, const Rank &root,
                          void *stream = nullptr) const
  {
    const Int32 number = root;
    if (!number.fits()) return refused(number.problem("broadcast", "root"));
    const std::int32_t member = number.value();
    const bool is_root = place(dim).rank == static_cast<std::size_t>(member);
    return operate(dim, {"broadcast", send, recv, is_root ? bytes<T>(count) : 0, bytes<T>(count), 0, "root", member, DM_SUM, stream},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_broadcast(mesh, name, send, recv, count, detail::dtype<T>(), member, stream);
                   });
  }

  /// Gathers send of every rank of dim, in rank order, on every rank; recv has send.size() times
  /// size(dim) elements. See dm_all_gather.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> all_gather(const Text &dim, Send &&send, Recv &&recv, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("all_gather");
    const S from(send);
    const R to(recv);
    std::size_t ranks = 0;
    if (const dm_status status = group_size(dim, &ranks); status != DM_STATUS_OK) return refused(Error::last(status));
    if (to.size() % ranks != 0 || to.size() / ranks != from.size())
      return sizes("all_gather", "recv", to.size(), from.size(), "send", ranks);
    return all_gather(dim, from.data(), to.data(), from.size(), stream);
  }
  /// Gathers send_count elements of every rank.
  template <class T>
  Returns<void> all_gather(const Text &dim, const T *send, detail::Same<T> *recv, std::size_t send_count, void *stream = nullptr) const
  {
    const Place here = place(dim);
    return operate(dim, {"all_gather", send, recv, bytes<T>(send_count), bytes<T>(send_count, here.ranks),
                    -static_cast<std::ptrdiff_t>(bytes<T>(send_count, here.rank)), nullptr, 0, DM_SUM, stream},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_all_gather(mesh, name, send, recv, send_count, detail::dtype<T>(), stream);
                   });
  }

  /// Reduces over all ranks of dim and leaves block i on rank i; send has recv.size() times
  /// size(dim) elements. See dm_reduce_scatter.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> reduce_scatter(const Text &dim, Send &&send, Recv &&recv, Op op = Op::sum, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("reduce_scatter");
    const S from(send);
    const R to(recv);
    std::size_t ranks = 0;
    if (const dm_status status = group_size(dim, &ranks); status != DM_STATUS_OK) return refused(Error::last(status));
    if (from.size() % ranks != 0 || from.size() / ranks != to.size())
      return sizes("reduce_scatter", "send", from.size(), to.size(), "recv", ranks);
    return reduce_scatter(dim, from.data(), to.data(), to.size(), op, stream);
  }
  /// Reduces and scatters blocks of recv_count elements.
  template <class T>
  Returns<void> reduce_scatter(const Text &dim, const T *send, detail::Same<T> *recv, std::size_t recv_count, Op op = Op::sum,
                               void *stream = nullptr) const
  {
    const Place here = place(dim);
    return operate(dim, {"reduce_scatter", send, recv, bytes<T>(recv_count, here.ranks), bytes<T>(recv_count),
                    static_cast<std::ptrdiff_t>(bytes<T>(recv_count, here.rank)), nullptr, 0, static_cast<dm_op>(op), stream},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_reduce_scatter(mesh, name, send, recv, recv_count, detail::dtype<T>(), static_cast<dm_op>(op), stream);
                   });
  }

  /// Sends block i of send to rank i of dim and receives block i of recv from it; both have as
  /// many elements, a multiple of size(dim). See dm_all_to_all.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> all_to_all(const Text &dim, Send &&send, Recv &&recv, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("all_to_all");
    const S from(send);
    const R to(recv);
    std::size_t ranks = 0;
    if (const dm_status status = group_size(dim, &ranks); status != DM_STATUS_OK) return refused(Error::last(status));
    if (to.size() != from.size()) return sizes("all_to_all", "recv", to.size(), from.size());
    if (from.size() % ranks != 0)
      return refused("all_to_all: send has " + std::to_string(from.size()) + " elements, which " + std::to_string(ranks) +
                     " ranks do not divide");
    return all_to_all(dim, from.data(), to.data(), from.size() / ranks, stream);
  }
  /// Exchanges blocks of count_per_peer elements.
  template <class T>
  Returns<void> all_to_all(const Text &dim, const T *send, detail::Same<T> *recv, std::size_t count_per_peer, void *stream = nullptr) const
  {
    const Place here = place(dim);
    return operate(dim, {"all_to_all", send, recv, bytes<T>(count_per_peer, here.ranks), bytes<T>(count_per_peer, here.ranks),
                    0, nullptr, 0, DM_SUM, stream, true},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_all_to_all(mesh, name, send, recv, count_per_peer, detail::dtype<T>(), stream);
                   });
  }

  /// Sends the next send_counts[i] elements of send to each rank i of dim, and receives the next
  /// recv_counts[i] elements of recv from it. The counts have a number for each rank, and add up to
  /// the elements of their buffer. See dm_all_to_allv.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> all_to_allv(const Text &dim, Send &&send, Span<const std::size_t> send_counts, Recv &&recv,
                            Span<const std::size_t> recv_counts, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("all_to_allv");
    const S from(send);
    const R to(recv);
    using T = detail::ElementOf<Recv>;
    if (const std::optional<Error> problem = counted("all_to_allv", dim, "send", from.size(), send_counts)) return refused(*problem);
    if (const std::optional<Error> problem = counted("all_to_allv", dim, "recv", to.size(), recv_counts)) return refused(*problem);
    // Only a rank that is alone works in place.
    const std::ptrdiff_t in_place = place(dim).ranks == 1 ? 0 : PTRDIFF_MIN;
    return operate(dim,
                   {"all_to_allv", from.data(), to.data(), bytes<T>(from.size()), bytes<T>(to.size()), in_place, nullptr, 0,
                    DM_SUM, stream},
                   [from, to, out = list(send_counts), into = list(recv_counts), stream](const dm_mesh *mesh, const char *name) {
                     return dm_all_to_allv(mesh, name, from.data(), out.data(), nullptr, to.data(), into.data(), nullptr,
                                           detail::dtype<T>(), stream);
                   });
  }

  /// Gathers send of every rank of dim, in rank order, on every rank. recv_counts is the same on
  /// all ranks: the elements of each rank's send, which add up to those of recv. See
  /// dm_all_gatherv.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> all_gatherv(const Text &dim, Send &&send, Recv &&recv, Span<const std::size_t> recv_counts, void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("all_gatherv");
    const S from(send);
    const R to(recv);
    using T = detail::ElementOf<Recv>;
    if (const std::optional<Error> problem = counted("all_gatherv", dim, "recv", to.size(), recv_counts, "send", from.size()))
      return refused(*problem);
    return operate(dim,
                   {"all_gatherv", from.data(), to.data(), bytes<T>(from.size()), bytes<T>(to.size()),
                    -own_place<T>(dim, recv_counts), nullptr, 0, DM_SUM, stream},
                   [from, to, counts = list(recv_counts), stream](const dm_mesh *mesh, const char *name) {
                     return dm_all_gatherv(mesh, name, from.data(), to.data(), counts.data(), nullptr, detail::dtype<T>(), stream);
                   });
  }

  /// Reduces send over all ranks of dim and leaves the next send_counts[i] elements of the result
  /// on each rank i. send_counts is the same on all ranks: the elements of each rank's recv, which
  /// add up to those of send. See dm_reduce_scatterv.
  template <class Send, class Recv, class S = detail::Sent<Send>, class R = detail::Received<Recv>>
  Returns<void> reduce_scatterv(const Text &dim, Send &&send, Span<const std::size_t> send_counts, Recv &&recv, Op op = Op::sum,
                                void *stream = nullptr) const
  {
    detail::check_types<Send, Recv>();
    if (gone<Send>()) return temporary("reduce_scatterv");
    const S from(send);
    const R to(recv);
    using T = detail::ElementOf<Recv>;
    if (const std::optional<Error> problem = counted("reduce_scatterv", dim, "send", from.size(), send_counts, "recv", to.size()))
      return refused(*problem);
    return operate(dim,
                   {"reduce_scatterv", from.data(), to.data(), bytes<T>(from.size()), bytes<T>(to.size()),
                    own_place<T>(dim, send_counts), nullptr, 0, static_cast<dm_op>(op), stream},
                   [from, to, counts = list(send_counts), op, stream](const dm_mesh *mesh, const char *name) {
                     return dm_reduce_scatterv(mesh, name, from.data(), counts.data(), nullptr, to.data(), detail::dtype<T>(),
                                               static_cast<dm_op>(op), stream);
                   });
  }

  /// Sends a buffer to the rank peer of dim, which receives it with recv(). See dm_send.
  template <class Buffer, class S = detail::Sent<Buffer>>
  Returns<void> send(const Text &dim, Buffer &&buffer, Int32 peer, void *stream = nullptr) const
  {
    static_assert(!std::is_void_v<detail::ElementOf<Buffer>>,
                  "std::vector<bool> holds bits, not elements in memory: use std::vector<std::uint8_t>");
    if (gone<Buffer>()) return temporary("send");
    const S from(buffer);
    return send(dim, from.data(), from.size(), peer, stream);
  }
  /// Sends count elements, which may be const.
  template <class T, class Rank, detail::IfInt32<Rank> = 0>
  Returns<void> send(const Text &dim, T *buffer, std::size_t count, const Rank &peer, void *stream = nullptr) const
  {
    const Int32 number = peer;
    if (!number.fits()) return refused(number.problem("send", "peer"));
    const std::int32_t member = number.value();
    return operate(dim, {"send", buffer, nullptr, bytes<T>(count), 0, 0, "peer", member, DM_SUM, stream},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_send(mesh, name, buffer, count, detail::dtype<std::remove_const_t<T>>(), member, stream);
                   });
  }

  /// Receives a buffer from the rank peer of dim, which sends as many elements with send(). See
  /// dm_recv.
  template <class Buffer, class R = detail::Received<Buffer>>
  Returns<void> recv(const Text &dim, Buffer &&buffer, Int32 peer, void *stream = nullptr) const
  {
    detail::check_received<Buffer>();
    const R to(buffer);
    return recv(dim, to.data(), to.size(), peer, stream);
  }
  /// Receives count elements.
  template <class T, class Rank, detail::IfInt32<Rank> = 0>
  Returns<void> recv(const Text &dim, T *buffer, std::size_t count, const Rank &peer, void *stream = nullptr) const
  {
    const Int32 number = peer;
    if (!number.fits()) return refused(number.problem("recv", "peer"));
    const std::int32_t member = number.value();
    return operate(dim, {"recv", nullptr, buffer, 0, bytes<T>(count), 0, "peer", member, DM_SUM, stream},
                   [=](const dm_mesh *mesh, const char *name) {
                     return dm_recv(mesh, name, buffer, count, detail::dtype<T>(), member, stream);
                   });
  }

  /// Begins a group: this thread's operations up to group_end() run together, so their buffers must
  /// live until then. Local. End the group by group_end() and not by dm_group_end. See
  /// dm_group_start; group() is safer, as it ends by itself and runs whole or not at all.
  Returns<void> group_start() const
  {
    const dm_status status = dm_group_start(capi());
    if (status == DM_STATUS_OK) {
      if (detail::Collected *const group = detail::Collected::innermost(); group != nullptr) group->started();
      else ++detail::raw_groups();
    }
    return Calls::done(status);
  }

  /// Ends the group and runs its operations. See dm_group_end.
  Returns<void> group_end() const
  {
    detail::Collected *const group = detail::Collected::innermost();
    if (group != nullptr && !group->ended())
      return refused(Error(Status::invalid_state, "group_end: this ends the group of group(), which ends by itself"));
    const dm_status status = dm_group_end(capi());
    // A C function can have ended the groups of this thread. The library then says that none was
    // begun.
    std::size_t &raw = detail::raw_groups();
    if (group == nullptr && raw > 0) raw = status == DM_STATUS_INVALID_STATE ? 0 : raw - 1;
    return Calls::done(status);
  }

  /// Calls operations(), which gives nothing or a Result<void>, and runs the operations that it
  /// called together: mesh.group([&] { mesh.send(...); mesh.recv(...); }).
  ///
  /// The arguments of each are checked and kept when it is called; all are issued when operations()
  /// has returned, so that their buffers must live until group() has returned. When operations()
  /// throws or gives an error, or when one operation was refused, none of them runs and that error
  /// comes out. An operation that a group within a group refuses fails the outer group, too. Calls
  /// through raw communicators are not collected: they join the library's group at once. A call that
  /// would wait or end without the collected operations (barrier(), stream_wait(), finalize() ...) is
  /// refused with invalid_state. An abort or a recovery in operations() ends the group: none of its
  /// operations run, and the error is aborted. On cuda, where the library refuses an operation at the
  /// end of the group, the meshes of all of its operations end, because NCCL cannot drop the others.
  template <class Operations> Returns<void> group(Operations &&operations) const
  {
    detail::Collected collected;
    if (const dm_status status = collected.begin(capi()); status != DM_STATUS_OK) return refused(Error::last(status));
    if constexpr (std::is_void_v<std::invoke_result_t<Operations>>) {
      std::forward<Operations>(operations)();
    } else {
      const Result<void> result = std::forward<Operations>(operations)();
      if (!result) return Style::template failure<void>(result.error());
    }
    if (const std::optional<Error> failure = collected.end()) return Style::template failure<void>(*failure);
    return Returns<void>();
  }

private:
  template <class Function> static Function function(void *address)
  {
    static_assert(std::is_pointer_v<Function> && std::is_function_v<std::remove_pointer_t<Function>>,
                  "proc<F>: F is a pointer to a function");
    static_assert(sizeof(Function) == sizeof(void *));
    Function function = nullptr;
    std::memcpy(&function, &address, sizeof function);
    return function;
  }

  struct Free {
    void operator()(dm_mesh *mesh) const noexcept { dm_free(mesh); }
  };

  template <class T> static Returns<T> invalid(const std::string &message)
  {
    return Calls::template fail<T>(Status::invalid_argument, message);
  }

  // ---- the work behind them ----

  // Runs an operation, or keeps it for the end of this thread's group.
  template <class Issue> Returns<void> operate(const Text &dim, const detail::Operands &operands, Issue issue) const
  {
    detail::Collected *const group = detail::Collected::innermost();
    if (group == nullptr) return Calls::done(issue(capi(), dim.c_str()));
    const std::optional<Error> error = group->add(capi(), dim, operands, std::move(issue));
    if (error) return Style::template failure<void>(*error);
    return Returns<void>();
  }

  // An operation that is refused here; the rest of its group does not run either.
  static Returns<void> refused(const Error &error)
  {
    if (detail::Collected *const group = detail::Collected::innermost(); group != nullptr) group->refuse(error);
    return Style::template failure<void>(error);
  }
  static Returns<void> refused(const std::string &message) { return refused(Error(Status::invalid_argument, message)); }

  // A temporary as what is sent: in a group its elements have gone before they are sent.
  template <class Buffer> static constexpr bool gone() noexcept
  {
    if constexpr (detail::is_temporary<Buffer>) return detail::Collected::is_open();
    return false;
  }
  static Returns<void> temporary(const char *call)
  {
    return refused(std::string(call) + ": the buffer is a temporary, which has gone when the group runs: give it a name");
  }

  // The bytes of count elements for each of `ranks` ranks. SIZE_MAX where that number would
  // overflow.
  template <class T> static constexpr std::size_t bytes(std::size_t count, std::size_t ranks = 1) noexcept
  {
    return count > PTRDIFF_MAX / sizeof(T) / (ranks > 0 ? ranks : 1) ? SIZE_MAX : count * sizeof(T) * ranks;
  }

  // This rank's place along dim and the ranks there, for what a group checks. For a dimension that
  // does not exist the defaults stay, because dm_get_comm in Collected::add gives the error.
  struct Place {
    std::size_t rank = 0;  ///< this rank along the dimension
    std::size_t ranks = 1; ///< the size of the dimension
  };
  Place place(const Text &dim) const noexcept
  {
    Place here;
    std::int32_t rank = 0;
    if (detail::Collected::innermost() == nullptr || dm_get_local_rank(capi(), dim.c_str(), &rank) != DM_STATUS_OK) return here;
    here.rank = static_cast<std::size_t>(rank);
    if (group_size(dim, &here.ranks) != DM_STATUS_OK) here.ranks = 1;
    return here;
  }

  // Checks the counts of a buffer of that many elements: one for each rank of dim, and together the
  // buffer's size. This rank's count is the size of the other buffer, where that one has a name.
  std::optional<Error> counted(const char *call, const Text &dim, const char *which, std::size_t size, Span<const std::size_t> counts,
                               const char *other_name = nullptr, std::size_t other = 0) const
  {
    std::size_t ranks = 0, left = size;
    std::int32_t rank = 0;
    if (const dm_status status = group_size(dim, &ranks); status != DM_STATUS_OK) return Error::last(status);
    if (const dm_status status = dm_get_local_rank(capi(), dim.c_str(), &rank); status != DM_STATUS_OK) return Error::last(status);
    const std::string name = std::string(call) + ": " + which;
    if (counts.size() != ranks)
      return Error(Status::invalid_argument, name + " has " + std::to_string(counts.size()) +
                                                 " counts, but the dimension has " + std::to_string(ranks) + " ranks");
    for (std::size_t i = 0; i < ranks; ++i) {
      if (counts[i] > left) left = 0, ranks = 0;
      else left -= counts[i];
    }
    if (ranks == 0 || left != 0)
      return Error(Status::invalid_argument, name + " has " + std::to_string(size) + " elements, which is not the sum of its counts");
    const std::size_t own = counts[static_cast<std::size_t>(rank)];
    if (other_name != nullptr && own != other)
      return Error(Status::invalid_argument, std::string(call) + ": " + other_name + " has " + std::to_string(other) +
                                                 " elements, but the count of this rank is " + std::to_string(own));
    return std::nullopt;
  }

  // The bytes before this rank's block, for what a group checks.
  template <class T> std::ptrdiff_t own_place(const Text &dim, Span<const std::size_t> counts) const noexcept
  {
    std::size_t before = 0;
    for (std::size_t i = 0; i < place(dim).rank && i < counts.size(); ++i) before += counts[i];
    return static_cast<std::ptrdiff_t>(bytes<T>(before));
  }

  // A copy of the counts, which a group needs when it runs.
  static std::vector<std::size_t> list(Span<const std::size_t> counts)
  {
    return std::vector<std::size_t>(counts.data(), counts.data() + counts.size());
  }

  // A new handle of what a C function makes.
  template <class Make> static Returns<BasicMesh> view(Make make)
  {
    dm_mesh *mesh = nullptr;
    const dm_status status = make(&mesh);
    return Calls::give(status, BasicMesh(mesh));
  }

  // Makes a root mesh: checks dims and options, and calls make() with the options in their C form.
  template <class Make> static Returns<BasicMesh> make(const Dims &dims, const InitOptions &options, Make make)
  {
    if (options.world.gone()) return no_world();
    if (const std::string problem = dims.problem(); !problem.empty()) return invalid<BasicMesh>(problem);
    dm_init_options wishes = options.capi();
    wishes.dim_options = dims.options();
    wishes.num_dim_options = wishes.dim_options != nullptr ? dims.size() : 0;
    return view([&](dm_mesh **mesh) { return make(wishes, mesh); });
  }

  // The default world is no stand-in for a world that was moved elsewhere.
  static Returns<BasicMesh> no_world()
  {
    return Calls::template fail<BasicMesh>(Status::invalid_handle, "options.world is a World that is empty or was moved from");
  }

  // The ranks of this rank's group along dim; an error where a collective over dim would have one.
  dm_status group_size(const Text &dim, std::size_t *size) const noexcept
  {
    std::int32_t rank = 0;
    std::int32_t ranks = 0;
    dm_status status = dm_get_local_rank(capi(), dim.c_str(), &rank);
    if (status == DM_STATUS_OK) status = dm_size(capi(), dim.c_str(), &ranks);
    if (status == DM_STATUS_OK) *size = static_cast<std::size_t>(ranks);
    return status;
  }

  static Returns<void> sizes(const char *call, const char *which, std::size_t size, std::size_t other)
  {
    return refused(std::string(call) + ": " + which + " has " + std::to_string(size) + " elements, send has " + std::to_string(other));
  }

  static Returns<void> sizes(const char *call, const char *which, std::size_t size, std::size_t other, const char *other_name,
                             std::size_t ranks)
  {
    return refused(std::string(call) + ": " + which + " has " + std::to_string(size) + " elements, not " + std::to_string(ranks) +
                   " (the ranks of the dimension) times the " + std::to_string(other) + " of " + other_name);
  }

  std::unique_ptr<dm_mesh, Free> mesh_;
};

namespace detail {

template <class Style>
typename Style::template Returns<Plan> plan_ranks(const Texts &locations, Span<const std::int32_t> shape, Span<const std::uint32_t> traffic)
{
  using Calls = detail::Calls<Style>;
  if (!traffic.empty() && traffic.size() != shape.size())
    return Calls::template fail<Plan>(Status::invalid_argument,
                                      std::to_string(traffic.size()) + " weights of traffic for " + std::to_string(shape.size()) +
                                          " dimensions");
  // A plan has at most as many ranks as there are locations; a larger shape is refused.
  Plan plan{std::vector<std::int32_t>(locations.size() + 1), {}};
  dm_plan_options wishes = DM_PLAN_OPTIONS_INIT;
  wishes.world_size = locations.size() > INT32_MAX ? -1 : static_cast<std::int32_t>(locations.size());
  wishes.locations = locations.data();
  wishes.shape = shape.data();
  wishes.ndim = shape.size();
  wishes.traffic = traffic.empty() ? nullptr : traffic.data();
  const dm_status status = Calls::fill(plan.report, 2048, [&](char *report, std::size_t capacity, std::size_t *length) {
    return dm_plan_ranks(&wishes, plan.ranks.data(), report, capacity, length);
  });
  if (status == DM_STATUS_OK) {
    std::size_t ranks = 1;
    for (const std::int32_t size : shape) ranks *= static_cast<std::size_t>(size);
    plan.ranks.resize(ranks);
    plan.report.pop_back();  // the NUL
  }
  return Calls::give(status, std::move(plan));
}

}  // namespace detail

// ---- events ----

/// The kinds of events: DM_EVENT_NONE and so on. A newer library may give values that are not
/// listed here.
enum class EventKind : dm_event_kind {
  none = DM_EVENT_NONE,
  joined = DM_EVENT_JOINED,
  slow = DM_EVENT_SLOW,
  lost = DM_EVENT_LOST,
  aborted = DM_EVENT_ABORTED,
  recovered = DM_EVENT_RECOVERED,
};

/// One event, with copies of its strings and ranks. See dm_event.
struct Event {
  /// The kind of the event.
  EventKind kind = EventKind::none;
  /// This process's rank in the world. For a slow call that belongs to no world, its rank in the
  /// communicator.
  std::int32_t rank = -1;
  /// The number of ranks of the world, or of that communicator.
  std::int32_t world_size = 0;
  /// The epoch of the world, or of the mesh that the event is about.
  std::int64_t epoch = 0;
  /// When this process noticed what has happened.
  std::chrono::system_clock::time_point time = {};
  /// The world ranks that the event is about: the ranks that have joined, the ranks for which the
  /// call waits, the ranks that are lost, the ranks that have aborted, or the ranks that were lost
  /// or left out in a recovery.
  std::vector<std::int32_t> ranks = {};
  /// The group of a slow call ("mesh/tp"), or the mesh; empty where the event is about the world.
  std::string group = {};
  /// The dimension of a slow call; empty where it has none.
  std::string dim = {};
  /// The work of a slow call: "all-reduce" and the like, or the text of a call like dm_flatten.
  std::string operation = {};
  /// The number of a slow call in its group, from 1; -1 otherwise.
  std::int64_t call = -1;
  /// How long a slow call has waited, in seconds; negative otherwise.
  double waited_seconds = -1.0;
  /// How many events were left out before this one because the queue was full.
  std::uint64_t dropped = 0;
  /// A description of the event in one line.
  std::string message = {};

  /// A copy of an event of C.
  [[nodiscard]] static Event from(const dm_event &event)
  {
    const auto text = [](const char *words) { return words != nullptr ? std::string(words) : std::string(); };
    Event copy;
    copy.kind = static_cast<EventKind>(event.kind);
    copy.rank = event.rank;
    copy.world_size = event.world_size;
    copy.epoch = event.epoch;
    copy.time += std::chrono::duration_cast<std::chrono::system_clock::duration>(std::chrono::nanoseconds(event.time_ns));
    if (event.num_ranks > 0) copy.ranks.assign(event.ranks, event.ranks + event.num_ranks);
    copy.group = text(event.group);
    copy.dim = text(event.dim);
    copy.operation = text(event.operation);
    copy.call = event.call;
    copy.waited_seconds = event.waited_seconds;
    copy.dropped = event.dropped;
    copy.message = text(event.message);
    return copy;
  }
};

/// Options for a handler or a queue of events. See dm_event_options.
struct EventOptions {
  /// The time after which a waiting call is slow. The call gives an event then, and another one
  /// whenever the time that it has waited has doubled. 0: 10 s.
  std::chrono::milliseconds slow{0};

  /// The struct of C.
  [[nodiscard]] dm_event_options capi() const noexcept
  {
    dm_event_options options = DM_EVENT_OPTIONS_INIT;
    options.flags = 0;
    options.slow_ms = slow.count();
    return options;
  }
};

/// A function that gets the events, on the library's thread "dm-events". An exception that leaves
/// it ends the program.
using EventHandler = std::function<void(const Event &event)>;

namespace detail {

/* An EventHandler behind dm_set_event_handler. It stays for the whole program, as a LogBridge
 * does. */
struct EventBridge {
  EventHandler handler;
  EventBridge *earlier;

  static void call(void *user_data, const dm_event *event) noexcept { static_cast<EventBridge *>(user_data)->handler(Event::from(*event)); }

  static EventBridge *make(EventHandler &&handler)
  {
    static std::atomic<EventBridge *> last{nullptr};
    EventBridge *made = new EventBridge{std::move(handler), last.load()};
    while (!last.compare_exchange_weak(made->earlier, made)) {}
    return made;
  }
};

}  // namespace detail

/// A queue of this process's events, for programs with a loop of their own. Its destructor frees
/// the queue. Movable, not copyable.
template <class Style> class BasicEvents {
  using Calls = detail::Calls<Style>;

public:
  /// The return type of a function that can fail: T, or a Result of it.
  template <class T> using Returns = typename Style::template Returns<T>;

  /// An empty queue, without a handle.
  BasicEvents() noexcept = default;
  /// The queue of a C handle, which it owns from now on.
  explicit BasicEvents(dm_events *events) noexcept : events_(events) {}

  /// Opens a queue that keeps the events from now on. Local. See dm_events_open.
  [[nodiscard]] static Returns<BasicEvents> open(const EventOptions &options = {})
  {
    const dm_event_options wishes = options.capi();
    dm_events *events = nullptr;
    const dm_status status = dm_events_open(&wishes, &events);
    return Calls::give(status, BasicEvents(events));
  }

  /// Sets the handler of this process, in place of an earlier one. An empty function removes the
  /// handler. Local. Each handler stays in memory until the program ends. See
  /// dm_set_event_handler.
  static Returns<void> set_handler(EventHandler handler, const EventOptions &options = {})
  {
    const dm_event_options wishes = options.capi();
    if (!handler) return Calls::done(dm_set_event_handler(nullptr, nullptr, &wishes));
    return Calls::done(dm_set_event_handler(&detail::EventBridge::call, detail::EventBridge::make(std::move(handler)), &wishes));
  }

  /// The descriptor that is readable while there are events, for poll and epoll. Read nothing from
  /// it. Local. See dm_events_fd.
  [[nodiscard]] Returns<int> fd() const
  {
    std::int32_t fd = -1;
    const dm_status status = dm_events_fd(capi(), &fd);
    return Calls::give(status, static_cast<int>(fd));
  }

  /// Returns the next event, or an empty optional where no event comes within the timeout. Local.
  /// See dm_events_next.
  [[nodiscard]] Returns<std::optional<Event>> next(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) const
  {
    dm_event event = DM_EVENT_INIT;
    const dm_status status = dm_events_next(capi(), timeout.count(), &event);
    std::optional<Event> copy;
    if (status == DM_STATUS_OK && event.kind != DM_EVENT_NONE) copy = Event::from(event);
    return Calls::give(status, std::move(copy));
  }

  /// The C handle, borrowed. An empty queue has none, which is NULL.
  [[nodiscard]] dm_events *capi() const noexcept { return events_.get(); }
  /// Gives the C handle away, to be freed with dm_events_free.
  [[nodiscard]] dm_events *release() noexcept { return events_.release(); }

private:
  struct Free {
    /// Frees the handle.
    void operator()(dm_events *events) const noexcept { dm_events_free(events); }
  };
  std::unique_ptr<dm_events, Free> events_;
};

// ---- the two styles ----

#ifndef DM_NO_EXCEPTIONS
/// A world whose functions throw.
using World = BasicWorld<detail::Throws>;
/// A mesh whose functions throw.
using Mesh = BasicMesh<detail::Throws>;
/// A queue of events whose functions throw.
using Events = BasicEvents<detail::Throws>;

/// Makes a mesh, dm::init("cuda", {{"replicate", 2}, {"shard", 4}}). Collective over the world.
/// See Mesh::init and dm_init.
[[nodiscard]] inline Mesh init(const Text &device_type, const Dims &dims, const InitOptions &options = {})
{
  return Mesh::init(device_type, dims, options);
}
/// Makes a mesh of the device type of options.world. Without a world the device type is cuda where
/// this machine has a GPU, else cpu.
[[nodiscard]] inline Mesh init(const Dims &dims, const InitOptions &options = {}) { return Mesh::init({}, dims, options); }

/// Ranks for InitOptions::ranks that keep the dimensions that talk most inside the closest domains
/// of the machine. locations has a path of each world rank, "rack1/host3/nvl0"; traffic a weight of
/// each dimension, or nothing. Local. See dm_plan_ranks.
[[nodiscard]] inline Plan plan_ranks(const Texts &locations, Span<const std::int32_t> shape, Span<const std::uint32_t> traffic = {})
{
  return detail::plan_ranks<detail::Throws>(locations, shape, traffic);
}

/// See Mesh::equals.
[[nodiscard]] inline bool operator==(const Mesh &a, const Mesh &b) { return a.equals(b); }
/// See Mesh::equals.
[[nodiscard]] inline bool operator!=(const Mesh &a, const Mesh &b) { return !a.equals(b); }
#endif

namespace nothrow {

/// A world whose functions give a Result.
using World = BasicWorld<detail::Gives>;
/// A mesh whose functions give a Result.
using Mesh = BasicMesh<detail::Gives>;
/// A queue of events whose functions give a Result.
using Events = BasicEvents<detail::Gives>;

/// dm::init, with a Result in place of an exception.
[[nodiscard]] inline Result<Mesh> init(const Text &device_type, const Dims &dims, const InitOptions &options = {})
{
  return Mesh::init(device_type, dims, options);
}
/// dm::init, with a Result in place of an exception.
[[nodiscard]] inline Result<Mesh> init(const Dims &dims, const InitOptions &options = {}) { return Mesh::init({}, dims, options); }

/// dm::plan_ranks, with a Result in place of an exception.
[[nodiscard]] inline Result<Plan> plan_ranks(const Texts &locations, Span<const std::int32_t> shape, Span<const std::uint32_t> traffic = {})
{
  return detail::plan_ranks<detail::Gives>(locations, shape, traffic);
}

}  // namespace nothrow

#ifdef DM_NO_EXCEPTIONS
}  // inline namespace no_exceptions
#endif

}  // namespace dm

#ifndef DM_NO_EXCEPTIONS
/// Meshes as keys of unordered containers; throws as Mesh::hash.
template <> struct std::hash<dm::Mesh> {
  std::size_t operator()(const dm::Mesh &mesh) const { return mesh.hash(); }
};
#endif

#endif /* DEVICEMESH_HPP */
