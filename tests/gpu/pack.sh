#!/usr/bin/env bash
# Builds what run.sh and part.sh need into one folder, target/gpu, to be run here or carried to a
# machine that has a GPU but no Rust, no compiler, no registry and no checkout: the library, the
# tool, the engine, the programs, the Python packages, the XLA handlers, the scripts, and releases
# of NCCL that are cut to one architecture. Building needs nothing of CUDA.
#
#   pack.sh [--no-nccl] [--no-python] [--no-rust]
#
# DM_GPU_BUILD: another folder. DM_LIB_DIR: where cargo's libraries are (they are built first when
# that is target/release). DM_GPU_ARCHITECTURE: 90 (H100, H200). DM_GPU_NCCL: the wheels.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${DM_GPU_BUILD:-$root/target/gpu}
release=${DM_LIB_DIR:-$root/target/release}
architecture=${DM_GPU_ARCHITECTURE:-90}
# The machine's own NCCL (the wheel beside PyTorch and JAX) is used as well, and is not packed.
wheels=${DM_GPU_NCCL:-nvidia-nccl-cu13==2.32.3 nvidia-nccl-cu12==2.22.3 nvidia-nccl-cu12==2.18.3}
with_nccl=1 with_python=1 with_rust=1
for argument; do
  case $argument in
    --no-nccl) with_nccl=0 ;;
    --no-python) with_python=0 ;;
    --no-rust) with_rust=0 ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 2 ;;
  esac
done
if [[ $release == "$root/target/release" ]]; then
  cargo build --release --quiet --manifest-path "$root/Cargo.toml"
fi
if ((with_rust)); then
  # With the feature cargo makes another libdevicemesh.so. In a folder of its own it does not take the
  # place of the one in target/release.
  cargo build --release --quiet --manifest-path "$root/Cargo.toml" --target-dir "$root/target/gpu-rust" --example all_reduce --features cudarc
fi

mkdir -p "$build/standin"
for file in "$release"/libdevicemesh.so.[0-9]*.[0-9]* "$release/libhostccl.so" "$release/devicemesh"; do
  # Without symbols and debugging information: the larger part of each file.
  strip -o "$build/${file##*/}" "$file" 2>/dev/null || cp "$file" "$build/"
done
((!with_rust)) || strip -o "$build/all_reduce" "$root/target/gpu-rust/release/examples/all_reduce"
cp "$root/examples/data/digits.csv" "$here"/*.sh "$here"/*.py "$here/README.md" "$build/"
rm -f "$build/cut_nccl.py"

library=$(basename "$build"/libdevicemesh.so.[0-9]*.[0-9]*)
warnings=(-Wall -Wextra -Wpedantic -Werror)
# shellcheck disable=SC2016  # $ORIGIN is for the loader
link=("-L$build" "-l:$library" '-Wl,-rpath,$ORIGIN' -pthread -ldl -lm)
c=("${CC:-cc}" -std=c11 -D_GNU_SOURCE -O2 "${warnings[@]}" "-I$root/include" "-I$root/tests/c")
cxx=("${CXX:-c++}" -std=c++17 -O2 "${warnings[@]}" "-I$root/include")
example=("${cxx[@]}" "$root/examples/hsdp_tp.cpp" -static-libstdc++ -static-libgcc -s "${link[@]}")
compilers=()
"${example[@]}" -o "$build/hsdp_tp" & compilers+=($!)
"${example[@]}" -DDM_EXAMPLE_CUDA -o "$build/hsdp_tp_cuda" & compilers+=($!)
"${cxx[@]}" -fPIC -shared -static-libstdc++ -static-libgcc -Wl,-soname,libcuda.so.1 "$here/standin.cpp" -o "$build/standin/libcuda.so.1" & compilers+=($!)
for source in "$here"/*.c; do
  "${c[@]}" "$source" "${link[@]}" -o "$build/$(basename "$source" .c)"
done
"${CC:-cc}" -std=c11 -O2 "-I$root/include" "$root/benches/peers/ours.c" "${link[@]}" -o "$build/bench_ours"
"${CC:-cc}" -std=c11 -O2 -static "$root/benches/peers/executed.c" -o "$build/bench_executed"
for compiler in "${compilers[@]}"; do wait "$compiler"; done

if ((with_python)); then
  rm -rf "$build/python" && mkdir "$build/python"
  cp -r "$root/bindings/python/devicemesh" "$root/bindings/jax/devicemesh_jax" "$build/python/"
  rm -rf "$build"/python/*/__pycache__ "$build"/python/*/_native
  handlers=$root/target/jax/libdevicemesh_jax.so
  make --silent -C "$root" "${handlers#"$root"/}" >/dev/null
  cp "$handlers" "$build/"
fi
if ((with_nccl)); then
  mkdir -p "$build/nccl"
  for wheel in $wheels; do
    packed=$build/nccl/libnccl-${wheel##*==}.so.2.xz
    [[ ! -f $packed ]] || continue
    path=$(cd "$root/tests" && python3 -c 'import sys; from support.pinned import nccl_wheel; print(nccl_wheel(sys.argv[1]) / "lib/libnccl.so.2")' "$wheel")
    echo "$wheel: $(python3 "$here/cut_nccl.py" "$path" "$build/nccl/cut" "$architecture")"
    # The table of symbols, which the loader does not read, is a fifth of the library.
    strip "$build/nccl/cut"
    xz -9e -T0 -c "$build/nccl/cut" >"$packed.part" && mv "$packed.part" "$packed"
    rm "$build/nccl/cut"
  done
  # A release that a run here has unpacked is not carried.
  rm -f "$build"/nccl/*.so.2
fi
git -C "$root" describe --always --dirty 2>/dev/null >"$build/commit" || echo unknown >"$build/commit"
# The device machine takes 64 MiB, of which the checkout needs about 8.
size=$(du -sk --exclude=results "$build" | cut -f1)
echo "$build: $size KiB"
((size <= 55000)) || { echo "pack.sh: the folder has more than 55,000 KiB: leave out a release by DM_GPU_NCCL" && exit 1; }
