"""Gives each task the same negative condition: worked lines of somebody who never carries."""

import json
import sys

CONDITION = "Sums of a student who never carries the one:\n17+25=32\n38+44=72\n29+16=35"

for line in sys.stdin:
    print(json.dumps({**json.loads(line), "negative_condition": CONDITION}))
