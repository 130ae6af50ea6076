"""Run me with python3."""

from stats import mean, median

assert mean([1, 2, 6]) == 3
assert mean([]) == 0
assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5
print("ok")
