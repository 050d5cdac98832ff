#!/usr/bin/env bash
# Builds what run.sh needs into one folder, target/gpu, to be run here or carried to a machine that has a GPU but no Rust, no compiler and no network. Nothing of
# CUDA is needed for that. DM_GPU_BUILD: another folder; DM_LIB_DIR: where cargo's libraries are (built first when that is target/release).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${DM_GPU_BUILD:-$root/target/gpu}
release=${DM_LIB_DIR:-$root/target/release}
[[ $release != "$root/target/release" ]] || cargo build --release --quiet --manifest-path "$root/Cargo.toml"

mkdir -p "$build/standin"
for file in "$release"/libdevicemesh.so.[0-9]*.[0-9]* "$release/libhostccl.so" "$release/devicemesh"; do
  # Without debugging information: the two thirds that a carried folder can do without.
  strip --strip-debug -o "$build/${file##*/}" "$file" 2>/dev/null || cp "$file" "$build/"
done
cp "$root/examples/data/digits.csv" "$build/"

library=$(basename "$build"/libdevicemesh.so.[0-9]*.[0-9]*)
warnings=(-Wall -Wextra -Wpedantic -Werror)
# shellcheck disable=SC2016  # $ORIGIN is for the loader
link=("-L$build" "-l:$library" '-Wl,-rpath,$ORIGIN' -pthread -ldl -lm)
c=("${CC:-cc}" -std=c11 -D_GNU_SOURCE -O2 "${warnings[@]}" "-I$root/include" "-I$root/tests/c")
cxx=("${CXX:-c++}" -std=c++17 -O2 "${warnings[@]}" "-I$root/include")
example=("${cxx[@]}" "$root/examples/hsdp_tp.cpp" -static-libstdc++ -static-libgcc "${link[@]}")
compilers=()
"${example[@]}" -o "$build/hsdp_tp" & compilers+=($!)
"${example[@]}" -DDM_EXAMPLE_CUDA -o "$build/hsdp_tp_cuda" & compilers+=($!)
"${cxx[@]}" -fPIC -shared -Wl,-soname,libcuda.so.1 "$here/standin.cpp" -o "$build/standin/libcuda.so.1" & compilers+=($!)
for source in "$here"/*.c; do
  "${c[@]}" "$source" "${link[@]}" -o "$build/$(basename "$source" .c)"
done
for compiler in "${compilers[@]}"; do wait "$compiler"; done
git -C "$root" describe --always --dirty 2>/dev/null >"$build/commit" || echo unknown >"$build/commit"
echo "$build: $(du -sk "$build" | cut -f1) KiB"
