// Gloo's part of benches/peers, against Debian's libgloo-dev: TCP over the loopback device, which
// is all that it has on one machine, or over the interface that DM_BENCH_IFACE names. It has
// several algorithms for all-reduce between which its caller chooses: each is measured, and
// bench.py takes the best. It has no bfloat16.
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/alltoall.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include "measure.h"

namespace {

std::shared_ptr<gloo::rendezvous::Context> context;
// The barrier and the bookkeeping use tags and slots beside those of the work.
constexpr uint32_t TAG = 1, MAXIMUM_TAG = 2;
constexpr uint64_t SLOT = uint64_t(1) << 40;

// The data that stays from one call to the next. The algorithms of the old interface are made once
// for their buffer, and messages have registered buffers.
struct State {
  std::unique_ptr<gloo::Algorithm> algorithm;
  std::unique_ptr<gloo::transport::UnboundBuffer> send, recv;
  void *unused;
};

bool is(const char *variant, const char *name) { return strcmp(variant, name) == 0; }

void all_reduce(struct work *work, const char *variant)
{
  State &state = *static_cast<State *>(work->state);
  if (state.algorithm)
    return state.algorithm->run();
  gloo::AllreduceOptions options(context);
  using Algorithm = gloo::AllreduceOptions::Algorithm;
  options.setAlgorithm(is(variant, "ring") ? Algorithm::RING : Algorithm::BCUBE);
  options.setOutput(static_cast<float *>(work->recv), work->count);
  options.setReduceFunction(static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
  options.setTag(TAG);
  gloo::allreduce(options);
}

void run(struct work *work, const char *variant)
{
  State &state = *static_cast<State *>(work->state);
  float *send = static_cast<float *>(work->send), *recv = static_cast<float *>(work->recv);
  switch (work->operation) {
  case ALL_REDUCE: all_reduce(work, variant); break;
  case ALL_GATHER: {
    gloo::AllgatherOptions options(context);
    options.setInput(send, work->part);
    options.setOutput(recv, work->count);
    options.setTag(TAG);
    gloo::allgather(options);
    break;
  }
  case REDUCE_SCATTER:
    state.algorithm->run();
    break;
  case BROADCAST:
    for (int root = 0; root < work->ranks; root++) {
      gloo::BroadcastOptions options(context);
      options.setOutput(recv, work->count);
      options.setRoot(root);
      options.setTag(TAG);
      gloo::broadcast(options);
    }
    break;
  case ALL_TO_ALL: {
    gloo::AlltoallOptions options(context);
    options.setInput(send, work->count);
    options.setOutput(recv, work->count);
    options.setTag(TAG);
    gloo::alltoall(options);
    break;
  }
  default:
    if (work->rank == 0)
      state.send->send(work->right, SLOT), state.send->waitSend();
    state.recv->recv(work->left, SLOT), state.recv->waitRecv();
    if (work->rank != 0)
      state.send->send(work->right, SLOT), state.send->waitSend();
  }
}

void prepare(struct work *work, const char *variant)
{
  State *state = new State;
  state->unused = work->recv;
  const size_t bytes = work->count * sizeof(float);
  std::vector<float *> buffers{static_cast<float *>(work->send)};
  const int count = static_cast<int>(work->count);
  if (work->operation == ALL_REDUCE && is(variant, "halving doubling"))
    state->algorithm = std::make_unique<gloo::AllreduceHalvingDoubling<float>>(context, buffers, count);
  else if (work->operation == ALL_REDUCE && is(variant, "ring chunked"))
    state->algorithm = std::make_unique<gloo::AllreduceRingChunked<float>>(context, buffers, count);
  else if (work->operation == REDUCE_SCATTER) {
    // It reduces in place and leaves this rank's part at the front.
    work->recv = work->send;
    state->algorithm = std::make_unique<gloo::ReduceScatterHalvingDoubling<float>>(
        context, buffers, count, std::vector<int>(static_cast<size_t>(work->ranks), static_cast<int>(work->part)));
  } else if (work->operation == SEND_RECV) {
    state->send = context->createUnboundBuffer(work->send, bytes);
    state->recv = context->createUnboundBuffer(work->recv, bytes);
  }
  work->state = state;
}

void maximum(int64_t *values, size_t count)
{
  gloo::AllreduceOptions options(context);
  options.setOutput(values, count);
  options.setReduceFunction(static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::max<int64_t>));
  options.setTag(MAXIMUM_TAG);
  gloo::allreduce(options);
}

void release(struct work *work, const char *)
{
  // No rank takes its buffers away while another still sends into them.
  int64_t nothing = 0;
  maximum(&nothing, 1);
  State *state = static_cast<State *>(work->state);
  work->recv = state->unused;
  delete state;
}

const char *const *variants(enum operation operation, enum dtype dtype)
{
  static const char *const one[] = {"", nullptr}, *const all_reduces[] = {"ring", "bcube", "ring chunked", "halving doubling", nullptr};
  return dtype != FLOAT32 ? one + 1 : operation == ALL_REDUCE ? all_reduces : one;
}

} // namespace

int main(int argc, char **argv)
{
  struct library library = {};
  library.rank = atoi(getenv("RANK"));
  library.ranks = atoi(getenv("WORLD_SIZE"));
  library.variants = variants;
  library.prepare = prepare;
  library.release = release;
  library.run = run;
  library.maximum = maximum;
  gloo::rendezvous::FileStore store(getenv("DM_BENCH_SCRATCH"));
  gloo::transport::tcp::attr attributes;
  const char *interface = getenv("DM_BENCH_IFACE");
  attributes.iface = interface ? interface : "lo";
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
  context = std::make_shared<gloo::rendezvous::Context>(library.rank, library.ranks);
  context->setTimeout(std::chrono::minutes(10));
  context->connectFullMesh(store, device);
  const int code = measure(&library, argc, argv);
  // No rank closes its connections while another still waits for something.
  int64_t nothing = 0;
  maximum(&nothing, 1);
  return code;
}
