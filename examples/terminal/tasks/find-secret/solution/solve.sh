#!/bin/bash
set -e
cd config
grep -rl '^password=' . | sed 's|^[.]/||' > ../found.txt
sed -i 's/^password=.*/password=***/' "$(cat ../found.txt)"
