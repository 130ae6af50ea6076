#!/bin/bash
# Runs the checks of this folder, writes their report and the outcome.
exec python3 "$(dirname "$0")/check.py"
