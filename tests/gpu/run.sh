#!/usr/bin/env bash
# Runs libdevicemesh on real NCCL, on one GPU or several, under one setting of NCCL, and writes what
# came of it case by case. part.sh runs the lists for a first day. See README.md beside this file.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: run.sh [options]
  --ranks "1 2 4 8"   numbers of ranks
  --only NAME         only this case (may be given again); --list names them
  --deadline SECONDS  each case is ended after so long (120; some have more, in proportion)
  --budget SECONDS    all together; a case that does not fit is skipped
  --out DIR           where results.tsv, results.md and logs.tar go (target/gpu/results)
  --seen DIR          results of an earlier run: its cases are not run again (may be given again)
  --again             runs also what DIR of --out has a verdict for
  --setting NAME      sockets, cumem, cumem-host, multirank, multirank-docker, native, native-docker
  --native            the same as --setting native: nothing of NCCL's is set, a GPU for each rank
  --nccl NAME         the libnccl.so.2 to use: a path, "machine", or a release of the packed folder
  --set NAME=VALUE    one more environment variable for all ranks (may be given again)
  --dry-run           without a GPU: the host engine on host memory, the same programs
  --dry-run=driver    the same, but by the GPU's way: a stand-in for the CUDA driver, libhostccl.so in NCCL's place
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# A packed folder has the programs beside this script; a checkout has them in target/gpu.
if [[ -x $here/probe ]]; then build=$here root=
else root=$(cd "$here/../.." && pwd) && build=${DM_GPU_BUILD:-$root/target/gpu}; fi
cases=(inventory info collectives meshes check abort kill alone graph stream_wait shrink recover memory host_pointer cost adopt lazy config
  overhead renew uneven sanitizer torch adopt_torch other_copy torch_streams torch_graph jax jax_buffers jax_mismatch bench hsdp_tp rust)
command_line="tests/gpu/run.sh ${*@Q}"

mode=gpu ranks="1 2 4 8" deadline=120 budget=0 out=$build/results only=() nccl=${DM_CCL_LIBRARY:-machine} more=() seen=() again=0 setting=sockets
while (($#)); do
  case $1 in
    --ranks) ranks=${2:?} && shift ;;
    --only) only+=("${2:?}") && shift ;;
    --deadline) deadline=${2:?} && shift ;;
    --budget) budget=${2:?} && shift ;;
    --out) out=${2:?} && shift ;;
    --seen) seen+=("${2:?}") && shift ;;
    --again) again=1 ;;
    --setting) setting=${2:?} && shift ;;
    --native) setting=native ;;
    --nccl) nccl=${2:?} && shift ;;
    --set) more+=("${2:?}") && shift ;;
    --dry-run) mode=host ;;
    --dry-run=driver) mode=driver ;;
    --list) printf '%s\n' "${cases[@]}" && exit ;;
    *) usage && exit 2 ;;
  esac
  shift
done
for name in ${only+"${only[@]}"}; do
  [[ " ${cases[*]} " == *" $name "* ]] || { echo "no case $name; --list names them" && exit 2; }
done

[[ -x $build/probe ]] || "$here/pack.sh" --no-nccl || exit 1
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
# What a case prints goes to running.log first, which is left behind when this is killed.
output=$out/running.log running=
# A case that is ended early takes its ranks along: the tool ends them when it is told to end.
# shellcheck disable=SC2329  # called by the trap
stop() { [[ -z $running ]] || kill -TERM "$running" 2>/dev/null; }
trap stop EXIT
trap 'exit 130' INT TERM
python=${DM_GPU_PYTHON:-python3}

# ---- the settings ----

# NCCL refuses two ranks of one host on one GPU. Up to 2.29 every process therefore says that it is
# another host, and they talk through sockets on the loopback. Since 2.30 "multirank" lets ranks of
# one host share a GPU, with the transports that ranks of one host have. Few blocks, because the
# processes take turns on the GPU.
shared=(NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_RAS_ENABLE=0 NCCL_MAX_CTAS=2 NCCL_DEBUG=WARN)
apart=("${shared[@]}" NCCL_NET=Socket NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0)
# shellcheck disable=SC2016  # for the rank's own shell
own_host=(bash -c 'export NCCL_HOSTID="r$RANK"; exec "$@"' rank)
case $setting in
  sockets) nccl_settings=("${apart[@]}" NCCL_CUMEM_ENABLE=0) as_own_host=("${own_host[@]}") ;;
  cumem) nccl_settings=("${apart[@]}" NCCL_CUMEM_ENABLE=1 NCCL_CUMEM_HOST_ENABLE=0) as_own_host=("${own_host[@]}") ;;
  cumem-host) nccl_settings=("${apart[@]}" NCCL_CUMEM_ENABLE=1 NCCL_CUMEM_HOST_ENABLE=1) as_own_host=("${own_host[@]}") ;;
  multirank) nccl_settings=("${shared[@]}" NCCL_MULTI_RANK_GPU_ENABLE=1) as_own_host=() ;;
  multirank-docker) nccl_settings=("${shared[@]}" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_CUMEM_HOST_ENABLE=0) as_own_host=() ;;
  native) nccl_settings=(NCCL_DEBUG=WARN) as_own_host=() ;;
  native-docker) nccl_settings=(NCCL_DEBUG=WARN NCCL_CUMEM_HOST_ENABLE=0) as_own_host=() ;;
  *) echo "no setting $setting" && usage && exit 2 ;;
esac
nccl_settings+=(${more+"${more[@]}"})

# ---- the machine ----

# NCCL comes with distributions, CUDA's packages, or as a Python wheel.
find_nccl() {
  local candidate
  candidate=$(ldconfig -p 2>/dev/null | awk '/libnccl\.so\.2 /{print $NF; exit}')
  [[ -n $candidate ]] || candidate=$("$python" - 2>/dev/null <<'PYTHON'
import glob, importlib.util
for folder in importlib.util.find_spec("nvidia").submodule_search_locations:
    print(*glob.glob(folder + "/nccl/lib/libnccl.so.2")[:1], sep="\n")
PYTHON
  )
  printf '%s' "${candidate%%$'\n'*}"
}

# A release of the packed folder, unpacked at its first use.
unpack_nccl() { # RELEASE
  local library=$build/nccl/libnccl-$1.so.2
  if [[ ! -f $library && -f $library.xz ]]; then
    { xz -dc "$library.xz" 2>/dev/null || "$python" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$library.xz"; } \
      >"$library.part" && mv "$library.part" "$library"
  fi
  printf '%s' "$library"
}

version_text() { # 22809 -> 2.28.9, 13000 -> 13.0
  if ((${1:-0} >= 20000)); then echo "$(($1 / 10000)).$(($1 / 100 % 100)).$(($1 % 100))"
  else echo "$((${1:-0} / 1000)).$((${1:-0} % 1000 / 10))"; fi
}

asked=$nccl
case $mode in
  gpu)
    export DM_DEVICE=cuda
    case $nccl in
      machine) nccl=$(find_nccl) ;;
      */*) ;;
      *) nccl=$(unpack_nccl "$nccl") ;;
    esac
    ;;
  host) export DM_DEVICE=cpu && nccl=$build/libhostccl.so ;;
  driver)
    export DM_DEVICE=cuda DM_GPU_STANDIN=1 LD_LIBRARY_PATH=$build/standin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    nccl=$build/libhostccl.so
    ;;
esac
export DM_CCL_LIBRARY=$nccl DM_LIBRARY
DM_LIBRARY=$(echo "$build"/libdevicemesh.so.[0-9]*.[0-9]*)
packages=$build/python handlers=$build/libdevicemesh_jax.so
[[ -d $packages || -z $root ]] || packages=$root/bindings/python:$root/bindings/jax handlers=$root/target/jax/libdevicemesh_jax.so

probed=$("$build/probe")
has_gpu=$?
value() { sed -n "s/^$1=//p" <<<"$probed" | head -n 1; }
nccl_version=$(value NCCL_VERSION) devices=$(value DEVICES)
why=
if [[ $mode == gpu ]]; then
  if ((has_gpu != 0)); then why="no GPU: $(value WHY)"
  elif [[ -z $nccl_version ]]; then why="no NCCL $asked: $(value NCCL_WHY); say where libnccl.so.2 is with --nccl"
  elif [[ $setting == multirank* ]] && ((nccl_version < 23000)); then why="NCCL $(version_text "$nccl_version") is older than 2.30"; fi
fi
machine="$(uname -m), $(nproc) cores, Linux $(uname -r); devices: ${devices:-0} x $(value DEVICE)"
driver_version="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) (CUDA $(version_text "$(value CUDA_DRIVER_VERSION)"))"
release=$(version_text "${nccl_version:-0}")
[[ $mode == gpu ]] || release=$asked-$mode

# shellcheck source=tests/gpu/results.sh
. "$here/results.sh"
# shellcheck source=tests/gpu/cases.sh
. "$here/cases.sh"

rm -f "$output"
echo "results: $out/results.tsv and results.md, output of all: $out/logs.tar"
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0 && passed + before > 0))
