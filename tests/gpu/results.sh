# shellcheck shell=bash disable=SC2154  # run.sh reads this file and sets the variables
# How a case is run, and how its verdict, its figures and what it saw are kept. Every case is
# written as soon as it has ended, so a run that is cut off leaves what it has found, and the next
# one goes on behind it.
#
# results.tsv has a line per event, in columns: setting, release, case, ranks, kind, value, text.
# Kinds: began, ok, FAIL, skip; FIGURE and SEEN, which a program printed.

passed=0 failed=0 skipped=0 before=0 began_all=$SECONDS
tsv=$out/results.tsv
touch "$tsv"

record() { # case, ranks, kind, value, text
  local text=${5//$'\t'/ }
  printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$setting" "$release" "$1" "$2" "$3" "$4" "${text//$'\n'/ }" >>"$tsv"
}

# Whether an earlier run has a verdict for this case, or has begun it twice without coming to one.
has_result() { # case, ranks
  local files=("$tsv") folder
  ((again == 0)) || return 1
  for folder in ${seen[@]+"${seen[@]}"}; do [[ ! -f $folder/results.tsv ]] || files+=("$folder/results.tsv"); done
  awk -F'\t' -v setting="$setting" -v release="$release" -v name="$1" -v ranks="$2" '
    $1 == setting && $2 == release && $3 == name && $4 == ranks && $5 ~ /^(ok|FAIL)$/ { found = 1 }
    END { exit !found }' "${files[@]}"
}

times_begun() { # case, ranks: in this folder and the earlier ones
  local files=("$tsv") folder
  for folder in ${seen[@]+"${seen[@]}"}; do [[ ! -f $folder/results.tsv ]] || files+=("$folder/results.tsv"); done
  awk -F'\t' -v setting="$setting" -v release="$release" -v name="$1" -v ranks="$2" '
    $1 == setting && $2 == release && $3 == name && $4 == ranks { if ($5 == "began") ++open; else if ($5 != "FIGURE" && $5 != "SEEN") open = 0 }
    END { print open + 0 }' "${files[@]}"
}

# The tables for docs/gpu-results.md, of everything that this folder has.
results() {
  {
    case $mode in
      gpu) echo "## $(value DEVICE), $(date -u +%Y-%m-%d)" ;;
      *) echo "## Dry run, $(date -u +%Y-%m-%d): nothing here ran on a GPU" ;;
    esac
    echo
    echo "- machine: $machine"
    ((has_gpu != 0)) || echo "- driver: $driver_version"
    echo "- libdevicemesh: commit $(cat "$build/commit")"
    echo "- command (the last): \`$command_line\`"
    echo "- each rank's environment under the setting $setting: \`${nccl_settings[*]}${as_own_host:+ NCCL_HOSTID=r\$RANK}\`"
    echo
    awk -F'\t' '$5 ~ /^(ok|FAIL|skip)$/ { last[$1 FS $2 FS $3 FS $4] = $5 } END { for (key in last) ++count[last[key]]
      printf "%d passed, %d failed, %d skipped.\n", count["ok"], count["FAIL"], count["skip"] }' "$tsv"
    echo
    echo "| case | setting | NCCL | verdict | s | |"
    echo "|---|---|---|---|---|---|"
    # The last verdict of each case, in the order in which the cases first came.
    awk -F'\t' '$5 ~ /^(ok|FAIL|skip)$/ { key = $1 FS $2 FS $3 FS $4; if (!(key in line)) order[++n] = key; gsub(/\|/, "\\|", $7)
      line[key] = sprintf("| %s x%s | %s | %s | %s | %s | %s |", $3, $4, $1, $2, $5, $6, $7) } END { for (at = 1; at <= n; ++at) print line[order[at]] }' "$tsv"
    echo
    echo "| ranks | setting | NCCL | figure | value |"
    echo "|---|---|---|---|---|"
    awk -F'\t' '$5 == "FIGURE" { printf "| x%s | %s | %s | %s | %s |\n", $4, $1, $2, $7, $6 }' "$tsv"
    echo
    echo "| case | setting | NCCL | seen |"
    echo "|---|---|---|---|"
    awk -F'\t' '$5 == "SEEN" { gsub(/\|/, "\\|", $7); printf "| %s x%s | %s | %s | %s: %s |\n", $3, $4, $1, $2, $6, $7 }' "$tsv"
  } >"$out/results.md.part"
  mv "$out/results.md.part" "$out/results.md"
}

verdict() { # ok|FAIL|skip, case, ranks, seconds, text
  case $1 in ok) ((++passed)) ;; FAIL) ((++failed)) ;; *) ((++skipped)) ;; esac
  printf '%-4s %s x%s (%s s)%s\n' "$1" "$2" "$3" "$4" "${5:+: $5}"
  record "$2" "$3" "$1" "$4" "${5:-}"
  results
}

wanted() { [[ -z ${only+x} || ${#only[@]} -eq 0 || " ${only[*]} " == *" $1 "* ]]; }

# Keeps what the case printed under its own name in logs.tar.
keep_log() { # name
  local name=$setting.$release.$1.log
  mv "$output" "$out/$name"
  tar -C "$out" -rf "$out/logs.tar" "$name" 2>/dev/null
  rm -f "${out:?}/$name"
}

# Runs one case: CASE RANKS SECONDS COMMAND... The caller may set these variables: settings (more of
# the environment), launch (words before the command), expect (the exit code), grace (how long the
# others may go on after the first failure), pattern and lines (so many lines like pattern must have
# come), needs (a reason to skip the case), variant (a second case of this name: graph.abort).
check() {
  local case=$1 count=$2 limit=$3 label="$1${variant:+.$variant}" left=$((budget - SECONDS + began_all)) began ended code=0 text='' begun
  shift 3
  wanted "$case" || return 0
  if has_result "$label" "$count"; then ((++before)) && return; fi
  if [[ -n $why ]]; then verdict skip "$label" "$count" 0 "$why" && return; fi
  if [[ -n ${needs:-} ]]; then verdict skip "$label" "$count" 0 "$needs" && return; fi
  # The benchmark is of the host engine.
  if [[ $mode == gpu && $setting == native* && $case != bench ]] && ((count > devices)); then
    verdict skip "$label" "$count" 0 "native is for a GPU for each rank: $count ranks, $devices GPUs" && return
  fi
  if ((budget > 0 && left <= 0)); then verdict skip "$label" "$count" 0 "the budget of $budget s is used up" && return; fi
  begun=$(times_begun "$label" "$count")
  if ((begun >= 2)); then verdict FAIL "$label" "$count" 0 "two runs were cut off in this case" && return; fi
  ((budget == 0 || limit <= left)) || limit=$left
  record "$label" "$count" began "$limit" "$*"
  began=$(date +%s.%N)
  printf '==== %s x%s: %s\n' "$label" "$count" "$*" >"$output"
  # The tool's own time-out ends the ranks in order; the outer one is for the tool itself.
  env "${nccl_settings[@]}" ${settings[@]+"${settings[@]}"} timeout --kill-after=10 $((limit + 15)) \
    "$build/devicemesh" run -n "$count" --timeout "$limit" --grace-period 5 --failure-grace "${grace:-15}" -- ${launch[@]+"${launch[@]}"} "$@" >>"$output" 2>&1 </dev/null &
  running=$!
  wait "$running" || code=$?
  running=
  ended=$(awk -v from="$began" -v to="$(date +%s.%N)" 'BEGIN { printf "%.1f", to - from }')
  if ((code == 124 && limit == left)); then text="ended with the budget of $budget s" code=77
  elif ((code == 77)); then text=$(sed -n 's/^.*WHY=//p' "$output" | head -n 1)
  elif ((code != ${expect:-0})); then text="exit code $code instead of ${expect:-0}; $(grep -v 'FIGURE|\|SEEN|' "$output" | tail -n 5 | tr '\n' ' ')"
  elif [[ -n ${pattern:-} ]] && (($(grep -c "$pattern" "$output") != ${lines:-0})); then
    text="$(grep -c "$pattern" "$output") lines like «$pattern» instead of ${lines:-0}"
  fi
  # Pipes and no process substitution, which needs /dev/fd.
  grep '^FIGURE|' "$output" | while IFS='|' read -r _ what number unit; do record "$label" "$count" FIGURE "$number $unit" "$what"; done
  grep '^SEEN|' "$output" | while IFS='|' read -r _ what said; do record "$label" "$count" SEEN "$what" "$said"; done
  printf '==== exit code %s after %s s\n' "$code" "$ended" >>"$output"
  keep_log "$label.x$count"
  if ((code == 77)); then verdict skip "$label" "$count" "$ended" "$text"
  elif [[ -n $text ]]; then verdict FAIL "$label" "$count" "$ended" "$text"
  else verdict ok "$label" "$count" "$ended"; fi
}

each() { # CASE "LEAST MOST" FACTOR COMMAND...: for the numbers of ranks within these
  local case=$1 least=${2% *} most=${2#* } factor=$3 n
  shift 3
  for n in $ranks; do
    ((n < least || n > most)) || check "$case" "$n" $((deadline * factor)) "$@"
  done
}
