/* The least struct_size of each struct is the size that it had in its first release
 * (LEAST_<struct>, from tests/compatibility/records), whatever the struct has grown to. One byte
 * less is refused. */
#include <devicemesh.h>

#include <stdio.h>
#include <string.h>

static int failures;

/* One byte less is refused with the least size. The least size is not refused, whatever else the
 * call says. */
static void check(const char *name, size_t least, size_t less, dm_status status)
{
  char said[128];
  snprintf(said, sizeof said, "struct_size is %zu, but the struct has at least %zu bytes", least - less, least);
  const int refused = status == DM_STATUS_INVALID_ARGUMENT && strstr(dm_last_error(), said) != NULL;
  if (refused == (less == 1) && (refused || !strstr(dm_last_error(), "struct_size"))) return;
  fprintf(stderr, "%s (FIRST_SIZE in src/ffi/arguments.rs) with struct_size %zu of at least %zu: status %d, \"%s\"\n",
          name, least - less, least, (int)status, dm_last_error());
  ++failures;
}

int main(void)
{
  const int32_t shape[] = {1};
  const char *location = "host0";
  dm_world_options offline = DM_WORLD_OPTIONS_INIT;
  dm_world *world = NULL;
  offline.flags = DM_WORLD_OFFLINE;
  offline.world_size = 1;

  for (size_t less = 0; less < 2; ++less) {
    dm_error_info info = DM_ERROR_INFO_INIT;
    if (dm_world_init("cpu", &offline, &world) != DM_STATUS_OK) return 1;

    dm_world_options join = offline;
    dm_world *other = NULL;
    join.struct_size = LEAST_dm_world_options - less;
    check("dm_world_options", LEAST_dm_world_options, less, dm_world_init("cpu", &join, &other));
    dm_world_free(other);

    dm_world_info place = DM_WORLD_INFO_INIT;
    place.struct_size = LEAST_dm_world_info - less;
    check("dm_world_info", LEAST_dm_world_info, less, dm_world_get_info(world, &place));

    dm_store_callbacks callbacks = DM_STORE_CALLBACKS_INIT;
    callbacks.struct_size = LEAST_dm_store_callbacks - less;
    join = (dm_world_options)DM_WORLD_OPTIONS_INIT;
    join.store = &callbacks;
    other = NULL;
    /* The call is refused either way, because no callback is set. */
    check("dm_store_callbacks", LEAST_dm_store_callbacks, less, dm_world_init("cpu", &join, &other));
    dm_world_free(other);

    dm_init_options options = DM_INIT_OPTIONS_INIT;
    dm_dim_options dim = DM_DIM_OPTIONS_INIT;
    dm_mesh *mesh = NULL;
    options.world = world;
    options.dim_options = &dim;
    options.num_dim_options = 1;
    options.struct_size = LEAST_dm_init_options - less;
    check("dm_init_options", LEAST_dm_init_options, less, dm_init("cpu", shape, 1, NULL, &options, &mesh));
    dm_free(mesh);

    mesh = NULL;
    options.struct_size = sizeof options;
    dim.struct_size = LEAST_dm_dim_options - less;
    check("dm_dim_options", LEAST_dm_dim_options, less, dm_init("cpu", shape, 1, NULL, &options, &mesh));
    dm_free(mesh);

    dm_call_options call = DM_CALL_OPTIONS_INIT;
    mesh = NULL;
    options.dim_options = NULL;
    options.num_dim_options = 0;
    if (dm_init("cpu", shape, 1, NULL, &options, &mesh) != DM_STATUS_OK) return 1;
    dm_recover_options wishes = DM_RECOVER_OPTIONS_INIT;
    dm_recovery recovery = DM_RECOVERY_INIT;
    dm_mesh *next = NULL;
    wishes.struct_size = LEAST_dm_recover_options - less;
    /* The call is refused either way, because the world is offline. */
    check("dm_recover_options", LEAST_dm_recover_options, less, dm_recover(mesh, &wishes, &next, NULL));
    recovery.struct_size = LEAST_dm_recovery - less;
    check("dm_recovery", LEAST_dm_recovery, less, dm_get_recovery(mesh, &recovery));
    call.struct_size = LEAST_dm_call_options - less;
    check("dm_call_options", LEAST_dm_call_options, less, dm_finalize(mesh, &call));
    dm_free(mesh);

    dm_event_options watching = DM_EVENT_OPTIONS_INIT;
    dm_event event = DM_EVENT_INIT;
    dm_events *events = NULL;
    watching.struct_size = LEAST_dm_event_options - less;
    check("dm_event_options", LEAST_dm_event_options, less, dm_set_event_handler(NULL, NULL, &watching));
    if (dm_events_open(NULL, &events) != DM_STATUS_OK) return 1;
    event.struct_size = LEAST_dm_event - less;
    check("dm_event", LEAST_dm_event, less, dm_events_next(events, 0, &event));
    dm_events_free(events);

    dm_plan_options plan = DM_PLAN_OPTIONS_INIT;
    int32_t rank = -1;
    plan.world_size = 1;
    plan.locations = &location;
    plan.shape = shape;
    plan.ndim = 1;
    plan.struct_size = LEAST_dm_plan_options - less;
    check("dm_plan_options", LEAST_dm_plan_options, less, dm_plan_ranks(&plan, &rank, NULL, 0, NULL));

    info.struct_size = LEAST_dm_error_info - less;
    check("dm_error_info", LEAST_dm_error_info, less, dm_last_error_info(&info));
    dm_world_free(world);
    world = NULL;
  }
  printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
