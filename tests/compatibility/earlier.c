/* Two ranks make a mesh with every options struct, sum, and read an error. It is compiled against
 * today's header, one of the future, and those of earlier releases with this SONAME. */
#include <devicemesh.h>

#include <stdio.h>
#include <string.h>

#define OK(call)                                                                                   \
  do {                                                                                             \
    const dm_status status = (call);                                                               \
    if (status != DM_STATUS_OK) {                                                                  \
      fprintf(stderr, "line %d: %s: %s\n", __LINE__, dm_status_name(status), dm_last_error());     \
      return 1;                                                                                    \
    }                                                                                              \
  } while (0)

int main(void)
{
  dm_world_options join = DM_WORLD_OPTIONS_INIT;
  dm_dim_options dims[2] = {DM_DIM_OPTIONS_INIT, DM_DIM_OPTIONS_INIT};
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_call_options call = DM_CALL_OPTIONS_INIT;
  dm_plan_options plan = DM_PLAN_OPTIONS_INIT;
  dm_error_info info = DM_ERROR_INFO_INIT;
  dm_world *world = NULL;
  dm_mesh *mesh = NULL, *none = NULL;
  const int32_t shape[] = {2, 1};
  const char *names[] = {"dp", "tp"};
  const char *locations[] = {"host0", "host0"};
  int32_t rank = -1, planned[2] = {-1, -1};
  float sum = 0;

  join.timeout_ms = 60000;
#ifdef FUTURE
  /* The library is too old to know this field. That is an error when the field is set, and nothing
   * when it is not. */
  join.later = 1;
  if (dm_world_init("cpu", &join, &world) != DM_STATUS_INVALID_ARGUMENT ||
      !strstr(dm_last_error(), "it is older than the header you compiled with")) {
    fprintf(stderr, "a field of the future: %s\n", dm_last_error());
    return 1;
  }
  join.later = 0;
#endif
  OK(dm_world_init("cpu", &join, &world));
  plan.world_size = 2;
  plan.locations = locations;
  plan.shape = shape;
  plan.ndim = 2;
  OK(dm_plan_ranks(&plan, planned, NULL, 0, NULL));
  options.world = world;
  options.ranks = planned;
  options.num_ranks = 2;
  options.dim_options = dims; /* an array: its stride is the caller's struct_size */
  options.num_dim_options = 2;
  dims[0].flags = DM_DIM_OWN_COMM;
  dims[0].comm_name = "first";
  dims[1].comm_name = "second";
  OK(dm_init("cpu", shape, 2, names, &options, &mesh));
  OK(dm_rank(mesh, &rank));
  sum = (float)rank;
  OK(dm_all_reduce(mesh, "dp", &sum, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  if (sum != 1 || dm_slice(mesh, &names[1], 1, &none) != DM_STATUS_OK) return 1;
  dm_free(none);
  none = NULL;
  const char *wrong[] = {"nowhere"};
  if (dm_slice(mesh, wrong, 1, &none) != DM_STATUS_NOT_FOUND || none) return 1;
  OK(dm_last_error_info(&info));
  if (info.status != DM_STATUS_NOT_FOUND || info.struct_size != sizeof info || !strstr(info.message, "nowhere")) return 1;
  call.timeout_ms = 60000;
  OK(dm_finalize(mesh, &call));
  dm_free(mesh);
  dm_world_free(world);
  printf("sum 1\n");
  return 0;
}
