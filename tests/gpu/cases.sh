# shellcheck shell=bash disable=SC2154,SC2034
# run.sh reads this file, and results.sh reads the variables that are set here.
# The cases, in the order in which they are run. README.md says what each must show.

launch=(${as_own_host[@]+"${as_own_host[@]}"}) settings=()
no_gpu=
[[ $mode == gpu ]] || no_gpu="a dry run"

shape_of() { # ranks, what separates the sizes: three dimensions
  case $1 in 1) echo "1${2}1${2}1" ;; 2) echo "1${2}1${2}2" ;; 4) echo "1${2}2${2}2" ;; 8) echo "2${2}2${2}2" ;; esac
}

inventory_of_machine() {
  local command
  for command in "nvidia-smi" "nvidia-smi topo -m" "nvidia-smi nvlink -s" "nvidia-smi -q -d COMPUTE,PERFORMANCE,MEMORY" "cat /proc/driver/nvidia/version" \
    "uname -a" "nproc" "lscpu" "free -m" "df -h /dev/shm /tmp" "ulimit -a" "cat /proc/self/status" "ls -l /dev/nvidia*" "ip -brief address" \
    "ldd --version" "nvcc --version" "$python --version" "$python -m pip list" "$build/probe" "ls -l $build/nccl"; do
    printf '\n$ %s\n' "$command"
    bash -c "$command" 2>&1 </dev/null | head -n 400
  done
}

if wanted inventory && ! has_result inventory 1; then
  inventory_of_machine >"$output"
  for name in NCCL_VERSION CUDA_DRIVER_VERSION DEVICES DEVICE COMPUTE_CAPABILITY_MAJOR COMPUTE_CAPABILITY_MINOR VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED \
    HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED HANDLE_TYPE_FABRIC_SUPPORTED MULTICAST_SUPPORTED HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED; do
    [[ -z $(value "$name") ]] || record inventory 1 SEEN "$name" "$(value "$name")"
  done
  keep_log inventory
  # On a machine that has no GPU the list is kept as well, for it may say why.
  if [[ -n $why ]]; then verdict skip inventory 1 0 "$why"; else verdict ok inventory 1 0 "the machine is in logs.tar"; fi
fi
# One small case with everything that NCCL says, for each setting and release.
settings=(NCCL_DEBUG=INFO "NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH,P2P,SHM,NVLS,REG,ALLOC")
for n in $ranks; do
  ((n < 2)) || { check info "$n" "$deadline" "$build/meshes" && break; }
done
settings=()
each collectives "1 8" 1 "$build/collectives"
each meshes "1 8" 1 "$build/meshes"
# In a dry run the processors make the copies of 64 MiB that are meant for a GPU.
repeats=3
[[ $mode == gpu ]] || repeats=1
for n in $ranks; do
  [[ -n $(shape_of "$n" ,) ]] || continue
  pattern='^verified: ' lines=1 check check "$n" "$deadline" "$build/devicemesh" check "$(shape_of "$n" ,)" dp,cp,tp --flatten dp,cp=dpcp --device "$DM_DEVICE" \
    --sizes 4B,1MiB --iterations 10 --repeats "$repeats" --timeout "$deadline" --quiet
done
each abort "2 8" 1 "$build/abort"
for name in kill shrink stream_wait; do
  for n in $ranks; do
    ((n < 2)) || grace=60 expect=137 pattern='^survivor [0-9]* fine$' lines=$((n - 1)) check "$name" "$n" "$deadline" "$build/$name"
  done
done
for name in lose spare; do
  for n in $ranks; do
    [[ $n -ge 2 && ($name == lose || $n -ge 3) ]] || continue
    variant=$name grace=60 expect=137 pattern='^survivor [0-9]* fine$' lines=$((n - 1)) check recover "$n" "$deadline" "$build/recover" "$name"
  done
done
for name in abort destroy aborts; do variant=$name each alone "2 8" 1 "$build/alone" "$name"; done
for name in works abort finalize world making unseen behind; do variant=$name each graph "1 4" 1 "$build/graph" "$name"; done
each memory "1 8" 1 "$build/memory"
for asked in unset 0 1; do
  [[ $asked == unset ]] && settings=() || settings=("DM_CHECK_POINTERS=$asked")
  variant=$asked each host_pointer "1 2" 1 "$build/host_pointer"
done
settings=()
each cost "2 8" 1 "$build/cost" 5
each adopt "1 8" 1 "$build/adopt"
each lazy "1 8" 1 "$build/meshes" lazy
# NCCL_MAX_CTAS would override what the configs ask for.
launch=(env -u NCCL_MAX_CTAS ${as_own_host[@]+"${as_own_host[@]}"})
each config "1 8" 1 "$build/config"
launch=(${as_own_host[@]+"${as_own_host[@]}"})
each overhead "1 2" 1 "$build/overhead"
each renew "2 4" 1 "$build/renew"
# Hosts with two ranks and with one: hangs in NCCL 2.31.2 (nccl#2385).
# shellcheck disable=SC2016  # for the rank's own shell
launch=(bash -c 'export NCCL_HOSTID="h$((RANK / 2))"; exec "$@"' rank)
if [[ $setting == multirank* ]]; then needs=$no_gpu check uneven 3 "$deadline" "$build/meshes"; fi
launch=(${as_own_host[@]+"${as_own_host[@]}"})

if wanted sanitizer; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null)
  sanitizer=${sanitizer%%$'\n'*}
  # NCCL asks the driver for what it may not have, and takes the error as the answer (nccl#727).
  launch=(${as_own_host[@]+"${as_own_host[@]}"} "${sanitizer:-none}" --tool memcheck --report-api-errors no --error-exitcode 99)
  [[ -n $no_gpu || -n $sanitizer ]] || needs="no compute-sanitizer in PATH or /usr/local/cuda*"
  needs=${no_gpu:-${needs:-}} each sanitizer "1 2" 2 "$build/meshes"
  needs='' launch=(${as_own_host[@]+"${as_own_host[@]}"})
fi

# ---- Python ----

settings=("PYTHONPATH=$packages" "DM_JAX_LIBRARY=$handlers" PYTHONDONTWRITEBYTECODE=1)
python_has() { [[ -n $why ]] || "$python" -c "import $1" 2>/dev/null; }
if wanted torch || wanted adopt_torch || wanted other_copy || wanted torch_streams || wanted torch_graph; then
  python_has torch || needs="no PyTorch in $python (DM_GPU_PYTHON names another)"
  each torch "2 8" 1 "$python" "$here/torch_mesh.py"
  needs=${needs:-$no_gpu}
  each torch_streams "2 8" 1 "$python" "$here/torch_streams.py"
  each torch_graph "2 4" 1 "$python" "$here/torch_graph.py"
  each adopt_torch "1 8" 1 "$python" "$here/torch_adopt.py"
  each other_copy "2 2" 1 "$python" "$here/torch_adopt.py" other
  needs=
fi
if wanted jax || wanted jax_buffers || wanted jax_mismatch; then
  python_has jax || needs="no JAX in $python (DM_GPU_PYTHON names another)"
  each jax "2 8" 1 "$python" "$here/jax_ranks.py"
  needs=${needs:-$no_gpu}
  each jax_buffers "2 8" 1 "$python" "$here/jax_ranks.py" buffers
  each jax_mismatch "2 8" 1 "$python" "$here/jax_ranks.py" mismatch
  needs=
fi
settings=()

# ---- speed, and the example ----

# The host engine as `make bench` measures it, with a core for each rank.
if wanted bench; then
  cores=$(nproc)
  # shellcheck disable=SC2016  # for the rank's own shell
  launch=(bash -c 'exec taskset -c "$LOCAL_RANK" "$@"' rank)
  command -v taskset >/dev/null || launch=()
  for n in $ranks; do
    ((n >= 2)) || continue
    ((n <= cores)) || needs="$n ranks need $n cores, there are $cores"
    sizes=4,64,1024,16384,262144,1048576,16777216,67108864 milliseconds=50 operations=all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,send_recv
    [[ $mode == gpu ]] || sizes=4,65536 milliseconds=1 operations=all_reduce
    DM_CCL_LIBRARY='' check bench "$n" $((deadline * 2)) "$build/bench_ours" collectives "$milliseconds" "$operations" float32 "$sizes"
    variant=idle DM_CCL_LIBRARY='' check bench "$n" "$deadline" "$build/bench_ours" idle 1
    variant=start DM_CCL_LIBRARY='' check bench "$n" "$deadline" "$build/bench_executed" "$build/bench_ours" start
    needs=
  done
  launch=(${as_own_host[@]+"${as_own_host[@]}"})
fi
for n in $ranks; do
  [[ -n $(shape_of "$n" ' ') ]] || continue
  program=$build/hsdp_tp && [[ $DM_DEVICE == cpu ]] || program=$build/hsdp_tp_cuda
  # shellcheck disable=SC2046  # three words
  pattern='^check: one process gets the same losses' lines=1 check hsdp_tp "$n" $((deadline * 2)) "$program" --data "$build/digits.csv" --shape $(shape_of "$n" ' ') --check
done
# Rust: cudarc's slices and streams. The stand-in driver has too few functions for cudarc.
[[ -x $build/all_reduce && $mode != driver ]] || needs="no all_reduce in $build, or a dry run"
pattern='elements are .*, 0 are not' ; for n in $ranks; do lines=$n check rust "$n" "$deadline" "$build/all_reduce"; done
pattern='' needs=''
