/* ranks: 2 */
/* A group in which an operation is refused runs none of its operations, and dm_group_end says why.
 * dm_abort ends a group that a program has left open after an error, so later operations are not
 * queued into it. */
#include "check.h"

static dm_mesh *fresh(void)
{
  const int32_t shape[1] = {2};
  dm_mesh *mesh = NULL;
  REQUIRE(dm_init("cpu", shape, 1, NULL, NULL, &mesh));
  return mesh;
}

static void sums(dm_mesh *mesh)
{
  float one = 1, sum = 0;
  OK(dm_all_reduce(mesh, NULL, &one, &sum, 1, DM_FLOAT32, DM_SUM, NULL));
  CHECK(sum == 2);
}

int main(void)
{
  dm_mesh *mesh = fresh();
  const int32_t me = rank_of(mesh);
  float one = 1, got = 0;

  OK(dm_group_start(mesh));
  OK(dm_send(mesh, NULL, &one, 1, DM_FLOAT32, 1 - me, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "peer is 7", dm_recv(mesh, NULL, &got, 1, DM_FLOAT32, 7, NULL));
  FAILS(DM_STATUS_INVALID_ARGUMENT, "peer is 7", dm_group_end(mesh));
  sums(mesh);

  /* Here the refused operation is in an inner group, and the operation before it has another
   * dimension's name. */
  OK(dm_group_start(mesh));
  OK(dm_group_start(mesh));
  FAILS(DM_STATUS_NOT_FOUND, "nowhere", dm_recv(mesh, "nowhere", &got, 1, DM_FLOAT32, 0, NULL));
  OK(dm_group_end(mesh));
  FAILS(DM_STATUS_NOT_FOUND, "nowhere", dm_group_end(mesh));
  sums(mesh);

  /* A handle that was freed inside the group names no mesh any more. Its dm_group_end is refused,
   * and ends the group without its operations. */
  dm_mesh *copy = NULL, *freed = NULL;
  OK(dm_clone(mesh, &copy));
  freed = copy;
  OK(dm_group_start(copy));
  OK(dm_send(copy, NULL, &one, 1, DM_FLOAT32, 1 - me, NULL));
  dm_free(copy);
  GIVES(DM_STATUS_INVALID_HANDLE, dm_recv(freed, NULL, &got, 1, DM_FLOAT32, 1 - me, NULL));
  GIVES(DM_STATUS_INVALID_HANDLE, dm_group_end(freed));
  GIVES(DM_STATUS_INVALID_STATE, dm_group_end(mesh));
  sums(mesh);

  /* A freed handle in an inner group fails the whole group. */
  OK(dm_group_start(mesh));
  OK(dm_send(mesh, NULL, &one, 1, DM_FLOAT32, 1 - me, NULL));
  OK(dm_group_start(mesh));
  GIVES(DM_STATUS_INVALID_HANDLE, dm_group_end(freed));
  FAILS(DM_STATUS_INVALID_HANDLE, "is not a live dm_mesh", dm_group_end(mesh));
  sums(mesh);

  /* The program's error path does not call dm_group_end. */
  OK(dm_group_start(mesh));
  /* The other rank may have aborted already. */
  if (dm_send(mesh, NULL, &one, 1, DM_FLOAT32, 1 - me, NULL) != DM_STATUS_OK) CHECK(strstr(dm_last_error(), "aborted") != NULL);
  GIVES(DM_STATUS_INVALID_ARGUMENT, dm_recv(mesh, NULL, &got, 1, DM_FLOAT32, -1, NULL));
  OK(dm_abort(mesh));
  dm_mesh *next = fresh();
  sums(next);
  GIVES(DM_STATUS_ABORTED, dm_group_end(mesh));
  sums(next);
  OK(dm_finalize(next, NULL));
  dm_free(next);
  dm_free(mesh);
  return finish();
}
