#!/bin/bash
set -e
sed -i 's/\bcalc\b/total_price/g' shop/price.py shop/order.py
sed -i 's/import calc$/import total_price/; s/, calc(/, total_price(/' shop/__main__.py
