#!/bin/bash
set -e
printf 'PARTS = $(sort $(wildcard parts/*.txt))\n\nbook.txt: $(PARTS)\n\tcat $(PARTS) > book.txt\n\nclean:\n\trm -f book.txt\n' > Makefile
