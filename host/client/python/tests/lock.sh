#!/bin/sh
# Makes requirements.txt, the locked packages of the client's tests and of their editable installation. Needs uv.
set -eu
cd "$(dirname "$0")"
{
  echo '# Made by lock.sh: do not edit.'
  echo 'setuptools>=68' | uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --generate-hashes \
    --extra test ../pyproject.toml -
} >requirements.new
mv requirements.new requirements.txt
