#!/bin/sh
# tool_files.sh TOOL FOLDER: writes the files that the tool prints about itself, for installing: its
# man pages in FOLDER/man, and its completions in FOLDER/share, where shells look for them. It leaves
# out what this tool does not have, and everything where the tool cannot run (because it was built
# for another machine).
set -eu
tool=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder"

# write FILE ARGUMENT...: calls the tool with these arguments, and keeps its output in FILE if the
# tool succeeds.
write() {
  file=$folder/$1
  shift
  mkdir -p "$(dirname "$file")"
  "$tool" "$@" >"$file" 2>/dev/null || rm -f "$file"
}

mkdir -p "$folder/man/man1"
"$tool" man --dir "$folder/man/man1" >/dev/null 2>&1 || rm -f "$folder/man/man1"/*
write share/bash-completion/completions/devicemesh completions bash
write share/zsh/site-functions/_devicemesh completions zsh
write share/fish/vendor_completions.d/devicemesh.fish completions fish
find "$folder" -mindepth 1 -type d -empty -delete
