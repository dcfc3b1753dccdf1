"""Commands that look at a machine or predict a step: doctor, probe, estimate."""
