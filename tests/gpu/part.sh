#!/usr/bin/env bash
# One part of a first day on a GPU: a list of settings and cases that ends within ten minutes, with
# what teaches most first. A part that was cut off goes on where it stopped.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: part.sh PART [options]
  PART              a, b, c, d, bench: a machine with one GPU; eight-a, eight-b, eight-c: with eight
  --out DIR         where the results go (results/PART beside the programs)
  --seen DIR        results of an earlier part or of this one: its cases are not run again (may be given again)
  --seconds N       the part ends itself after so long (540)
  --deadline N      each case is ended after so long (60; some have twice that)
  --list            prints the list of the part and runs nothing
  --dry-run[=driver], --short   without a GPU, as run.sh says; the short form runs few cases
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
part=${1:-} out='' seen=() seconds=540 deadline=60 list=0 short=0 pass=()
case $part in a | b | c | d | bench | eight-a | eight-b | eight-c) shift ;; *) usage && exit 2 ;; esac
while (($#)); do
  case $1 in
    --out) out=${2:?} && shift ;;
    --seen) seen+=(--seen "${2:?}") && shift ;;
    --seconds) seconds=${2:?} && shift ;;
    --deadline) deadline=${2:?} && shift ;;
    --list) list=1 ;;
    --dry-run | --dry-run=driver) pass+=("$1") ;;
    --short) short=1 ;;
    *) usage && exit 2 ;;
  esac
  shift
done
[[ -n $out ]] || out=$here/results/$part
((list)) || mkdir -p "$out" || exit 1
newest=2.32.3 step=
trap '[[ -z $step ]] || kill -TERM "$step" 2>/dev/null' EXIT
trap 'exit 130' INT TERM

# One step: SETTING NCCL "RANKS" CASE...
with() {
  local setting=$1 nccl=$2 ranks=$3 left=$((seconds - SECONDS)) only=() name
  shift 3
  if ((list)); then printf '%-16s NCCL %-8s ranks %-6s %s\n' "$setting" "$nccl" "$ranks" "$*" && return; fi
  for name in "$@"; do
    # The short form keeps one case of each kind: what it is for is the lists and the folder.
    ((short)) && [[ " inventory info config graph shrink jax torch bench " != *" $name "* ]] || only+=(--only "$name")
  done
  ((${#only[@]})) || return 0
  ((left > 0)) || { echo "part $part: $seconds s are used up; left: $setting, NCCL $nccl, $ranks ranks: $*" && return; }
  echo "---- part $part: $setting, NCCL $nccl, $ranks ranks, $left s left"
  "$here/run.sh" --setting "$setting" --nccl "$nccl" --ranks "$ranks" --deadline "$deadline" --budget "$left" --out "$out" \
    ${seen[@]+"${seen[@]}"} ${pass[@]+"${pass[@]}"} "${only[@]}" &
  step=$!
  wait "$step"
  step=
}

case $part in
  # 2 ranks on one GPU, with the NCCL of the machine; then the same with cuMem.
  a)
    with sockets machine 2 inventory info collectives meshes abort kill graph alone stream_wait check adopt config memory host_pointer cost overhead lazy
    with cumem machine 2 info meshes abort alone graph memory collectives
    with cumem-host machine 2 info meshes abort alone memory
    with sockets machine 2 shrink recover sanitizer hsdp_tp
    ;;
  # Python on 2 ranks.
  b)
    with sockets machine 2 torch_streams torch_graph adopt_torch jax jax_buffers jax_mismatch torch
    with sockets "$newest" 2 other_copy jax
    with cumem-host machine 2 torch_streams adopt_torch jax
    ;;
  # The newest NCCL, several ranks on the GPU as one host.
  c)
    with multirank "$newest" 2 info meshes abort kill alone graph stream_wait shrink renew memory collectives
    with multirank "$newest" 4 info meshes uneven abort kill recover alone shrink renew memory
    with multirank-docker "$newest" 4 info meshes abort alone kill
    with sockets "$newest" 2 info meshes abort kill shrink renew adopt config
    with multirank "$newest" 4 cost check hsdp_tp
    ;;
  # Older releases; then more ranks.
  d)
    with sockets 2.18.3 2 info meshes abort kill graph alone collectives adopt config memory
    with sockets 2.22.3 2 info meshes abort kill graph alone collectives adopt config memory
    with sockets machine 4 info meshes abort kill collectives cost memory check
    with sockets machine 8 info meshes abort kill recover cost memory
    with sockets machine "4 8" hsdp_tp
    ;;
  # The host engine with a core for each rank.
  bench) with native machine "2 4 8 16" bench ;;
  # A GPU for each rank: nothing of NCCL's is set.
  eight-a)
    with native machine 8 inventory info collectives meshes abort alone graph kill stream_wait memory shrink check cost
    with native machine 2 info abort alone graph
    with native-docker machine 8 info abort alone kill
    with native machine 8 adopt config lazy overhead hsdp_tp
    ;;
  eight-b)
    with native machine 8 torch_streams torch_graph adopt_torch jax jax_mismatch jax_buffers torch
    with native "$newest" 8 other_copy info meshes abort kill alone stream_wait shrink memory
    with native "$newest" 4 renew graph
    ;;
  eight-c)
    with native 2.18.3 8 info meshes abort kill alone graph memory
    with native 2.22.3 8 info meshes abort kill alone graph memory
    with multirank "$newest" 8 info meshes abort
    with native machine "2 4" collectives check cost
    with native machine "2 4 8 16" bench
    ;;
esac
((list)) && exit
# The last verdict of each case counts.
awk -F'\t' -v part="$part" -v seconds="$SECONDS" '$5 ~ /^(ok|FAIL|skip)$/ { last[$1 FS $2 FS $3 FS $4] = $5 } END {
  for (key in last) ++count[last[key]]
  printf "part %s: ended after %d s; %d ok, %d FAIL, %d skip\n", part, seconds, count["ok"], count["FAIL"], count["skip"]
  exit count["FAIL"] > 0 || count["ok"] == 0 }' "$out/results.tsv"
