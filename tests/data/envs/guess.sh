#!/usr/bin/env bash
# The environment of guess.py in a few lines of another language; the number is 42.
while read -r line; do
  case $line in
    *'"op":"reset"'*) echo '{"observation": "Your guess?"}' ;;
    *'"action":"42"'*) echo '{"observation": "Yes.", "reward": 1, "done": true}' ;;
    *) echo '{"observation": "No.", "reward": 0}' ;;
  esac
done
