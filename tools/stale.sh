#!/bin/sh
# Removes what earlier builds left in build/ of modules that are gone: setuptools would install it again.
cd "$(dirname "$0")/.." || exit
find build/*/lib* -name '*.p*' -delete 2>/dev/null  # .py, .pyi, .pyx and .pxd
# Of the compiled modules only those without a source: the others are not compiled again.
find build/*/lib* -name '*.so' ! -name '_utility.*' 2>/dev/null | while read -r built; do
    source=src/counterd/${built#*/counterd/}
    [ -e "${source%%.*}.pyx" ] || rm "$built"
done
exit 0
