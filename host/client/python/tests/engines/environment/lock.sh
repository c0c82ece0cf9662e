#!/bin/sh
# Makes NAME.txt, the locked packages of an environment of the engines' tests, from NAME.in and NAME.overrides. Needs uv.
# sglang's own requirements are not installed: hundreds of packages, nearly all for GPUs. dynamo is the router that they ask, gemma a
# model.
#
#   lock.sh [NAME...]      # all of them
set -eu
cd "$(dirname "$0")"
compile() { uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --generate-hashes "$@"; }
[ $# -gt 0 ] || set -- engines engines-0.32 dynamo gemma
for name; do
  {
    echo '# Made by lock.sh: do not edit.'
    case $name in
      dynamo) compile dynamo.in ;;
      gemma) compile --no-deps gemma.in ;;
      *) compile --override overrides.txt --override "$name.overrides" "$name.in" ;;
    esac
    if [ "$name" = engines ]; then compile --no-deps sglang.in; fi
  } >"$name.new"
  mv "$name.new" "$name.txt"
done
