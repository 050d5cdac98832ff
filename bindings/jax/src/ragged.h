// The collectives whose blocks have a length for each rank. Lengths and offsets count rows: steps
// along the first axis.

#ifndef DEVICEMESH_JAX_RAGGED_H
#define DEVICEMESH_JAX_RAGGED_H

#include <string>
#include <utility>
#include <vector>

#include "call.h"

namespace {

// The number of elements of the library's in one row of a buffer: a step along its first axis.
size_t row_of(const Operand &buffer, const Call &call) {
  size_t row = call.parts;
  for (size_t axis = 1; axis < buffer.dimensions().size(); axis++) row *= static_cast<size_t>(buffer.dimensions()[axis]);
  return row;
}

// The attribute counts, in elements of the library's.
std::vector<size_t> counted(Call &call, size_t row) {
  std::vector<size_t> counts;
  for (int64_t rows : call.list("counts")) counts.push_back(static_cast<size_t>(rows) * row);
  return counts;
}

ffi::Error all_gatherv(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    const std::vector<size_t> counts = counted(call, row_of(send, call));
    return library.dm_all_gatherv(call.mesh, call.dim, send.untyped_data(), recv->untyped_data(), counts.data(),
                                  nullptr, call.dtype, call.stream);
  });
}

ffi::Error reduce_scatterv(Origin origin, ffi::Dictionary attributes, Operand send, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  return call.run([&] {
    const std::vector<size_t> counts = counted(call, row_of(send, call));
    return library.dm_reduce_scatterv(call.mesh, call.dim, send.untyped_data(), counts.data(), nullptr,
                                      recv->untyped_data(), call.dtype, call.op(), call.stream);
  });
}

// Blocks of rows: where they begin, and how many rows they have.
struct RowBlocks {
  std::vector<size_t> starts, counts;

  // Reads both lists, and compares them with the number of rows of the buffer. row is the number of
  // elements of a row.
  ffi::Error read(Call &call, const char *what, const Operand &offsets, const Operand &sizes, int64_t rows, size_t row) {
    std::vector<int64_t> first, length;
    for (auto [numbers, from] : {std::pair(&first, &offsets), std::pair(&length, &sizes)}) {
      if (ffi::Error wrong = call.read(*from, *numbers); wrong.failure()) return wrong;
    }
    if (first.size() != static_cast<size_t>(call.size) || length.size() != first.size()) {
      return ffi::Error::InvalidArgument(std::string(what) + ": there must be one offset and one size for each rank");
    }
    for (size_t rank = 0; rank < first.size(); rank++) {
      if (length[rank] < 0 || (length[rank] > 0 && (first[rank] < 0 || first[rank] > rows - length[rank]))) {
        return ffi::Error::InvalidArgument(
            "the block of rank " + std::to_string(rank) + " has " + std::to_string(length[rank]) + " rows from row " +
            std::to_string(first[rank]) + " on, but " + what + " has " + std::to_string(rows) + " rows");
      }
      starts.push_back(length[rank] > 0 ? static_cast<size_t>(first[rank]) * row : 0);
      counts.push_back(static_cast<size_t>(length[rank]) * row);
    }
    return ffi::Error::Success();
  }
};

// recv begins as the output that the program has given, and keeps the rows that nobody sends.
ffi::Error all_to_allv(Origin origin, ffi::Dictionary attributes, Operand send, Operand, Operand send_offsets,
                       Operand send_sizes, Operand recv_offsets, Operand recv_sizes, Token, Result recv, TokenOut) {
  Call call(origin, attributes, send);
  if (call.error.failure()) return call.error;
  const size_t row = row_of(send, call);
  RowBlocks sends, receives;
  if (ffi::Error wrong = sends.read(call, "the operand", send_offsets, send_sizes, send.dimensions()[0], row);
      wrong.failure())
    return wrong;
  if (ffi::Error wrong = receives.read(call, "the output", recv_offsets, recv_sizes, recv->dimensions()[0], row);
      wrong.failure())
    return wrong;
  return call.run([&] {
    return library.dm_all_to_allv(call.mesh, call.dim, send.untyped_data(), sends.counts.data(), sends.starts.data(), recv->untyped_data(),
                                  receives.counts.data(), receives.starts.data(), call.dtype, call.stream);
  });
}

}  // namespace

#endif
