#!/bin/sh
# install.sh install|uninstall: puts a finished build into a prefix, or removes exactly that.
# `make install` and `make uninstall` call it with the variables below. CMakeLists.txt has the same
# list of files for CMake, and tests/test_install.py compares the two.
#
#   RELEASE                         cargo's folder with the libraries and the tool
#   TOOL                            for install: a tool that prints its man page and completions here
#   DESTDIR PREFIX LIBDIR INCLUDEDIR BINDIR DATADIR MANDIR   as make's (GNU coding standards); all but DESTDIR absolute
set -eu
action=$1
case $action in
  install | uninstall) ;;
  *) echo "install.sh: unknown action $action: it is install or uninstall" >&2 && exit 2 ;;
esac
for variable in PREFIX LIBDIR INCLUDEDIR BINDIR DATADIR MANDIR; do
  eval "value=\$$variable"
  case $value in
    /*) ;;
    *) echo "install.sh: $variable is $value, and must begin with / (a shell does not replace ~ there: write \$HOME)" >&2 && exit 2 ;;
  esac
done
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\([0-9.]*\)"$/\1/p' Cargo.toml | head -n 1)
case $version in
  0.*) soversion=${version%.*} ;;
  *) soversion=${version%%.*} ;;
esac
static_libs=$(cat packaging/native-static-libs.txt)

# Paths below the prefix are written relative to the prefix, so that the tree can be moved. Other
# paths are written as they are.
case $LIBDIR in
  "$PREFIX"/*)
    up=$(printf %s "${LIBDIR#"$PREFIX"/}" | sed 's,[^/][^/]*,..,g')
    pc_prefix="\${pcfiledir}/../$up" pc_libdir="\${prefix}/${LIBDIR#"$PREFIX"/}" cmake_prefix="\${_devicemesh_here}/../../$up" ;;
  *) pc_prefix=$PREFIX pc_libdir=$LIBDIR cmake_prefix=$PREFIX ;;
esac
case $INCLUDEDIR in
  "$PREFIX"/*) pc_include="\${prefix}/${INCLUDEDIR#"$PREFIX"/}" cmake_include="$cmake_prefix/${INCLUDEDIR#"$PREFIX"/}" ;;
  *) pc_include=$INCLUDEDIR cmake_include=$INCLUDEDIR ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# put MODE FILE PLACE
put() {
  case $action in
    install) install -D -m "$1" "$2" "$DESTDIR$3" ;;
    uninstall) rm -f "$DESTDIR$3" ;;
  esac
}

# link TARGET PLACE
link() {
  case $action in
    install) ln -sf "$1" "$DESTDIR$2" ;;
    uninstall) rm -f "$DESTDIR$2" ;;
  esac
}

# fill TEMPLATE PLACE
fill() {
  sed -e "s|@VERSION@|$version|" -e "s|@SOVERSION@|$soversion|" -e "s|@STATIC_LIBS@|$static_libs|" \
    -e "s|@PC_PREFIX@|$pc_prefix|" -e "s|@PC_LIBDIR@|$pc_libdir|" -e "s|@PC_INCLUDEDIR@|$pc_include|" -e "s|@CMAKE_INCLUDE@|$cmake_include|" \
    "$1" >"$scratch/filled"
  put 644 "$scratch/filled" "$2"
}

for name in devicemesh hostccl; do
  put 755 "$RELEASE/lib$name.so" "$LIBDIR/lib$name.so.$version"
  link "lib$name.so.$version" "$LIBDIR/lib$name.so.$soversion"
  link "lib$name.so.$soversion" "$LIBDIR/lib$name.so"
done
put 644 "$RELEASE/libdevicemesh.a" "$LIBDIR/libdevicemesh.a"
for header in devicemesh.h devicemesh.hpp hostccl.h; do
  put 644 "include/$header" "$INCLUDEDIR/$header"
done
for module in devicemesh devicemesh-static hostccl; do
  fill "packaging/$module.pc.in" "$LIBDIR/pkgconfig/$module.pc"
done
for file in Config ConfigVersion Targets Nccl; do
  put 644 "cmake/devicemesh$file.cmake" "$LIBDIR/cmake/devicemesh/devicemesh$file.cmake"
done
fill cmake/devicemeshPlaces.cmake.in "$LIBDIR/cmake/devicemesh/devicemeshPlaces.cmake"
put 755 "$RELEASE/devicemesh" "$BINDIR/devicemesh"
for licence in LICENSE-APACHE LICENSE-MIT; do
  put 644 "$licence" "$DATADIR/doc/devicemesh/$licence"
done

# tool_file FILE PLACE: a file that the tool prints, if the tool prints it.
tool_file() {
  if [ "$action" = uninstall ] || [ -e "$scratch/tool/$1" ]; then
    put 644 "$scratch/tool/$1" "$2"
  fi
}

if [ "$action" = install ]; then
  sh packaging/tool_files.sh "$TOOL" "$scratch/tool"
fi
for page in '' -check -completions -help -info -man -new -ps -run -show -store -trace -why; do
  tool_file "man/man1/devicemesh$page.1" "$MANDIR/man1/devicemesh$page.1"
done
for file in bash-completion/completions/devicemesh zsh/site-functions/_devicemesh fish/vendor_completions.d/devicemesh.fish; do
  tool_file "share/$file" "$DATADIR/$file"
done

# Uninstalling removes the folders that belong to this package alone.
if [ "$action" = uninstall ]; then
  rmdir "$DESTDIR$LIBDIR/cmake/devicemesh" "$DESTDIR$DATADIR/doc/devicemesh" 2>/dev/null || true
fi

# The loader finds libraries by a cache, which only root can write.
if [ -z "$DESTDIR" ]; then
  PATH=$PATH:/usr/sbin:/sbin
  if [ "$(id -u)" = 0 ]; then ldconfig 2>/dev/null || true; fi
  # The cache may name the folder in another way: /lib for /usr/lib, for example.
  is_found() {
    ldconfig -p 2>/dev/null | sed -n "s/^.*libdevicemesh\.so\.$soversion .*=> //p" | while read -r found; do
      if [ "$found" -ef "$LIBDIR/libdevicemesh.so.$soversion" ]; then echo found; fi
    done | grep -q found
  }
  if [ "$action" = install ] && ! is_found; then
    echo "The loader does not look in $LIBDIR: link programs with -Wl,-rpath,$LIBDIR, or set LD_LIBRARY_PATH, or name the folder in /etc/ld.so.conf.d and run ldconfig."
  fi
fi
