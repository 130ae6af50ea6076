"""Adds variant and seed to metric records, and keeps the last of each name: python tagged.py VARIANT SEED < records."""

import json
import sys

last = {record["name"]: record for record in map(json.loads, sys.stdin)}
for record in last.values():
    print(json.dumps({**record, "variant": sys.argv[1], "seed": int(sys.argv[2])}))
