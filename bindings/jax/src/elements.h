// The types of XLA's elements, and the types of the library's as which they travel.

#ifndef DEVICEMESH_JAX_ELEMENTS_H
#define DEVICEMESH_JAX_ELEMENTS_H

#include <cstddef>
#include <optional>

#include "devicemesh.h"
#include "xla/ffi/api/ffi.h"

namespace {

// How one element of XLA's travels.
struct Wire {
  // The element type that the library is told.
  dm_dtype dtype;
  // The number of elements of that type in one element of XLA's.
  size_t parts;
};

// Types that the library reduces, with any operator.
inline std::optional<Wire> reduced(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::S8: return Wire{DM_INT8, 1};
    case xla::ffi::DataType::U8: return Wire{DM_UINT8, 1};
    case xla::ffi::DataType::S32: return Wire{DM_INT32, 1};
    case xla::ffi::DataType::U32: return Wire{DM_UINT32, 1};
    case xla::ffi::DataType::S64: return Wire{DM_INT64, 1};
    case xla::ffi::DataType::U64: return Wire{DM_UINT64, 1};
    case xla::ffi::DataType::F16: return Wire{DM_FLOAT16, 1};
    case xla::ffi::DataType::F32: return Wire{DM_FLOAT32, 1};
    case xla::ffi::DataType::F64: return Wire{DM_FLOAT64, 1};
    case xla::ffi::DataType::BF16: return Wire{DM_BFLOAT16, 1};
    case xla::ffi::DataType::F8E4M3FN: return Wire{DM_FLOAT8E4M3, 1};
    case xla::ffi::DataType::F8E5M2: return Wire{DM_FLOAT8E5M2, 1};
    default: return std::nullopt;
  }
}

// Types that the library reduces as another type, with this operator. A complex number is two
// floats, which are summed separately. A truth value is a byte with the value 0 or 1.
inline std::optional<Wire> reduced(xla::ffi::DataType type, dm_op op) {
  const bool sums = op == DM_SUM || op == DM_AVG, compares = op == DM_MAX || op == DM_MIN;
  switch (type) {
    case xla::ffi::DataType::C64: return sums ? std::optional<Wire>({DM_FLOAT32, 2}) : std::nullopt;
    case xla::ffi::DataType::C128: return sums ? std::optional<Wire>({DM_FLOAT64, 2}) : std::nullopt;
    case xla::ffi::DataType::PRED: return compares ? std::optional<Wire>({DM_UINT8, 1}) : std::nullopt;
    default: return reduced(type);
  }
}

// Types that the library moves. Elements that it does not know travel as their parts or bytes.
inline std::optional<Wire> moved(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::C64: return Wire{DM_FLOAT32, 2};
    case xla::ffi::DataType::C128: return Wire{DM_FLOAT64, 2};
    case xla::ffi::DataType::S16: return Wire{DM_INT8, 2};
    case xla::ffi::DataType::U16: return Wire{DM_UINT8, 2};
    case xla::ffi::DataType::PRED: return Wire{DM_UINT8, 1};
    case xla::ffi::DataType::F8E4M3:
    case xla::ffi::DataType::F8E4M3B11FNUZ:
    case xla::ffi::DataType::F8E5M2FNUZ:
    case xla::ffi::DataType::F8E4M3FNUZ:
    case xla::ffi::DataType::F8E3M4:
    case xla::ffi::DataType::F8E8M0FNU: return Wire{DM_INT8, 1};
    default: return reduced(type);
  }
}

}  // namespace

#endif
