/* Communicators that the program made itself by plain NCCL are given to dm_from_comms. As a mesh
 * they do what communicators of dm_init do. Borrowed ones outlive the mesh and are destroyed here;
 * owned ones end with dm_finalize. */
#include "gpu.h"
#include "plain.h"

/* All-reduces on a communicator that is still this program's. */
static void works(const plain *nccl, ncclComm_t comm, int32_t size)
{
  int32_t one = 1, sum = 0;
  int32_t *data = (int32_t *)device_alloc(sizeof one);
  device_put(data, &one, sizeof one);
  plain_says(nccl, nccl->AllReduce(data, data, 1, ncclInt32, ncclSum, comm, (cudaStream_t)device_stream()), "ncclAllReduce");
  device_get(&sum, data, sizeof sum);
  CHECK(sum == size);
  device_free(data);
}

int main(void)
{
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  int32_t rank = -1, ranks = 0;
  options.world = join_world(&rank, &ranks);
  const int32_t inner = ranks % 2 == 0 ? 2 : 1, outer = ranks / inner;
  const int32_t shape[] = {outer, inner};
  const char *names[] = {"outer", "inner"};
  /* Its communicator carries the unique ids around; any other way would do. */
  dm_mesh *carrier = NULL, *mesh = NULL, *flat = NULL;
  const int32_t line[] = {ranks};
  REQUIRE(dm_init(device_type(), line, 1, NULL, &options, &carrier));
  const plain nccl = plain_open(carrier);

  for (int owned = 0; owned < 2; ++owned) {
    ncclUniqueId id = plain_id(&nccl, carrier, rank);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t all = NULL, comms[2] = {NULL, NULL};
    plain_says(&nccl, nccl.CommInitRankConfig(&all, ranks, id, rank, &config), "ncclCommInitRankConfig");
    plain_says(&nccl, nccl.CommSplit(all, rank % inner, rank / inner, &comms[0], NULL), "ncclCommSplit");
    plain_says(&nccl, nccl.CommSplit(all, rank / inner, rank % inner, &comms[1], NULL), "ncclCommSplit");
    options.flags = owned ? DM_INIT_OWN_COMMS : 0;
    REQUIRE(dm_from_comms(device_type(), shape, 2, names, comms, &options, &mesh));
    ncclComm_t back = NULL;
    for (int index = 0; index < 2; ++index) {
      REQUIRE(dm_get_comm(mesh, names[index], &back));
      CHECK(back == comms[index]);
      check_group(mesh, names[index]);
    }
    REQUIRE(dm_flatten(mesh, "both", NULL, &flat)); /* this one the library makes */
    check_group(flat, NULL);
    dm_free(flat);
    OK(dm_finalize(mesh, NULL));
    dm_free(mesh);
    if (!owned) {
      works(&nccl, comms[0], outer);
      works(&nccl, comms[1], inner);
      for (int index = 1; index >= 0; --index) plain_end(&nccl, comms[index]);
    }
    plain_end(&nccl, all);
  }
  OK(dm_finalize(carrier, NULL));
  dm_free(carrier);
  dm_world_free(options.world);
  return finish();
}
