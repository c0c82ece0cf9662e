#!/bin/sh
# Builds proxies of libcuda and libcufile that inject faults (c/proxy.c) before libraries that need not be here: they are looked
# for at DIR/libcuda.so.1 and DIR/libcufile.so.0 of the machine that runs them, which may be links. There:
#
#   KVHOST_DOUBLE=cuFileRead:every=100:code=5030 LD_LIBRARY_PATH=OUT kvhost ...
#
# Usage: proxy.sh OUT DIR    (DIR is made here for the time of linking; it must not hold these names)
set -eu
out=$1 dir=$2 here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out" "$dir"
build() { # NAME FLAGS
  [ ! -e "$dir/$1" ] || { echo "$dir/$1 exists" >&2; exit 1; }
  echo 'void kvhost_stub(void) {}' | cc -shared -fPIC -x c -o "$dir/$1" -
  cc -std=gnu11 -O1 -Wall -Wextra -Werror -shared -fPIC -fvisibility=hidden $2 "-DREAL_LIBRARY=\"$dir/$1\"" -o "$out/$1" "$here/c/proxy.c" \
    -Wl,--no-as-needed "$dir/$1" -ldl -lpthread || { rm "$dir/$1"; exit 1; }
  rm "$dir/$1"
}
build libcuda.so.1 -DCUDA
build libcufile.so.0 ""
