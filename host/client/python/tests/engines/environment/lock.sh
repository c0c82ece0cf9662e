#!/bin/sh
# Makes engines.txt, the locked packages of the engines' tests, from the .in files, and dynamo.txt, those of the router that
# they ask. Needs uv. sglang's own requirements are not installed: hundreds of packages, nearly all for GPUs.
set -eu
cd "$(dirname "$0")"
compile() { uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --generate-hashes "$@"; }
{
  echo '# Made by lock.sh: do not edit.'
  compile --override overrides.txt engines.in
  compile --no-deps sglang.in
} >engines.new
mv engines.new engines.txt

{
  echo '# Made by lock.sh: do not edit.'
  compile dynamo.in
} >dynamo.new
mv dynamo.new dynamo.txt
