#!/usr/bin/env bash
# Runs libdevicemesh on real NCCL with 1, 2, 4 and 8 ranks on one GPU, and writes what came of it as Markdown. See README.md beside this file.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: tests/gpu/run.sh [options]
  --ranks "1 2 4 8"   numbers of ranks
  --only NAME         only this case (may be given again); --list names them
  --deadline SECONDS  each case is ended after so long (120; some have more, in proportion)
  --budget SECONDS    all together; what does not fit is skipped
  --out DIR           where results.md and log.txt go (target/gpu/results)
  --dry-run           without a GPU: the host engine on host memory, the same programs
  --dry-run=driver    the same, but by the GPU's way: a stand-in for the CUDA driver, libhostccl.so in NCCL's place
  --nccl PATH         the libnccl.so.2 to use
  --set NAME=VALUE    one more environment variable for all ranks (may be given again)
TEXT
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${DM_GPU_BUILD:-$root/target/gpu}
cases=(collectives meshes check hsdp_tp abort kill adopt lazy config cost overhead torch adopt_torch multirank sanitizer)
command_line="tests/gpu/run.sh ${*@Q}"

mode=gpu ranks="1 2 4 8" deadline=120 budget=0 out=$build/results only=() nccl=${DM_CCL_LIBRARY:-} more=()
while (($#)); do
  case $1 in
    --ranks) ranks=${2:?} && shift ;;
    --only) only+=("${2:?}") && shift ;;
    --deadline) deadline=${2:?} && shift ;;
    --budget) budget=${2:?} && shift ;;
    --out) out=${2:?} && shift ;;
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

[[ -x $build/probe ]] || "$here/pack.sh" || exit 1
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
log=$out/log.txt figures=$(mktemp) table=$(mktemp) output=$(mktemp) running=
: >"$log"
# What is ended early takes what it started with it: the tool ends its ranks when it is told to end.
# shellcheck disable=SC2329  # called by the trap
stop() {
  [[ -z $running ]] || kill -TERM "$running" 2>/dev/null
  rm -f "$figures" "$table" "$output"
}
trap stop EXIT
trap 'exit 130' INT TERM

# ---- the machine ----

# NCCL comes with distributions, CUDA's packages, or as a Python wheel.
find_nccl() {
  local candidate
  candidate=$(ldconfig -p 2>/dev/null | awk '/libnccl\.so\.2 /{print $NF; exit}')
  [[ -n $candidate ]] || candidate=$(python3 - 2>/dev/null <<'PYTHON'
import glob, importlib.util
for folder in importlib.util.find_spec("nvidia").submodule_search_locations:
    print(*glob.glob(folder + "/nccl/lib/libnccl.so.2")[:1], sep="\n")
PYTHON
  )
  printf '%s' "${candidate%%$'\n'*}"
}

version_text() { # 22809 -> 2.28.9, 13000 -> 13.0
  if ((${1:-0} >= 20000)); then echo "$(($1 / 10000)).$(($1 / 100 % 100)).$(($1 % 100))"
  else echo "$((${1:-0} / 1000)).$((${1:-0} % 1000 / 10))"; fi
}

case $mode in
  gpu)
    export DM_DEVICE=cuda
    [[ -n $nccl ]] || nccl=$(find_nccl)
    ;;
  host) export DM_DEVICE=cpu && nccl=$build/libhostccl.so ;;
  driver)
    export DM_DEVICE=cuda LD_LIBRARY_PATH=$build/standin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    nccl=$build/libhostccl.so
    ;;
esac
export DM_CCL_LIBRARY=$nccl DM_LIBRARY
DM_LIBRARY=$(echo "$build"/libdevicemesh.so.[0-9]*.[0-9]*)

probed=$("$build/probe")
has_gpu=$?
value() { sed -n "s/^$1=//p" <<<"$probed" | head -n 1; }
nccl_version=$(value NCCL_VERSION)
why=
if [[ $mode == gpu ]]; then
  if ((has_gpu != 0)); then why="no GPU: $(value WHY)"
  elif [[ -z $nccl_version ]]; then why="no NCCL: $(value NCCL_WHY); say where libnccl.so.2 is with --nccl"; fi
fi

# Several ranks on one GPU: NCCL refuses that on one host, so every process says that it is another host (which NCCL_HOSTID is for), and they talk through
# sockets on the loopback. Few blocks, because the processes take turns on the GPU. The library says what it warns of, in the log.
nccl_settings=(NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_ENABLE=0
  NCCL_RAS_ENABLE=0 NCCL_MAX_CTAS=2 NCCL_DEBUG=WARN ${more+"${more[@]}"})
# shellcheck disable=SC2016  # for the rank's own shell
as_own_host=(bash -c 'export NCCL_HOSTID="r$RANK"; exec "$@"' rank)

# ---- results and cases ----

passed=0 failed=0 skipped=0 torch=none began_all=$SECONDS

machine="$(uname -m), $(nproc) cores, Linux $(uname -r); device: $(value DEVICE)"
driver_version="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) (CUDA $(version_text "$(value CUDA_DRIVER_VERSION)"))"

# Written anew after every case, so that something is there also when this is ended from outside.
results() {
  {
    case $mode in
      gpu) echo "## $(value DEVICE), $(date -u +%Y-%m-%d)" ;;
      *) echo "## Dry run, $(date -u +%Y-%m-%d): nothing here ran on a GPU" ;;
    esac
    echo
    echo "- machine: $machine"
    ((has_gpu != 0)) || echo "- driver: $driver_version"
    echo "- communicator library: $nccl, version $(version_text "${nccl_version:-0}"); PyTorch: $torch"
    echo "- libdevicemesh: commit $(cat "$build/commit")"
    echo "- command: \`$command_line\`"
    echo "- each rank's environment: \`${nccl_settings[*]} NCCL_HOSTID=r\$RANK\`"
    echo
    echo "$passed passed, $failed failed, $skipped skipped."
    echo
    echo "| case | verdict | s | |"
    echo "|---|---|---|---|"
    cat "$table"
    echo
    echo "| ranks | figure | value |"
    echo "|---|---|---|"
    cat "$figures"
  } >"$out/results.md"
}

verdict() { # ok|FAIL|skip, label, seconds, text
  local text=${4:-}
  case $1 in ok) ((++passed)) ;; FAIL) ((++failed)) ;; *) ((++skipped)) ;; esac
  printf '%-4s %s (%s s)%s\n' "$1" "$2" "$3" "${text:+: $text}"
  printf '| %s | %s | %s | %s |\n' "$2" "$1" "$3" "${text//|/\\|}" >>"$table"
  results
}

wanted() { [[ -z ${only+x} || ${#only[@]} -eq 0 || " ${only[*]} " == *" $1 "* ]]; }

# Runs one case: CASE RANKS SECONDS COMMAND... Variables that the caller may set: settings (more of the environment), launch (what goes before the
# command), expect (the exit code), grace (how long the others may go on after the first failure), lines (so many lines like `pattern` must have come).
check() {
  local case=$1 count=$2 limit=$3 label="$1 x$2" left=$((budget - SECONDS + began_all)) began ended code=0 text=''
  shift 3
  wanted "$case" || return 0
  if [[ -n $why ]]; then verdict skip "$label" 0 "$why" && return; fi
  if ((budget > 0 && left <= 0)); then verdict skip "$label" 0 "the budget of $budget s is used up" && return; fi
  ((budget == 0 || limit <= left)) || limit=$left
  began=$(date +%s.%N)
  # The tool's own time-out ends the ranks in order; the outer one is for the tool itself.
  env "${nccl_settings[@]}" ${settings[@]+"${settings[@]}"} timeout --kill-after=15 $((limit + 30)) \
    "$build/devicemesh" run -n "$count" --timeout "$limit" --grace-period "${grace:-15}" -- ${launch[@]+"${launch[@]}"} "$@" >"$output" 2>&1 </dev/null &
  running=$!
  wait "$running" || code=$?
  running=
  ended=$(awk -v from="$began" -v to="$(date +%s.%N)" 'BEGIN { printf "%.1f", to - from }')
  { printf '==== %s: exit code %s after %s s: %s\n' "$label" "$code" "$ended" "$*" && cat "$output"; } >>"$log"
  if ((code == 124 && limit == left)); then text="ended with the budget of $budget s" code=77
  elif ((code == 77)); then text=$(sed -n 's/^WHY=//p' "$output" | head -n 1)
  elif ((code != ${expect:-0})); then text="exit code $code instead of ${expect:-0}; $(grep -v '^FIGURE' "$output" | tail -n 5 | tr '\n' ' ')"
  elif [[ -n ${pattern:-} ]] && (($(grep -c "$pattern" "$output") != ${lines:-0})); then
    text="$(grep -c "$pattern" "$output") lines like «$pattern» instead of ${lines:-0}"
  fi
  grep '^FIGURE|' "$output" | sed "s/^FIGURE|\(.*\)|\(.*\)|\(.*\)$/| x$count | \1 | \2 \3 |/" >>"$figures"
  torch_version=$(sed -n 's/^TORCH=//p' "$output" | head -n 1)
  [[ -z $torch_version ]] || torch=$torch_version
  if ((code == 77)); then verdict skip "$label" "$ended" "$text"
  elif [[ -n $text ]]; then verdict FAIL "$label" "$ended" "$text"
  else verdict ok "$label" "$ended"; fi
}

each() { # CASE "LEAST MOST" FACTOR COMMAND...: for the numbers of ranks within these
  local case=$1 least=${2% *} most=${2#* } factor=$3 n
  shift 3
  for n in $ranks; do
    ((n < least || n > most)) || check "$case" "$n" $((deadline * factor)) "$@"
  done
}

launch=("${as_own_host[@]}")
each collectives "1 8" 1 "$build/collectives"
each meshes "1 8" 1 "$build/meshes"
for n in $ranks; do
  case $n in 1) shape="1 1 1" ;; 2) shape="1 1 2" ;; 4) shape="1 2 2" ;; 8) shape="2 2 2" ;; *) continue ;; esac
  program=$build/hsdp_tp && [[ $DM_DEVICE == cpu ]] || program=$build/hsdp_tp_cuda
  # shellcheck disable=SC2086  # three words
  pattern='^check: one process gets the same losses' lines=1 check hsdp_tp "$n" $((deadline * 2)) "$program" --data "$build/digits.csv" --shape $shape --check
done
for n in $ranks; do
  case $n in 1) shape=1,1,1 ;; 2) shape=1,1,2 ;; 4) shape=1,2,2 ;; 8) shape=2,2,2 ;; *) continue ;; esac
  pattern='^verified: ' lines=1 check check "$n" "$deadline" "$build/devicemesh" check "$shape" dp,cp,tp --flatten dp,cp=dpcp --device "$DM_DEVICE" \
    --sizes 4B,1MiB --iterations 10 --repeats 3 --timeout "$deadline" --quiet
done
each abort "2 8" 1 "$build/abort"
for n in $ranks; do
  ((n < 2)) || grace=60 expect=137 pattern='^survivor [0-9]* fine$' lines=$((n - 1)) check kill "$n" "$deadline" "$build/kill"
done
each adopt "1 8" 1 "$build/adopt"
each lazy "1 8" 1 "$build/meshes" lazy
# NCCL_MAX_CTAS would override what the configs ask for.
launch=(env -u NCCL_MAX_CTAS "${as_own_host[@]}")
each config "1 8" 1 "$build/config"
launch=("${as_own_host[@]}")
each cost "2 8" 1 "$build/cost" 5
each overhead "1 2" 1 "$build/overhead"
python=${DM_GPU_PYTHON:-python3}
if wanted torch; then
  if [[ -z $why ]] && ! "$python" -c 'import torch' 2>/dev/null; then verdict skip torch 0 "no PyTorch in $python (DM_GPU_PYTHON names another)"
  else each torch "2 8" 1 "$python" "$here/torch_mesh.py"; fi
fi

if wanted adopt_torch; then
  if [[ -z $why && $mode != gpu ]]; then verdict skip adopt_torch 0 "a dry run"
  elif [[ -z $why ]] && ! "$python" -c 'import torch' 2>/dev/null; then verdict skip adopt_torch 0 "no PyTorch in $python (DM_GPU_PYTHON names another)"
  else
    settings=("PYTHONPATH=$here/../../bindings/python")
    each adopt_torch "1 8" 1 "$python" "$here/torch_adopt.py"
    settings=()
  fi
fi

# Since 2.30 NCCL also takes several ranks of one host on a GPU when it is told to.
launch=()
if wanted multirank; then
  if [[ -z $why && $mode != gpu ]]; then verdict skip multirank 0 "a dry run"
  elif [[ -z $why ]] && ((nccl_version < 23000)); then verdict skip multirank 0 "NCCL $(version_text "$nccl_version") is older than 2.30"
  else
    settings=(NCCL_MULTI_RANK_GPU_ENABLE=1)
    each multirank "2 8" 1 "$build/meshes"
    settings=()
  fi
fi

if wanted sanitizer; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null)
  sanitizer=${sanitizer%%$'\n'*}
  if [[ -z $why && $mode != gpu ]]; then verdict skip sanitizer 0 "a dry run"
  elif [[ -z $why && -z $sanitizer ]]; then verdict skip sanitizer 0 "no compute-sanitizer in PATH or /usr/local/cuda*"
  else
    launch=("${as_own_host[@]}" "$sanitizer" --tool memcheck --error-exitcode 99)
    each sanitizer "1 2" 2 "$build/collectives"
  fi
fi

# ---- the end ----

echo "results: $out/results.md, output of all: $log"
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0 && passed > 0))
