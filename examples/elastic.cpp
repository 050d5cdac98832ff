// The training of hsdp_tp.cpp as a job that heals: any rank may be killed at any time, again and
// again. A spare takes its place, or a process that is started in its place, and gets the state of
// the training along replicate. Where nobody takes the place, the job goes on with the other
// replica.
//
//     devicemesh run -n 9 --failure-grace 1d -- ./elastic --check       8 ranks and a spare
//     devicemesh run -n 8 --spares 1 --restart rank --max-restarts 5 -- ./elastic --check
//
// Every batch is whole, because the ranks that are left share it. So the losses are those of an
// undisturbed run, also with fewer replicas, where the same sums are only added in another order.
// --check compares them with a training by one process, and the weights of all replicas bit by bit.
//
// The collectives are the mesh's, and not NCCL's on the communicators as in hsdp_tp.cpp: they end
// at a deadline also where a rank is stopped and not lost. Memory is the host's: on a GPU a program
// must also wait for its stream with a deadline before it knows that a step is done.
#include <devicemesh.hpp>

#include "device_cpu.h"
#include "digits.h"
#include "elastic_options.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <thread>

#include <unistd.h>

namespace {

constexpr int kStepsPerEpoch = kTrain / kBatch;
constexpr int kMostFailed = 5;  // recoveries that may fail one after the other

// ---- the state of the training ----

// What this rank keeps of the weights after `step` steps.
struct State {
  std::int64_t step = 0;
  std::vector<float> mine, velocity;
};

// The state, and the one before the last step: when a rank is lost, the others may be one step
// apart.
struct History {
  State now, before;
  std::vector<float> losses;  // of each step, summed over the batch

  void put_into(const Network &net) const
  {
    device::upload(net.mine.data, now.mine.data(), net.piece);
    device::upload(net.velocity.data, now.velocity.data(), net.piece);
  }

  void take_from(const Network &net)
  {
    std::swap(now, before);
    now.step = before.step + 1;
    now.mine.resize(net.piece);
    now.velocity.resize(net.piece);
    device::download(now.mine.data(), net.mine.data, net.piece);
    device::download(now.velocity.data(), net.velocity.data, net.piece);
  }
};

bool is_in(const dm::Mesh &mesh) { return !mesh.recovery().new_coordinate.empty(); }

std::int64_t over_all(const dm::Mesh &mesh, std::int64_t value, dm::Op op)
{
  for (const char *dim : {"replicate", "shard", "tp"}) {
    std::int64_t reduced = 0;
    mesh.all_reduce(dim, &value, &reduced, 1, op);
    value = reduced;
  }
  return value;
}

// After a recovery the ranks go back to the last step that all of them have done, and those that
// have joined get the state along replicate from a rank that has it.
void share_state(const dm::Mesh &mesh, bool has_state, History &history)
{
  State &now = history.now;
  const std::int64_t first = over_all(mesh, has_state ? now.step : std::numeric_limits<std::int64_t>::max(), dm::Op::min);
  if (has_state && now.step > first) now = history.before;
  if (has_state && now.step != first) fail("this rank has no state of step " + std::to_string(first));
  const dm::Recovery recovery = mesh.recovery();
  if (recovery.joined_ranks.empty()) return;

  // What is received is the state only when all of it has come.
  State got{first, now.mine, now.velocity};
  std::vector<float> losses = history.losses;
  const std::int32_t root = recovery.state_root.value();
  mesh.broadcast("replicate", got.mine, root);
  mesh.broadcast("replicate", got.velocity, root);
  mesh.broadcast("replicate", losses, root);
  now = got;
  history.losses = losses;
}

// ---- the training ----

Place place(const dm::Mesh &mesh, const char *dim)
{
  return {static_cast<int>(mesh.local_rank(dim)), static_cast<int>(mesh.size(dim))};
}

// The training on one mesh. A call throws dm::Error when a rank is lost; then the mesh has ended.
class Training {
  const dm::Mesh &mesh_;
  const dm::Mesh data_;
  Network net_;
  Order order_;

public:
  Training(const dm::Mesh &mesh, const Digits &digits)
      // A dimension that was made exists in the mesh after a recovery, too, so this call is local
      // then.
      : mesh_(mesh), data_(mesh({"replicate", "shard"}).flatten("data")),
        net_(digits, place(data_, "data"), place(mesh, "shard"), place(mesh, "tp")), order_(digits.count())
  {
  }

  // Gives the history the first weights, unless it has any.
  void begin(History &history) const
  {
    if (!history.now.mine.empty()) return;
    history.take_from(net_);
    history.now.step = 0;
  }

  void go_on(const History &history) const { history.put_into(net_); }

  void step(History &history)
  {
    const std::int64_t step = history.now.step;
    net_.load_batch(order_.in_epoch(static_cast<int>(step / kStepsPerEpoch)), static_cast<int>(step % kStepsPerEpoch) * kBatch);
    forward();
    net_.backward();
    mesh_.reduce_scatter("shard", net_.gradient.data, net_.my_gradient.data, net_.piece);
    mesh_.all_reduce("replicate", net_.my_gradient.data, net_.my_gradient.data, net_.piece);
    net_.sum_losses();
    data_.all_reduce("data", net_.sums.data, net_.sums.data, 1);

    // The step has no further collective. So no rank is more than one step ahead of another one.
    net_.update();
    history.losses[step] = net_.sum();
    history.take_from(net_);
  }

  double accuracy()
  {
    const int tests = net_.load_tests(order_.in_epoch(0));
    forward();
    net_.sum_hits();
    return net_.sum() / tests;
  }

  // Whether all replicas have these weights and losses, bit by bit.
  bool is_same_on_replicas(const History &history) const
  {
    std::vector<std::int32_t> bits;
    for (const std::vector<float> *part : {&history.now.mine, &history.now.velocity, &history.losses}) {
      bits.resize(bits.size() + part->size());
      std::memcpy(&bits[bits.size() - part->size()], part->data(), part->size() * sizeof(float));
    }
    std::vector<std::int32_t> least(bits.size()), most(bits.size());
    mesh_.all_reduce("replicate", bits, least, dm::Op::min);
    mesh_.all_reduce("replicate", bits, most, dm::Op::max);
    return over_all(mesh_, least == most, dm::Op::min) == 1;
  }

private:
  void forward()
  {
    mesh_.all_gather("shard", net_.mine.data, net_.weights.data, net_.piece);
    net_.forward();
    mesh_.all_reduce("tp", net_.logits.data, net_.logits.data, net_.num_logits());
    net_.loss();
  }
};

// ---- a rank's life ----

struct Result {
  std::vector<float> losses;
  double accuracy = 0;
  bool is_first = false;  // at coordinate (0, 0, 0)
  bool is_same = true;    // on all replicas
};

double mean_loss(const std::vector<float> &losses, int epoch)
{
  return std::accumulate(losses.begin() + epoch * kStepsPerEpoch, losses.begin() + (epoch + 1) * kStepsPerEpoch, 0.0) / kTrain;
}

// The training on this mesh, until it is done or a rank is lost (dm::Error). No value: somebody
// waits to join, for whom the ranks recover although nobody is lost.
std::optional<Result> train(const dm::Mesh &mesh, const Digits &digits, History &history, bool &has_state, bool talk)
{
  const std::int64_t steps = options.epochs * kStepsPerEpoch;
  Training training(mesh, digits);
  const bool is_first = place(mesh, "replicate").rank + place(mesh, "shard").rank + place(mesh, "tp").rank == 0;
  const std::int64_t epoch = mesh.recovery().epoch;
  training.begin(history);
  if (epoch > 0) {
    share_state(mesh, has_state, history);
    has_state = true;
  }
  training.go_on(history);
  bool is_new = epoch > 0;
  while (history.now.step < steps) {
    training.step(history);
    const std::int64_t step = history.now.step;
    if (is_new) say("goes on: step %lld has loss %.6f", static_cast<long long>(step), history.losses[step - 1] / kBatch);
    is_new = false;
    if (step % kStepsPerEpoch == 0 && is_first && talk) {
      const int done = static_cast<int>(step / kStepsPerEpoch);
      std::printf("epoch %2d  loss %.6f\n", done, mean_loss(history.losses, done - 1));
      std::fflush(stdout);
    }
    if (step % kStepsPerEpoch == 1 && is_first && talk) say("is at step %lld", static_cast<long long>(step));
    if (step % kStepsPerEpoch == 0 && step < steps && over_all(mesh, mesh.world().waiting(), dm::Op::max) > 0) return std::nullopt;
    if (options.pause.count() > 0 && talk) std::this_thread::sleep_for(options.pause);
  }
  Result result;
  result.accuracy = training.accuracy();
  result.is_same = training.is_same_on_replicas(history);
  result.losses = history.losses;
  result.is_first = is_first;
  return result;
}

void say_epoch(const dm::Mesh &mesh)
{
  const dm::Recovery recovery = mesh.recovery();
  say("is %s epoch %lld: %zu lost, %zu joined", is_in(mesh) ? "in" : "benched in", static_cast<long long>(recovery.epoch),
      recovery.lost_ranks.size(), recovery.joined_ranks.size());
}

// A rank's whole life, with every recovery. No value: the rank was never needed, or came too late.
std::optional<Result> live(dm::Mesh mesh, const Digits &digits)
{
  History history;
  history.losses.resize(options.epochs * kStepsPerEpoch);
  bool has_state = is_in(mesh) && !mesh.recovery().has_joined;
  int failed = 0;  // recoveries, one after the other
  for (;;) {
    std::optional<Result> result;
    const bool was_in = is_in(mesh);
    bool somebody_waits = false;
    if (was_in) {
      try {
        result = train(mesh, digits, history, has_state, true);
        if (result) {
          mesh.world().finalize();
          return result;
        }
        somebody_waits = true;
        say("lets in who waits");
      } catch (const dm::Error &error) {
        // Whatever has happened, recover() knows whether a rank is lost, and refuses otherwise.
        say("notices: %s", error.what());
      }
    }
    dm::RecoverOptions wishes;
    wishes.dim = "replicate";
    wishes.min_size = 1;
    wishes.replace = options.replace;
    wishes.silent = options.silent;
    // The collectives may have a short deadline. A recovery also waits for other processes.
    if (options.timeout.count() > 0) wishes.timeout = options.timeout + options.replace + options.silent + std::chrono::seconds(30);
    wishes.has_state = has_state;
    try {
      mesh = mesh.recover(wishes);
    } catch (const dm::Error &error) {
      // Whoever waited may be lost by now. Then the mesh goes on.
      if (somebody_waits && error.status() == dm::Status::invalid_state) continue;
      // A rank that stops while the next mesh is made fails the recovery on all ranks. They try
      // again.
      const bool was_late = error.status() == dm::Status::timeout || error.status() == dm::Status::peer_lost;
      if (was_late && ++failed < kMostFailed) {
        say("tries again: %s", error.what());
        continue;
      }
      if (error.status() != dm::Status::aborted) throw;
      // A rank was lost while the job ended. The others had agreed on its end, so all were done.
      if (result) return result;
      if (was_in) throw;
      say("waited until the job had ended");
      return std::nullopt;
    }
    failed = 0;
    has_state = has_state && is_in(mesh) && !mesh.recovery().has_joined;
    say_epoch(mesh);
  }
}

// The mesh of the job that begins or runs. Ranks from 8 on are spares. A process that is started in
// the place of a lost rank waits here until a recovery lets it in. No value: the job has ended
// meanwhile.
std::optional<dm::Mesh> join()
{
  std::int64_t ticket = 0;
  try {
    dm::WorldOptions place;
    // A rank whose host is cut off while it joins ends then, and not after the ten minutes that it
    // has without this.
    if (options.timeout.count() > 0) place.timeout = options.timeout + std::chrono::seconds(30);
    const dm::World world = dm::World::init(device::type, place);
    ticket = world.info().ticket;
    dm::InitOptions wishes;
    wishes.world = world;
    wishes.timeout = options.timeout;
    for (;;) {
      try {
        return dm::init({{"replicate", 2}, {"shard", 2}, {"tp", 2}}, wishes);
      } catch (const dm::Error &error) {
        if (ticket == 0 || error.status() != dm::Status::timeout) throw;
      }
    }
  } catch (const dm::Error &error) {
    const char *how = std::getenv("DM_JOIN");
    const bool comes_back = ticket > 0 || (how != nullptr && std::strcmp(how, "running") == 0);
    if (!comes_back || error.status() != dm::Status::invalid_state) throw;
    say("came too late: %s", error.what());
    return std::nullopt;
  }
}

// Compares the losses with those of one process: a world of one rank, and a mesh whose dimensions
// have size 1.
bool has_losses_of_one_process(const Result &result, const Digits &digits)
{
  dm::WorldOptions alone;
  alone.world_size = 1;
  const dm::World world = dm::World::init(device::type, alone);
  dm::InitOptions single;
  single.world = world;
  const dm::Mesh mesh = dm::init({{"replicate", 1}, {"shard", 1}, {"tp", 1}}, single);
  History history;
  history.losses.resize(result.losses.size());
  bool has_state = true;
  const Result reference = train(mesh, digits, history, has_state, false).value();
  world.finalize();
  double worst = 0;
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    const double expected = mean_loss(reference.losses, epoch);
    worst = std::max(worst, std::abs(mean_loss(result.losses, epoch) - expected) / expected);
  }
  std::printf("check: one process gets the same losses up to %.1e relative, accuracy %.2f %%\n", worst, 100 * reference.accuracy);
  if (!(worst <= 1e-4)) std::printf("check: more than 1e-4\n");
  return worst <= 1e-4;
}

}  // namespace

int main(int argc, char **argv)
try {
  read_arguments(argc, argv);
  const Digits digits = read_digits(options.data);
  if (const char *number = std::getenv("RANK")) rank = std::atoi(number);
  say("is process %d", static_cast<int>(getpid()));

  std::optional<dm::Mesh> made = join();
  if (!made) return 0;  // `devicemesh run` would take another exit code for a rank that fails
  dm::Mesh mesh = std::move(*made);
  rank = mesh.rank();
  say("is %s", is_in(mesh) ? "in the mesh" : "a spare");
  if (mesh.recovery().epoch > 0) say_epoch(mesh);

  const std::optional<Result> result = live(std::move(mesh), digits);
  if (!result) return 0;
  say("is done: losses %016llx", digest(result->losses));
  bool good = result->is_same && (options.epochs < 20 || result->accuracy >= 0.95);
  if (!result->is_first) return good ? 0 : 1;
  std::printf("test accuracy %.2f %%\n", 100 * result->accuracy);
  if (options.check) {
    std::printf("check: the weights and losses are %s on all replicas\n", result->is_same ? "equal bit by bit" : "not equal");
    good = has_losses_of_one_process(*result, digits) && good;
  }
  if (!good) std::printf("the result is wrong\n");
  return good ? 0 : 1;
} catch (const dm::Error &error) {
  say("gives up: %s", error.what());
  fail("rank " + std::to_string(rank) + ": " + error.what());
}
