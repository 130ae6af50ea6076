"""`python -m strop` is the console script."""

from strop.cli.main import main

main()
