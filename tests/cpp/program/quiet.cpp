// The file without exceptions.
#include "parts.hpp"

const char *quiet_name(dm_mesh *handle, std::size_t index)
{
  static std::string text;
  dm::nothrow::Mesh mesh(handle);
  const dm::Result<std::string> name = mesh.dim_name(index);
  text = name ? *name : name.error().what();
  static_cast<void>(mesh.release());  // the caller owns the handle
  return text.c_str();
}
