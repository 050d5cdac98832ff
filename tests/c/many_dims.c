/* A mesh of thousands of dimensions: dm_init ends soon after its ranks have agreed. */
#include "check.h"

int main(void)
{
  enum { kDims = 3000 };
  static int32_t shape[kDims];
  dm_init_options options = DM_INIT_OPTIONS_INIT;
  dm_mesh *mesh = NULL;
  for (size_t index = 0; index < kDims; ++index) shape[index] = 1;
  const double began = seconds_now();
  REQUIRE(dm_init("cpu", shape, kDims, NULL, &options, &mesh));
  /* It takes about a second without optimisation. Where the work grew with the cube of the number
   * of dimensions, it took 19 seconds. */
  CHECK(seconds_now() - began < 4);
  OK(dm_check(mesh, "dim_2999"));
  OK(dm_finalize(mesh, NULL));
  dm_free(mesh);
  return finish();
}
