"""From scores of models to a training signal on each sampled token: NSD, CompassOPD, and their baselines."""
