/* A pipeline with the 1F1B schedule, in C.
 *
 *     devicemesh run -n 8 -- ./pipeline
 *
 * The mesh is (pp, tp) with tp=2: each stage is two ranks, and each of these has half of the
 * stage's weights. With 8 ranks the stage after that of world rank 0 is that of world rank 2, but
 * its rank along pp is 1. dm_neighbor gives the rank along pp, which dm_send and dm_recv take.
 *
 * A stage computes y[i] = w[i] * x[i]. The loss is the sum of y[i] * y[i] / 2 after the last stage.
 * Each rank compares its gradient with that of one process.
 *
 * 1F1B (one forward, one backward; Narayanan et al., PipeDream, SOSP 2019): after a warm-up, each
 * stage does one forward and one backward step in turn. So a stage keeps the inputs of at most as
 * many microbatches as there are stages from it to the end. */
#include <devicemesh.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { kWidth = 3, kMicrobatches = 6 };

static void check(dm_status status, const char *call)
{
  if (status != DM_STATUS_OK) {
    fprintf(stderr, "%s: %s: %s\n", call, dm_status_name(status), dm_last_error());
    exit(1);
  }
}
#define CHECK(call) check(call, #call)

static dm_mesh *mesh;
static int32_t stage, half, before, after; /* before and after are ranks along pp; -1 where the pipeline ends */
static float weights[kWidth], gradient[kWidth];

static float weight(int32_t at_stage, int32_t at_half, int i) { return (float)(1 + (at_stage + 2 * at_half + i) % 3) / 2; }
static float input(int microbatch, int32_t at_half, int i) { return (float)((microbatch + 3 * at_half + i) % 4) - 1; }

/* Sends out to the stage `to`, and receives in from the stage `from`, together. -1: no such
   stage. */
static void exchange(const float *out, int32_t to, float *in, int32_t from)
{
  CHECK(dm_group_start(mesh));
  if (to >= 0) CHECK(dm_send(mesh, "pp", out, kWidth, DM_FLOAT32, to, NULL));
  if (from >= 0) CHECK(dm_recv(mesh, "pp", in, kWidth, DM_FLOAT32, from, NULL));
  CHECK(dm_group_end(mesh));
}

static void forward(const float *x, float *y)
{
  for (int i = 0; i < kWidth; ++i) y[i] = weights[i] * x[i];
}

/* Turns the gradient of y into that of x, and adds to the gradient of the weights. */
static void backward(const float *x, const float *dy, float *dx)
{
  for (int i = 0; i < kWidth; ++i) {
    gradient[i] += x[i] * dy[i];
    dx[i] = weights[i] * dy[i];
  }
}

/* The inputs and outputs of the microbatches that are on their way. */
static float xs[kMicrobatches][kWidth], ys[kMicrobatches][kWidth];

static void first_input(int microbatch)
{
  if (before < 0)
    for (int i = 0; i < kWidth; ++i) xs[microbatch][i] = input(microbatch, half, i);
}

static void train(int32_t stages)
{
  float dy[kWidth], dx[kWidth];
  const int warmup = stages - 1 - stage < kMicrobatches ? stages - 1 - stage : kMicrobatches;
  int next = 0, oldest = 0; /* the microbatches of the next forward and of the next backward step */
  for (; next < warmup; ++next) {
    first_input(next);
    exchange(NULL, -1, xs[next], before);
    forward(xs[next], ys[next]);
    exchange(ys[next], after, NULL, -1);
  }
  if (next < kMicrobatches) {
    first_input(next);
    exchange(NULL, -1, xs[next], before);
  }
  for (; next < kMicrobatches; ++next, ++oldest) {
    const bool is_last_forward = next + 1 == kMicrobatches;
    forward(xs[next], ys[next]);
    exchange(ys[next], after, dy, after);
    backward(xs[oldest], after < 0 ? ys[oldest] : dy, dx); /* the gradient of y * y / 2 is y */
    if (!is_last_forward) first_input(next + 1);
    exchange(dx, before, is_last_forward ? NULL : xs[next + 1], is_last_forward ? -1 : before);
  }
  for (; oldest < kMicrobatches; ++oldest) {
    exchange(NULL, -1, dy, after);
    backward(xs[oldest], dy, dx);
    exchange(dx, before, NULL, -1);
  }
}

/* The gradient of this rank's weights, computed by one process. The numbers are small multiples of
 * powers of two, so both ways give the same bits. */
static bool is_right(int32_t stages)
{
  float expected[kWidth] = {0};
  for (int microbatch = 0; microbatch < kMicrobatches; ++microbatch)
    for (int i = 0; i < kWidth; ++i) {
      float x = input(microbatch, half, i), others = 1;
      for (int32_t at = 0; at < stages; ++at)
        if (at != stage) others *= weight(at, half, i);
      expected[i] += others * x * others * x * weights[i];
    }
  for (int i = 0; i < kWidth; ++i)
    if (expected[i] != gradient[i]) return false;
  return true;
}

int main(void)
{
  dm_world *world = NULL;
  int32_t rank, ranks, next_rank = -1;
  CHECK(dm_world_init("cpu", NULL, &world));
  CHECK(dm_world_size(world, &ranks));
  if (ranks % 2 != 0) {
    fprintf(stderr, "pipeline: an even number of ranks is needed, not %d\n", ranks);
    return 1;
  }
  const int32_t shape[] = {ranks / 2, 2};
  const char *names[] = {"pp", "tp"};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  options.world = world;
  CHECK(dm_init("cpu", shape, 2, names, &options, &mesh));
  CHECK(dm_rank(mesh, &rank));
  CHECK(dm_get_local_rank(mesh, "pp", &stage));
  CHECK(dm_get_local_rank(mesh, "tp", &half));
  CHECK(dm_neighbor(mesh, "pp", -1, false, &before));
  CHECK(dm_neighbor(mesh, "pp", 1, false, &after));
  for (int i = 0; i < kWidth; ++i) weights[i] = weight(stage, half, i);

  train(shape[0]);

  /* A world rank is for people: for a log, or for another library. */
  if (after >= 0) CHECK(dm_translate_rank(mesh, "pp", after, &next_rank));
  const bool right = is_right(shape[0]);
  int32_t wrong = !right;
  CHECK(dm_all_reduce(mesh, "tp", &wrong, &wrong, 1, DM_INT32, DM_SUM, NULL));
  if (after >= 0)
    printf("rank %d is stage %d; it sends to rank %d along pp, which is world rank %d; gradients: %s\n", rank, stage, after, next_rank,
           wrong == 0 ? "right" : "wrong");
  else
    printf("rank %d is stage %d, the last one; gradients: %s\n", rank, stage, wrong == 0 ? "right" : "wrong");
  CHECK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  dm_world_free(world);
  return wrong == 0 ? 0 : 1;
}
