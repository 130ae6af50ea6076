"""Task families, calibration and the statistics of pass rates."""
