/* MPI's part of benches/peers, compiled with MPICH's and with Open MPI's mpicc. No bfloat16: MPI
 * 4.0 has no such type. */
#include <mpi.h>

#include "measure.h"

static void run(struct work *work, const char *variant)
{
  (void)variant;
  const int count = (int)work->count, part = (int)work->part;
  switch (work->operation) {
  case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, work->recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case ALL_GATHER: MPI_Allgather(work->send, part, MPI_FLOAT, work->recv, part, MPI_FLOAT, MPI_COMM_WORLD); break;
  case REDUCE_SCATTER: MPI_Reduce_scatter_block(work->send, work->recv, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case BROADCAST:
    for (int root = 0; root < work->ranks; root++)
      MPI_Bcast(work->recv, count, MPI_FLOAT, root, MPI_COMM_WORLD);
    break;
  case ALL_TO_ALL: MPI_Alltoall(work->send, part, MPI_FLOAT, work->recv, part, MPI_FLOAT, MPI_COMM_WORLD); break;
  default:
    if (work->rank == 0)
      MPI_Send(work->send, count, MPI_FLOAT, work->right, 0, MPI_COMM_WORLD);
    MPI_Recv(work->recv, count, MPI_FLOAT, work->left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (work->rank != 0)
      MPI_Send(work->send, count, MPI_FLOAT, work->right, 0, MPI_COMM_WORLD);
  }
}

static void maximum(int64_t *values, size_t count)
{
  MPI_Allreduce(MPI_IN_PLACE, values, (int)count, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
}

static const char *const *variants(enum operation operation, enum dtype dtype)
{
  static const char *const one[] = {"", NULL};
  (void)operation;
  return dtype == FLOAT32 ? one : one + 1;
}

/* A Cartesian communicator, one of each dimension, and one of the first two together. */
static void start(int ranks)
{
  int shape[3];
  const int periods[3] = {0, 0, 0};
  MPI_Comm mesh, part;
  start_shape(ranks, shape);
  MPI_Cart_create(MPI_COMM_WORLD, 3, shape, periods, 0, &mesh);
  mark("root");
  for (int dim = 0; dim < 3; dim++)
    MPI_Cart_sub(mesh, (int[3]){dim == 0, dim == 1, dim == 2}, &part);
  mark("splits");
  MPI_Cart_sub(mesh, (int[3]){1, 1, 0}, &part);
  mark("flatten");
}

int main(int argc, char **argv)
{
  struct library library = {.variants = variants, .run = run, .maximum = maximum};
  int code = 0;
  note_execution(argc, argv);
  mark("load");
  MPI_Init(&argc, &argv);
  mark("rendezvous");
  MPI_Comm_rank(MPI_COMM_WORLD, &library.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &library.ranks);
  if (marks.executed) {
    start(library.ranks);
    print_marks(&library);
  } else
    code = measure(&library, argc, argv);
  MPI_Finalize();
  return code;
}
