// Four ranks, as threads of this process, meet in a store of the caller's, which is a map. The
// library drops the store exactly when the last world is gone. The error that the store returns
// or throws is the error of the call that needed the store.
#include "check.hpp"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

class MapStore : public dm::Store {
public:
  std::int32_t set(std::string_view key, std::string_view value) override
  {
    const std::lock_guard<std::mutex> hold(lock_);
    values_[std::string(key)] = value;
    changed_.notify_all();
    return 0;
  }

  std::int32_t get(std::string_view key, std::chrono::milliseconds timeout, std::string &value) override
  {
    std::unique_lock<std::mutex> hold(lock_);
    const std::string name(key);
    if (!changed_.wait_for(hold, timeout, [&] { return values_.count(name) == 1; })) return not_yet;
    value = values_[name];
    return 0;
  }

  std::int32_t add(std::string_view key, std::int64_t amount, std::int64_t &sum) override
  {
    const std::lock_guard<std::mutex> hold(lock_);
    std::string &value = values_[std::string(key)];
    sum = (value.empty() ? 0 : std::stoll(value)) + amount;
    value = std::to_string(sum);
    changed_.notify_all();
    return 0;
  }

protected:
  std::mutex lock_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

// A store in which ranks decide together, so that their job can recover.
struct DecidingStore : MapStore {
  std::int32_t compare_set(std::string_view key, std::string_view expected, std::string_view value, std::string &stands) override
  {
    const std::lock_guard<std::mutex> hold(lock_);
    std::string &known = values_[std::string(key)];
    if (known == expected) known = value;
    stands = known;
    changed_.notify_all();
    return 0;
  }
  [[nodiscard]] bool has_compare_set() const override { return true; }
};

struct Broken : MapStore {
  explicit Broken(bool throws) : throws_(throws) {}
  std::int32_t add(std::string_view, std::int64_t, std::int64_t &) override
  {
    if (throws_) throw std::runtime_error("no service");
    return 42;
  }
  bool throws_;
};

// Asks a service that is down whether it can compare and set.
struct Undecided : MapStore {
  [[nodiscard]] bool has_compare_set() const override { throw std::runtime_error("no service"); }
};

static dm::WorldOptions options_of(std::int32_t rank, std::int32_t size, std::shared_ptr<dm::Store> store)
{
  dm::WorldOptions options;
  options.world_size = size;
  options.rank = rank;
  options.local_rank = rank;
  options.timeout = std::chrono::minutes(2);
  options.store = std::move(store);
  return options;
}

// Rank 0 ends the mesh, and all ranks go on with another one.
static dm::Mesh recovered(const dm::Mesh &mesh, std::int32_t rank)
{
  if (rank == 0) {
    mesh.abort();
  } else {
    try {
      mesh.barrier();
      CHECK(false);
    } catch (const dm::Error &) {
      // It is told that rank 0 has ended the mesh.
    }
  }
  dm::Mesh next = mesh.recover();
  CHECK(next.recovery().epoch == 1 && next.recovery().lost_ranks.empty());
  return next;
}

static void four_ranks(std::shared_ptr<MapStore> store)
{
  const std::weak_ptr<MapStore> watch = store;
  std::vector<std::thread> ranks;
  for (std::int32_t rank = 0; rank < 4; ++rank)
    ranks.emplace_back([rank, store] {
      try {
        const dm::World world = dm::World::init("cpu", options_of(rank, 4, store));
        CHECK(world.rank() == rank && world.size() == 4);
        dm::InitOptions options;
        options.world = world;
        dm::Mesh mesh = dm::init({{"dp", 2}, {"tp", 2}}, options);
        if (store->has_compare_set()) mesh = recovered(mesh, rank);
        else THROWS(dm::Status::unsupported, "compare_set", mesh.recover());
        std::vector<int> values(1, rank);
        mesh.all_reduce("dp", values);
        CHECK(values[0] == rank % 2 * 2 + 2);
        world.barrier();
        mesh.finalize();
      } catch (const dm::Error &error) {
        std::fprintf(stderr, "rank %d: %s\n", static_cast<int>(rank), error.what());
        std::exit(1);
      }
    });
  store.reset();
  for (std::thread &rank : ranks) rank.join();
  CHECK(watch.expired());
}

static void broken(bool throws, const std::string &text)
{
  auto store = std::make_shared<Broken>(throws);
  // The error of add reaches the caller, and a world that was not made keeps nothing of the store.
  THROWS(dm::Status::store, text, dm::World::init("cpu", options_of(0, 2, store)));
  CHECK(store.use_count() == 1);
}

static void undecided()
{
  auto store = std::make_shared<Undecided>();
  try {
    static_cast<void>(dm::World::init("cpu", options_of(0, 2, store)));
    CHECK(false);
  } catch (const std::runtime_error &error) {
    CHECK(error.what() == std::string("no service"));
  }
  CHECK(store.use_count() == 1);
}

int main()
{
  return run([] {
    four_ranks(std::make_shared<MapStore>());
    four_ranks(std::make_shared<DecidingStore>());
    broken(false, "returned 42");
    broken(true, "returned -1");
    undecided();

    dm::WorldOptions offline;
    offline.offline = true;
    offline.world_size = 1 << 20;
    offline.rank = 5;
    dm::InitOptions options;
    const dm::World world = dm::World::init("cuda", offline);
    options.world = world;
    const dm::Mesh mesh = dm::init({{"dp", 1 << 10}, {"tp", 1 << 10}}, options);
    CHECK(mesh.local_rank("tp") == 5 && mesh.ranks().size() == 1 << 20);
    THROWS(dm::Status::unsupported, "offline", mesh.comm("tp"));
    // A NUL does not cut a string of an option.
    dm::DimOptions named;
    named.comm_name = std::string("dp\0x", 4);
    THROWS(dm::Status::invalid_argument, "not UTF-8", mesh.flatten("flat", named));
    dm::RecoverOptions along;
    along.dim = std::string("dp\0x", 4);
    THROWS(dm::Status::invalid_argument, "not UTF-8", mesh.recover(along));
    THROWS(dm::Status::invalid_argument, "init_method", [] {
      dm::WorldOptions wrong;
      wrong.init_method = "http://nowhere";
      return dm::World::init("cpu", wrong);
    }());
  });
}
