/* ranks: 1 4 */
// mesh.group() runs all of its operations or none. After an exception, a refused operation or an
// ignored error no rank has made half of an exchange.
#include "check.hpp"

#include <cstdlib>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

// The number of times that this thread still gets memory. Negative: always.
static thread_local long allowed = -1;

// Where gcc puts only one of these functions into a caller, it warns that the other does not match.
[[gnu::noinline]] void *operator new(std::size_t size)
{
  if (allowed > 0) --allowed;
  else if (allowed == 0) throw std::bad_alloc();
  void *const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void *memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }

// An inner group tells the outer one of a refusal also while an exception leaves it.
static_assert(std::is_nothrow_copy_constructible_v<dm::Error> && std::is_nothrow_copy_assignable_v<dm::Error>);

struct Ring {
  const dm::Mesh &mesh;
  std::int32_t me, ranks, next, before;

  // Shows that nothing of an earlier group is still under way: its values would arrive in the
  // place of these.
  void turn(std::int32_t value) const
  {
    std::vector<std::int32_t> mine(5, value + me), got(5, -1), one(1, 1);
    mesh.group([&] {
      mesh.send("x", mine, next);
      mesh.recv("x", got, before);
    });
    CHECK(got == std::vector<std::int32_t>(5, value + before));
    mesh.all_reduce("x", one);
    CHECK(one[0] == ranks);
  }
};

static void exceptions(const Ring &ring)
{
  const dm::Mesh &mesh = ring.mesh;
  std::vector<float> mine(1000, 1.0f + static_cast<float>(ring.me)), theirs(1000);
  try {
    mesh.group([&] {
      mesh.send("x", mine, ring.next);
      throw std::runtime_error("after the first of two");
    });
    CHECK(false);
  } catch (const std::runtime_error &error) {
    CHECK(error.what() == std::string("after the first of two"));
  }
  ring.turn(10);
  try {
    mesh.group([&] {
      mesh.all_reduce("x", mine);
      mesh.group([&] { mesh.recv("x", theirs, ring.before); });
      throw 5;
    });
    CHECK(false);
  } catch (int thrown) {
    CHECK(thrown == 5 && mine[0] == 1.0f + static_cast<float>(ring.me) && theirs[0] == 0);
  }
  ring.turn(20);

  // An exception that leaves an inner group does not end the outer group.
  mesh.group([&] {
    mesh.send("x", mine, ring.next);
    try {
      mesh.group([&] {
        mesh.all_reduce("x", mine);
        throw 5;
      });
    } catch (int) {
    }
    mesh.group([&] { mesh.recv("x", theirs, ring.before); });
    CHECK(theirs[0] == 0);
  });
  CHECK(theirs[0] == 1.0f + static_cast<float>(ring.before) && mine[0] == 1.0f + static_cast<float>(ring.me));
}

static void refusals(const Ring &ring)
{
  const dm::Mesh &mesh = ring.mesh;
  const std::size_t n = static_cast<std::size_t>(ring.ranks);
  std::vector<float> mine(4 * n + 4, 1), theirs(4 * n + 4);
  const auto fails = [&](dm::Status status, const char *text, auto operation) {
    THROWS(status, text, (mesh.group([&] {
      mesh.send("x", mine, ring.next);
      operation();
    }), 0));
    ring.turn(30);
    // An error that the callback catches or ignores fails the group as well.
    const dm::nothrow::Mesh quiet(mesh.clone().release());
    REFUSED(status, text, quiet.group([&] {
      static_cast<void>(quiet.send("x", mine, ring.next));
      try {
        operation();
      } catch (const dm::Error &) {
      }
    }));
    ring.turn(40);
  };
  using Status = dm::Status;
  fails(Status::invalid_argument, "recv: peer is 99, but dimension x has ranks 0 to", [&] { mesh.recv("x", theirs, 99); });
  fails(Status::invalid_argument, "peer is -1", [&] { mesh.send("x", mine, -1); });
  fails(Status::invalid_argument, "root is 99", [&] { mesh.reduce("x", mine.data(), theirs.data(), 1, 99); });
  fails(Status::not_found, "y", [&] { mesh.recv("y", theirs, ring.before); });
  fails(Status::invalid_argument, "recv is NULL", [&] { mesh.recv("x", static_cast<float *>(nullptr), 4, ring.before); });
  fails(Status::invalid_argument, "larger than memory", [&] { mesh.recv("x", theirs.data(), SIZE_MAX / 2, ring.before); });
  fails(Status::invalid_argument, "op is 77", [&] { mesh.all_reduce("x", mine, static_cast<dm::Op>(77)); });
  fails(Status::invalid_argument, "all_gather: recv has", [&] { mesh.all_gather("x", mine, dm::Span<float>(theirs.data(), 3)); });
  fails(Status::invalid_argument, "all_reduce: send and recv overlap", [&] { mesh.all_reduce("x", theirs.data(), theirs.data() + 1, 2); });
  fails(Status::invalid_argument, "all_to_all: send and recv overlap", [&] { mesh.all_to_all("x", theirs.data(), theirs.data() + 1, 2); });
  fails(Status::invalid_argument, "cpu has no streams", [&] { mesh.send("x", mine, ring.next, &theirs); });
  fails(Status::invalid_argument, "send: the buffer is a temporary", [&] { mesh.send("x", std::vector<float>(4), ring.next); });
  fails(Status::invalid_argument, "all_reduce: the buffer is a temporary", [&] { mesh.all_reduce("x", std::vector<float>(mine), mine); });
  const auto constant = [&]() -> const std::vector<float> { return mine; };
  fails(Status::invalid_argument, "send: the buffer is a temporary", [&] { mesh.send("x", constant(), ring.next); });
  fails(Status::invalid_argument, "send: the buffer is a temporary", [&] { mesh.send("x", std::initializer_list<float>{1, 2}, ring.next); });

  dm::Mesh mine_too = mesh.clone();
  fails(Status::invalid_handle, "", [&] {
    mesh.recv("x", theirs, ring.before);
    if (mine_too.capi() == nullptr) mine_too = mesh.clone();
    mine_too.all_reduce("x", theirs);
    mine_too = dm::Mesh();
  });
  // An operation that an inner group refuses is missing in the outer group. This is so also where
  // nobody reads the result of the inner group.
  fails(Status::invalid_argument, "recv: peer is 99", [&] {
    const dm::nothrow::Mesh quiet(mesh.clone().release());
    static_cast<void>(quiet.group([&] { static_cast<void>(quiet.recv("x", theirs, 99)); }));
  });
  fails(Status::invalid_argument, "recv: peer is 99", [&] {
    try {
      mesh.group([&] { mesh.recv("x", theirs, 99); });
    } catch (const dm::Error &) {
    }
  });
  fails(Status::invalid_handle, "not a live dm_mesh", [&] {
    static_cast<void>(dm::nothrow::Mesh().group([&] { mesh.recv("x", theirs, ring.before); }));
  });
  // Inside the callback a pair of dm_group_start and dm_group_end is allowed. One of them alone is
  // refused.
  fails(Status::invalid_state, "group_end: this ends the group of group()", [&] { mesh.group_end(); });
  fails(Status::invalid_state, "group_start() without group_end()", [&] { mesh.group_start(); });
  mesh.group([&] {
    mesh.group_start();
    mesh.send("x", mine, ring.next);
    mesh.group_end();
    mesh.recv("x", theirs, ring.before);
  });
  CHECK(theirs[0] == 1);

  // The callback may also free the group's own mesh.
  dm::Mesh own = mesh.clone();
  own.group([&] {
    mesh.send("x", mine, ring.next);
    mesh.recv("x", theirs, ring.before);
    own = dm::Mesh();
  });
  CHECK(theirs[0] == 1);
  THROWS(Status::invalid_state, "begun no group", mesh.group_end());
}

// Between group_start() and group_end() the operations wait as well.
static void raw(const Ring &ring)
{
  const dm::Mesh &mesh = ring.mesh;
  const std::vector<float> mine(4, static_cast<float>(ring.me));
  std::vector<float> theirs(4);
  const auto is_refused = [&] {
    THROWS(dm::Status::invalid_argument, "send: the buffer is a temporary", mesh.send("x", std::vector<float>(4), ring.next));
    THROWS(dm::Status::invalid_argument, "all_reduce: the buffer is a temporary", mesh.all_reduce("x", std::vector<float>(mine), theirs));
  };
  mesh.group_start();
  is_refused();
  mesh.group_start();
  mesh.send("x", mine, ring.next);
  mesh.recv("x", theirs, ring.before);
  mesh.group_end();
  is_refused();
  mesh.group_end();
  mesh.all_reduce("x", std::vector<float>(mine), theirs);
  // A group also ends when group_end() throws.
  mesh.group_start();
  try {
    mesh.recv("x", theirs.data(), 4, 99);
  } catch (const dm::Error &) {
  }
  THROWS(dm::Status::invalid_argument, "peer is 99", mesh.group_end());
  mesh.all_reduce("x", std::vector<float>(mine), theirs);
  THROWS(dm::Status::invalid_state, "begun no group", mesh.group_end());
  mesh.all_reduce("x", std::vector<float>(mine), theirs);
  // An abort by this thread ends its group.
  dm::DimOptions apart;
  apart.own_comm = true;
  const dm::Mesh other = dm::init("cpu", {{"x", mesh.size(), apart}});
  mesh.group_start();
  other.abort();
  mesh.all_reduce("x", std::vector<float>(mine), theirs);
}

// A call that would wait, or end, without the collected operations is refused.
static void waits(const Ring &ring)
{
  const dm::Mesh &mesh = ring.mesh;
  const dm::nothrow::Mesh quiet(mesh.clone().release());
  const dm::World world = mesh.world();
  const auto inside = [&](const char *text, bool tells) {
    using Status = dm::Status;
    THROWS(Status::invalid_state, std::string("stream_wait: ") + text, mesh.stream_wait("x", nullptr));
    REFUSED(Status::invalid_state, std::string("stream_wait: ") + text, quiet.stream_wait("x", nullptr));
    if (!tells) return;
    THROWS(Status::invalid_state, std::string("barrier: ") + text, mesh.barrier("x"));
    THROWS(Status::invalid_state, std::string("finalize: ") + text, mesh.finalize());
    THROWS(Status::invalid_state, std::string("all_gather_bytes: ") + text, mesh.all_gather_bytes("x", "mine"));
    REFUSED(Status::invalid_state, std::string("broadcast_bytes: ") + text, quiet.broadcast_bytes("x", "mine", 0));
    THROWS(Status::invalid_state, std::string("barrier: ") + text, world.barrier());
    THROWS(Status::invalid_state, std::string("all_gather_bytes: ") + text, world.all_gather_bytes("mine"));
    THROWS(Status::invalid_state, std::string("broadcast_bytes: ") + text, world.broadcast_bytes("mine", 0));
    THROWS(Status::invalid_state, std::string("locations: ") + text, world.locations());
    THROWS(Status::invalid_state, std::string("finalize: ") + text, world.finalize());
    THROWS(Status::invalid_state, std::string("finalize_default: ") + text, dm::World::finalize_default());
  };
  std::vector<std::int32_t> sum(3, 1);
  mesh.group([&] {
    mesh.barrier("x");  // nothing is collected yet
    mesh.all_reduce("x", sum);
    inside("this thread has not left group(); 1 operation is queued", ring.ranks == 1);
    mesh.group([&] {
      mesh.all_reduce("x", sum);
      inside("this thread has not left group(); 2 operations are queued", false);
    });
  });
  CHECK(sum == std::vector<std::int32_t>(3, ring.ranks * ring.ranks));
  mesh.stream_wait("x", nullptr);
  mesh.barrier("x");
  if (ring.ranks == 1) return;
  // The other ranks need not wait for a rank that is refused.
  if (ring.me == 0) {
    mesh.group([&] {
      mesh.all_reduce("x", sum);
      THROWS(dm::Status::invalid_state, "barrier: ", mesh.barrier("x"));
    });
  } else {
    THROWS(dm::Status::invalid_argument, "rank 0", mesh.barrier("x"));
    mesh.all_reduce("x", sum);
  }
  mesh.barrier("x");
}

// An abort in the callback ends the library's group. So the operations that were collected before
// and after it are not made one by one.
static void aborts(const Ring &ring)
{
  const dm::Mesh &mesh = ring.mesh;
  const std::vector<float> mine(4, 1);
  std::vector<float> theirs(4);
  const char *const text = "group: an abort or a recovery in its callback has ended it";
  for (const bool is_inner : {false, true}) {
    dm::DimOptions apart;
    apart.own_comm = true;
    const dm::Mesh other = dm::init("cpu", {{"x", ring.ranks, apart}});
    const auto body = [&] {
      mesh.send("x", mine, ring.next);
      other.abort();
      mesh.recv("x", theirs, ring.before);
    };
    THROWS(dm::Status::aborted, text, (mesh.group([&] {
      // The error of the inner group fails the outer one also where it is caught.
      if (is_inner) THROWS(dm::Status::aborted, text, (mesh.group(body), 0));
      else body();
    }), 0));
    CHECK(theirs[0] == 0);
    ring.turn(60);
  }
}

static void kept(const Ring &ring)
{
  const dm::Mesh &mesh = ring.mesh;
  const std::size_t n = static_cast<std::size_t>(ring.ranks), me = static_cast<std::size_t>(ring.me);
  std::vector<double> whole(2 * n), blocks(2 * n, 1), mine(3, ring.me + 1.0), rooted(3);
  std::iota(whole.begin() + static_cast<std::ptrdiff_t>(2 * me), whole.begin() + static_cast<std::ptrdiff_t>(2 * me) + 2, 2.0 * ring.me);
  // An operation keeps the name and counts of its call, and in-place calls stay in place.
  mesh.group([&] {
    std::string name = "x";
    std::size_t count = 2;
    mesh.all_gather(name, whole.data() + count * me, whole.data(), count);
    mesh.reduce_scatter(name, blocks.data(), blocks.data() + count * me, count);
    mesh.reduce(name, mine, rooted, 0);
    mesh.broadcast(name, mine, 0);
    name = "no such dimension";
    count = 99;
  });
  for (std::size_t at = 0; at < 2 * n; ++at) CHECK(whole[at] == static_cast<double>(at));
  CHECK(blocks[2 * me] == static_cast<double>(n) && mine[2] == 1);
  CHECK(ring.me != 0 || rooted[1] == static_cast<double>(n * (n + 1) / 2));
}

// When no memory is left for the operations that an inner group hands to the outer one, the outer
// group gets none of them.
static void without_memory(const dm::Mesh &mesh)
{
  const std::int32_t sent = 1;
  bool failed = true;
  for (long count = 0; failed; ++count) {
    std::vector<std::int32_t> got(3, 0);
    failed = false;
    mesh.group([&] {
      try {
        mesh.group([&] {
          for (std::int32_t &each : got) mesh.all_gather("x", &sent, &each, 1);
          allowed = count;
        });
      } catch (const std::bad_alloc &) {
        failed = true;
      }
      allowed = -1;
    });
    CHECK(got == std::vector<std::int32_t>(3, failed ? 0 : 1));
    CHECK(failed || count > 0);
  }
}

int main()
{
  return run([] {
    const char *given = std::getenv("WORLD_SIZE");
    const int ranks = given == nullptr ? 1 : std::atoi(given);
    const dm::Mesh mesh = dm::init("cpu", {{"x", ranks}});
    const std::int32_t me = mesh.local_rank();
    const Ring ring{mesh, me, ranks, (me + 1) % ranks, (me + ranks - 1) % ranks};
    exceptions(ring);
    refusals(ring);
    raw(ring);
    waits(ring);
    aborts(ring);
    kept(ring);
    if (ranks == 1) without_memory(mesh);
    ring.turn(50);
    mesh.finalize();
  });
}
