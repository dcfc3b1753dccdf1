"""Commands that check a machine or predict a step: doctor, probe, estimate."""
